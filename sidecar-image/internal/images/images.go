// Package images decides what a session image's name stands for: it is looked
// up in the engine, checked against the operator's policy before the first use
// of its digest, and used by its id, so that no tag is resolved between the
// check and the use.
package images

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// fresh is how long an answer of the engine is used: a tag that was moved, or
// an image that was removed, is noticed after that.
const fresh = 5 * time.Second

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
	Now    func() time.Time // nil is time.Now

	mu    sync.Mutex
	known map[string]answer
	ready map[string]bool // by id: verified, where that is asked for, and fit for sessions
}

type answer struct {
	id string
	at time.Time
}

// Resolve returns the id from which containers of ref are created.
func (i *Images) Resolve(ctx context.Context, ref string) (string, error) {
	now := i.Now
	if now == nil {
		now = time.Now
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if a, ok := i.known[ref]; ok && now().Sub(a.at).Abs() < fresh {
		return a.id, nil
	}
	img, err := i.Engine.ResolveImage(ctx, ref, i.Pull)
	if err != nil {
		return "", err
	}
	if i.known == nil {
		i.known, i.ready = map[string]answer{}, map[string]bool{}
	}
	// By reference too: a signature is looked for in the reference's repository.
	if key := ref + "\x00" + img.ID; !i.ready[key] {
		if err := i.verify(ctx, ref, img); err != nil {
			return "", err
		}
		i.ready[key] = true
	}
	if old := i.known[ref]; old.id != img.ID || old.at.IsZero() {
		if err := i.Engine.UseImage(ctx, img.ID); err != nil {
			return "", err
		}
	}
	i.known[ref] = answer{img.ID, now()}
	return img.ID, nil
}

// verify accepts an image when one of the digests that the engine has of it is
// signed: of its index or of its platform's manifest.
func (i *Images) verify(ctx context.Context, ref string, img engine.Image) error {
	if i.Verify == nil {
		return nil
	}
	if len(img.Digests) == 0 {
		return fmt.Errorf("session image %s is refused: SANDBOX_IMAGE_POLICY asks for a signature, and the engine knows no manifest digest of it (an image that was loaded, not pulled)", ref)
	}
	var errs []error
	for _, d := range img.Digests {
		err := i.Verify(ctx, ref, d)
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", d, err))
	}
	return fmt.Errorf("session image %s is refused by SANDBOX_IMAGE_POLICY: %w", ref, errors.Join(errs...))
}
