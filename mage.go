//go:build ignore

// Command mage runs the project's targets without an installed mage:
//
//	go run mage.go dist
package main

import (
	"fmt"
	"os"

	"github.com/magefile/mage/mage"
)

func main() {
	// A fresh checkout compiles the targets for two to three minutes before
	// they can print anything; say so before the silence, not after it.
	fmt.Fprintln(os.Stderr, "mage: compiling the targets (minutes on a fresh checkout, then cached)")
	os.Exit(mage.Main())
}
