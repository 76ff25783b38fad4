// Package debiantest makes small signed Debian archives for tests, with a key
// of their own: what a mirror serves, on disk, so that a test can serve it
// over HTTP or file:, and break it.
package debiantest

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/armor"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/ulikunitz/xz"
)

// Key signs InRelease files.
type Key struct {
	entity *openpgp.Entity
	config *packet.Config
}

// NewKey makes a key that is valid from the given time on.
func NewKey(t testing.TB, from time.Time) *Key {
	config := &packet.Config{Algorithm: packet.PubKeyAlgoEdDSA, DefaultHash: crypto.SHA256, Time: func() time.Time { return from }}
	e, err := openpgp.NewEntity("Test Archive", "", "archive@example.test", config)
	must(t, err)
	return &Key{e, config}
}

// Public is the armored public key.
func (k *Key) Public(t testing.TB) []byte {
	var b bytes.Buffer
	w, err := armor.Encode(&b, openpgp.PublicKeyType, nil)
	must(t, err)
	must(t, k.entity.Serialize(w))
	must(t, w.Close())
	return append(b.Bytes(), '\n')
}

// Sign makes a clear-signed document.
func (k *Key) Sign(t testing.TB, text string) []byte {
	var b bytes.Buffer
	w, err := clearsign.Encode(&b, k.entity.PrivateKey, k.config)
	must(t, err)
	_, err = w.Write([]byte(text))
	must(t, err)
	must(t, w.Close())
	return append(b.Bytes(), '\n')
}

// Archive is a folder as a mirror serves it.
type Archive struct {
	Dir string
	Key *Key
}

// Package is a binary package; its file holds arbitrary bytes.
type Package struct {
	Name, Version, Arch string
	Fields              string // more lines of its entry: "Depends: libc6\n"
	Content             string // the file's; "NAME VERSION" when empty
}

// Path is the package's file below the archive's root.
func (p Package) Path() string {
	return fmt.Sprintf("pool/main/%s/%s/%s_%s_%s.deb", p.Name[:1], p.Name, p.Name, p.Version, p.Arch)
}

// Release is a suite to publish.
type Release struct {
	Suite      string
	Date       time.Time
	ValidUntil time.Time // left out when zero
	Packages   []Package
	Arches     []string
}

// Text writes the suite's packages and indexes (plain and by hash) and
// returns the Release text that vouches for them.
func (a *Archive) Text(t testing.TB, r Release) string {
	var text bytes.Buffer
	fmt.Fprintf(&text, "Origin: Test\nSuite: %s\nCodename: %s\nDate: %s\n", r.Suite, r.Suite, r.Date.UTC().Format("Mon, 02 Jan 2006 15:04:05 UTC"))
	if !r.ValidUntil.IsZero() {
		fmt.Fprintf(&text, "Valid-Until: %s\n", r.ValidUntil.UTC().Format("Mon, 02 Jan 2006 15:04:05 UTC"))
	}
	if strings.HasSuffix(r.Suite, "-backports") {
		text.WriteString("NotAutomatic: yes\nButAutomaticUpgrades: yes\n")
	}
	text.WriteString("Acquire-By-Hash: yes\nComponents: main\nArchitectures:")
	for _, arch := range r.Arches {
		text.WriteString(" " + arch)
	}
	text.WriteString("\nSHA256:\n")
	for _, arch := range r.Arches {
		plain := a.index(t, r.Packages, arch)
		index := compress(t, plain)
		dir := path.Join("dists", r.Suite, "main", "binary-"+arch)
		a.Write(t, path.Join(dir, "Packages.xz"), index)
		a.Write(t, path.Join(dir, "by-hash/SHA256", sum(index)), index)
		// apt takes an index only when its uncompressed form is listed too.
		fmt.Fprintf(&text, " %s %d main/binary-%s/Packages\n", sum(plain), len(plain), arch)
		fmt.Fprintf(&text, " %s %d main/binary-%s/Packages.xz\n", sum(index), len(index), arch)
	}
	return text.String()
}

// Publish is Text, signed and stored as the suite's InRelease file.
func (a *Archive) Publish(t testing.TB, r Release) {
	a.Write(t, path.Join("dists", r.Suite, "InRelease"), a.Key.Sign(t, a.Text(t, r)))
}

func (a *Archive) index(t testing.TB, packages []Package, arch string) []byte {
	var b bytes.Buffer
	for _, p := range packages {
		if p.Arch != arch && p.Arch != "all" {
			continue
		}
		content := p.Content
		if content == "" {
			content = p.Name + " " + p.Version
		}
		a.Write(t, p.Path(), []byte(content))
		fmt.Fprintf(&b, "Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: Test <test@example.test>\n%sFilename: %s\nSize: %d\nSHA256: %s\nDescription: test\n\n",
			p.Name, p.Version, p.Arch, p.Fields, p.Path(), len(content), sum([]byte(content)))
	}
	return b.Bytes()
}

// Write stores a file of the archive.
func (a *Archive) Write(t testing.TB, name string, content []byte) {
	file := filepath.Join(a.Dir, filepath.FromSlash(name))
	must(t, os.MkdirAll(filepath.Dir(file), 0o755))
	must(t, os.WriteFile(file, content, 0o644))
}

func compress(t testing.TB, text []byte) []byte {
	var b bytes.Buffer
	w, err := xz.NewWriter(&b)
	must(t, err)
	_, err = w.Write(text)
	must(t, err)
	must(t, w.Close())
	return b.Bytes()
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
