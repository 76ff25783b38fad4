//go:build mage

package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/internal/build"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/smoke"
)

// Dist builds the whole family for both platforms into dist/, describes, signs and judges it, and smokes what runs here.
func Dist(ctx context.Context) error {
	r, err := build.Run(ctx, options(nil))
	if err != nil {
		return err
	}
	replaced, err := dist.Watch("dist")
	if err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{Sbom, Provenance, Sign, Policy, func(ctx context.Context) error {
		_, err := smoke.Run(ctx, smoke.Options{Root: ".", Native: true, Getenv: os.Getenv, Out: os.Stdout, Log: os.Stderr})
		return err
	}} {
		err := step(ctx)
		if rerr := replaced(); rerr != nil {
			return rerr
		}
		if err != nil {
			return err
		}
	}
	return dist.Summary(os.Stdout, r)
}

// Images holds the targets of single images.
type Images mg.Namespace

// Build builds images (NAME,NAME), or the whole family, into dist/oci; images of the same commit that are there stay.
func (Images) Build(ctx context.Context, name *string) error {
	r, err := build.Run(ctx, options(name))
	if err != nil {
		return err
	}
	return dist.Summary(os.Stdout, r)
}

// Inspect prints what an image of dist/oci is and what is in it.
func (Images) Inspect(name string) error {
	return dist.Inspect(os.Stdout, "dist", name)
}

// Load puts an image's native variant into podman; into docker where DOCKER_HOST is set or no podman answers.
func (Images) Load(ctx context.Context, name string) error {
	ref, engine, err := dist.Load(ctx, os.Getenv, "dist", name)
	if err != nil {
		return err
	}
	fmt.Printf("%s has %s\n", engine, ref)
	return nil
}

// Reproduce builds the family, or images (NAME,NAME), twice from nothing and compares the digests.
func (Images) Reproduce(ctx context.Context, name *string) error {
	return build.Reproduce(ctx, options(name), os.Stdout)
}

// Rebuild builds dist, or images of it (NAME,NAME), again from nothing and elsewhere, and compares the digests.
func (Images) Rebuild(ctx context.Context, name *string) error {
	return build.Rebuild(ctx, options(name), os.Stdout)
}

func options(names *string) build.Options {
	o := build.Options{Root: ".", Getenv: os.Getenv, Log: os.Stderr}
	if names != nil {
		o.Images = strings.Split(*names, ",")
	}
	return o
}
