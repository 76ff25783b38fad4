// Package mageargs reads the command lines of the targets that take an image's
// name or none. Mage knows optional arguments as flags only.
package mageargs

import (
	"slices"
	"strings"
)

var optional = []string{"images:build", "images:rebuild", "images:reproduce", "smoke"}

// targets are those without a colon in their names: what else follows one of
// optional is meant as a name, so that a mistyped one is refused, not skipped
// for the whole family.
var targets = []string{"dist", "fuzz", "lint", "pins", "policy", "promote", "provenance", "race", "release", "sbom", "sign", "smoke", "test", "verify"}

// Names turns `images:build NAME` into `images:build -name=NAME`, in place.
func Names(args []string) {
	for i := 0; i+1 < len(args); i++ {
		next := args[i+1]
		if !slices.Contains(optional, strings.ToLower(args[i])) || next == "" || strings.HasPrefix(next, "-") ||
			strings.Contains(next, ":") || slices.Contains(targets, strings.ToLower(next)) {
			continue
		}
		args[i+1] = "-name=" + next
	}
}
