//go:build mage

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/upstream"
)

// Lock groups the targets around images/lock, the list of all sources.
type Lock mg.Namespace

const lockDir = "images/lock"

func lockConfig(ctx context.Context) (*upstream.Config, error) {
	groups, err := lock.LoadGroups("images/groups.yaml")
	return &upstream.Config{
		Dir: lockDir, Groups: groups, Mirrors: mirror.FromMachine(ctx, os.Getenv),
		Env: os.Getenv, Now: time.Now(), Out: os.Stderr,
	}, err
}

// Update locks the newest sources that the mirrors offer and prints what changed.
func (Lock) Update(ctx context.Context) error {
	c, err := lockConfig(ctx)
	if err != nil {
		return err
	}
	changes, err := c.Update(ctx, upstream.Suites())
	if err != nil {
		return err
	}
	printChanges(changes)
	return nil
}

// Verify re-checks the lock from the archive keys, the checksum database and
// the registry down to each entry, which downloads Go, Node and npm (270 MB);
// with -full also the bytes of the Debian packages (1.1 GB in all).
func (Lock) Verify(ctx context.Context, full *bool) error {
	c, err := lockConfig(ctx)
	if err != nil {
		return err
	}
	return c.Verify(ctx, full != nil && *full)
}

// Diff prints the package changes between two locks, each a file or a git revision.
func (Lock) Diff(ctx context.Context, a, b string) error {
	from, err := lock.Open(ctx, a, filepath.Join(lockDir, lock.FileName))
	if err != nil {
		return err
	}
	to, err := lock.Open(ctx, b, filepath.Join(lockDir, lock.FileName))
	if err != nil {
		return err
	}
	printChanges(lock.Diff(from, to))
	return nil
}

// Fetch fills a folder with all sources and the Go modules of the build: a file: mirror for machines without a network.
func (Lock) Fetch(ctx context.Context, dir string) error {
	c, err := lockConfig(ctx)
	if err != nil {
		return err
	}
	toolchains, err := upstream.Toolchains("go.mod", "tools/buildkitd/go.mod")
	if err != nil {
		return err
	}
	if err := c.Copy(ctx, dir, toolchains...); err != nil {
		return err
	}
	if err := c.CopyModules(ctx, dir, ".", "tools/buildkitd"); err != nil {
		return err
	}
	variables, err := upstream.Variables(dir)
	for _, v := range variables {
		name, value, _ := strings.Cut(v, "=")
		fmt.Printf("export %s='%s'\n", name, value) // URLs, in which no quote is left
	}
	return err
}

func printChanges(changes []lock.Change) {
	for _, c := range changes {
		fmt.Println(c)
	}
	fmt.Printf("%d changes\n", len(changes))
}
