//go:build mage

package main

import (
	"context"
	"os"

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
