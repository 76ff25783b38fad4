package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestProgram(t *testing.T) {
	checkout := func(text string) string {
		dir := t.TempDir()
		pkg := filepath.Join(dir, "cmd", "hello")
		if err := errors.Join(os.MkdirAll(pkg, 0o755),
			os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.test/m\n\ngo 1.24\n"), 0o644),
			os.WriteFile(filepath.Join(pkg, "main.go"), []byte("package main\n\nfunc main() { println(\""+text+"\") }\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	dir := filepath.Join(t.TempDir(), "programs")
	compile := func(root string) string {
		t.Helper()
		program, err := Program(t.Context(), root, dir, "./cmd/hello", "arm64")
		if err != nil {
			t.Error(err)
			return ""
		}
		if info, err := os.Stat(program); err != nil || info.Mode().Perm()&0o111 == 0 {
			t.Errorf("%v, %v", info, err)
		}
		return program
	}
	one, other := checkout("one"), checkout("two")
	var first string
	var all sync.WaitGroup
	for range 4 { // test programs of one checkout that start together
		all.Go(func() { _ = compile(one) })
	}
	all.Wait()
	first = compile(one)
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	second := compile(other)
	if first == second {
		t.Error("two programs have one place")
	}
	if again := compile(one); again != first {
		t.Errorf("the same program is in %s and in %s", first, again)
	}
	// A container that has it mounted must still find it.
	if after, err := os.Stat(first); err != nil || !os.SameFile(before, after) {
		t.Errorf("the program was replaced by itself (%v)", err)
	}
	old := time.Now().Add(-30 * 24 * time.Hour)
	for _, program := range []string{first, second} {
		if err := os.Chtimes(filepath.Dir(program), old, old); err != nil {
			t.Fatal(err)
		}
	}
	compile(one)
	if _, err := os.Stat(second); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an old one is still there: %v", err)
	}
	if err := os.Truncate(first, 0); err != nil { // a power cut
		t.Fatal(err)
	}
	if info, err := os.Stat(compile(one)); err != nil || info.Size() == 0 {
		t.Errorf("the empty program is kept: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*-*")); err != nil || len(left) != 1 { // and the lock
		t.Errorf("%v, %v", left, err)
	}
	if _, err := Program(t.Context(), one, dir, "./cmd/none", "arm64"); err == nil {
		t.Error("a program that does not exist compiles")
	}
}

// A program of last week that one process takes is not what another sweeps away
// at that moment.
func TestProgramIsNotSweptWhenTaken(t *testing.T) {
	dir := t.TempDir()
	old := time.Now().Add(-30 * 24 * time.Hour)
	var all sync.WaitGroup
	for _, name := range []string{"one", "two", "three"} {
		folder := filepath.Join(dir, name)
		all.Go(func() {
			for range 300 {
				tmp, err := os.MkdirTemp(dir, "new-*")
				if err == nil {
					err = os.WriteFile(filepath.Join(tmp, name), []byte(name), 0o755)
				}
				if err != nil {
					t.Error(err)
					return
				}
				_ = os.Chtimes(folder, old, old) // which another one may have swept
				if err := place(t.Context(), dir, tmp, folder, name, []byte(name)); err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Stat(filepath.Join(folder, name)); err != nil {
					t.Error(err)
					return
				}
				if err := os.RemoveAll(tmp); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}

// What is in use for weeks stays.
func TestKeep(t *testing.T) {
	dir := t.TempDir()
	kept := filepath.Join(dir, "kept")
	if err := os.Mkdir(kept, 0o755); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		Keep(ctx, kept)
		for range 30 {
			time.Sleep(24 * time.Hour) // of the test's own clock
			synctest.Wait()
			Sweep(dir)
			if _, err := os.Stat(kept); err != nil {
				t.Fatal(err)
			}
		}
		cancel()
	})
}
