//go:build mage

package main

import (
	"context"
	"fmt"
	"os"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/internal/bench"
)

// Bench holds the targets that measure, each writing its table into docs/PERFORMANCE.md.
type Bench mg.Namespace

// Build measures builds of the family against a Dockerfile under QEMU; twenty-five minutes on two cores.
func (Bench) Build(ctx context.Context) error {
	table, err := bench.Build(ctx, ".", os.Getenv, os.Stderr)
	if err != nil {
		return err
	}
	fmt.Println(table)
	return bench.Record("docs/PERFORMANCE.md", "bench:build", table)
}

// Release measures releases to a local registry: a first one, the same again, and one with other programs; a few minutes.
func (Bench) Release(ctx context.Context) error {
	table, err := bench.Release(ctx, ".", os.Getenv, os.Stderr)
	if err != nil {
		return err
	}
	fmt.Println(table)
	return bench.Record("docs/PERFORMANCE.md", "bench:release", table)
}
