package release

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// A registry has no compare-and-swap, and some never move or delete a tag. So
// the lock only adds tags: a contender adds lock-ID-N, then lists. Whoever sees
// another live claim withdraws by adding unlock-ID and comes back at random. Of
// two that claim at once at least the later sees the other, so never both hold.
const (
	lockType  = "application/vnd.loomcycle.lock.v1+json"
	claimTag  = "lock-"
	removeTag = "unlock-"
	expires   = "com.loomcycle.lock.expires"
	holder    = "com.loomcycle.lock.holder"
)

// lease is how long a claim counts without being renewed. Clocks of machines
// that release should agree within a minute.
type lease struct {
	length, renew time.Duration
	now           func() time.Time
	sleep         func(context.Context, time.Duration) error
	notice        func(string, ...any)
}

type lock struct {
	lease
	client *registry.Client
	repo   string
	id     string
	who    string
	n      int
	until  time.Time
}

// busyError tells who holds the lock.
type busyError struct{ registry, who, until string }

func (e *busyError) Error() string {
	return fmt.Sprintf("another release holds the lock in %s: %s, until %s at the latest; wait for it, or run again with a longer -wait", e.registry, e.who, e.until)
}

// acquire takes the lock, waiting for at most wait. The claims of dead runs
// that the caller knows of are withdrawn first; note is told each id before it is
// claimed, so that a kill leaves no claim that nobody knows.
func acquire(ctx context.Context, l lease, c *registry.Client, repo, who string, wait time.Duration, dead []string, note func(id string) error) (*lock, error) {
	k := &lock{lease: l, client: c, repo: repo, who: who}
	for _, id := range dead {
		if err := k.withdraw(ctx, id); err != nil {
			return nil, err
		}
	}
	deadline := l.now().Add(wait)
	for {
		busy, err := k.others(ctx)
		if err != nil {
			return nil, err
		}
		if busy == nil {
			var id [8]byte
			_, _ = rand.Read(id[:])
			k.id, k.n = hex.EncodeToString(id[:]), 0
			if err := errors.Join(note(k.id), k.claim(ctx)); err != nil {
				return nil, err
			}
			if busy, err = k.others(ctx); err != nil || busy != nil {
				err = errors.Join(err, k.withdraw(ctx, k.id))
			}
			if err != nil || busy == nil {
				return k, err
			}
		}
		if !l.now().Before(deadline) {
			return nil, busy
		}
		l.notice("%s is being released to by %s; waiting", c.Address(), busy.who)
		if err := l.sleep(ctx, l.renew/20+mrand.N(l.renew/20)); err != nil {
			return nil, err
		}
	}
}

func (k *lock) claim(ctx context.Context) error {
	until := k.now().Add(k.length)
	if err := k.put(ctx, claimTag+k.id+"-"+strconv.Itoa(k.n), map[string]string{expires: until.UTC().Format(time.RFC3339), holder: k.who}); err != nil {
		return fmt.Errorf("take the release lock: %w", err)
	}
	k.n++
	k.until = until
	return nil
}

// withdraw ends a claim. A registry that never moves a tag refuses it a second
// time, so one that was withdrawn, by whomever, is left as it is.
func (k *lock) withdraw(ctx context.Context, id string) error {
	_, absent, err := k.client.Digest(ctx, k.repo, removeTag+id)
	if err == nil && !absent {
		return nil
	}
	if err == nil {
		err = k.put(ctx, removeTag+id, map[string]string{holder: k.who})
	}
	if err != nil {
		if _, absent, lerr := k.client.Digest(ctx, k.repo, removeTag+id); lerr == nil && !absent {
			return nil
		}
		return fmt.Errorf("give the release lock back: %w", err)
	}
	return nil
}

func (k *lock) put(ctx context.Context, tag string, annotations map[string]string) error {
	if err := k.client.PushBlob(ctx, k.repo, registry.Bytes(signing.Empty)); err != nil {
		return err
	}
	m, err := signing.Artifact(lockType, map[string][]byte{lockType: signing.Empty}, annotations)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return k.client.PutManifest(ctx, k.repo, tag, registry.Manifest{Raw: raw, Type: types.OCIManifestSchema1})
}

// others finds a live claim that is not ours.
func (k *lock) others(ctx context.Context) (*busyError, error) {
	tags, err := k.client.Tags(ctx, k.repo)
	if err != nil {
		return nil, err
	}
	last := map[string]int{}
	for _, t := range tags {
		id, n, ok := strings.Cut(strings.TrimPrefix(t, claimTag), "-")
		i, err := strconv.Atoi(n)
		if strings.HasPrefix(t, claimTag) && ok && err == nil && id != k.id && !slices.Contains(tags, removeTag+id) {
			last[id] = max(last[id], i)
		}
	}
	for id, n := range last {
		tag := claimTag + id + "-" + strconv.Itoa(n)
		m, _, err := k.client.Fetch(ctx, k.repo, tag)
		if err != nil {
			return nil, err
		}
		var parsed struct{ Annotations map[string]string }
		if err := json.Unmarshal(m.Raw, &parsed); err != nil {
			return nil, fmt.Errorf("claim %s in %s: %w", tag, k.repo, err)
		}
		until, err := time.Parse(time.RFC3339, parsed.Annotations[expires])
		if err != nil {
			return nil, fmt.Errorf("claim %s in %s says not when it ends: %w", tag, k.repo, err)
		}
		if k.now().Before(until) {
			return &busyError{k.client.Address(), parsed.Annotations[holder], until.Format(time.RFC3339)}, nil
		}
		// Ended without a word: withdrawn for it, so nobody reads it again.
		if err := k.withdraw(ctx, id); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// keep renews the lease until ctx ends; lost is called when it can't.
func (k *lock) keep(ctx context.Context, lost func(error)) {
	for k.sleep(ctx, k.renew) == nil {
		if err := k.claim(ctx); err != nil && ctx.Err() == nil && k.now().Add(k.renew).After(k.until) {
			lost(fmt.Errorf("the release lock in %s could not be renewed: %w", k.client.Address(), err))
			return
		}
	}
}
