package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/provenance"
	"github.com/loomcycle/loomcycle-images/internal/sbom"
)

func init() {
	commands["provenance"] = command{"[-dist DIR]: write the SLSA provenance of every variant to dist/provenance", runProvenance}
}

func runProvenance(_ context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("provenance", flag.ContinueOnError)
	open := buildFlags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	b, err := open()
	if err != nil {
		return err
	}
	if err := sameRepository(env.getenv, b.release.Source.Repository); err != nil {
		return err
	}
	family, err := images.Load(os.DirFS(b.root))
	if err != nil {
		return err
	}
	groups, err := b.groups()
	if err != nil {
		return err
	}
	made, err := dist.ReadMade(b.folder)
	if err != nil {
		return err
	}
	run := provenance.FromEnvironment(env.getenv, b.release.Source.Repository, "urn:uuid:"+uuid.NewString())
	return b.replace("provenance", func(at *build) error {
		for _, image := range b.release.Images {
			definition, err := family.Image(image.Name)
			if err != nil {
				return err
			}
			run.Started, run.Finished = made[image.Name].Started, made[image.Name].Finished
			for _, v := range image.Platforms {
				statement, err := b.provenance(definition, groups, v, made[image.Name].Workers[v.Platform], run)
				if err != nil {
					return err
				}
				if err := writeFile(at.file("provenance", image.Name, v.Platform, ".json"), statement); err != nil {
					return err
				}
			}
			fmt.Fprintf(env.log, "provenance %s: %d platforms, SLSA build level %d\n", image.Name, len(image.Platforms), run.Level)
		}
		return nil
	})
}

// sameRepository refuses a workflow of another repository than the one that
// the images name as their source, such as a fork's.
func sameRepository(getenv func(string) string, source string) error {
	if getenv("GITHUB_ACTIONS") != "true" {
		return nil
	}
	runs := cmp.Or(getenv("GITHUB_SERVER_URL"), "https://github.com") + "/" + getenv("GITHUB_REPOSITORY")
	if !strings.EqualFold(runs, strings.TrimSuffix(source, ".git")) {
		return fmt.Errorf("this workflow runs in %s, and the images name %s as their source: set source and url in images/family.yaml to the repository that builds them", runs, source)
	}
	return nil
}

func (b *build) provenance(image *images.Image, groups lock.Groups, v dist.Variant, worker string, run provenance.Run) ([]byte, error) {
	facts, err := b.facts(image.Name, v)
	if err != nil {
		return nil, err
	}
	in := provenance.Input{
		Image: image.Name, Platform: v.Platform, Digest: v.Digest, Version: b.release.Version,
		Repository: b.release.Source.Repository, Commit: b.release.Source.Commit, Loomcycle: b.release.Source.Loomcycle,
		Package: b.release.Source.LoomcyclePackage, LDFlags: b.release.Source.LoomcycleLDFlags,
		Epoch: b.release.Epoch, Compression: b.release.Compression,
		Lock: b.lock, LockDigest: b.release.LockDigest, Worker: worker, Modules: programModules(facts), Run: run,
	}
	for _, l := range v.Layers {
		in.Groups = append(in.Groups, l.Group)
	}
	in.Compiled, in.Tools = compiles(image, in.Groups, in.Loomcycle), tools(groups, v.Layers)
	return provenance.Statement(in)
}

// compiles tells whether something in an image was compiled by the worker's
// Go toolchain: all programs are, but a runtime that came as a binary.
func compiles(image *images.Image, groups []string, loomcycle string) bool {
	prebuilt := strings.HasPrefix(loomcycle, "bin:")
	return slices.Contains(groups, "gocache") ||
		slices.ContainsFunc(image.Programs, func(p string) bool { return p != "loomcycle" || !prebuilt })
}

// groups are the groups of sources that the images were built from.
func (b *build) groups() (lock.Groups, error) {
	return lock.LoadGroups(filepath.Join(b.root, "images", "groups.yaml"))
}

// tools are the groups that the worker ran to make the layers.
func tools(groups lock.Groups, layers []dist.Layer) []string {
	out := []string{}
	for _, l := range layers {
		group, _ := groups.Get(l.Group)
		for _, g := range slices.Concat(groups.Chain(group.GoCache), groups.Chain(group.PyCache)) {
			if !slices.Contains(out, g.Name) {
				out = append(out, g.Name)
			}
		}
	}
	return out
}

// programModules are the modules that are linked into our own programs; those
// in Debian's are sources of Debian's build, not of this one.
func programModules(facts sbom.Facts) []provenance.Module {
	var out []provenance.Module
	for _, p := range facts.Packages {
		if p.Type == "go-module" && p.WithinType == "go-module" && p.H1 != "" {
			out = append(out, provenance.Module{Path: p.Name, Version: p.Version, H1: p.H1})
		}
	}
	slices.SortFunc(out, func(a, b provenance.Module) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version))
	})
	return out
}
