//go:build mage

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/internal/bench"
	"github.com/loomcycle/loomcycle-images/internal/sidecar"
)

// Sidecar holds the targets of the sandbox sidecar.
type Sidecar mg.Namespace

// Run starts the sidecar on this machine with the session image of dist, or SANDBOX_IMAGE.
func (Sidecar) Run(ctx context.Context) error {
	return sidecar.Run(ctx, os.Getenv, os.Stderr)
}

// Sidecar measures the sandbox sidecar against an engine command per call, under runc and runsc.
func (Bench) Sidecar(ctx context.Context) error {
	table, err := sidecar.Bench(ctx, "runc,runsc", os.Stderr)
	fmt.Print(table)
	if table == "" {
		return err
	}
	// A row that missed its goal is recorded too.
	return errors.Join(err, bench.Record("docs/PERFORMANCE.md", "bench:sidecar", table))
}
