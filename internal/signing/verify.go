package signing

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/loomcycle/loomcycle-images/internal/dist"
)

// What every subject must carry.
var (
	OnIndex   = []string{Signature, Membership, Provenance}
	OnVariant = []string{Signature, SPDX, CycloneDX, Provenance}
)

// Member is the predicate of Membership.
type Member struct {
	Version string      `json:"version"`
	Source  dist.Source `json:"source"`
	Image   dist.Image  `json:"image"`
}

// Checked is one thing that was found right.
type Checked struct {
	Subject string // "index" or a platform
	Digest  v1.Hash
	Type    string // predicate type
}

// VerifyImage checks an image index and all its variants: each manifest against
// its digest, each signature and attestation against who is trusted, and the
// index against what its release says of it. The error is the first wrong thing.
func VerifyImage(ctx context.Context, s Store, index v1.Hash, t *Trust) (*Member, []Checked, error) {
	var done []Checked
	fail := func(subject string, err error) (*Member, []Checked, error) {
		return nil, done, fmt.Errorf("%s@%s: %s: %w", s.Name(), index, subject, err)
	}
	m, err := s.Manifest(ctx, index)
	if err != nil {
		return fail("index", err)
	}
	if !m.Type.IsIndex() {
		return nil, nil, fmt.Errorf("%s@%s is no index (%s); verify the image's index, which leads to every platform", s.Name(), index, m.Type)
	}
	if got, _, err := v1.SHA256(bytes.NewReader(m.Raw)); err != nil || got != index {
		return fail("index", fmt.Errorf("the content has the digest %s", got))
	}
	parsed, err := v1.ParseIndexManifest(bytes.NewReader(m.Raw))
	if err != nil {
		return fail("index", err)
	}
	found, err := verifySubject(ctx, s, index, OnIndex, t)
	if err != nil {
		return fail("index", err)
	}
	for _, w := range OnIndex {
		if err := content(w, found[w].Predicate); err != nil {
			return fail("index", fmt.Errorf("%s: %w", Title(w), err))
		}
		done = append(done, Checked{"index", index, w})
	}
	var member Member
	if err := json.Unmarshal(found[Membership].Predicate, &member); err != nil {
		return fail("index", fmt.Errorf("release membership: %w", err))
	}
	if err := compare(member.Image, index, parsed.Manifests); err != nil {
		return fail("index", err)
	}
	for _, d := range parsed.Manifests {
		platform := platformOf(d)
		found, err := verifySubject(ctx, s, d.Digest, OnVariant, t)
		if err != nil {
			return fail(platform, err)
		}
		for _, w := range OnVariant {
			if err := content(w, found[w].Predicate); err != nil {
				return fail(platform, fmt.Errorf("%s: %w", Title(w), err))
			}
			done = append(done, Checked{platform, d.Digest, w})
		}
		if _, err := s.Manifest(ctx, d.Digest); err != nil {
			return fail(platform, err)
		}
	}
	return &member, done, nil
}

// VerifyDigest checks that a digest carries statements of the given types.
func VerifyDigest(ctx context.Context, s Store, subject v1.Hash, want []string, t *Trust) error {
	_, err := verifySubject(ctx, s, subject, want, t)
	if err != nil {
		return fmt.Errorf("%s@%s: %w", s.Name(), subject, err)
	}
	return nil
}

// verifySubject finds, for each wanted predicate type, a bundle that verifies.
// What a stranger attached beside it does no harm, up to maxBundles.
func verifySubject(ctx context.Context, s Store, subject v1.Hash, want []string, t *Trust) (map[string]*Statement, error) {
	attached, err := Bundles(ctx, s, subject)
	if err != nil {
		return nil, err
	}
	found, wrong := map[string]*Statement{}, map[string][]error{}
	for _, a := range attached {
		// The annotation only says where to look; what counts is signed.
		st, err := t.Verify(ctx, subject, a.Bundle)
		if err != nil {
			wrong[a.PredicateType] = append(wrong[a.PredicateType], err)
			continue
		}
		found[st.PredicateType] = st
	}
	for _, w := range want {
		switch {
		case found[w] != nil:
		case len(wrong[w]) > 0:
			return nil, fmt.Errorf("%s: %w", Title(w), errors.Join(wrong[w]...))
		default:
			return nil, fmt.Errorf("%s: none is attached to %s (found: %s)", Title(w), subject, kinds(attached))
		}
	}
	return found, nil
}

func kinds(attached []Attachment) string {
	var names []string
	for _, a := range attached {
		names = append(names, Title(a.PredicateType))
	}
	slices.Sort(names)
	if names = slices.Compact(names); len(names) == 0 {
		return "nothing"
	}
	return strings.Join(names, ", ")
}

// compare checks an index against the release's account of it.
func compare(image dist.Image, index v1.Hash, manifests []v1.Descriptor) error {
	if image.IndexDigest.String() != index.String() {
		return fmt.Errorf("its release membership is that of %s", image.IndexDigest)
	}
	if len(manifests) != len(image.Platforms) {
		return fmt.Errorf("it has %d variants, its release %d", len(manifests), len(image.Platforms))
	}
	for _, d := range manifests {
		if d.Platform == nil {
			return fmt.Errorf("manifest %s has no platform", d.Digest)
		}
		v, err := image.Variant(platformOf(d))
		if err != nil {
			return err
		}
		if v.Digest.String() != d.Digest.String() {
			return fmt.Errorf("%s is %s in the index and %s in its release", v.Platform, d.Digest, v.Digest)
		}
	}
	return nil
}

func platformOf(d v1.Descriptor) string { return d.Platform.OS + "/" + d.Platform.Architecture }

// content is a look at a predicate that tells a document from an empty shell;
// the policies look deeper.
func content(predicateType string, predicate []byte) error {
	var p struct {
		SPDXVersion     string
		Packages        []json.RawMessage
		BOMFormat       string
		Components      []json.RawMessage
		BuildDefinition *struct{ BuildType string }
		RunDetails      *struct{ Builder struct{ ID string } }
	}
	if len(predicate) > 0 {
		if err := json.Unmarshal(predicate, &p); err != nil {
			return err
		}
	}
	switch {
	case predicateType == SPDX && (!strings.HasPrefix(p.SPDXVersion, "SPDX-2.") || len(p.Packages) == 0):
		return errors.New("it is not an SPDX 2 document with packages")
	case predicateType == CycloneDX && (p.BOMFormat != "CycloneDX" || len(p.Components) == 0):
		return errors.New("it is not a CycloneDX document with components")
	case predicateType == Provenance && (p.BuildDefinition == nil || p.RunDetails == nil || p.RunDetails.Builder.ID == ""):
		return errors.New("it names no build definition or no builder")
	}
	return nil
}
