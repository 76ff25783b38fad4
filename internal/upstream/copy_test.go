package upstream

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// The copy is a module proxy from which the module builds, and nothing else is
// left of what the go command made. The world is this machine's module cache.
func TestCopyModules(t *testing.T) {
	text, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	mage := regexp.MustCompile(`github.com/magefile/mage (v\S+)`).FindSubmatch(text)
	cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil || mage == nil {
		t.Fatal(err, "or mage is not in go.mod")
	}
	t.Setenv("GOPROXY", "off") // not this machine's, but the one passed in
	vars := map[string]string{"GOPROXY": "file://" + strings.TrimSpace(string(cache)) + "/cache/download", "GONOSUMDB": "*"}
	root := t.TempDir()
	for _, module := range []string{".", "tool"} {
		if err := os.MkdirAll(filepath.Join(root, module), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, module, "go.mod"), []byte("module example.test/m\n\ngo 1.24\n\nrequire github.com/magefile/mage "+string(mage[1])+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	c := &Config{Out: t.Output(), Env: func(name string) string { return vars[name] }}
	for range 2 { // the second finds all there
		if err := c.CopyModules(t.Context(), dir, root, "tool"); err != nil {
			t.Fatal(err)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(dir, "modules")); err != nil || len(entries) != 1 {
		t.Errorf("beside the proxy there is more: %v %v", entries, err)
	}
	get := exec.Command("go", "mod", "download")
	get.Dir = root
	get.Env = append(os.Environ(), "GONOSUMDB=*", "GOMODCACHE="+t.TempDir(), "GOFLAGS=-modcacherw", "GOPROXY=file://"+filepath.Join(dir, Modules))
	if out, err := get.CombinedOutput(); err != nil {
		t.Errorf("from the copy: %v\n%s", err, out)
	}
	if err := c.CopyModules(t.Context(), dir, root, "none"); err == nil || !strings.Contains(err.Error(), "GOPROXY of this machine") {
		t.Errorf("error %v for a folder without a module", err)
	}
}

// Where there is no hard link the second name is a copy.
func TestLinkFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "Packages.xz")
	if err := os.WriteFile(file, []byte("index"), 0o644); err != nil {
		t.Fatal(err)
	}
	elsewhere, err := os.MkdirTemp("/dev/shm", "link")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(elsewhere) })
	if os.Link(file, filepath.Join(elsewhere, "link")) == nil {
		citest.Skip(t, "%s and %s are one file system", file, elsewhere)
	}
	for range 2 {
		name := filepath.Join(elsewhere, "by-hash", "SHA256", "0")
		if err := linkFile(file, name); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(name); err != nil || string(text) != "index" {
			t.Errorf("%q, %v", text, err)
		}
	}
}
