package build

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

func TestModulesOfFileProxies(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"example.test/m/@v/v1.0.0.zip", "golang.org/toolchain/@v/v0.0.1-go1.27.4.linux-amd64.zip"} {
		file := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("zip"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ proxy, inside, err string }{
		{"https://user:word@proxy.example|direct", "https://user:word@proxy.example|direct", ""},
		{"file://" + dir + ",https://proxy.example,off", "file:///modules/0,https://proxy.example,off", ""},
		{"file://" + dir + "|file://" + filepath.Join(dir, "example.test"), "file:///modules/0|file:///modules/1", ""},
		{"file:mirror/go", "", "GOPROXY names file:mirror/go: the go command wants the whole path"},
		{"file:///no/such/folder", "", "no such file"},
		{"file:///no/such/folder,file://" + dir + ",https://proxy.example", "file:///modules/0,https://proxy.example", ""},
	} {
		inside, folders, err := modules(c.proxy)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: error %v, want one with %q", c.proxy, err, c.err)
			}
			continue
		}
		if err != nil || inside != c.inside || len(folders) != strings.Count(c.inside, "/modules/") || len(proxies(folders)) != len(folders) {
			t.Errorf("%s: %q with %d folders, %v; want %q", c.proxy, inside, len(folders), err, c.inside)
		}
		for _, name := range slices.Sorted(maps.Keys(folders)) {
			if r, err := folders[name].Open("golang.org/toolchain/@v/v0.0.1-go1.27.4.linux-amd64.zip"); err == nil {
				r.Close()
				t.Errorf("%s: a toolchain is sent along", c.proxy)
			}
		}
	}
}

// A file: mirror whose folder is absent hands over to the next, as one that
// lacks the file does; alone it is named.
func TestMirrorWithoutFolder(t *testing.T) {
	dir := t.TempDir()
	src := lock.Source{Kind: lock.KindDebian, Name: "a", Path: "pool/a.deb"}
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "pool"), 0o755), os.WriteFile(filepath.Join(dir, src.Path), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for list, want := range map[string]string{
		"file:/no/such/folder http://mirror.example.test": "http://mirror.example.test/pool/a.deb",
		"file:/no/such/folder file:" + dir:                "file://" + dir + "/pool/a.deb",
		"file:/no/such/folder":                            "",
	} {
		s := newSources(mirror.FromMachine(t.Context(), getenv(map[string]string{"DEBIAN_MIRROR": list})))
		at, err := s.place(t.Context(), src)
		if at != want || (err == nil) != (want != "") || err != nil && !strings.Contains(err.Error(), "names /no/such/folder") {
			t.Errorf("%s: at %q, %v, not at %q", list, at, err, want)
		}
	}
}
