package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/vcs"
)

// Reproduce builds the commit twice and compares every digest. The builds
// share the mirrors and the go command's cache, of which no byte gets into an
// image: each has its own cache folder and BuildKit state, no remote cache, its
// own checkout at a path of another length, and another degree of parallelism.
// Both checkouts are made first: the commit may change meanwhile.
func Reproduce(ctx context.Context, o Options, w io.Writer) error {
	return elsewhere(ctx, o, func(o Options, sides []side) (err error) {
		var results [2]*dist.Release
		for i, s := range sides {
			fmt.Fprintf(w, "build %d of 2: an empty BuildKit that runs %d step(s) at a time\n", i+1, s.parallelism)
			if results[i], err = s.build(ctx, o); err != nil {
				return err
			}
		}
		return compare(w, results[0], results[1])
	})
}

// Rebuild is one such build of images of the checkout's dist folder, compared with it.
func Rebuild(ctx context.Context, o Options, w io.Writer) error {
	have, err := dist.Read(filepath.Join(o.Root, "dist"))
	if err != nil {
		return err
	}
	state, err := vcs.Describe(ctx, o.Root)
	if err != nil {
		return err
	}
	if have.Source.Commit != state.Commit || strings.HasSuffix(state.Commit, "-dirty") {
		return fmt.Errorf("dist is a build of %s and the checkout is at %s: commit all changes and build again", have.Source.Commit, state.Commit)
	}
	if len(o.Images) == 0 {
		for _, img := range have.Images {
			o.Images = append(o.Images, img.Name)
		}
	}
	var images []dist.Image
	for _, name := range o.Images {
		img, err := have.Image(name)
		if err != nil {
			return err
		}
		images = append(images, *img)
	}
	have.Images = images
	return elsewhere(ctx, o, func(o Options, sides []side) error {
		made, err := sides[1].build(ctx, o)
		if err != nil {
			return err
		}
		return compare(w, have, made)
	})
}

// side is a build apart from others: its checkout, cache folder and how many
// steps its BuildKit runs at a time.
type side struct {
	root, cache string
	parallelism int
}

// elsewhere makes two sides in a temporary folder.
func elsewhere(ctx context.Context, o Options, build func(Options, []side) error) (err error) {
	tmp, err := buildkit.TempRoot(o.Getenv)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(tmp, "reproduce-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, buildkit.Discard(ctx, dir)) }()
	sides := []side{{filepath.Join(dir, "a"), filepath.Join(dir, "cache-0"), 1}, {filepath.Join(dir, "somewhere", "else", "b"), filepath.Join(dir, "cache-1"), 4}}
	for i, from := range []string{o.Root, sides[0].root} {
		if err := vcs.Clone(ctx, from, sides[i].root); err != nil {
			return err
		}
	}
	o.Getenv = buildkit.WithoutCaches(o.Getenv)
	return build(o, sides)
}

func (s side) build(ctx context.Context, o Options) (r *dist.Release, err error) {
	machine := o.Getenv
	o.Getenv = func(name string) string {
		if name == "LOOMCYCLE_CACHE" {
			return s.cache
		}
		return machine(name)
	}
	bk := buildkit.Options{Getenv: o.Getenv, Log: o.Log, CacheDir: s.cache, Root: s.root, Private: "reproduce", Parallelism: s.parallelism, Programs: programs(o.Getenv)}
	conn, err := buildkit.Connect(ctx, bk)
	if err != nil {
		return nil, explain(err)
	}
	defer func() {
		err = errors.Join(err, conn.Close())
		daemon, derr := buildkit.NewDaemon(bk)
		if derr == nil {
			derr = daemon.Remove(ctx)
		}
		err = errors.Join(err, derr)
	}()
	o.Root, o.Builder, o.Dist = s.root, conn, ""
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
		if x, y := len(img.Platforms), len(b.Images[i].Platforms); x != y {
			return fmt.Errorf("one build of %s has %d platforms, the other %d", img.Name, x, y)
		}
		for j, v := range img.Platforms {
			u := b.Images[i].Platforms[j]
			if x, y := len(v.Layers), len(u.Layers); x != y {
				return fmt.Errorf("one build of %s for %s has %d layers, the other %d", img.Name, v.Platform, x, y)
			}
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
