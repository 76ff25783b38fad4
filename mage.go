//go:build ignore

// Command mage runs the project's targets without an installed mage:
//
//	go run mage.go dist
package main

import (
	"os"

	"github.com/loomcycle/loomcycle-images/internal/magerun"
	"github.com/loomcycle/loomcycle-images/internal/orphan"
)

func main() {
	orphan.PassOn("go")
	os.Exit(magerun.Main(os.Args[1:]))
}
