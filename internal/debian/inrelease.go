// Package debian reads what a Debian archive publishes about itself: the
// signed InRelease file of a suite and the Packages indexes that it vouches
// for. Nothing here is believed before a committed archive key has signed it.
package debian

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/opencontainers/go-digest"
	"pault.ag/go/debian/control"
)

// Keyring holds the public keys whose signature an InRelease file may carry.
type Keyring = openpgp.EntityList

// LoadKeyring reads every armored public key file (*.asc) of dir.
func LoadKeyring(dir string) (Keyring, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.asc"))
	if err != nil {
		return nil, err
	}
	var ring Keyring
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		keys, err := openpgp.ReadArmoredKeyRing(f)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s is no armored OpenPGP public key: %w", name, err)
		}
		ring = append(ring, keys...)
	}
	if len(ring) == 0 {
		return nil, fmt.Errorf("%s holds no archive key (*.asc), so no InRelease file can be checked", dir)
	}
	return ring, nil
}

// Release is the verified content of an InRelease file.
type Release struct {
	Suite      string // the name it was asked for by: trixie-updates
	Date       time.Time
	ValidUntil time.Time // zero when the suite never expires (stable itself)
	ByHash     bool      // indexes are served under by-hash/SHA256/ too
	Files      map[string]File
}

// File is an index of a suite, known by its path below dists/SUITE/.
type File struct {
	Size   int64 // bytes
	SHA256 digest.Digest
}

// The reasons why an InRelease file is refused, for errors.Is.
var (
	ErrUnsigned = errors.New("it carries no valid signature of a committed archive key")
	ErrExpired  = errors.New("it has expired")
)

// signingDelay is how far a signature may be younger than the Date field:
// the archive dates the file first and signs it minutes later.
const signingDelay = 24 * time.Hour

// ReadInRelease checks the clear-signed text of a suite's InRelease file
// against the keyring, that it is of the suite asked for (by codename or
// suite name), and its Date and Valid-Until against now. Only text under the
// signature is read.
func ReadInRelease(text []byte, keys Keyring, suite string, now time.Time) (*Release, error) {
	fail := func(err error) (*Release, error) {
		return nil, fmt.Errorf("the InRelease file of %s cannot be used: %w", suite, err)
	}
	block, rest := clearsign.Decode(text)
	if block == nil || !bytes.HasPrefix(text, []byte("-----BEGIN PGP SIGNED MESSAGE-----")) || len(bytes.TrimSpace(rest)) > 0 {
		return fail(ErrUnsigned)
	}
	paragraph, err := readParagraph(block.Plaintext)
	if err != nil {
		return fail(err)
	}
	r := &Release{Suite: suite, ByHash: paragraph.Values["Acquire-By-Hash"] == "yes", Files: map[string]File{}}
	if r.Date, err = date(paragraph, "Date"); err != nil {
		return fail(err)
	}
	if _, err := block.VerifySignature(keys, &packet.Config{Time: func() time.Time { return r.Date.Add(signingDelay) }}); err != nil {
		return fail(fmt.Errorf("%w: %w", ErrUnsigned, err))
	}
	if names := []string{paragraph.Values["Codename"], paragraph.Values["Suite"]}; !slices.Contains(names, suite) {
		return fail(fmt.Errorf("it is of suite %s", strings.Join(names, " or ")))
	}
	// A clock that is a little slow is no attack.
	if r.Date.After(now.Add(time.Hour)) {
		return fail(fmt.Errorf("its date %s lies after the clock's %s", r.Date.Format(time.RFC3339), now.UTC().Format(time.RFC3339)))
	}
	if paragraph.Values["Valid-Until"] != "" {
		if r.ValidUntil, err = date(paragraph, "Valid-Until"); err != nil {
			return fail(err)
		}
		if now.After(r.ValidUntil) {
			return fail(fmt.Errorf("%w: it was valid until %s and it is %s", ErrExpired, r.ValidUntil.Format(time.RFC3339), now.UTC().Format(time.RFC3339)))
		}
	}
	for line := range strings.Lines(paragraph.Values["SHA256"]) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 3 {
			return fail(fmt.Errorf("a SHA256 line has %d fields, not 3: %q", len(fields), line))
		}
		size, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			return fail(fmt.Errorf("the size of %s is no number: %q", fields[2], fields[1]))
		}
		d := digest.NewDigestFromEncoded(digest.SHA256, fields[0])
		if err := d.Validate(); err != nil {
			return fail(fmt.Errorf("the SHA256 of %s is malformed: %q", fields[2], fields[0]))
		}
		r.Files[fields[2]] = File{Size: size, SHA256: d}
	}
	return r, nil
}

// readParagraph reads the first paragraph of a control file.
func readParagraph(text []byte) (*control.Paragraph, error) {
	r, err := control.NewParagraphReader(bytes.NewReader(text), nil)
	if err != nil {
		return nil, err
	}
	p, err := r.Next()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("it is empty")
	}
	return p, err
}

// date reads a date as Debian writes it (RFC 1123, always UTC or GMT).
func date(p *control.Paragraph, field string) (time.Time, error) {
	value := strings.Replace(p.Values[field], "UTC", "GMT", 1)
	for _, layout := range []string{"Mon, 02 Jan 2006 15:04:05 GMT", "Mon, _2 Jan 2006 15:04:05 GMT"} {
		if t, err := time.ParseInLocation(layout, value, time.UTC); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("its %s is no date: %q", field, p.Values[field])
}
