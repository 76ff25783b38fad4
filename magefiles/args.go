//go:build mage

package main

import (
	"os"
	"slices"
	"strings"
)

// optional are the targets that take an image's name or none. Mage knows
// optional arguments as flags only.
var optional = []string{"images:build", "smoke"}

// init turns `images:build NAME` into `images:build -name=NAME`, before mage
// reads the arguments.
func init() {
	for i := 1; i+1 < len(os.Args); i++ {
		if slices.Contains(optional, strings.ToLower(os.Args[i])) && strings.HasPrefix(os.Args[i+1], "loomcycle") {
			os.Args[i+1] = "-name=" + os.Args[i+1]
		}
	}
}
