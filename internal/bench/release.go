package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/build"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/supplychain"
	"github.com/loomcycle/loomcycle-images/internal/vcs"
)

// Release builds the family twice, as 1.0.0 and, with another runtime, as
// 1.0.1, and has the supply-chain program time their releases to a registry on
// loopback. With a warm BuildKit it takes a few minutes.
func Release(ctx context.Context, root string, getenv func(string) string, log io.Writer) (text string, err error) {
	tmp, err := cache.Temp(getenv)
	if err != nil {
		return "", err
	}
	cache, err := cache.Dir(getenv)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(tmp, "bench-release-*")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, host.Discard(ctx, dir)) }()
	b := bench{checkout: filepath.Join(dir, "checkout"), dir: dir, getenv: getenv, log: log}
	git := func(args ...string) error {
		if out, err := host.Command(ctx, "git", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := vcs.Clone(ctx, root, b.checkout); err != nil {
		return "", err
	}
	args := []string{"bench-release", "-root", b.checkout}
	for _, version := range []string{"1.0.0", "1.0.1"} {
		if version == "1.0.1" {
			if err := b.change(); err != nil {
				return "", err
			}
			if err := git("-C", b.checkout, "-c", "user.name=bench", "-c", "user.email=bench@example.test", "commit", "-q", "-a", "-m", "Another runtime"); err != nil {
				return "", err
			}
		}
		o := build.Options{Root: b.checkout, Dist: filepath.Join(dir, version), Log: log, Getenv: func(name string) string {
			if name == "VERSION" {
				return version
			}
			return getenv(name)
		}}
		if _, err := build.Run(ctx, o); err != nil {
			return "", err
		}
		args = append(args, o.Dist)
	}
	var table bytes.Buffer
	err = supplychain.Command{Root: root, Cache: cache, Out: &table, Log: log}.Run(ctx, args...)
	return table.String(), err
}
