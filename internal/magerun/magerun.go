// Package magerun is mage for runs that overlap. Mage writes a file beside the
// targets while it compiles them, and has one program for all checkouts with
// the same targets, whatever else is in them; here one run of a checkout
// compiles at a time, into a program of the checkout's own.
package magerun

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"syscall"

	"github.com/magefile/mage/mage"
	"github.com/magefile/mage/mg"
)

// Main is the mage command with its arguments, from any folder of the checkout.
// It returns the exit code.
func Main(args []string) int {
	dir, err := os.Getwd()
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		return 1
	}
	for at := dir; at != filepath.Dir(at); at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "magefiles")); err == nil {
			dir = at
			_ = os.Chdir(dir) // mage says what is missing where it stays
			break
		}
	}
	inv, cmd, err := mage.Parse(os.Stderr, io.Discard, args)
	switch {
	case err == nil && cmd == mage.CompileStatic:
		defer lock(dir)()
		fallthrough
	case err != nil, cmd != mage.None, inv.List, inv.Help, inv.Autocomplete, inv.Dir != "": // no target of this checkout is run
		return mage.ParseAndRun(os.Stdout, os.Stderr, os.Stdin, args)
	}
	inv.Stdin, inv.Stdout, inv.Stderr = os.Stdin, os.Stdout, os.Stderr
	program := filepath.Join(mg.CacheDir(), fmt.Sprintf("mage-%.8x", sha256.Sum256([]byte(dir))))
	if code := compile(inv, dir, program); code != 0 {
		return code
	}
	return mage.RunCompiled(inv, program, log.New(os.Stderr, "", 0))
}

func compile(inv mage.Invocation, dir, program string) int {
	defer lock(dir)()
	// The go command links beside the program and renames it: a copy from
	// another file system is not whole at once.
	tmp := program + ".tmp"
	if err := errors.Join(os.RemoveAll(tmp), os.MkdirAll(tmp, 0o755)); err != nil { // what a killed run has left
		fmt.Fprintln(os.Stderr, "Error: making the folder of the compiled targets (MAGEFILE_CACHE):", err)
		return 1
	}
	defer os.RemoveAll(tmp)
	if before, set := os.LookupEnv("GOTMPDIR"); set {
		defer os.Setenv("GOTMPDIR", before)
	} else {
		defer os.Unsetenv("GOTMPDIR")
	}
	os.Setenv("GOTMPDIR", tmp)
	// A fresh checkout compiles the targets for two to three minutes before
	// they can print anything; say so before the silence, not after it.
	fmt.Fprintln(os.Stderr, "mage: compiling the targets (minutes on a fresh checkout, then cached)")
	inv.CompileOut, inv.Force = program, true // whatever MAGEFILE_HASHFAST says
	return mage.Invoke(inv)
}

// lock waits until no other run compiles the targets of the checkout. Where a
// file system has no locks, there is none.
func lock(dir string) (unlock func()) {
	f, err := os.Open(filepath.Join(dir, "magefiles"))
	if err != nil {
		return func() {} // mage says it
	}
	if errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		fmt.Fprintln(os.Stderr, "mage: waiting for another run that compiles the targets")
		_ = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
	}
	return func() { f.Close() }
}
