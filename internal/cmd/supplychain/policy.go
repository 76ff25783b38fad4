package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/sbom"
	"github.com/loomcycle/loomcycle-images/policies"
)

func init() {
	commands["policy"] = command{"[-dist DIR] [-signatures FILE] [-input FILE]: judge the build by policies/", runPolicy}
}

func runPolicy(ctx context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("policy", flag.ContinueOnError)
	open := buildFlags(flags)
	signatures := flags.String("signatures", "", "a JSON list of what was verified: {digest, kind, by, verified}; without it, signatures are not judged")
	input := flags.String("input", "", "write the document that the rules judge to this file")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b, err := open()
	if err != nil {
		return err
	}
	in, err := b.policyInput(env.now())
	if err != nil {
		return err
	}
	if *signatures != "" {
		text, err := os.ReadFile(*signatures)
		if err != nil {
			return err
		}
		in.Signatures = []policies.Signature{}
		if err := json.Unmarshal(text, &in.Signatures); err != nil {
			return fmt.Errorf("%s: %w", *signatures, err)
		}
	}
	if *input != "" {
		if err := writeJSON(*input, in); err != nil {
			return err
		}
	}
	d, err := policies.Evaluate(ctx, in)
	if err != nil {
		return err
	}
	for _, v := range d.Excepted {
		fmt.Fprintln(env.log, "policy: by exception:", v)
	}
	for _, line := range d.Expiring {
		fmt.Fprintln(env.log, "policy: warning:", line)
	}
	if err := d.Err(); err != nil {
		return err
	}
	signed := ""
	if in.Signatures == nil {
		signed = "; signatures were not judged"
	}
	fmt.Fprintf(env.out, "policy: %d images keep %d rules%s\n", len(in.Images), len(d.Rules), signed)
	return nil
}

// facts reads what `sbom` found in a variant.
func (b *build) facts(image string, v dist.Variant) (sbom.Facts, error) {
	text, err := os.ReadFile(b.file("sbom", image, v.Platform, ".facts.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return sbom.Facts{}, fmt.Errorf("%s for %s has no SBOM; run `sbom` first", image, v.Platform)
	}
	if err != nil {
		return sbom.Facts{}, err
	}
	facts, err := sbom.ReadFacts(text)
	if err == nil && facts.Digest != v.Digest {
		err = fmt.Errorf("the SBOM of %s for %s is of another build (%s); run `sbom` again", image, v.Platform, facts.Digest)
	}
	return facts, err
}

// policyInput collects everything that is known of the build.
func (b *build) policyInput(now time.Time) (policies.Input, error) {
	in := policies.Input{Now: now.UTC().Format(time.RFC3339), Release: b.release, Lock: b.lock}
	family, err := images.Load(os.DirFS(b.root))
	if err != nil {
		return in, err
	}
	groups, err := b.groups()
	if err != nil {
		return in, err
	}
	sums, err := os.ReadFile(filepath.Join(b.root, "go.sum"))
	if err != nil {
		return in, fmt.Errorf("read what the modules of our programs are compared with: %w", err)
	}
	in.Modules = strings.Split(strings.TrimSpace(string(sums)), "\n")
	for _, image := range b.release.Images {
		definition, err := family.Image(image.Name)
		if err != nil {
			return in, err
		}
		out := policies.Image{
			Name: image.Name, IndexDigest: image.IndexDigest,
			Contract: policies.Contract{
				Title: definition.Title, User: definition.Config.User, Distroless: definition.Distroless,
				Programs: definition.Programs, Budget: map[string]int64{},
			},
		}
		for arch, size := range definition.Budget {
			if out.Contract.Budget[arch], err = units.FromHumanSize(size); err != nil {
				return in, fmt.Errorf("budget of %s for %s: %w", image.Name, arch, err)
			}
		}
		if out.Index, err = b.indexed(image.IndexDigest); err != nil {
			return in, err
		}
		for _, v := range image.Platforms {
			variant, err := b.policyVariant(image, groups, v)
			if err != nil {
				return in, err
			}
			out.Variants = append(out.Variants, variant)
		}
		in.Images = append(in.Images, out)
	}
	return in, nil
}

// indexed lists the manifests that an index names.
func (b *build) indexed(d digest.Digest) ([]digest.Digest, error) {
	index, err := b.index(d)
	if err != nil {
		return nil, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read the index %s: %w", d, err)
	}
	out := []digest.Digest{}
	for _, m := range manifest.Manifests {
		out = append(out, digest.Digest(m.Digest.String()))
	}
	return out, nil
}

func (b *build) policyVariant(image dist.Image, groups lock.Groups, v dist.Variant) (policies.Variant, error) {
	out := policies.Variant{Platform: v.Platform, Digest: v.Digest, ConfigDigest: v.Config, Size: v.Size, Layers: v.Layers, Tools: tools(groups, v.Layers), Annotations: map[string]string{}}
	img, _, err := b.image(image.IndexDigest, v)
	if err != nil {
		return out, err
	}
	manifest, err := img.Manifest()
	if err != nil {
		return out, fmt.Errorf("%s for %s: %w", image.Name, v.Platform, err)
	}
	if manifest.Annotations != nil {
		out.Annotations = manifest.Annotations
	}
	if out.Config, err = img.RawConfigFile(); err != nil {
		return out, fmt.Errorf("%s for %s: %w", image.Name, v.Platform, err)
	}
	if _, err := b.facts(image.Name, v); err != nil {
		return out, err
	}
	for into, name := range map[*json.RawMessage]string{
		&out.Facts:      b.file("sbom", image.Name, v.Platform, ".facts.json"),
		&out.Provenance: b.file("provenance", image.Name, v.Platform, ".json"),
	} {
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			return out, fmt.Errorf("%s for %s has no provenance; run `provenance` first", image.Name, v.Platform)
		}
		if err != nil {
			return out, err
		}
		*into = text
	}
	return out, nil
}
