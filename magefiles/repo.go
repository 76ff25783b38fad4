//go:build mage

package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/magefile/mage/sh"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

// Test passes the project's tests, with real engines, daemons and registries.
func Test(ctx context.Context) error {
	if err := host.Need(ctx, os.Stderr, host.Tests...); err != nil {
		return err
	}
	return sh.RunV("go", "test", "-timeout=30m", "./...")
}

// Lint runs go vet, staticcheck and, where there are workflows, actionlint.
func Lint(ctx context.Context) error {
	for _, args := range [][]string{
		{"vet", "./..."},
		{"vet", "-tags=mage", "./magefiles"},
		{"tool", "-modfile=tools/lint/go.mod", "staticcheck", "./..."},
		{"tool", "-modfile=tools/lint/go.mod", "staticcheck", "-tags=mage", "./magefiles"},
	} {
		if err := sh.RunV("go", args...); err != nil {
			return err
		}
	}
	workflows, err := filepath.Glob(".github/workflows/*.yml")
	if err != nil || len(workflows) == 0 {
		return err
	}
	return sh.RunV("go", append([]string{"tool", "-modfile=tools/lint/go.mod", "actionlint"}, workflows...)...)
}
