package signing

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
	"github.com/loomcycle/loomcycle-images/internal/registry"
)

// Store is where manifests, their blobs and their referrers are read from.
type Store interface {
	Manifest(ctx context.Context, h v1.Hash) (registry.Manifest, error)
	Blob(ctx context.Context, h v1.Hash) ([]byte, error)
	Referrers(ctx context.Context, h v1.Hash) ([]v1.Descriptor, error)
	// Open opens a blob of any size.
	Open(ctx context.Context, h v1.Hash) (io.ReadCloser, error)
	Name() string
}

// Layout is an OCI layout on disk; its referrers are the manifests with a
// subject that its index.json lists.
type Layout string

// Name implements Store.
func (l Layout) Name() string { return string(l) }

// Open opens a blob; the reader fails at its end if the bytes do not match the digest.
func (l Layout) Open(_ context.Context, h v1.Hash) (io.ReadCloser, error) {
	f, err := os.Open(filepath.Join(string(l), "blobs", h.Algorithm, h.Hex))
	if err != nil {
		return nil, err
	}
	return registry.Checked(f, h, string(l)), nil
}

// Check reads all that the manifests lead to, each blob once, and fails at the
// first that is missing or does not match its digest.
func (l Layout) Check(ctx context.Context, manifests ...v1.Hash) error {
	done := map[v1.Hash]bool{}
	for ; len(manifests) > 0; manifests = manifests[1:] {
		m, err := l.Manifest(ctx, manifests[0])
		if err != nil {
			return err
		}
		var of struct { // an index, or a manifest
			Manifests, Layers []v1.Descriptor
			Config            v1.Descriptor
		}
		if err := json.Unmarshal(m.Raw, &of); err != nil {
			return fmt.Errorf("read manifest %s: %w", manifests[0], err)
		}
		for _, d := range of.Manifests {
			manifests = append(manifests, d.Digest)
		}
		if !m.Type.IsIndex() {
			of.Layers = append(of.Layers, of.Config)
		}
		for _, d := range of.Layers {
			if done[d.Digest] {
				continue
			}
			r, err := l.Open(ctx, d.Digest)
			if err != nil {
				return fmt.Errorf("a blob of manifest %s: %w", manifests[0], err)
			}
			_, err = io.Copy(io.Discard, r)
			if err := errors.Join(err, r.Close(), ctx.Err()); err != nil {
				return fmt.Errorf("manifest %s: %w", manifests[0], err)
			}
			done[d.Digest] = true
		}
	}
	return nil
}

// Blob implements Store; the bytes are checked against the digest.
func (l Layout) Blob(_ context.Context, h v1.Hash) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(string(l), "blobs", h.Algorithm, h.Hex))
	if err != nil {
		return nil, err
	}
	if got := hash(b); got != h {
		return nil, fmt.Errorf("blob %s in %s has the digest %s", h, l, got)
	}
	return b, nil
}

// Manifest implements Store.
func (l Layout) Manifest(ctx context.Context, h v1.Hash) (registry.Manifest, error) {
	b, err := l.Blob(ctx, h)
	if err != nil {
		return registry.Manifest{}, fmt.Errorf("read manifest %s: %w", h, err)
	}
	var m struct{ MediaType types.MediaType }
	if err := json.Unmarshal(b, &m); err != nil {
		return registry.Manifest{}, fmt.Errorf("read manifest %s: %w", h, err)
	}
	return registry.Manifest{Raw: b, Type: m.MediaType}, nil
}

func (l Layout) index() (*v1.IndexManifest, error) {
	i, err := layout.ImageIndexFromPath(string(l))
	if err != nil {
		return nil, fmt.Errorf("open the OCI layout %s: %w", l, err)
	}
	return i.IndexManifest()
}

// Referrers implements Store.
func (l Layout) Referrers(ctx context.Context, h v1.Hash) ([]v1.Descriptor, error) {
	index, err := l.index()
	if err != nil {
		return nil, err
	}
	var found []v1.Descriptor
	for _, d := range index.Manifests {
		if d.MediaType != types.OCIManifestSchema1 || d.ArtifactType == "" {
			continue
		}
		raw, err := l.Blob(ctx, d.Digest)
		if err != nil {
			return nil, err
		}
		m, err := v1.ParseManifest(bytes.NewReader(raw))
		if err != nil {
			return nil, fmt.Errorf("manifest %s in %s: %w", d.Digest, l, err)
		}
		if m.Subject != nil && m.Subject.Digest == h {
			d.Annotations = m.Annotations
			found = append(found, d)
		}
	}
	return found, nil
}

// Attach stores attachments in the layout. One of the same subject and
// predicate type is replaced. index.json changes in one rename, at the end.
func (l Layout) Attach(attachments []Attachment) error {
	type key struct {
		subject v1.Hash
		kind    string
	}
	fresh := map[key]bool{}
	for _, a := range attachments {
		fresh[key{a.Subject, a.PredicateType}] = true
		for _, b := range [][]byte{Empty, a.Bundle, a.Manifest} {
			if err := l.write(b); err != nil {
				return fmt.Errorf("store the %s of %s: %w", Title(a.PredicateType), a.Subject, err)
			}
		}
	}
	return l.edit(func(index *v1.IndexManifest) {
		index.Manifests = slices.DeleteFunc(index.Manifests, func(d v1.Descriptor) bool {
			if d.ArtifactType != string(BundleType) {
				return false
			}
			raw, err := l.Blob(context.Background(), d.Digest)
			if err != nil {
				return true // damaged: what it signed is signed anew
			}
			m, err := v1.ParseManifest(bytes.NewReader(raw))
			return err != nil || m.Subject == nil || fresh[key{m.Subject.Digest, m.Annotations[typeAnnotation]}]
		})
		for _, a := range attachments {
			index.Manifests = append(index.Manifests, v1.Descriptor{
				MediaType: types.OCIManifestSchema1, ArtifactType: string(BundleType), Digest: hash(a.Manifest), Size: int64(len(a.Manifest)),
			})
		}
	})
}

func hash(b []byte) v1.Hash {
	h, _, _ := v1.SHA256(bytes.NewReader(b)) // reading from memory does not fail
	return h
}

func (l Layout) write(b []byte) error {
	return layout.Path(l).WriteBlob(hash(b), io.NopCloser(bytes.NewReader(b)))
}

func (l Layout) edit(change func(*v1.IndexManifest)) error {
	index, err := l.index()
	if err != nil {
		return err
	}
	change(index)
	raw, err := json.MarshalIndent(index, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(string(l), "index.json"), append(raw, '\n'), 0o644)
}

// Repository is one repository of a registry.
type Repository struct {
	Client *registry.Client
	Path   string // below the client's prefix
}

// Name implements Store.
func (r Repository) Name() string { return r.Client.Address() + "/" + r.Path }

// Manifest implements Store.
func (r Repository) Manifest(ctx context.Context, h v1.Hash) (registry.Manifest, error) {
	m, _, err := r.Client.Fetch(ctx, r.Path, h.String())
	return m, err
}

// Blob implements Store.
func (r Repository) Blob(ctx context.Context, h v1.Hash) ([]byte, error) {
	return r.Client.ReadBlob(ctx, r.Path, h)
}

// Open opens a blob.
func (r Repository) Open(ctx context.Context, h v1.Hash) (io.ReadCloser, error) {
	return r.Client.OpenBlob(ctx, r.Path, h)
}

// Referrers implements Store.
func (r Repository) Referrers(ctx context.Context, h v1.Hash) ([]v1.Descriptor, error) {
	return r.Client.Referrers(ctx, r.Path, h)
}

// maxBundles is how many bytes of bundles are read of one digest: most of a year
// of a scanner's daily attestations.
const maxBundles = 4 * registry.MaxBlob

// Bundles reads the sigstore bundles that refer to a digest. A referrer that
// isn't one is not read.
func Bundles(ctx context.Context, s Store, subject v1.Hash) ([]Attachment, error) {
	referrers, err := s.Referrers(ctx, subject)
	if err != nil {
		return nil, err
	}
	// Some registries list the configuration's type in the place of the artifact's.
	referrers = slices.DeleteFunc(referrers, func(d v1.Descriptor) bool {
		return d.ArtifactType != "" && d.ArtifactType != string(BundleType) && d.ArtifactType != string(emptyType)
	})
	found := make([]Attachment, len(referrers))
	var total atomic.Int64 // bytes
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for i, d := range referrers {
		g.Go(func() error {
			m, err := s.Manifest(gctx, d.Digest)
			if err != nil {
				return err
			}
			parsed, err := v1.ParseManifest(bytes.NewReader(m.Raw))
			if err != nil {
				return fmt.Errorf("referrer %s of %s in %s: %w", d.Digest, subject, s.Name(), err)
			}
			if len(parsed.Layers) != 1 || parsed.Layers[0].MediaType != BundleType {
				return nil // somebody else's
			}
			if parsed.Layers[0].Size > registry.MaxBlob {
				return nil // nor is any of ours of that size
			}
			b, err := s.Blob(gctx, parsed.Layers[0].Digest)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("the bundle %s of %s is missing in %s", parsed.Layers[0].Digest, subject, s.Name())
			}
			if total.Add(int64(len(b))) > maxBundles {
				return fmt.Errorf("more than %d bytes of bundles are attached to %s in %s, which no release does; delete what is foreign", maxBundles, subject, s.Name())
			}
			found[i] = Attachment{parsed.Annotations[typeAnnotation], subject, m.Raw, b}
			return err
		})
	}
	err = g.Wait()
	return slices.DeleteFunc(found, func(a Attachment) bool { return a.Bundle == nil }), err
}
