package bench

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Every call makes another runtime, and one that can't says so: figures of a
// rebuild without a change would be wrong.
func TestChange(t *testing.T) {
	const name = "runtime/cmd/loomcycle/main.go"
	text, err := os.ReadFile(filepath.Join("..", "..", name))
	if err != nil {
		t.Fatal(err)
	}
	b := bench{checkout: t.TempDir()}
	file := filepath.Join(b.checkout, name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := b.change(); err != nil {
			t.Fatal(err)
		}
		changed, err := os.ReadFile(file)
		if err != nil || bytes.Equal(changed, text) {
			t.Fatalf("nothing has changed, %v", err)
		}
		text = changed
	}
	if err := os.WriteFile(file, []byte("package main\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := b.change(); err == nil {
		t.Error("it says that it has changed what has no place for it")
	}
}
