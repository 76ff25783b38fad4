// Package citest keeps a test that a machine cannot run from passing for one
// that ran.
package citest

import (
	"os"
	"os/exec"
	"testing"
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
