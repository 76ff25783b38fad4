//go:build mage

package main

import (
	"os"

	"github.com/loomcycle/loomcycle-images/internal/mageargs"
	"github.com/loomcycle/loomcycle-images/internal/orphan"
)

// init runs before mage reads the arguments.
func init() {
	mageargs.Names(os.Args[1:])
	// A CI system's cancel button sends SIGTERM, and mage cancels targets on an
	// interrupt only.
	orphan.Interrupt("mage")
}
