//go:build mage

package main

import (
	"os"
	"os/signal"
	"syscall"

	"github.com/loomcycle/loomcycle-images/internal/mageargs"
)

// init runs before mage reads the arguments.
func init() {
	mageargs.Names(os.Args[1:])
	// Mage cancels targets on an interrupt only; a CI system's cancel button
	// sends SIGTERM.
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	go func() {
		for range term {
			_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
		}
	}()
}
