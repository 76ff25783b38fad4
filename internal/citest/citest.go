// Package citest keeps a test that a machine cannot run from passing for one
// that ran, and builds the programs that tests take from tools.
package citest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/cache"
)

// Skip ends the test with the reason, in CI as a failure: CI has what the tests need.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// Program finds a program, or skips the test and says where it comes from.
func Program(t testing.TB, name, from string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Skip(t, "%s is missing: %s", name, from)
	}
	return path
}

// CacheDir is a cache folder of the test's own, with the compiled programs of the
// project's, which take minutes. It is in root, which is buildkit.TempRoot: there
// also a daemon ends that a killed test leaves.
func CacheDir(t testing.TB, root string) string {
	t.Helper()
	shared, err := cache.Dir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	top, err := os.MkdirTemp(root, "test-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(top); err != nil {
			t.Error(err)
		}
	})
	own, bin := filepath.Join(top, "cache"), filepath.Join(shared, "bin")
	if err := errors.Join(os.MkdirAll(bin, 0o755), os.Mkdir(own, 0o755), os.Symlink(bin, filepath.Join(own, "bin"))); err != nil {
		t.Fatal(err)
	}
	return own
}

// Tool builds a program of a module in tools, once, into the cache folder.
func Tool(t testing.TB, module, name, tags, pkg string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("building " + name + " takes minutes")
	}
	dir, err := cache.Dir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "bin", name)
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	_, here, _, _ := runtime.Caller(0)
	temp, err := cache.Temp(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	env := append(os.Environ(), "GOTMPDIR="+temp) // from there it is renamed: another test may run it
	if tags != "" {
		env = append(env, "CGO_ENABLED=0") // no C library of a storage driver
	}
	if err := Retry(t, func() error {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-tags", tags, "-o", program, pkg)
		cmd.Dir, cmd.Env = filepath.Join(filepath.Dir(here), "..", "..", "tools", module), env
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	}); err != nil {
		t.Fatalf("build %s: %v", name, err)
	}
	return program
}

// Retry tries three times what may need a network, as the go command does for a
// module that the machine does not have: a proxy fails at times.
func Retry(t testing.TB, try func() error) error {
	t.Helper()
	for n := 1; ; n++ {
		err := try()
		if err == nil || n == 3 {
			return err
		}
		t.Logf("it is tried again: %v", err)
		select {
		case <-time.After(time.Duration(n) * 5 * time.Second):
		case <-t.Context().Done():
			return err
		}
	}
}
