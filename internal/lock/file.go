package lock

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// The files of a lock's folder (images/lock).
const (
	FileName   = "lock.json"
	ReleaseDir = "inrelease" // SUITE: the InRelease file that was locked
	KeyDir     = "keys"      // *.asc: the archive keys that may sign them
)

// Arches lists the architectures that every lock covers, by Debian's name.
func Arches() []string { return []string{"amd64", "arm64"} }

// Load reads and checks dir's lock file.
func Load(dir string) (*Lock, error) {
	file := filepath.Join(dir, FileName)
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("there is no lock at %s: run lock:update: %w", file, err)
	}
	if err != nil {
		return nil, err
	}
	l, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return l, nil
}

// Parse reads and checks the text of a lock file.
func Parse(text []byte) (*Lock, error) {
	var l Lock
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return nil, fmt.Errorf("it is no lock file: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("it is no lock file: something follows the JSON value")
	}
	return &l, l.Validate()
}

// Save checks the lock and writes it to dir, replacing the file in one step.
func (l *Lock) Save(dir string) error {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("refusing to save a wrong lock: %w", err)
	}
	text, err := l.Marshal()
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(dir, FileName), text, 0o644)
}

// Marshal renders the lock with one source a line, so that a diff of two
// locks is a list of changed sources.
func (l *Lock) Marshal() ([]byte, error) {
	w := &lineWriter{}
	w.line("{")
	w.line(`"epoch": %d,`, l.Epoch)
	w.line(`"suites": [`)
	for i, s := range l.Suites {
		w.value("", s, i == len(l.Suites)-1)
	}
	w.line("],")
	section(w, "debian", l.Debian, false)
	w.line(`"go": {`)
	for i, arch := range sortedKeys(l.Go) {
		w.value(arch, l.Go[arch], i == len(l.Go)-1)
	}
	w.line("},")
	section(w, "npm", l.NPM, true)
	w.line("}")
	return w.Bytes(), w.err
}

func section[T any](w *lineWriter, name string, lists map[string][]T, last bool) {
	w.line("%q: {", name)
	for i, arch := range sortedKeys(lists) {
		w.line("%q: [", arch)
		for j, v := range lists[arch] {
			w.value("", v, j == len(lists[arch])-1)
		}
		w.line("]%s", comma(i == len(lists)-1))
	}
	w.line("}%s", comma(last))
}

type lineWriter struct {
	bytes.Buffer
	err error
}

func (w *lineWriter) line(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }

func (w *lineWriter) value(key string, v any, last bool) {
	if key != "" {
		fmt.Fprintf(w, "%q: ", key)
	}
	text, err := json.Marshal(v)
	w.err = errors.Join(w.err, err)
	w.line("%s%s", text, comma(last))
}

func comma(last bool) string {
	if last {
		return ""
	}
	return ","
}

func sortedKeys[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Validate reports the first entry that breaks a rule of the format.
func (l *Lock) Validate() error {
	arches := Arches()
	if l.Epoch <= 0 {
		return errors.New(`"epoch" must be the seconds since 1970 of the newest InRelease file`)
	}
	if err := l.validateSuites(); err != nil {
		return err
	}
	for _, m := range []struct {
		name string
		keys []string
	}{{"debian", sortedKeys(l.Debian)}, {"go", sortedKeys(l.Go)}, {"npm", sortedKeys(l.NPM)}} {
		if !slices.Equal(m.keys, arches) {
			return fmt.Errorf("%q has entries for %q, but must have them for %q", m.name, m.keys, arches)
		}
	}
	for _, arch := range arches {
		if err := l.validateDebian(arch); err != nil {
			return err
		}
		if err := l.validateTools(arch); err != nil {
			return err
		}
	}
	return nil
}

func (l *Lock) validateSuites() error {
	if len(l.Suites) == 0 {
		return errors.New(`"suites" is empty`)
	}
	var newest int64
	for _, s := range l.Suites {
		if s.Name == "" || s.Name != path.Base(s.Name) {
			return fmt.Errorf("a suite has the name %q", s.Name)
		}
		if s.Archive != Main && s.Archive != Security {
			return fmt.Errorf("suite %s: archive %q is neither %q nor %q", s.Name, s.Archive, Main, Security)
		}
		if len(s.Components) == 0 {
			return fmt.Errorf("suite %s: no components", s.Name)
		}
		date, err := time.Parse(time.RFC3339, s.Date)
		if err != nil {
			return fmt.Errorf("suite %s: %w", s.Name, err)
		}
		if err := sha256Only(s.Release); err != nil {
			return fmt.Errorf("suite %s: release: %w", s.Name, err)
		}
		newest = max(newest, date.Unix())
	}
	if newest != l.Epoch {
		return fmt.Errorf("epoch is %d, but the newest suite's date is %d", l.Epoch, newest)
	}
	return nil
}

func (l *Lock) validateDebian(arch string) error {
	seen := map[[2]string]bool{}
	previous := [2]string{}
	for _, p := range l.Debian[arch] {
		key := [2]string{p.Group, p.Name}
		switch {
		case p.Group == "" || p.Name == "" || p.Version == "":
			return fmt.Errorf("debian %s: a package lacks its group, name or version: %+v", arch, p)
		case p.Arch != arch && p.Arch != "all":
			return fmt.Errorf("debian %s: %s is of another architecture", arch, p)
		case !slices.ContainsFunc(l.Suites, func(s Suite) bool { return s.Name == p.Suite }):
			return fmt.Errorf("debian %s: %s is of suite %q, which the lock does not list", arch, p, p.Suite)
		case seen[key]:
			return fmt.Errorf("debian %s: %s is twice in group %s", arch, p, p.Group)
		case slices.Compare(previous[:], key[:]) > 0:
			return fmt.Errorf("debian %s: %s of group %s is out of order: sort by group, then name", arch, p, p.Group)
		}
		seen[key], previous = true, key
		if err := p.entry().validate(); err != nil {
			return fmt.Errorf("debian %s: %s: %w", arch, p, err)
		}
	}
	return nil
}

func (l *Lock) validateTools(arch string) error {
	first := Arches()[0]
	m := l.Go[arch]
	if err := (entry{m.Path, m.Size, m.SHA256}).validate(); err != nil {
		return fmt.Errorf("go %s: %w", arch, err)
	}
	if !strings.HasPrefix(m.H1, "h1:") {
		return fmt.Errorf("go %s: h1 is %q, which is no hash of the checksum database", arch, m.H1)
	}
	// Nothing else ties the file to the version that the checksum database and
	// the registry are asked about.
	if want := ToolchainPath(m.Version, arch); m.Path != want {
		return fmt.Errorf("go %s: the path of %s is %s, not %s", arch, m.Version, want, m.Path)
	}
	if other := l.Go[first].Version; m.Version != other {
		return fmt.Errorf("go %s is %s, but %s is %s: both must be one release", arch, m.Version, first, other)
	}
	if len(l.NPM[arch]) != 2 {
		return fmt.Errorf("npm %s has %d packages, not 2 (node, npm)", arch, len(l.NPM[arch]))
	}
	for i, p := range l.NPM[arch] {
		if err := (entry{p.Path, p.Size, p.SHA256}).validate(); err != nil {
			return fmt.Errorf("npm %s: %s: %w", arch, p, err)
		}
		if want := []string{NodePackage(arch), NPM}[i]; p.Name != want {
			return fmt.Errorf("npm %s: %s is in the place of %s", arch, p, want)
		}
		if want := NPMPath(p.Name, p.Version); p.Path != want {
			return fmt.Errorf("npm %s: the path of %s is %s, not %s", arch, p, want, p.Path)
		}
		if !strings.HasPrefix(p.Integrity, "sha512-") {
			return fmt.Errorf("npm %s: %s: integrity %q is no sha512", arch, p, p.Integrity)
		}
		if other := l.NPM[first][i]; p.Version != other.Version {
			return fmt.Errorf("npm %s: %s is not the release that %s has (%s)", arch, p, first, other)
		}
	}
	return nil
}

// entry is what every source has.
type entry struct {
	path   string
	size   int64
	sha256 digest.Digest
}

func (p Package) entry() entry { return entry{p.Path, p.Size, p.SHA256} }

func (e entry) validate() error {
	if !filepath.IsLocal(e.path) || path.Clean(e.path) != e.path {
		return fmt.Errorf("path %q is not a clean path below a mirror's root", e.path)
	}
	if e.size <= 0 {
		return fmt.Errorf("size %d is not positive", e.size)
	}
	return sha256Only(e.sha256)
}

func sha256Only(d digest.Digest) error {
	if err := d.Validate(); err != nil {
		return fmt.Errorf("digest %q: %w", d, err)
	}
	if d.Algorithm() != digest.SHA256 {
		return fmt.Errorf("digest %q is not a sha256", d)
	}
	return nil
}
