package release

import (
	"bytes"
	"context"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// copyManifest copies a manifest by digest with all that it needs, the deepest
// first. A manifest that is there is taken as complete, for a registry refuses one
// whose blobs it lacks; of an index a clean-up may have deleted the variants.
func copyManifest(ctx context.Context, src signing.Store, dst signing.Repository, h v1.Hash) error {
	there, err := dst.Client.HasManifest(ctx, dst.Path, h)
	if err != nil {
		return err
	}
	m, err := src.Manifest(ctx, h)
	if err != nil {
		return err
	}
	if there && !m.Type.IsIndex() {
		return nil
	}
	if m.Type.IsIndex() {
		index, err := v1.ParseIndexManifest(bytes.NewReader(m.Raw))
		if err != nil {
			return fmt.Errorf("index %s: %w", h, err)
		}
		for _, d := range index.Manifests {
			if err := copyManifest(ctx, src, dst, d.Digest); err != nil {
				return err
			}
		}
		if there {
			return nil
		}
		return dst.Client.PutManifest(ctx, dst.Path, h.String(), m)
	}
	parsed, err := v1.ParseManifest(bytes.NewReader(m.Raw))
	if err != nil {
		return fmt.Errorf("manifest %s: %w", h, err)
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, d := range append(parsed.Layers, parsed.Config) {
		g.Go(func() error {
			return dst.Client.PushBlob(gctx, dst.Path, registry.Blob{Digest: d.Digest, Size: d.Size,
				Open: func(ctx context.Context) (io.ReadCloser, error) { return src.Open(ctx, d.Digest) }})
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return dst.Client.PutManifest(ctx, dst.Path, h.String(), m)
}

// subjects lists an index with its variants, or a manifest alone.
func subjects(ctx context.Context, src signing.Store, h v1.Hash) ([]v1.Hash, error) {
	m, err := src.Manifest(ctx, h)
	if err != nil || !m.Type.IsIndex() {
		return []v1.Hash{h}, err
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(m.Raw))
	if err != nil {
		return nil, fmt.Errorf("index %s: %w", h, err)
	}
	all := []v1.Hash{h}
	for _, d := range index.Manifests {
		all = append(all, d.Digest)
	}
	return all, nil
}

// attach copies the bundles that refer to a digest and its variants. A run that
// signed again adds nothing: what the registry has, verified and with the same
// statement, stays the only one. Provenance differs from run to run by nature,
// so the first one, of the build that was published, stays.
func attach(ctx context.Context, src signing.Store, dst signing.Repository, h v1.Hash, t *signing.Trust) error {
	all, err := subjects(ctx, src, h)
	if err != nil {
		return err
	}
	for _, subject := range all {
		local, err := signing.Bundles(ctx, src, subject)
		if err != nil {
			return err
		}
		remote, err := signing.Bundles(ctx, dst, subject)
		if err != nil {
			return err
		}
		for _, a := range local {
			if has(ctx, remote, a, t) {
				continue
			}
			for _, b := range [][]byte{signing.Empty, a.Bundle} {
				if err := dst.Client.PushBlob(ctx, dst.Path, registry.Bytes(b)); err != nil {
					return err
				}
			}
			mh, _, err := v1.SHA256(bytes.NewReader(a.Manifest))
			if err != nil {
				return err
			}
			if err := dst.Client.PutManifest(ctx, dst.Path, mh.String(), registry.Manifest{Raw: a.Manifest, Type: "application/vnd.oci.image.manifest.v1+json"}); err != nil {
				return err
			}
		}
	}
	return nil
}

func has(ctx context.Context, remote []signing.Attachment, a signing.Attachment, t *signing.Trust) bool {
	for _, r := range remote {
		if bytes.Equal(r.Manifest, a.Manifest) {
			return true
		}
	}
	if t == nil {
		return false
	}
	want, err := t.Verify(ctx, a.Subject, a.Bundle)
	if err != nil {
		return false
	}
	for _, r := range remote {
		got, err := t.Verify(ctx, a.Subject, r.Bundle)
		if err == nil && got.PredicateType == want.PredicateType &&
			(want.PredicateType == signing.Provenance || bytes.Equal(got.Predicate, want.Predicate)) {
			return true
		}
	}
	return false
}
