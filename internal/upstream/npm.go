package upstream

import (
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/mod/semver"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// manifest is what the registry says of one version of a package.
type manifest struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Dist    struct {
		Integrity string `json:"integrity"`
	} `json:"dist"`
}

// packument is what the registry says of a package.
type packument struct {
	Tags     map[string]string   `json:"dist-tags"`
	Versions map[string]manifest `json:"versions"`
}

func (c *Config) packument(ctx context.Context, name string) (*packument, error) {
	src := lock.Source{Kind: lock.KindNPM, Name: "the registry's entry of " + name, Path: name}
	text, from, err := c.Mirrors.Read(ctx, src, "application/vnd.npm.install-v1+json, application/json", 256<<20)
	if err != nil {
		return nil, err
	}
	var p packument
	if err := json.Unmarshal(text, &p); err != nil {
		return nil, fmt.Errorf("%s from %s is no JSON as a registry gives: set %s to an npm registry: %w", src.Name, from, src.Kind.Variable(), err)
	}
	return &p, nil
}

// manifest is the registry's entry of one version: the path under which a
// copied mirror keeps it too.
func (c *Config) manifest(ctx context.Context, p lock.NPMPackage) (*manifest, []byte, error) {
	src := lock.Source{Kind: lock.KindNPM, Name: "the registry's entry of " + p.String(), Path: p.Name + "/" + p.Version}
	text, from, err := c.Mirrors.Read(ctx, src, "application/json", 16<<20)
	if err != nil {
		return nil, nil, err
	}
	var m manifest
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, nil, fmt.Errorf("%s from %s is no JSON as a registry gives: set %s to an npm registry: %w", src.Name, from, src.Kind.Variable(), err)
	}
	return &m, text, nil
}

// newestNPM locks the newest stable Node that both platforms have (the
// registry's newest is the current LTS line or one after it) and the npm
// that its makers call latest.
func (c *Config) newestNPM(ctx context.Context, tmp string) (map[string][]lock.NPMPackage, error) {
	arches := lock.Arches()
	entries := make([]*packument, len(arches)+1)
	names := []string{}
	for _, arch := range arches {
		names = append(names, lock.NodePackage(arch))
	}
	names = append(names, lock.NPM)
	g, gctx := errgroup.WithContext(ctx)
	for i, name := range names {
		g.Go(func() (err error) {
			entries[i], err = c.packument(gctx, name)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	node := ""
	for v := range entries[0].Versions {
		if _, both := entries[1].Versions[v]; !both || !semver.IsValid("v"+v) || semver.Prerelease("v"+v) != "" {
			continue
		}
		if node == "" || semver.Compare("v"+v, "v"+node) > 0 {
			node = v
		}
	}
	npm := entries[2].Tags["latest"]
	if node == "" || npm == "" {
		return nil, fmt.Errorf("the npm registry has no release of Node for both platforms or no latest npm: set %s to a complete one", lock.KindNPM.Variable())
	}
	versions := []string{node, node, npm}
	locked := make([]lock.NPMPackage, len(names))
	g, ctx = errgroup.WithContext(ctx)
	for i, name := range names {
		g.Go(func() (err error) {
			locked[i], err = c.lockNPM(ctx, name, versions[i], entries[i].Versions[versions[i]].Dist.Integrity, tmp)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	out := map[string][]lock.NPMPackage{}
	for i, arch := range arches {
		out[arch] = []lock.NPMPackage{locked[i], locked[len(arches)]}
	}
	return out, nil
}

// lockNPM downloads a tarball, checks it against the registry's integrity
// and notes its sha256.
func (c *Config) lockNPM(ctx context.Context, name, version, integrity, tmp string) (lock.NPMPackage, error) {
	p := lock.NPMPackage{Name: name, Version: version, Path: lock.NPMPath(name, version), Integrity: integrity}
	file := filepath.Join(tmp, filepath.Base(p.Path))
	var err error
	if p.Size, p.SHA256, _, err = c.Mirrors.Download(ctx, p.Source(), file); err != nil {
		return p, err
	}
	return p, checkIntegrity(p, file)
}

// checkIntegrity compares a tarball with the package's sha512 integrity.
func checkIntegrity(p lock.NPMPackage, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha512.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if found := "sha512-" + base64.StdEncoding.EncodeToString(sum.Sum(nil)); found != p.Integrity {
		return fmt.Errorf("%s has another content than the registry publishes: expected %s, found %s: set %s to another registry", p, p.Integrity, found, lock.KindNPM.Variable())
	}
	return nil
}
