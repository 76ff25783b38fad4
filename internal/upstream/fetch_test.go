package upstream_test

import (
	"archive/zip"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/upstream"
)

// The target as docs/SOURCES.md has it, by a shell: with the servers gone, the
// variables that it prints are enough for lock:verify, for the modules, and for
// an older go command to take the Go that go.mod asks for. The folder's name
// has what separates lists and what a shell reads.
func TestFetchTarget(t *testing.T) {
	needApt(t)
	if testing.Short() {
		t.Skip("compiling the targets takes a minute")
	}
	targets := filepath.Join(t.TempDir(), "targets")
	compile := exec.CommandContext(t.Context(), "go", "run", "mage.go", "-compile", targets)
	compile.Dir = "../.."
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w := newWorld(t)
	checkout := filepath.Join(t.TempDir(), "checkout")
	w.config.Dir = filepath.Join(checkout, "images/lock")
	key, err := os.ReadFile(filepath.Join(w.keys, "test.asc"))
	if err != nil {
		t.Fatal(err)
	}
	w.write(t, filepath.Join(w.config.Dir, lock.KeyDir, "test.asc"), key)
	w.write(t, filepath.Join(checkout, "images/groups.yaml"), []byte(`groups:
  - {name: static, title: static, closure: false, debian: [tzdata]}
  - {name: base, title: base, debian: ["?essential"]}
  - {name: tools, title: tools, after: base, debian: [git]}
  - {name: rust, title: Rust, after: tools, debian: [rustc/trixie-backports]}
  - {name: go, title: Go, go: true}
  - {name: node, title: Node, npm: [node, npm]}
`))
	const module = "none.example.test/dep"
	gomod := "module example.test/m\n\ngo 1.24\n\ntoolchain go1.27.3\n\nrequire " + module + " v1.0.0\n"
	w.write(t, filepath.Join(checkout, "go.mod"), []byte(gomod))
	w.write(t, filepath.Join(checkout, "tools/buildkitd/go.mod"), []byte(gomod))
	var archive bytes.Buffer
	z := zip.NewWriter(&archive)
	f, err := z.Create(module + "@v1.0.0/go.mod")
	if err == nil {
		_, err = f.Write([]byte("module " + module + "\n"))
	}
	if err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	proxy := filepath.Join(w.root, "go", module, "@v")
	w.write(t, filepath.Join(proxy, "v1.0.0.info"), []byte(`{"Version": "v1.0.0"}`))
	w.write(t, filepath.Join(proxy, "v1.0.0.mod"), []byte("module "+module+"\n"))
	w.write(t, filepath.Join(proxy, "v1.0.0.zip"), archive.Bytes())
	w.update(t)

	sh := func(script string) string {
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", script)
		cmd.Dir = checkout
		cmd.Env = append(os.Environ(), "TARGETS="+targets, "GOTOOLCHAIN=local", "GOFLAGS=-modcacherw", "GOMODCACHE=")
		for name, value := range w.vars {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v\n%s%s", script, err, out, &stderr)
		}
		return string(out)
	}
	const dir = `'../a mirror, $mine; "it'"'s"`
	exports := sh("\"$TARGETS\" lock:fetch " + dir)
	w.close()
	t.Setenv("EXPORTS", exports)
	t.Setenv("GOPATH", t.TempDir())
	out := sh(`eval "$EXPORTS"; "$TARGETS" lock:verify -full; go mod download; GOTOOLCHAIN=go1.27.3 go version`)
	if want := "this is v0.0.1-go1.27.3.linux-" + runtime.GOARCH; !strings.Contains(out, want) {
		t.Errorf("%q is not in the output:\n%s", want, out)
	}
}

func TestToolchains(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for name, text := range map[string]string{
		"go": "go 1.26.8", "same": "go 1.26.8", "toolchain": "go 1.24\n\ntoolchain go1.26.8", "default": "go 1.26.8\n\ntoolchain default", "none": "",
	} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte("module example.test/m\n\n"+text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	if got, err := upstream.Toolchains(files...); err != nil || len(got) != 1 || got[0] != "go1.26.8" {
		t.Errorf("%q, %v", got, err)
	}
}
