//go:build mage

package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/supplychain"
)

// Sbom writes SPDX and CycloneDX documents of every variant into dist/sbom.
func Sbom(ctx context.Context) error { return supply(ctx, "sbom") }

// SBOM holds the targets that read SBOMs.
type SBOM mg.Namespace

// Diff prints what changed between the SBOMs of two dist folders, the older first.
func (SBOM) Diff(ctx context.Context, a, b string) error {
	paths := []string{a, b}
	for i := range paths {
		var err error
		if paths[i], err = filepath.Abs(paths[i]); err != nil {
			return err
		}
	}
	return supply(ctx, "sbom-diff", paths[0], paths[1])
}

// Provenance writes the SLSA provenance of every variant into dist/provenance.
func Provenance(ctx context.Context) error { return supply(ctx, "provenance") }

// Policy judges dist by the rules in policies/, and its signatures when it was signed.
func Policy(ctx context.Context) error {
	if signatures := filepath.Join("dist", "signatures.json"); exists(signatures) {
		return supply(ctx, "policy", "-signatures", signatures)
	}
	return supply(ctx, "policy")
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// supply runs a subcommand of the supply-chain program.
func supply(ctx context.Context, args ...string) error {
	cache, err := cache.Dir(os.Getenv)
	if err != nil {
		return err
	}
	return supplychain.Command{Root: ".", Cache: cache, Out: os.Stdout, Log: os.Stderr}.Run(ctx, args...)
}
