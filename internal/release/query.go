package release

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/mod/semver"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// reader opens a registry for reading.
func (o Options) reader(ctx context.Context, reg Registry, images []string) (*target, error) {
	o.Registry.ReadOnly = true
	return o.connect(ctx, reg, images)
}

// connect opens a registry; the error says where its name comes from.
func (o Options) connect(ctx context.Context, reg Registry, images []string) (*target, error) {
	o.Registry.Log = o.withDefaults().Notice
	c, err := registry.Open(ctx, reg.Address, o.Config.all(images), o.Registry)
	if err != nil && reg.Variable != "" {
		err = fmt.Errorf("%s=%s, which release.yaml asks for: %w", reg.Variable, reg.Address, err)
	}
	return &target{Registry: reg, client: c}, err
}

// Listed is a released version and the channels that point to it.
type Listed struct {
	Version  Version
	Registry string
	Digest   v1.Hash // of the release artifact
	Channels []string
}

// List lists what was released to each registry, the newest first.
func List(ctx context.Context, o Options) ([]Listed, error) {
	var all []Listed
	for _, reg := range o.Config.Registries {
		t, err := o.reader(ctx, reg, nil)
		if err != nil {
			return nil, err
		}
		tags, err := t.client.Tags(ctx, o.Config.Releases)
		if err != nil {
			return nil, err
		}
		at := map[v1.Hash][]string{}
		var found []Listed
		for _, tag := range tags {
			if strings.HasPrefix(tag, "sha256-") {
				continue // a referrers fallback or a cosign signature
			}
			h, absent, err := t.client.Digest(ctx, o.Config.Releases, tag)
			if err != nil {
				return nil, err
			}
			v, verr := ParseVersion(tag)
			switch {
			case absent:
			case verr == nil && string(v) == tag:
				found = append(found, Listed{Version: v, Registry: reg.Address, Digest: h})
			case verr == nil && slices.Contains(o.Config.VersionTags(v), tag):
			default:
				at[h] = append(at[h], tag)
			}
		}
		slices.SortFunc(found, func(a, b Listed) int { return semver.Compare(b.Version.sem(), a.Version.sem()) })
		for i := range found {
			found[i].Channels = at[found[i].Digest]
			slices.Sort(found[i].Channels)
		}
		all = append(all, found...)
	}
	return all, nil
}

// Shown is a release as a registry has it.
type Shown struct {
	Registry string
	Digest   v1.Hash
	Release  *dist.Release
	SBOMs    []signing.SBOM
}

// Show reads a release, given as a version or a channel, from the first registry.
func Show(ctx context.Context, o Options, tag string) (*Shown, error) {
	t, err := o.reader(ctx, o.Config.Registries[0], nil)
	if err != nil {
		return nil, err
	}
	h, absent, err := t.client.Digest(ctx, o.Config.Releases, tag)
	if err != nil {
		return nil, err
	}
	if absent {
		return nil, fmt.Errorf("%s has no release %s; `release:list` lists them", t.store(o.Config.Releases).Name(), tag)
	}
	s := &Shown{Registry: t.Address, Digest: h}
	if err := signing.VerifyDigest(ctx, t.store(o.Config.Releases), h, []string{signing.Signature}, o.Trust); err != nil {
		return nil, err
	}
	if s.Release, s.SBOMs, err = signing.ReadRelease(ctx, t.store(o.Config.Releases), h); err != nil {
		return nil, err
	}
	if err := o.Config.Bound(tag, s.Release.Version); err != nil {
		return nil, fmt.Errorf("%s:%s: %w", t.store(o.Config.Releases).Name(), tag, err)
	}
	return s, nil
}

// Bound checks that a tag may lead to what was signed as a part of a version. Who
// may write to a registry can tag anything that was ever signed.
func (c *Config) Bound(tag, version string) error {
	v, err := ParseVersion(version)
	if err != nil {
		return err
	}
	if !slices.Contains(c.VersionTags(v), tag) && c.Channel(tag, v) != nil {
		return fmt.Errorf("it was moved to the release that was signed as %s, and no tag %s belongs to that one; where the tag is your own, ask by digest", v, tag)
	}
	return nil
}

// known is what a registry or the dist folder knows of a version: its images.
func (o Options) known(ctx context.Context, v Version) (*dist.Release, error) {
	s, err := Show(ctx, o, string(v))
	if err == nil {
		return s.Release, nil
	}
	if local, lerr := dist.Read(o.Dist); lerr == nil && local.Version == string(v) {
		return local, nil
	}
	return nil, err
}

// Mirror copies a release from the first registry to another: images, release
// artifact, signatures and attestations as they are, then the version tags. It
// verifies before it copies and after, and overwrites no tag.
func Mirror(ctx context.Context, o Options, v Version, dest Registry) error {
	o = o.withDefaults()
	shown, err := Show(ctx, o, string(v))
	if err != nil {
		return err
	}
	r := &run{Options: o, version: v, release: shown.Release, artifact: shown.Digest}
	src, err := o.reader(ctx, o.Config.Registries[0], r.images())
	if err != nil {
		return err
	}
	if err := r.check(ctx, func(repository string) signing.Store { return src.store(repository) }); err != nil {
		return err
	}
	t, err := o.connect(ctx, dest, r.images())
	if err != nil {
		return err
	}
	r.targets = []*target{t}
	if _, err := r.states(ctx); err != nil {
		return err
	}
	all, err := r.contents()
	if err != nil {
		return err
	}
	for _, p := range all {
		if err := copyManifest(ctx, src.store(p.repository), t.store(p.repository), p.digest); err != nil {
			return err
		}
		if err := attach(ctx, src.store(p.repository), t.store(p.repository), p.digest, o.Trust); err != nil {
			return err
		}
		if err := r.copyLegacy(ctx, src, t, p); err != nil {
			return err
		}
	}
	if err := r.checkRemote(ctx); err != nil {
		return err
	}
	states, err := r.states(ctx)
	for _, s := range states {
		if err == nil && s.now != s.digest {
			err = r.tag(ctx, t, s.repository, s.tag, s.digest.String())
		}
	}
	return err
}

// copyLegacy copies cosign's older signature and attestation tags where there are
// any. One that the destination has may hold signatures of its owner, and stays.
func (r *run) copyLegacy(ctx context.Context, src, dst *target, p placed) error {
	all, err := subjects(ctx, src.store(p.repository), p.digest)
	if err != nil {
		return err
	}
	for _, s := range all {
		for _, suffix := range []string{"sig", "att"} {
			tag := s.Algorithm + "-" + s.Hex + "." + suffix
			h, absent, err := src.client.Digest(ctx, p.repository, tag)
			if err != nil {
				return err
			}
			if absent {
				continue
			}
			if now, absent, err := dst.client.Digest(ctx, p.repository, tag); err != nil {
				return err
			} else if !absent {
				if now != h {
					r.Notice("%s:%s is there with other signatures and stays; to mirror %s delete it first", dst.store(p.repository).Name(), tag, h)
				}
				continue
			}
			if err := copyManifest(ctx, src.store(p.repository), dst.store(p.repository), h); err != nil {
				return err
			}
			m, _, err := src.client.Fetch(ctx, p.repository, h.String())
			if err != nil {
				return err
			}
			if got, _, err := v1.SHA256(bytes.NewReader(m.Raw)); err != nil || got != h {
				return fmt.Errorf("%s changed while it was copied", tag)
			}
			if err := dst.client.PutManifest(ctx, p.repository, tag, m); err != nil {
				return err
			}
		}
	}
	return nil
}
