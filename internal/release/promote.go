package release

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// placed is what a release puts behind a tag of a repository.
type placed struct {
	repository string
	digest     v1.Hash
}

// contents lists the images and, last, the release artifact: its version tag
// is what makes a version released, so it is written when all else is.
func (r *run) contents() ([]placed, error) {
	var all []placed
	for _, i := range r.release.Images {
		h, err := v1.NewHash(i.IndexDigest.String())
		if err != nil {
			return nil, err
		}
		all = append(all, placed{r.Config.Repository(i.Name), h})
	}
	return append(all, placed{r.Config.Releases, r.artifact}), nil
}

type tagState struct {
	t *target
	placed
	tag string
	now v1.Hash // zero: free
}

// states reads every version tag. One that points elsewhere, or whose state is
// unknown, refuses the release.
func (r *run) states(ctx context.Context) ([]tagState, error) {
	all, err := r.contents()
	if err != nil {
		return nil, err
	}
	var found []tagState
	var wrong []error
	for _, p := range all {
		for _, t := range r.targets {
			for _, tag := range r.Config.VersionTags(r.version) {
				now, absent, err := t.client.Digest(ctx, p.repository, tag)
				switch {
				case err != nil:
					var e *transport.Error
					if errors.As(err, &e) && e.StatusCode == http.StatusInternalServerError { // a registry that once ran out of disk may answer so for ever
						err = fmt.Errorf("%w; run again, and where it stays so have the tag removed from the registry's storage", err)
					}
					wrong = append(wrong, err)
				case !absent && now != p.digest:
					wrong = append(wrong, fmt.Errorf("%s:%s already points to %s, not to %s: a version tag is never moved; release these images under a new version", t.store(p.repository).Name(), tag, now, p.digest))
				}
				found = append(found, tagState{t, p, tag, now})
			}
		}
	}
	return found, errors.Join(wrong...)
}

// promote plans every tag, checks the plan, and applies it: the version tags,
// which only ever appear, then the channels, whose moves are journalled and
// taken back when one of them fails.
func (r *run) promote(ctx context.Context) error {
	states, err := r.states(ctx)
	if err != nil {
		return err
	}
	moves, err := r.channels(ctx)
	if err != nil {
		return err
	}
	for _, m := range moves {
		r.journal.remember(m)
	}
	if err := r.journal.save(); err != nil {
		return err
	}
	for _, s := range states {
		if s.now == s.digest {
			continue
		}
		if err := r.tag(ctx, s.t, s.repository, s.tag, s.digest.String()); err != nil {
			return fmt.Errorf("the version tags so far point to the complete release, no channel was moved; run again to finish: %w", err)
		}
	}
	return r.move(ctx, moves)
}

// move applies moves that are in the journal. When one fails, all that the
// journal has are taken back, also those of an earlier run that was killed, and
// also when the caller gave up. Not without the lock: another release may move
// the same channels.
func (r *run) move(ctx context.Context, moves []move) error {
	for _, m := range moves {
		if err := r.apply(ctx, m); err != nil {
			if !errors.Is(err, errLost) {
				if _, back := r.undo(r.locked); back != nil {
					err = errors.Join(err, because(r.locked, back))
				}
			}
			if errors.Is(err, errLost) {
				err = fmt.Errorf("some channels may have moved; run again to finish, or `go run mage.go release:abort %s` to take them back: %w", r.version, err)
			}
			return err
		}
	}
	return nil
}

func (r *run) tag(ctx context.Context, t *target, repository, tag, digest string) error {
	m, _, err := t.client.Fetch(ctx, repository, digest)
	for _, other := range r.targets {
		if other.lock != nil && err == nil {
			err = other.lock.held() // of every registry: channels move together
		}
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = t.client.PutManifest(ctx, repository, tag, m)
	}
	if err != nil {
		return because(ctx, err)
	}
	r.Notice("%s:%s -> %s", t.store(repository).Name(), tag, digest)
	return nil
}

// channels plans the moves of this version's channels in every registry, given
// the versions that were released there. A channel that was rolled back waits for
// a newer version: running an old release again must not bring back what was bad.
func (r *run) channels(ctx context.Context) ([]move, error) {
	var moves []move
	for _, t := range r.targets {
		released, err := r.released(ctx, t)
		if err != nil {
			return nil, err
		}
		tags := r.Config.ChannelTags(r.version, released)
		if t.ImmutableTags && len(tags) > 0 {
			r.Notice("%s never moves a tag: the channels %v are skipped there", t.Address, tags)
			continue
		}
		marks, err := t.client.Tags(ctx, r.Config.Locks)
		if err != nil {
			return nil, err
		}
		for _, tag := range tags {
			if from := rolledBack(marks, tag); from != "" && !newer(r.version, from) {
				r.Notice("%s: the channel %s was rolled back from %s and stays where it is, for %s is no newer; release:rollback moves it", t.Address, tag, from, r.version)
				continue
			}
			more, err := r.plan(ctx, t, tag)
			if err != nil {
				return nil, err
			}
			moves = append(moves, more...)
		}
	}
	return r.ordered(moves), nil
}

// ordered puts the channels of the release artifact last, in all registries.
func (r *run) ordered(moves []move) []move {
	last := func(m move) int {
		if m.Repository == r.Config.Releases {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(moves, func(a, b move) int { return last(a) - last(b) })
	return moves
}

// plan notes, for all that a channel is to leave, where that was and where it goes.
// A channel is where its release artifact is: an image that is elsewhere was moved
// by a run that was killed, whose journal may be on another machine.
func (r *run) plan(ctx context.Context, t *target, tag string) ([]move, error) {
	all, err := r.contents()
	if err != nil {
		return nil, err
	}
	was := map[string]string{}
	h, unreleased, err := t.client.Digest(ctx, r.Config.Releases, tag)
	if err != nil {
		return nil, err
	}
	if !unreleased && h != r.artifact {
		old, _, err := signing.ReadRelease(ctx, t.store(r.Config.Releases), h)
		if err != nil {
			r.Notice("which release %s:%s is can't be read: %v", t.store(r.Config.Releases).Name(), tag, err)
			old = &dist.Release{}
		}
		for _, i := range old.Images {
			was[r.Config.Repository(i.Name)] = i.IndexDigest.String()
		}
	}
	var moves []move
	for _, p := range all {
		now, absent, err := t.client.Digest(ctx, p.repository, tag)
		if err != nil {
			return nil, err
		}
		m := move{Registry: t.Address, Repository: p.repository, Tag: tag, To: p.digest.String()}
		if !absent && !(unreleased && now == p.digest) { // that is a new channel, which a killed run began
			m.From = cmp.Or(was[p.repository], now.String())
		}
		if now != p.digest || m.From != m.To {
			moves = append(moves, m)
		}
	}
	return moves, nil
}

// released lists the versions that were released to a registry. A full disk leaves
// tags that are listed and that the registry then calls unknown; the newer ones,
// which hold back this version's channels, are asked for.
func (r *run) released(ctx context.Context, t *target) ([]Version, error) {
	tags, err := t.client.Tags(ctx, r.Config.Releases)
	if err != nil {
		return nil, err
	}
	var all []Version
	for _, tag := range tags {
		v, err := ParseVersion(tag)
		if err != nil || string(v) != tag {
			continue
		}
		if newer(v, r.version) {
			_, absent, err := t.client.Digest(ctx, r.Config.Releases, tag)
			if err != nil {
				return nil, err
			}
			if absent {
				continue
			}
		}
		all = append(all, v)
	}
	return all, nil
}

// rolledBack is the newest version that a channel was rolled back from, or none.
func rolledBack(marks []string, channel string) (from Version) {
	for _, m := range marks {
		text, found := strings.CutPrefix(m, backTag+channel+"-")
		if v, err := ParseVersion(text); found && err == nil && newer(v, from) {
			from = v
		}
	}
	return from
}

// mark notes that a channel is taken from newer versions, where there are any.
func (r *run) mark(ctx context.Context, t *target, channel string) error {
	all, err := r.released(ctx, t)
	if err != nil {
		return err
	}
	from := r.version
	for _, v := range all {
		if newer(v, from) && r.Config.Channel(channel, v) == nil {
			from = v
		}
	}
	if from == r.version {
		return nil
	}
	tag := backTag + channel + "-" + string(from)
	if _, absent, err := t.client.Digest(ctx, t.lock.repo, tag); err == nil && !absent {
		return nil // an earlier rollback noted it, and some registries move no tag
	}
	return t.lock.put(ctx, tag)
}

func (r *run) target(address string) (*target, error) {
	for _, t := range r.targets {
		if t.Address == address {
			return t, nil
		}
	}
	return nil, fmt.Errorf("the journal speaks of registry %s, which is not configured now", address)
}

func (r *run) apply(ctx context.Context, m move) error {
	t, err := r.target(m.Registry)
	if err != nil {
		return err
	}
	return r.tag(ctx, t, m.Repository, m.Tag, m.To)
}

// undo puts the journal's channels back where they were, the last first; what could
// not be put back stays in the journal. A channel that did not exist before stays:
// registries differ in what deleting a tag deletes.
// It tells whether any had been moved.
func (r *run) undo(ctx context.Context) (moved bool, err error) {
	var left []move
	var wrong []error
	for _, m := range slices.Backward(r.journal.Moves) {
		t, err := r.target(m.Registry)
		if err == nil {
			var now v1.Hash
			now, _, err = t.client.Digest(ctx, m.Repository, m.Tag)
			there := err == nil && now.String() == m.To
			moved = moved || there
			switch {
			case !there:
			case m.From == "":
				r.Notice("%s/%s:%s is new and stays", m.Registry, m.Repository, m.Tag)
			default:
				err = r.tag(ctx, t, m.Repository, m.Tag, m.From)
			}
		}
		if err != nil {
			left = append(left, m)
			wrong = append(wrong, fmt.Errorf("put %s/%s:%s back to %s: %w", m.Registry, m.Repository, m.Tag, m.From, err))
		}
	}
	if !moved && len(wrong) == 0 {
		r.Notice("no channel had been moved to %s: nothing is to be taken back", r.version)
	}
	slices.Reverse(left)
	r.journal.Moves = left
	return moved, errors.Join(append(wrong, r.journal.save())...)
}

// Abort takes back the channels that a killed release of the version had moved, by
// its journal, or on another machine by where the release artifact's channels are:
// one whose artifact had moved is then left, and the error names it.
// Version tags stay: each points to a complete release.
func Abort(ctx context.Context, o Options, v Version) (err error) {
	return o.with(ctx, v, func(ctx context.Context, r *run) error {
		var stay []string
		known := len(r.journal.Moves) > 0
		for _, t := range r.targets {
			if _, absent, err := t.client.Digest(ctx, r.Config.Releases, string(v)); err != nil {
				return err
			} else if absent || t.ImmutableTags {
				continue // no channel moves before the version is there
			}
			if err := r.load(ctx, t); err != nil {
				return err
			}
			for _, ch := range r.Config.Channels {
				moves, err := r.plan(ctx, t, v.expand(ch.Tag))
				if err != nil {
					return err
				}
				for _, m := range moves {
					r.journal.remember(m)
				}
				if h, absent, err := t.client.Digest(ctx, r.Config.Releases, v.expand(ch.Tag)); err != nil {
					return err
				} else if !absent && h == r.artifact && !known {
					stay = append(stay, t.Address+": "+v.expand(ch.Tag))
				}
			}
		}
		moved, err := r.undo(ctx)
		if err != nil {
			return err
		}
		if moved && len(stay) > 0 {
			return fmt.Errorf("channels that the killed release had moved to %s whole stay there, and where they were is known on its machine alone (%s): point each to a version with `go run mage.go release:rollback CHANNEL VERSION`", v, strings.Join(stay, ", "))
		}
		r.done = true
		return nil
	})
}

// Rollback points a channel to a version that was released before, for all
// images in all registries or none. The version is verified first. The channel
// stays until a version is released that is newer than all that it was taken from.
func Rollback(ctx context.Context, o Options, channel string, v Version) error {
	if err := o.Config.Channel(channel, v); err != nil {
		return err
	}
	return o.with(ctx, v, func(ctx context.Context, r *run) error {
		for _, m := range r.journal.Moves {
			if m.Tag != channel {
				return fmt.Errorf("an earlier run of %s was killed while it moved the channel %s; run it again, or take it back with `go run mage.go release:abort %s`", v, m.Tag, v)
			}
		}
		var moves []move
		for _, t := range r.targets {
			if t.ImmutableTags {
				r.Notice("%s never moves a tag: skipped", t.Address)
				continue
			}
			if err := r.load(ctx, t); err != nil {
				return err
			}
			if err := r.check(ctx, func(repository string) signing.Store { return t.store(repository) }); err != nil {
				return err
			}
			r.sayLeft(ctx, t, channel)
			more, err := r.plan(ctx, t, channel)
			if err != nil {
				return err
			}
			moves = append(moves, more...)
		}
		for _, t := range r.targets {
			if t.ImmutableTags {
				continue
			}
			if err := r.mark(ctx, t, channel); err != nil {
				return fmt.Errorf("no channel was moved: %w", err)
			}
		}
		moves = r.ordered(moves)
		for _, m := range moves {
			r.journal.remember(m)
		}
		if err := r.journal.save(); err != nil {
			return err
		}
		if err := r.move(ctx, moves); err != nil {
			return err
		}
		r.done = true
		return nil
	})
}

// sayLeft names the images that keep a channel where it is, because the version
// that it goes to has none of that name. What can't be read now is no hindrance.
func (r *run) sayLeft(ctx context.Context, t *target, channel string) {
	h, absent, err := t.client.Digest(ctx, r.Config.Releases, channel)
	if err != nil || absent {
		return
	}
	now, _, err := signing.ReadRelease(ctx, t.store(r.Config.Releases), h)
	if err != nil {
		return
	}
	for _, i := range now.Images {
		if _, err := r.release.Image(i.Name); err != nil {
			r.Notice("%s:%s stays where it is: %s has no such image", t.store(r.Config.Repository(i.Name)).Name(), channel, r.version)
		}
	}
}

// with does something under the locks for a version that need not be in a dist folder.
func (o Options) with(ctx context.Context, v Version, f func(context.Context, *run) error) (err error) {
	r := &run{Options: o.withDefaults(), version: v}
	if r.release, err = o.known(ctx, v); err != nil {
		return err
	}
	if r.journal, err = openJournal(o.State, v); err != nil {
		return err
	}
	defer r.journal.close()
	ctx, unlock, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if err := f(ctx, r); err != nil {
		return because(ctx, err)
	}
	return nil
}

// load reads the version's release artifact from a registry.
func (r *run) load(ctx context.Context, t *target) error {
	h, absent, err := t.client.Digest(ctx, r.Config.Releases, string(r.version))
	if err != nil {
		return err
	}
	if absent {
		return fmt.Errorf("%s was not released to %s", r.version, t.Address)
	}
	r.artifact = h
	if r.release, _, err = signing.ReadRelease(ctx, t.store(r.Config.Releases), h); err == nil {
		if err = r.Config.Bound(string(r.version), r.release.Version); err != nil {
			err = fmt.Errorf("%s:%s: %w", t.store(r.Config.Releases).Name(), r.version, err)
		}
	}
	return err
}
