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
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// A registry has no compare-and-swap, and some never move or delete a tag. So
// the lock only adds tags: a contender adds lock-ID-N-END, then lists. Whoever sees
// another live claim withdraws by adding unlock-ID and comes back at random. Of
// two that claim at once at least the later sees the other, so never both hold.
// The end, in seconds since 1970 UTC, is in the tag because a full disk leaves
// tags that can be listed and not be read.
const (
	lockType  = "application/vnd.loomcycle.lock.v1+json"
	claimTag  = "lock-"
	removeTag = "unlock-"
	backTag   = "rollback-" // CHANNEL-VERSION: the channel was rolled back from that version
	holder    = "com.loomcycle.lock.holder"
)

// A registry can't refuse a write of a release that has lost its lock, so the
// release must know it in time: it counts its lease as ended a tenth early.
var (
	errLost      = errors.New("the release lock is lost")
	errWithdrawn = fmt.Errorf("%w: another release has withdrawn it", errLost)
)

// lease is how long a claim counts without being renewed. Clocks of machines
// that release should agree within a tenth of it.
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

	mu  sync.Mutex
	end time.Time // until when the holder may write
	why error     // of the last renewal
}

// busyError tells who holds the lock.
type busyError struct{ registry, who, until string }

func (e *busyError) Error() string {
	return fmt.Sprintf("another release holds the lock in %s: %s, until %s at the latest; wait for it, then run this again", e.registry, e.who, e.until)
}

// acquire takes the lock, waiting for at most wait. The claims of dead runs
// that the caller knows of are withdrawn first; note is told each id before it is
// claimed, so that a kill leaves no claim that nobody knows.
func acquire(ctx context.Context, l lease, c *registry.Client, repo, who string, wait time.Duration, dead []string, note func(id string) error) (*lock, error) {
	// Without its monotonic part, which stands still while a machine is suspended.
	wall := l
	wall.now = func() time.Time { return l.now().Round(0) }
	k := &lock{lease: wall, client: c, repo: repo, who: who}
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
			if err := note(k.id); err != nil {
				return nil, err
			}
			if k.end, err = k.add(ctx); err == nil {
				busy, err = k.others(ctx)
			}
			if err == nil && busy == nil {
				return k, nil
			}
			// Also after Ctrl-C, and after a claim that failed: it may have arrived.
			short, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
			err = errors.Join(err, k.withdraw(short, k.id))
			if cancel(); err != nil {
				return nil, err
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

// add adds the next claim and tells how long it may be relied on. One that
// failed may have arrived, so its tag is not used again.
func (k *lock) add(ctx context.Context) (end time.Time, err error) {
	now, n := k.now(), k.n
	k.n++
	until := now.Add(k.length)
	if err := k.put(ctx, fmt.Sprintf("%s%s-%d-%d", claimTag, k.id, n, until.Unix())); err != nil {
		return time.Time{}, fmt.Errorf("take the release lock: %w", err)
	}
	return until.Add(-k.length / 10), nil
}

// held fails once the lock may be another's. It asks the wall clock: timers
// stand still while a machine is suspended.
func (k *lock) held() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case errors.Is(k.why, errLost):
		return fmt.Errorf("%s: %w", k.client.Address(), k.why)
	case !k.now().Before(k.end):
		return errors.Join(fmt.Errorf("%s: %w: it was not renewed before %s", k.client.Address(), errLost, k.end.UTC().Format(time.RFC3339)), k.why)
	}
	return nil
}

// withdraw ends a claim. A registry that never moves a tag refuses it a second
// time, so one that was withdrawn, by whomever, is left as it is.
func (k *lock) withdraw(ctx context.Context, id string) error {
	if _, absent, err := k.client.Digest(ctx, k.repo, removeTag+id); err == nil && !absent {
		return nil
	} // One that can't be read may be half written: it is written again.
	if err := k.put(ctx, removeTag+id); err != nil {
		if _, absent, lerr := k.client.Digest(ctx, k.repo, removeTag+id); lerr == nil && !absent {
			return nil
		}
		return fmt.Errorf("give the release lock back: %w", err)
	}
	return nil
}

func (k *lock) put(ctx context.Context, tag string) error {
	if err := k.client.PushBlob(ctx, k.repo, registry.Bytes(signing.Empty)); err != nil {
		return err
	}
	m, err := signing.Artifact(lockType, map[string][]byte{lockType: signing.Empty}, map[string]string{holder: k.who})
	if err != nil {
		return err
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return k.client.PutManifest(ctx, k.repo, tag, registry.Manifest{Raw: raw, Type: types.OCIManifestSchema1})
}

// others finds a live claim that is not ours. The time is taken first: a claim
// renewed before it ended is in a list that is read after it ended.
func (k *lock) others(ctx context.Context) (*busyError, error) {
	now := k.now()
	tags, err := k.client.Tags(ctx, k.repo)
	if err != nil {
		return nil, err
	}
	last := map[string]claim{}
	for _, t := range tags {
		if c, ok := parseClaim(t); ok && c.id != k.id && c.end.After(last[c.id].end) && !slices.Contains(tags, removeTag+c.id) {
			last[c.id] = c
		}
	}
	for id, c := range last {
		if now.Before(c.end) {
			return &busyError{k.client.Address(), k.whose(ctx, c), c.end.UTC().Format(time.RFC3339)}, nil
		}
		// Ended without a word: withdrawn, so that a renewal that comes late sees it.
		if err := k.withdraw(ctx, id); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// claim is what a tag of the lock says.
type claim struct {
	tag, id string
	end     time.Time
}

func parseClaim(tag string) (claim, bool) {
	rest, found := strings.CutPrefix(tag, claimTag)
	id, rest, _ := strings.Cut(rest, "-")
	_, end, _ := strings.Cut(rest, "-")
	seconds, err := strconv.ParseInt(end, 10, 64)
	return claim{tag, id, time.Unix(seconds, 0)}, found && err == nil
}

// whose reads who made a claim. Nothing depends on it, so it is not waited for.
func (k *lock) whose(ctx context.Context, c claim) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var m struct{ Annotations map[string]string }
	if raw, _, err := k.client.Fetch(ctx, k.repo, c.tag); err != nil || json.Unmarshal(raw.Raw, &m) != nil || m.Annotations[holder] == "" {
		return "a run whose claim " + c.tag + " can't be read"
	}
	return m.Annotations[holder]
}

// keep renews the lease until ctx ends; lost is called when it is over.
func (k *lock) keep(ctx context.Context, lost func(error)) {
	go k.watch(ctx, lost)
	for k.sleep(ctx, k.renew) == nil {
		end, err := k.extend(ctx)
		if ctx.Err() != nil {
			return
		}
		k.mu.Lock()
		if k.why = err; err == nil {
			k.end = end
		}
		k.mu.Unlock()
		switch {
		case errors.Is(err, errLost):
			lost(k.held())
			return
		case err != nil:
			k.notice("the release lock could not be renewed yet: %v", err)
		}
	}
}

// extend adds a claim. It gives up early enough for another try, and at the
// lease's end at the latest. That the claim still counts is seen afterwards: who
// finds it ended withdraws it, and whoever lists later finds the new one.
func (k *lock) extend(ctx context.Context) (end time.Time, err error) {
	k.mu.Lock()
	left := k.end.Sub(k.now())
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, min(left, k.renew))
	defer cancel()
	if end, err = k.add(ctx); err != nil {
		return end, err
	}
	_, absent, err := k.client.Digest(ctx, k.repo, removeTag+k.id)
	if err == nil && !absent {
		err = errWithdrawn
	}
	return end, err
}

// watch calls lost when the lease ends, whatever a renewal waits for.
func (k *lock) watch(ctx context.Context, lost func(error)) {
	for {
		if err := k.held(); err != nil {
			lost(err)
			return
		}
		k.mu.Lock()
		left := k.end.Sub(k.now())
		k.mu.Unlock()
		// In small steps: the sleep does not count the time of a suspend.
		if k.sleep(ctx, min(left, k.renew/10)) != nil {
			return
		}
	}
}
