package smoke

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/smoke/engine"
)

// target is one variant to test.
type target struct {
	engine.Image
	def    *images.Image // its definition
	groups []string      // names of the layers, where the build says
}

func (t *target) arch() string { return strings.TrimPrefix(t.Platform, "linux/") }

// task is a case on a target in a profile: one cell of the table.
type task struct {
	c       *Case
	profile string
	target  *target
	slow    float64 // SMOKE_SLOW
	loading time.Duration
}

func (t *task) name() string {
	if t.profile == "" {
		return t.c.Name
	}
	return t.c.Name + "/" + t.profile
}

func (t *task) key() string    { return t.name() + " " + t.target.Name + " " + t.target.Platform }
func (t *task) emulated() bool { return !t.c.Structure && t.target.arch() != runtime.GOARCH }

// timeout is how long a phase may take.
func (t *task) timeout() time.Duration {
	d := time.Duration(t.c.Timeout)
	if d == 0 {
		d = DefaultTimeout
	}
	return t.stretch(d)
}

func (t *task) stretch(d time.Duration) time.Duration {
	if t.emulated() {
		d *= EmulationFactor
	}
	return time.Duration(float64(d) * t.slow)
}

// matrix is every case on every target that it concerns, in every profile.
func (r *runner) matrix() []*task {
	var tasks []*task
	filter := r.Getenv("SMOKE_CASES")
	for i := range r.suite.Cases {
		c := &r.suite.Cases[i]
		for _, tg := range r.targets {
			if !concerns(c.Images, tg.Name) {
				continue
			}
			profiles := c.Profiles
			if len(profiles) == 0 {
				profiles = []string{""}
			}
			for _, p := range profiles {
				t := &task{c: c, profile: p, target: tg, slow: r.slow}
				if only := r.suite.Profiles[p].Images; p != "" && len(only) > 0 && !concerns(only, tg.Name) {
					continue
				}
				if t.emulated() && (!c.Emulate || r.Native) {
					continue
				}
				if ok, err := path.Match(filter, t.name()); filter != "" && (!ok || err != nil) && filter != c.Name {
					continue
				}
				tasks = append(tasks, t)
			}
		}
	}
	return tasks
}

// findTargets are the variants of the dist folder, or of references.
func (r *runner) findTargets(ctx context.Context) ([]*target, error) {
	prefix := ""
	if len(r.Refs) == 0 {
		r.Refs, prefix = strings.Fields(r.Getenv("SMOKE_REF")), "SMOKE_REF: "
	}
	if len(r.Refs) > 0 {
		var all []*target
		for _, ref := range r.Refs {
			targets, err := r.remoteTargets(ctx, ref)
			if err != nil {
				return nil, fmt.Errorf("%s%w", prefix, err)
			}
			for _, t := range targets {
				if slices.ContainsFunc(all, func(o *target) bool { return o.Name == t.Name && o.Platform == t.Platform }) {
					return nil, fmt.Errorf("two of %s are the image %s for %s: test one at a time", strings.Join(r.Refs, ", "), t.Name, t.Platform)
				}
			}
			all = append(all, targets...)
		}
		for _, name := range r.Images {
			if !slices.ContainsFunc(all, func(t *target) bool { return t.Name == name }) {
				return nil, fmt.Errorf("none of %s is an image %s, by its title label", strings.Join(r.Refs, ", "), name)
			}
		}
		return all, nil
	}
	release, err := dist.Read(r.Dist)
	if err != nil {
		return nil, err
	}
	for _, name := range r.Images {
		if _, err := release.Image(name); err != nil {
			return nil, err
		}
	}
	folder := filepath.Join(r.Dist, "oci")
	var out []*target
	for _, img := range release.Images {
		if len(r.Images) > 0 && !slices.Contains(r.Images, img.Name) {
			continue
		}
		def, err := r.family.Image(img.Name)
		if err != nil {
			return nil, err
		}
		for _, v := range img.Platforms {
			t := &target{def: def, Image: engine.Image{
				Name: img.Name, Platform: v.Platform, Index: img.IndexDigest, Manifest: v.Digest, Config: v.Config, Layout: folder,
			}}
			for _, l := range v.Layers {
				t.groups = append(t.groups, l.Group)
			}
			if t.Content, err = dist.Content(r.Dist, &img, &v); err != nil {
				return nil, err
			}
			out = append(out, t)
		}
	}
	return out, nil
}

// remoteTargets are the platforms of an image in a registry. Which image of
// the family it is, its title label says.
func (r *runner) remoteTargets(ctx context.Context, text string) ([]*target, error) {
	// Strict: an image without a registry is in none, not in a default one.
	ref, err := name.ParseReference(text, name.StrictValidation)
	if err != nil {
		return nil, fmt.Errorf("%w; write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@DIGEST", err)
	}
	opts := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	index, err := remote.Index(ref, opts...)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", text, err)
	}
	top, err := index.Digest()
	if err != nil {
		return nil, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", text, err)
	}
	var out []*target
	for _, d := range manifest.Manifests {
		if d.Platform == nil || !d.MediaType.IsImage() || d.Platform.OS != "linux" {
			continue // an attestation
		}
		content, err := index.Image(d.Digest)
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", text, err)
		}
		t := &target{Image: engine.Image{
			Content:  content,
			Platform: "linux/" + d.Platform.Architecture, Index: digest.Digest(top.String()), Manifest: digest.Digest(d.Digest.String()),
			Ref: ref.Context().Digest(d.Digest.String()).String(),
		}}
		config, err := content.ConfigFile()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", text, err)
		}
		for i := range r.family.Images {
			if def := &r.family.Images[i]; def.Title == config.Config.Labels["org.opencontainers.image.title"] {
				t.def, t.Name = def, def.Name
			}
		}
		if t.def == nil {
			return nil, fmt.Errorf("%s is no image of the family: its title label is %q", text, config.Config.Labels["org.opencontainers.image.title"])
		}
		for _, h := range config.History {
			t.groups = append(t.groups, strings.TrimPrefix(h.CreatedBy, "layer "))
		}
		if len(r.Images) == 0 || slices.Contains(r.Images, t.Name) {
			out = append(out, t)
		}
	}
	return out, nil
}
