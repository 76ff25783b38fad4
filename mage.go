//go:build ignore

// Command mage runs the project's targets without an installed mage:
//
//	go run mage.go dist
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/loomcycle/loomcycle-images/internal/orphan"
	"github.com/magefile/mage/mage"
)

func main() {
	orphan.PassOn("go")
	// From a folder below, too: the targets are in the one with magefiles.
	if at, err := os.Getwd(); err == nil {
		for dir := at; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
			if _, err := os.Stat(filepath.Join(dir, "magefiles")); err == nil {
				_ = os.Chdir(dir) // mage says what is missing where it stays
				break
			}
		}
	}
	// A fresh checkout compiles the targets for two to three minutes before
	// they can print anything; say so before the silence, not after it.
	fmt.Fprintln(os.Stderr, "mage: compiling the targets (minutes on a fresh checkout, then cached)")
	os.Exit(mage.Main())
}
