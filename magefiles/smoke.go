//go:build mage

package main

import (
	"bytes"
	"context"
	"io"
	"os"

	"github.com/loomcycle/loomcycle-images/internal/bench"
	"github.com/loomcycle/loomcycle-images/smoke"
)

// Smoke runs the smoke cases on one image of dist, or on all, or on SMOKE_REF.
func Smoke(ctx context.Context, name *string) error {
	o := smoke.Options{Root: ".", Getenv: os.Getenv, Out: os.Stdout, Log: os.Stderr}
	if name != nil {
		o.Images = []string{*name}
	}
	_, err := smoke.Run(ctx, o)
	return err
}

// Smoke measures the first commands of a fresh session container.
func (Bench) Smoke(ctx context.Context) error {
	var table bytes.Buffer
	o := smoke.Options{Root: ".", Getenv: os.Getenv, Out: io.MultiWriter(os.Stdout, &table), Log: os.Stderr}
	if err := smoke.Bench(ctx, o); err != nil {
		return err
	}
	return bench.Record("docs/PERFORMANCE.md", "bench:smoke", "```\n"+table.String()+"```")
}
