// Package images decides what a session image's name stands for: it is looked
// up in the engine, checked against the operator's policy before the first use
// of its digest, and used by its id, so that no tag is resolved between the
// check and the use.
package images

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"golang.org/x/sync/singleflight"
)

// fresh is how long an answer of the engine is used: a tag that was moved, or
// an image that was removed, is noticed after that.
const fresh = 5 * time.Second

// resolveTimeout is for a pull and the check of its signature. Those who wait
// for it may go sooner; it goes on for the next.
const resolveTimeout = 30 * time.Minute

// Engine resolves references.
type Engine interface {
	ResolveImage(ctx context.Context, ref string, pull bool) (engine.Image, error)
	PlaceAgent(ctx context.Context, id string) error
}

// Verifier checks an image's signature; nil accepts every image.
type Verifier func(ctx context.Context, ref, digest string) error

// Images are the session images of a sidecar.
type Images struct {
	Engine Engine
	Pull   bool
	Verify Verifier
	Now    func() time.Time // nil is time.Now

	flights singleflight.Group // by reference

	mu    sync.Mutex
	known map[string]answer
	ready map[string]bool // by id: verified, where that is asked for, and fit for sessions
}

type answer struct {
	id string
	at time.Time
}

// Resolve returns the id from which containers of ref are created. Callers of
// one reference share an inquiry, and wait for no other reference's.
func (i *Images) Resolve(ctx context.Context, ref string) (string, error) {
	now := i.Now
	if now == nil {
		now = time.Now
	}
	if id, ok := i.recall(ref, now()); ok {
		return id, nil
	}
	flight := i.flights.DoChan(ref, func() (any, error) {
		if id, ok := i.recall(ref, now()); ok {
			return id, nil // another inquiry ended just now
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveTimeout)
		defer cancel()
		return i.resolve(ctx, ref, now)
	})
	select {
	case r := <-flight:
		id, _ := r.Val.(string)
		return id, r.Err
	case <-ctx.Done():
		return "", fmt.Errorf("the session image %s is not there yet, and the sidecar goes on getting it: %w", ref, context.Cause(ctx))
	}
}

func (i *Images) recall(ref string, now time.Time) (string, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	a, ok := i.known[ref]
	return a.id, ok && now.Sub(a.at).Abs() < fresh
}

func (i *Images) resolve(ctx context.Context, ref string, now func() time.Time) (string, error) {
	img, err := i.Engine.ResolveImage(ctx, ref, i.Pull)
	if err != nil {
		return "", i.absent(ctx, ref, err)
	}
	// By reference too: a signature is looked for in the reference's repository.
	key := ref + "\x00" + img.ID
	i.mu.Lock()
	ready := i.ready[key]
	i.mu.Unlock()
	if !ready {
		if err := i.verify(ctx, ref, img); err != nil {
			return "", err
		}
	}
	i.mu.Lock()
	if i.known == nil {
		i.known, i.ready = map[string]answer{}, map[string]bool{}
	}
	i.ready[key] = true
	i.mu.Unlock()
	// Each time: what it was placed in may be gone.
	if err := i.Engine.PlaceAgent(ctx, img.ID); err != nil {
		return "", err
	}
	i.mu.Lock()
	i.known[ref] = answer{img.ID, now()}
	i.mu.Unlock()
	return img.ID, nil
}

// absent says what to do about an image that has to be in the engine already: nothing
// may be pulled, or nothing can be by that name.
func (i *Images) absent(ctx context.Context, ref string, err error) error {
	why := ""
	switch {
	case strings.HasPrefix(ref, "localhost/"):
		why = "localhost/ is no registry that it could come from"
	case !i.Pull:
		why = "SANDBOX_IMAGE_PULL=never forbids to pull it"
	default:
		return err
	}
	if _, missing := i.Engine.ResolveImage(ctx, ref, false); !cerrdefs.IsNotFound(missing) {
		return err // the engine is ill
	}
	return fmt.Errorf("the session image %s is not in the engine, and %s: load it into the engine that the sidecar uses (podman load, docker load; for a nested podman, whose storage is a volume, see sidecar-image/README.md), or name one of a registry: %w", ref, why, err)
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
