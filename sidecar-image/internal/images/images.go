// Package images decides what a session image's name stands for: it is looked
// up once, checked against the operator's policy before its first use, and
// from then on known by what it was then, whatever its tag does.
package images

import (
	"context"
	"fmt"
	"sync"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// Engine resolves references.
type Engine interface {
	ResolveImage(ctx context.Context, ref string, pull bool) (engine.Image, error)
	UseImage(ctx context.Context, id string) error
}

// Verifier checks an image's signature; nil accepts every image.
type Verifier func(ctx context.Context, ref, digest string) error

// Images are the session images of a sidecar.
type Images struct {
	Engine Engine
	Pull   bool
	Verify Verifier

	mu    sync.Mutex
	known map[string]engine.Image
}

// Resolve returns what containers of ref are created from.
func (i *Images) Resolve(ctx context.Context, ref string) (engine.Image, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if img, ok := i.known[ref]; ok {
		return img, nil
	}
	img, err := i.Engine.ResolveImage(ctx, ref, i.Pull)
	if err != nil {
		return engine.Image{}, err
	}
	if i.Verify != nil {
		if img.Digest == "" {
			return engine.Image{}, fmt.Errorf("session image %s is refused: SANDBOX_IMAGE_POLICY asks for a signature, and the engine knows no manifest digest of it (an image that was loaded, not pulled)", ref)
		}
		if err := i.Verify(ctx, ref, img.Digest); err != nil {
			return engine.Image{}, fmt.Errorf("session image %s (%s) is refused by SANDBOX_IMAGE_POLICY: %w", ref, img.Digest, err)
		}
	}
	if err := i.Engine.UseImage(ctx, img.ID); err != nil {
		return engine.Image{}, err
	}
	if i.known == nil {
		i.known = map[string]engine.Image{}
	}
	i.known[ref] = img
	return img, nil
}
