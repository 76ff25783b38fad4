package supplychain

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// Two checkouts that share a cache run each its own program.
func TestProgramOfACheckout(t *testing.T) {
	cache := t.TempDir()
	var first string
	for _, text := range []string{"one", "two"} {
		root := t.TempDir()
		dir := filepath.Join(root, "internal", "cmd", "supplychain")
		if err := errors.Join(os.MkdirAll(dir, 0o755),
			os.WriteFile(filepath.Join(root, "go.mod"), []byte("module example.test/m\n\ngo 1.24\n"), 0o644),
			os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\n\nimport \"os\"\n\nfunc main() { os.Stdout.WriteString(\""+text+" \" + os.Args[1]) }\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		c := Command{Root: root, Cache: cache, Out: &out, Log: t.Output()}
		if err := c.Run(t.Context(), "sbom"); err != nil || out.String() != text+" sbom" {
			t.Errorf("%q, %v", out.String(), err)
		}
		program, err := c.Program(t.Context())
		if err != nil || program == first {
			t.Errorf("%s, %v", program, err)
		}
		first = program
	}
	if _, err := os.Stat(first); err != nil {
		t.Error(err)
	}
}
