// Package citest keeps a test that a machine cannot run from passing for one
// that ran, and builds the programs that tests take from tools.
package citest

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

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
	cmd := exec.CommandContext(t.Context(), "go", "build", "-tags", tags, "-o", program, pkg)
	cmd.Dir = filepath.Join(filepath.Dir(here), "..", "..", "tools", module)
	cmd.Env = append(os.Environ(), "GOTMPDIR="+filepath.Dir(program)) // from there it is renamed: another test may run it
	if tags != "" {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=0") // no C library of a storage driver
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return program
}
