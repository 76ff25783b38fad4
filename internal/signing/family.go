package signing

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/dist"
)

// The release manifest as an artifact: release.json and the index of the SBOMs.
const (
	ReleaseType   = "application/vnd.loomcycle.release.v1+json"
	SBOMIndexType = "application/vnd.loomcycle.sbom-index.v1+json"
)

// documents are the predicates that lie beside a layout: KIND/IMAGE/OS-ARCH.SUFFIX.
var documents = []struct{ predicateType, kind, suffix string }{
	{SPDX, "sbom", ".spdx.json"},
	{CycloneDX, "sbom", ".cdx.json"},
	{Provenance, "provenance", ".json"},
}

// SBOM is an entry of the SBOM index.
type SBOM struct {
	Image    string        `json:"image"`
	Platform string        `json:"platform"`
	Subject  digest.Digest `json:"subject"`
	Type     string        `json:"predicateType"`
	Digest   digest.Digest `json:"digest"` // of the document
	Size     int64         `json:"size"`   // bytes
}

// job is one thing to sign: a manifest of the layout or, with a predicate, a
// statement about it.
type job struct {
	subject       v1.Descriptor
	predicateType string
	predicate     []byte
}

// SignFamily signs every index and variant of a dist folder, attests their
// SBOMs and provenance, makes the release artifact, signs it, and stores all of
// it in the folder's OCI layout. It returns the release artifact's digest,
// which depends on the images and SBOMs only, never on the signatures.
func SignFamily(ctx context.Context, folder string, r *dist.Release, s *Signer) (v1.Hash, error) {
	l := Layout(filepath.Join(folder, "oci"))
	var jobs []job
	add := func(h digest.Digest, predicateType string, predicate []byte) error {
		hash, err := v1.NewHash(h.String())
		if err != nil {
			return err
		}
		m, err := l.Manifest(ctx, hash)
		if err != nil {
			return err
		}
		jobs = append(jobs, job{v1.Descriptor{MediaType: m.Type, Digest: hash, Size: int64(len(m.Raw))}, predicateType, predicate})
		return nil
	}
	sboms := []SBOM{}
	for _, image := range r.Images {
		found, err := s.statements(folder, r, image, add)
		if err != nil {
			return v1.Hash{}, err
		}
		sboms = append(sboms, found...)
	}
	artifact, err := writeArtifact(folder, l, r, sboms)
	if err != nil {
		return v1.Hash{}, err
	}
	if err := add(digest.Digest(artifact.String()), Signature, nil); err != nil {
		return v1.Hash{}, err
	}
	attachments := make([]Attachment, len(jobs))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(8) // keyless, each is a conversation with three services
	for i, j := range jobs {
		g.Go(func() error {
			a, err := s.attach(gctx, j)
			if err != nil {
				return fmt.Errorf("%s of %s: %w", Title(j.predicateType), j.subject.Digest, err)
			}
			attachments[i] = a
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return v1.Hash{}, err
	}
	return artifact, l.Attach(attachments)
}

// statements adds what is to be signed of an image, and lists its SBOMs.
func (s *Signer) statements(folder string, r *dist.Release, image dist.Image, add func(h digest.Digest, predicateType string, predicate []byte) error) (sboms []SBOM, err error) {
	member, err := json.Marshal(Member{r.Version, r.Source, image})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(add(image.IndexDigest, Signature, nil), add(image.IndexDigest, Membership, member)); err != nil {
		return nil, err
	}
	var built []byte // by what: the same run made all variants
	for _, v := range image.Platforms {
		if err := add(v.Digest, Signature, nil); err != nil {
			return nil, err
		}
		for _, d := range documents {
			file := filepath.Join(folder, d.kind, image.Name, strings.ReplaceAll(v.Platform, "/", "-")+d.suffix)
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, fmt.Errorf("the %s of %s for %s is not made yet; run the targets sbom and provenance first: %w", Title(d.predicateType), image.Name, v.Platform, err)
			}
			predicate, err := predicateFor(text, v.Digest, d.predicateType)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			if level := buildLevel(predicate); level > 1 && d.predicateType == Provenance && s.keypair != nil {
				return nil, fmt.Errorf("%s claims SLSA build level %v, which a signature by a key does not reach: sign keyless, or run the target provenance again with COSIGN_KEY set", file, level)
			}
			if err := add(v.Digest, d.predicateType, predicate); err != nil {
				return nil, err
			}
			if d.predicateType == Provenance && built == nil {
				built = predicate
			}
			if d.kind == "sbom" {
				sboms = append(sboms, SBOM{image.Name, v.Platform, v.Digest, d.predicateType, digest.FromBytes(text), int64(len(text))})
			}
		}
	}
	if built, err = indexProvenance(image, built); err != nil {
		return nil, fmt.Errorf("the provenance of %s: %w", image.Name, err)
	}
	return sboms, add(image.IndexDigest, Provenance, built)
}

// predicateFor takes the predicate out of a document that is a whole statement,
// after a check that it speaks of the subject; another document is a predicate.
func predicateFor(text []byte, subject digest.Digest, predicateType string) ([]byte, error) {
	var st Statement
	if err := json.Unmarshal(text, &st); err != nil {
		return nil, err
	}
	if st.Type == "" {
		return text, nil
	}
	if st.PredicateType != predicateType || len(st.Subject) != 1 || st.Subject[0].Digest[subject.Algorithm().String()] != subject.Encoded() {
		return nil, fmt.Errorf("it is a statement of type %s about %v, want one of %s about %s; run the target provenance again", st.PredicateType, st.Subject, predicateType, subject)
	}
	return st.Predicate, nil
}

// buildLevel is the SLSA level that a provenance claims, 0 where it claims none.
func buildLevel(predicate []byte) float64 {
	var p struct {
		BuildDefinition struct {
			InternalParameters struct {
				SLSABuildLevel float64 `json:"slsaBuildLevel"`
			} `json:"internalParameters"`
		} `json:"buildDefinition"`
	}
	_ = json.Unmarshal(predicate, &p) // what is no provenance claims nothing
	return p.BuildDefinition.InternalParameters.SLSABuildLevel
}

// indexProvenance turns a variant's provenance into that of the index: the same
// builder and source, made of the variants. Tags lead to the index, so it is
// there that admission controllers look.
func indexProvenance(image dist.Image, variant []byte) ([]byte, error) {
	var p map[string]any
	d := json.NewDecoder(bytes.NewReader(variant))
	d.UseNumber()
	if err := d.Decode(&p); err != nil {
		return nil, err
	}
	build, _ := p["buildDefinition"].(map[string]any)
	if build == nil {
		return nil, fmt.Errorf("that of its variant names no build definition; run the target provenance again")
	}
	if external, ok := build["externalParameters"].(map[string]any); ok {
		delete(external, "platform")
	}
	if internal, ok := build["internalParameters"].(map[string]any); ok {
		delete(internal, "worker") // each variant has its own
	}
	var made []any
	all, _ := build["resolvedDependencies"].([]any)
	for _, a := range all {
		if of, _ := a.(map[string]any); of["name"] == "source" || of["name"] == "loomcycle" {
			made = append(made, a)
		}
	}
	for _, v := range image.Platforms {
		made = append(made, Resource{v.Platform, map[string]string{v.Digest.Algorithm().String(): v.Digest.Encoded()}})
	}
	build["resolvedDependencies"] = made
	return json.Marshal(p)
}

func (s *Signer) attach(ctx context.Context, j job) (Attachment, error) {
	st, err := NewStatement(j.subject.Digest, j.predicateType, j.predicate)
	if err != nil {
		return Attachment{}, err
	}
	b, err := s.Sign(ctx, st)
	if err != nil {
		return Attachment{}, err
	}
	return NewAttachment(j.subject, j.predicateType, b)
}

// writeArtifact stores the release artifact in the layout, in the place of an earlier one.
func writeArtifact(folder string, l Layout, r *dist.Release, sboms []SBOM) (v1.Hash, error) {
	text, err := os.ReadFile(filepath.Join(folder, "release.json"))
	if err != nil {
		return v1.Hash{}, err
	}
	list, err := json.MarshalIndent(sboms, "", "  ")
	if err != nil {
		return v1.Hash{}, err
	}
	contents := map[string][]byte{ReleaseType: text, SBOMIndexType: append(list, '\n')}
	m, err := Artifact(ReleaseType, contents, map[string]string{
		"org.opencontainers.image.version":  r.Version,
		"org.opencontainers.image.revision": r.Source.Commit,
		"org.opencontainers.image.source":   r.Source.Repository,
	})
	if err != nil {
		return v1.Hash{}, err
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return v1.Hash{}, err
	}
	blobs := [][]byte{Empty, raw}
	for _, c := range contents {
		blobs = append(blobs, c)
	}
	for _, b := range blobs {
		if err := l.write(b); err != nil {
			return v1.Hash{}, err
		}
	}
	d := v1.Descriptor{MediaType: types.OCIManifestSchema1, ArtifactType: ReleaseType, Digest: hash(raw), Size: int64(len(raw))}
	return d.Digest, l.edit(func(index *v1.IndexManifest) {
		index.Manifests = slices.DeleteFunc(index.Manifests, func(d v1.Descriptor) bool { return d.ArtifactType == ReleaseType })
		index.Manifests = append(index.Manifests, d)
	})
}

// ReadRelease reads the release artifact of a digest: release.json's text is
// checked against its schema.
func ReadRelease(ctx context.Context, s Store, artifact v1.Hash) (*dist.Release, []SBOM, error) {
	m, err := s.Manifest(ctx, artifact)
	if err != nil {
		return nil, nil, err
	}
	parsed, err := v1.ParseManifest(strings.NewReader(string(m.Raw)))
	if err != nil {
		return nil, nil, fmt.Errorf("%s@%s: %w", s.Name(), artifact, err)
	}
	var r *dist.Release
	var sboms []SBOM
	for _, d := range parsed.Layers {
		b, err := s.Blob(ctx, d.Digest)
		if err != nil {
			return nil, nil, fmt.Errorf("%s@%s: %w", s.Name(), artifact, err)
		}
		switch d.MediaType {
		case ReleaseType:
			if err := dist.Validate(b); err != nil {
				return nil, nil, fmt.Errorf("%s@%s: %w", s.Name(), artifact, err)
			}
			if err := json.Unmarshal(b, &r); err != nil {
				return nil, nil, err
			}
		case SBOMIndexType:
			if err := json.Unmarshal(b, &sboms); err != nil {
				return nil, nil, fmt.Errorf("%s@%s: SBOM index: %w", s.Name(), artifact, err)
			}
		}
	}
	if r == nil {
		return nil, nil, fmt.Errorf("%s@%s is not a release: it has no %s", s.Name(), artifact, ReleaseType)
	}
	return r, sboms, nil
}

// Release finds the release artifact of a layout.
func (l Layout) Release() (v1.Hash, error) {
	index, err := l.index()
	if err != nil {
		return v1.Hash{}, err
	}
	for _, d := range index.Manifests {
		if d.ArtifactType == ReleaseType {
			return d.Digest, nil
		}
	}
	return v1.Hash{}, fmt.Errorf("%s holds no release artifact; run the target sign first", l)
}
