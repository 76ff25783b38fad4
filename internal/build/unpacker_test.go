package build

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Two checkouts with different unpackers have different files of it, at once;
// what no build has asked for in a week goes.
func TestUnpackerOfACheckout(t *testing.T) {
	checkout := func(text string) string {
		dir := t.TempDir()
		program := filepath.Join(dir, "internal", "unpack", "cmd", "unpack")
		if err := errors.Join(os.MkdirAll(program, 0o755),
			os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.test/m\n\ngo 1.24\n"), 0o644),
			os.WriteFile(filepath.Join(program, "main.go"), []byte("package main\n\nfunc main() { println(\""+text+"\") }\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	cache := t.TempDir()
	compile := func(root string) string {
		t.Helper()
		dir, err := compileUnpacker(t.Context(), root, cache, "arm64")
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(filepath.Join(dir, "unpack")); err != nil || info.Mode().Perm()&0o111 == 0 {
			t.Fatalf("%v, %v", info, err)
		}
		return dir
	}
	one, other := checkout("one"), checkout("two")
	first, second := compile(one), compile(other)
	if first == second {
		t.Error("two unpackers have one place")
	}
	old := time.Now().Add(-30 * 24 * time.Hour)
	for _, dir := range []string{first, second} {
		if err := os.Chtimes(dir, old, old); err != nil {
			t.Fatal(err)
		}
	}
	if again := compile(one); again != first {
		t.Errorf("the same unpacker is in %s and in %s", first, again)
	}
	if _, err := os.Stat(second); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an old one is still there: %v", err)
	}
	if err := os.Truncate(filepath.Join(first, "unpack"), 0); err != nil { // a power cut
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(compile(one), "unpack")); err != nil || info.Size() == 0 {
		t.Errorf("the empty unpacker is kept: %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(cache, "unpack")); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}
