package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/module"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/sbom"
)

func init() {
	commands["sbom"] = command{"[-dist DIR]: write SPDX and CycloneDX documents of every variant to dist/sbom", runSBOM}
	commands["sbom-diff"] = command{"A B: what changed between two dist folders, the older first", runSBOMDiff}
}

func runSBOM(ctx context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	open := buildFlags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	b, err := open()
	if err != nil {
		return err
	}
	family, err := images.Load(os.DirFS(b.root))
	if err != nil {
		return err
	}
	components, err := sbom.DefaultComponents()
	if err != nil {
		return err
	}
	if ctx, err = sbom.WithLicences(ctx); err != nil {
		return err
	}
	tmp, err := cache.Temp(env.getenv)
	if err != nil {
		return err
	}
	store, err := imagefs.NewStore(tmp)
	if err != nil {
		return err
	}
	defer store.Close()
	return b.replace("sbom", func(at *build) error {
		var errs []error
		for _, image := range b.release.Images {
			definition, err := family.Image(image.Name)
			if err != nil {
				return err
			}
			for _, v := range image.Platforms {
				start := time.Now()
				catalog, err := at.describe(ctx, store, components, definition, family.Licenses, image, v)
				if err != nil {
					return err
				}
				if err := catalog.Err(); err != nil {
					errs = append(errs, err)
				}
				fmt.Fprintf(env.log, "sbom %s %s: %s in %.1f s\n", image.Name, v.Platform, catalog.Summary(), time.Since(start).Seconds())
			}
		}
		return errors.Join(errs...)
	})
}

// describe writes the documents of one variant.
func (b *build) describe(ctx context.Context, store *imagefs.Store, components sbom.Components, definition *images.Image, licences string, image dist.Image, v dist.Variant) (*sbom.Catalog, error) {
	name := image.Name
	img, config, err := b.image(image.IndexDigest, v)
	if err != nil {
		return nil, err
	}
	fsys, err := store.Open(ctx, img)
	if err != nil {
		return nil, fmt.Errorf("%s for %s: %w", name, v.Platform, err)
	}
	in := sbom.Variant{
		Image: name, Platform: v.Platform, Version: b.release.Version, Digest: v.Digest,
		Namespace: b.release.Source.Repository, FS: fsys, Lock: b.lock,
	}
	modules, err := sbom.Modules(fsys, components)
	if err != nil {
		return nil, fmt.Errorf("%s for %s: %w", name, v.Platform, err)
	}
	if in.ModuleCache, err = os.MkdirTemp("", "modules-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(in.ModuleCache)
	if err := moduleCache(ctx, in.ModuleCache, modules); err != nil {
		return nil, fmt.Errorf("%s for %s: %w", name, v.Platform, err)
	}
	in.Licences = []string{licences}
	for _, l := range v.Layers {
		in.Groups = append(in.Groups, l.Group)
	}
	for _, f := range definition.Files {
		in.Files = append(in.Files, strings.TrimPrefix(f.Path, "/"))
	}
	catalog, err := sbom.Inspect(ctx, in, components)
	if err != nil {
		return nil, err
	}
	created := config.Created.Time
	if created.IsZero() {
		created = time.Unix(b.release.Epoch, 0)
	}
	spdx, err := catalog.SPDX(created)
	if err != nil {
		return nil, err
	}
	cdx, err := catalog.CycloneDX(created)
	if err != nil {
		return nil, err
	}
	facts, err := catalog.Facts(config)
	if err != nil {
		return nil, err
	}
	return catalog, errors.Join(
		writeFile(b.file("sbom", name, v.Platform, ".spdx.json"), spdx),
		writeFile(b.file("sbom", name, v.Platform, ".cdx.json"), cdx),
		writeJSON(b.file("sbom", name, v.Platform, ".facts.json"), facts),
	)
}

// moduleCache fills a folder with links to the modules, by the names under
// which they are required, in the go command's own cache. Most are there already.
func moduleCache(ctx context.Context, folder string, modules map[string]string) error {
	if len(modules) == 0 {
		return nil
	}
	from := slices.Compact(slices.Sorted(maps.Values(modules)))
	cmd := exec.CommandContext(ctx, "go", append([]string{"mod", "download", "-json"}, from...)...)
	cmd.Dir = folder // outside any module
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "GO111MODULE=on")
	text, err := cmd.Output()
	dirs := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(text)); d.More(); {
		var m struct{ Path, Version, Dir, Error string }
		if e := d.Decode(&m); e != nil {
			return fmt.Errorf("go mod download: %w", e)
		}
		if m.Error != "" {
			err = errors.Join(err, errors.New(m.Error))
		}
		dirs[m.Path+"@"+m.Version] = m.Dir
	}
	if err != nil {
		return fmt.Errorf("download the modules of our programs for their licences; set GOPROXY if this machine has no other way: %w", err)
	}
	for required, content := range modules {
		name, version, _ := strings.Cut(required, "@")
		escaped, err := module.EscapePath(name)
		if err != nil {
			return err
		}
		at := filepath.Join(folder, escaped+"@"+version)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.Symlink(dirs[content], at)); err != nil {
			return err
		}
	}
	return nil
}

// runSBOMDiff compares what `sbom` wrote for two builds.
func runSBOMDiff(_ context.Context, env environment, args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("sbom-diff needs two dist folders, the older first")
	}
	facts := [2]map[string]sbom.Facts{}
	for i, folder := range args {
		facts[i] = map[string]sbom.Facts{}
		files, err := filepath.Glob(filepath.Join(folder, "sbom", "*", "*.facts.json"))
		if err != nil {
			return err
		}
		if len(files) == 0 {
			return fmt.Errorf("%s holds no SBOMs; run `sbom` on that build first", folder)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			f, err := sbom.ReadFacts(data)
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			facts[i][f.Image+" "+f.Platform] = f
		}
	}
	names := maps.Clone(facts[0])
	maps.Copy(names, facts[1])
	for _, name := range slices.Sorted(maps.Keys(names)) {
		before, had := facts[0][name]
		after, has := facts[1][name]
		fmt.Fprintln(env.out, name)
		switch {
		case !had:
			fmt.Fprintln(env.out, "+ the image is new")
		case !has:
			fmt.Fprintln(env.out, "- the image is gone")
		default:
			sbom.Compare(before, after).Print(env.out)
		}
	}
	return nil
}
