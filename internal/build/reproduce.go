package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/vcs"
)

// Reproduce builds the commit twice and compares every digest. The builds
// share nothing but the mirrors: each has its own BuildKit state, no remote
// cache, its own checkout at a path of another length, and another degree of
// parallelism. Both checkouts are made first: the commit may change meanwhile.
func Reproduce(ctx context.Context, o Options, w io.Writer) (err error) {
	tmp, err := buildkit.TempRoot(o.Getenv)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(tmp, "reproduce-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, buildkit.Discard(ctx, dir)) }()
	sides := []struct {
		root        string
		parallelism int
	}{{filepath.Join(dir, "a"), 1}, {filepath.Join(dir, "somewhere", "else", "b"), 4}}
	for i, from := range []string{o.Root, sides[0].root} {
		if err := vcs.Clone(ctx, from, sides[i].root); err != nil {
			return err
		}
	}
	o.Getenv = buildkit.WithoutCaches(o.Getenv)
	var results [2]*dist.Release
	for i, side := range sides {
		fmt.Fprintf(w, "build %d of 2: an empty BuildKit that runs %d step(s) at a time\n", i+1, side.parallelism)
		if results[i], err = fromNothing(ctx, o, side.root, filepath.Join(dir, fmt.Sprint("cache-", i)), side.parallelism); err != nil {
			return err
		}
	}
	return compare(w, results[0], results[1])
}

func fromNothing(ctx context.Context, o Options, root, cache string, parallelism int) (r *dist.Release, err error) {
	bk := buildkit.Options{Getenv: o.Getenv, Log: o.Log, CacheDir: cache, Root: root, Private: "reproduce", Parallelism: parallelism}
	conn, err := buildkit.Connect(ctx, bk)
	if err != nil {
		return nil, err
	}
	defer func() {
		err = errors.Join(err, conn.Close())
		daemon, derr := buildkit.NewDaemon(bk)
		if derr == nil {
			derr = daemon.Remove(ctx)
		}
		err = errors.Join(err, derr)
	}()
	o.Root, o.Builder, o.Dist = root, conn, ""
	return Run(ctx, o)
}

// compare prints each digest of both builds and fails on the first that
// differs.
func compare(w io.Writer, a, b *dist.Release) error {
	var differ error
	note := func(what string, x, y fmt.Stringer) {
		verdict := "same"
		if x.String() != y.String() {
			verdict = "DIFFERENT"
			if differ == nil {
				differ = fmt.Errorf("the builds differ, first in %s: %s and %s", what, x, y)
			}
		}
		fmt.Fprintf(w, "%-9s  %s  %s\n", verdict, x, what)
	}
	if len(a.Images) != len(b.Images) {
		return fmt.Errorf("one build has %d images, the other %d", len(a.Images), len(b.Images))
	}
	for i, img := range a.Images {
		for j, v := range img.Platforms {
			u := b.Images[i].Platforms[j]
			for k, l := range v.Layers {
				note(fmt.Sprintf("%s %s layer %s", img.Name, v.Platform, l.Group), l.Digest, u.Layers[k].Digest)
			}
			note(fmt.Sprintf("%s %s config", img.Name, v.Platform), v.Config, u.Config)
			note(fmt.Sprintf("%s %s manifest", img.Name, v.Platform), v.Digest, u.Digest)
		}
		note(img.Name+" index", img.IndexDigest, b.Images[i].IndexDigest)
	}
	return differ
}
