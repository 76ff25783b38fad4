//go:build mage

package main

import (
	"os"

	"github.com/loomcycle/loomcycle-images/internal/mageargs"
)

// init runs before mage reads the arguments.
func init() { mageargs.Names(os.Args[1:]) }
