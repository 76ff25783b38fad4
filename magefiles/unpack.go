//go:build mage

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/unpack/differential"
)

// Unpack groups the targets around the unpacker.
type Unpack mg.Namespace

// Diff compares an unpacked rootfs (amd64 or arm64) with one that mmdebstrap installs.
func (Unpack) Diff(ctx context.Context, arch string) error {
	l, err := lock.Load(lockDir)
	if err != nil {
		return err
	}
	cache, err := cache.Dir(os.Getenv)
	if err != nil {
		return err
	}
	if err := host.Need(ctx, os.Stderr, "mmdebstrap"); err != nil {
		return err
	}
	if err := host.Emulate(ctx, os.Stderr, arch); err != nil {
		return err
	}
	family, err := images.Load(os.DirFS("."))
	if err != nil {
		return err
	}
	all, err := lock.LoadGroups("images/groups.yaml")
	if err != nil {
		return err
	}
	groups, err := family.Installed(all)
	if err != nil {
		return err
	}
	job := &differential.Job{
		Lock: l, Arch: arch, Groups: groups,
		Debs: filepath.Join(cache, "debs"), Work: filepath.Join(cache, "differential", arch), Log: os.Stderr,
	}
	if err := job.Fetch(ctx, mirror.FromMachine(ctx, os.Getenv)); err != nil {
		return err
	}
	report, err := job.Run(ctx)
	if err != nil {
		return err
	}
	section := report.Text(arch, job.Packages())
	fmt.Print(section)
	if err := report.Err(); err != nil {
		return err
	}
	return differential.Record("docs/DIFFERENTIAL.md", arch, section)
}
