//go:build mage

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/smoke"
)

// Sign signs every image, SBOM and provenance of dist into its OCI layout.
func Sign(ctx context.Context) error { return supply(ctx, "sign") }

// Verify checks all that a consumer should of an image in a registry, or of a dist folder.
func Verify(ctx context.Context, ref string) error { return supply(ctx, "verify", absolute(ref)) }

// Promote moves the tags of a dist that was pushed before.
func Promote(ctx context.Context) error { return supply(ctx, "promote") }

// Pins writes a release's images, pinned by digest, to dist/pins; with
// PINS_FOLDER set it updates that folder in place.
func Pins(ctx context.Context, version string) error {
	if folder := os.Getenv("PINS_FOLDER"); folder != "" {
		return supply(ctx, "pins", "-update", absolute(folder), version)
	}
	return supply(ctx, "pins", version)
}

// Release pushes, checks and promotes dist; run it again to finish a killed one.
func Release(ctx context.Context) error { return supply(ctx, "release", "-wait", "30m") }

// RELEASE holds the targets that publish and read releases.
type RELEASE mg.Namespace

// Abort takes back the channels that a killed release of the version moved.
func (RELEASE) Abort(ctx context.Context, version string) error {
	return supply(ctx, "release-abort", version)
}

// List shows what was released to each registry.
func (RELEASE) List(ctx context.Context) error { return supply(ctx, "release-list") }

// Show prints a release's images and SBOMs, by version or channel.
func (RELEASE) Show(ctx context.Context, version string) error {
	return supply(ctx, "release-show", version)
}

// Pack writes the files of a release's page to dist/pack: SBOMs, digests and pins, with checksums.
func (RELEASE) Pack(ctx context.Context) error { return supply(ctx, "release-pack") }

// Mirror copies a release with its signatures and attestations to another registry.
func (RELEASE) Mirror(ctx context.Context, version, dest string) error {
	return supply(ctx, "release-mirror", version, dest)
}

// Rollback points a channel to an older version.
func (RELEASE) Rollback(ctx context.Context, channel, version string) error {
	return supply(ctx, "release-rollback", channel, version)
}

// SMOKE holds the targets that smoke-test what was published.
type SMOKE mg.Namespace

// Pulled runs the smoke cases on images pulled from registries, on the native
// platform: a file with one line "IMAGE REFERENCE" each, as a release writes it.
func (SMOKE) Pulled(ctx context.Context, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	o := smoke.Options{Root: ".", Native: true, Getenv: os.Getenv, Out: os.Stdout, Log: os.Stderr}
	if err := smoke.Pulled(ctx, o, string(text)); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// absolute keeps a path right for a program that runs in the repository's root.
func absolute(name string) string {
	if _, err := os.Stat(name); err != nil {
		return name
	}
	if abs, err := filepath.Abs(name); err == nil {
		return abs
	}
	return name
}
