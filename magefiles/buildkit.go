//go:build mage

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/magefile/mage/mg"

	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/dist"
)

// Buildkit holds the targets of the BuildKit daemons that build the images.
type Buildkit mg.Namespace

// Up finds the BuildKit daemon that builds would use, or starts a private one.
func (Buildkit) Up(ctx context.Context) error {
	b, err := buildkit.Connect(ctx, buildkit.Options{})
	if err != nil {
		return err
	}
	defer b.Close()
	for _, n := range b.Nodes() {
		fmt.Printf("%s (%s, BuildKit %s, %s)\n", n.Address, n.Source, n.Version, n.Platform)
	}
	return nil
}

// Down stops the private BuildKit daemon, if one is up, and waits until it is gone.
func (Buildkit) Down(ctx context.Context) error {
	d, err := buildkit.NewDaemon(buildkit.Options{})
	if err != nil {
		return err
	}
	return d.Down(ctx)
}

// Status shows the BuildKit daemons that builds would use, and starts none.
func (Buildkit) Status(ctx context.Context) error {
	s, err := buildkit.GetStatus(ctx, buildkit.Options{})
	if err != nil {
		return err
	}
	row := func(name string, value any) { fmt.Printf("%-12s %v\n", name, value) }
	for _, n := range s.Nodes {
		row("address", n.Address)
		row("found by", n.Source)
		row("version", n.Version)
		row("worker", n.Platform+", "+n.Snapshotter)
		row("builds for", strings.Join(n.Platforms, ", "))
		row("in use", fmt.Sprintf("%s in %d cache records, %d running builds", dist.Bytes(n.Bytes), n.Records, n.Builds))
	}
	if len(s.Missing) > 0 {
		row("address", "none for "+strings.Join(s.Missing, ", ")+": no daemon is up, a build would start a private one")
	}
	switch {
	case s.PID != 0:
		row("private", fmt.Sprintf("pid %d, up %s, log %s", s.PID, time.Since(s.Since).Round(time.Second), s.Log))
	default:
		row("private", "down, state in "+s.Dir)
	}
	row("cache folder", dist.Bytes(s.CacheBytes))
	return nil
}
