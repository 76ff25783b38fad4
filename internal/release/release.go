package release

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// Options are what a release needs from outside.
type Options struct {
	Config   *Config // resolved
	Dist     string  // the dist folder, signed
	State    string  // the folder of the journals
	Trust    *signing.Trust
	Registry registry.Options
	// Legacy also writes cosign's older tag scheme to registries that ask for it.
	Legacy func(ctx context.Context, c *registry.Client, repository string, subject v1.Hash, bundles []signing.Attachment) error
	// Hook runs a command on what was pushed.
	Hook   func(ctx context.Context, name string, command []string, refs []Ref) error
	Wait   time.Duration // for another release to end
	Lease  time.Duration // of the lock; 0 means 10 min
	Now    func() time.Time
	Notice func(format string, args ...any)
	// Step runs each part; nil means that it is announced and run.
	Step func(name string, run func() error) error
}

// Ref is an image as it lies in a registry.
type Ref struct{ Image, Reference string }

type target struct {
	Registry
	client *registry.Client
	lock   *lock
}

// run is one release of one version.
type run struct {
	Options
	version  Version
	release  *dist.Release
	layout   signing.Layout
	artifact v1.Hash
	journal  *journal
	targets  []*target
	locked   context.Context // ends when a lock is lost, not when the caller gives up: for what must be taken back then
	done     bool            // nothing is left for another run: the journal goes with the locks
	wrote    bool            // a step began that writes to a registry
}

var commit = regexp.MustCompile(`^[0-9a-f]{40}$`)

// Publish pushes, checks and promotes the family in a dist folder. It can be
// run again after any failure or kill and then finishes.
func Publish(ctx context.Context, o Options) error { return o.do(ctx, true) }

// Promote moves the tags of a family that Publish pushed before; it pushes nothing.
func Promote(ctx context.Context, o Options) error { return o.do(ctx, false) }

func (o Options) do(ctx context.Context, push bool) (err error) {
	r := &run{Options: o.withDefaults(), layout: signing.Layout(filepath.Join(o.Dist, "oci"))}
	if r.release, err = dist.Read(o.Dist); err != nil {
		return err
	}
	if r.version, err = ParseVersion(r.release.Version); err != nil {
		return err
	}
	if err := checkOut(r.release.Source); err != nil {
		return fmt.Errorf("%s: %w", o.Dist, err)
	}
	if err := r.Config.fits(r.images()); err != nil {
		return fmt.Errorf("the release configuration does not fit %s: %w", o.Dist, err)
	}
	if err := r.Step("check what is to be released", func() error { return r.checkLocal(ctx) }); err != nil {
		return err
	}
	if r.journal, err = openJournal(o.State, r.version); err != nil {
		return err
	}
	defer r.journal.close()
	ctx, unlock, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	steps := []struct {
		name string
		run  func() error
	}{
		{"check that the version is free", func() error { _, err := r.states(ctx); return err }},
		{"push", func() error { return r.push(ctx) }},
		{"attach signatures and attestations", func() error { return r.attach(ctx) }},
		{"check what was pushed", func() error { return r.checkRemote(ctx) }},
		{"smoke", func() error { return r.hook(ctx, "smoke", r.Config.Hooks.Smoke) }},
		{"policy", func() error { return r.hook(ctx, "policy", r.Config.Hooks.Policy) }},
		{"promote", func() error { return r.promote(ctx) }},
	}
	for _, s := range steps {
		if !push && (s.name == "push" || s.name == "attach signatures and attestations") {
			continue
		}
		r.wrote = r.wrote || s.name == "push" || s.name == "promote"
		if err := r.Step(s.name, s.run); err != nil {
			return fmt.Errorf("%s: %w", s.name, because(ctx, err))
		}
	}
	r.done = true
	return nil
}

// checkOut fails when a source is no commit: of the repository, or of the runtime
// where that comes from elsewhere. Binaries have a digest in the provenance instead.
func checkOut(s dist.Source) error {
	commits := map[string]string{"the images were": s.Commit}
	if l := s.Loomcycle; l != "" && !strings.HasPrefix(l, "bin:") {
		commits["the runtime, of "+l+", was"] = l[strings.LastIndex(l, "#")+1:]
	}
	for what, c := range commits {
		if !commit.MatchString(c) {
			return fmt.Errorf("%s built from the commit %q, which nobody can check out again; commit the changes and build anew", what, c)
		}
	}
	return nil
}

// because adds to an error why the context was cancelled, when it was not by the caller.
func because(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil && !errors.Is(c, context.Canceled) && !errors.Is(err, c) {
		return errors.Join(err, c)
	}
	return err
}

func (o Options) withDefaults() Options {
	if o.Lease == 0 {
		o.Lease = 10 * time.Minute
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Notice == nil {
		o.Notice = func(string, ...any) {}
	}
	if o.Step == nil {
		o.Step = func(name string, run func() error) error { o.Notice("%s", name); return run() }
	}
	return o
}

func (r *run) images() []string {
	var names []string
	for _, i := range r.release.Images {
		names = append(names, i.Name)
	}
	return names
}

// checkLocal verifies the layout as a consumer would, so that nothing unsigned is pushed.
func (r *run) checkLocal(ctx context.Context) error {
	var err error
	if r.artifact, err = r.layout.Release(); err != nil {
		return err
	}
	stored, _, err := signing.ReadRelease(ctx, r.layout, r.artifact)
	if err != nil {
		return err
	}
	if stored.Version != r.release.Version || !slices.EqualFunc(stored.Images, r.release.Images, func(a, b dist.Image) bool { return a.Name == b.Name && a.IndexDigest == b.IndexDigest }) {
		return fmt.Errorf("%s was signed before it was built again; run the target sign", r.Dist)
	}
	all, err := r.contents()
	if err != nil {
		return err
	}
	digests := make([]v1.Hash, len(all))
	for i, p := range all {
		digests[i] = p.digest
	}
	if err := r.layout.Check(ctx, digests...); err != nil {
		return err
	}
	return r.check(ctx, func(string) signing.Store { return r.layout })
}

// check verifies the release artifact and every image in the stores.
func (r *run) check(ctx context.Context, store func(repository string) signing.Store) error {
	if err := signing.VerifyDigest(ctx, store(r.Config.Releases), r.artifact, []string{signing.Signature}, r.Trust); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for _, image := range r.release.Images {
		g.Go(func() error {
			h, err := v1.NewHash(image.IndexDigest.String())
			if err != nil {
				return err
			}
			s := store(r.Config.Repository(image.Name))
			member, _, err := signing.VerifyImage(gctx, s, h, r.Trust)
			if err == nil && (member.Version != r.release.Version || member.Image.Name != image.Name) {
				err = fmt.Errorf("%s@%s was signed as %s %s, and release %s has it as %s", s.Name(), h, member.Image.Name, member.Version, r.release.Version, image.Name)
			}
			return err
		})
	}
	return g.Wait()
}

func (t *target) store(repository string) signing.Repository {
	return signing.Repository{Client: t.client, Path: repository}
}

// open logs in to every registry and takes its lock, always in the same order.
// The context it returns ends when a lock is lost too. The locks are kept until
// they are given back, also after the caller gave up.
func (r *run) open(ctx context.Context) (context.Context, func() error, error) {
	if err := r.journal.fits(r.Config.Registries); err != nil {
		return nil, nil, err
	}
	locked, lost := context.WithCancelCause(context.WithoutCancel(ctx))
	ctx, cancel := context.WithCancelCause(ctx)
	context.AfterFunc(locked, func() { cancel(context.Cause(locked)) })
	r.locked = locked
	unlock := func() error {
		lost(nil)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		var err error
		for _, t := range r.targets {
			if t.lock != nil {
				err = errors.Join(err, t.lock.withdraw(ctx, t.lock.id))
			}
		}
		// Nothing of it is anywhere: each claim that it made was given back just now.
		refused := r.journal.fresh && !r.wrote && len(r.journal.Moves) == 0 && len(r.targets) == len(r.Config.Registries)
		if err == nil && (r.done || refused) {
			// Last: a run that is killed while it unlocks leaves its claims on record.
			err = r.journal.finish()
		}
		return err
	}
	host, _ := os.Hostname()
	who := fmt.Sprintf("%s of %s by process %d on %s", r.version, r.release.Source.Commit, os.Getpid(), host)
	l := lease{r.Lease, r.Lease / 5, r.Now, registry.Sleep, r.Notice}
	registries := slices.Clone(r.Config.Registries)
	slices.SortFunc(registries, func(a, b Registry) int { return bytes.Compare([]byte(a.Address), []byte(b.Address)) })
	for _, reg := range registries {
		t, err := r.connect(ctx, reg, r.images())
		if err != nil {
			return nil, nil, errors.Join(err, unlock())
		}
		var dead []string
		if id := r.journal.Claims[reg.Address]; id != "" {
			dead = append(dead, id)
		}
		k, err := acquire(ctx, l, t.client, r.Config.Locks, who, r.Wait, dead, func(id string) error {
			r.journal.Claims[reg.Address] = id
			return r.journal.save()
		})
		if err != nil {
			return nil, nil, errors.Join(err, unlock())
		}
		t.lock = k
		r.targets = append(r.targets, t)
		go k.keep(locked, lost)
	}
	return ctx, unlock, nil
}

// each does something for every registry at once.
func (r *run) each(f func(t *target) error) error {
	var g errgroup.Group
	for _, t := range r.targets {
		g.Go(func() error { return f(t) })
	}
	return g.Wait()
}

func (r *run) push(ctx context.Context) error {
	return r.each(func(t *target) error {
		g, gctx := errgroup.WithContext(ctx)
		g.SetLimit(2)
		for _, image := range r.release.Images {
			g.Go(func() error {
				h, err := v1.NewHash(image.IndexDigest.String())
				if err != nil {
					return err
				}
				return copyManifest(gctx, r.layout, t.store(r.Config.Repository(image.Name)), h)
			})
		}
		g.Go(func() error { return copyManifest(gctx, r.layout, t.store(r.Config.Releases), r.artifact) })
		err := g.Wait()
		s := &t.client.Stats
		r.Notice("%s: %d blobs sent (%.1f MB), %d mounted, %d were there, %d uploads resumed", t.Address,
			s.Pushed.Load(), float64(s.Sent.Load())/1e6, s.Mounted.Load(), s.Skipped.Load(), s.Resumed.Load())
		return err
	})
}

func (r *run) attach(ctx context.Context) error {
	return r.each(func(t *target) error {
		g, gctx := errgroup.WithContext(ctx)
		g.SetLimit(4)
		put := func(repository string, h v1.Hash) {
			g.Go(func() error {
				if err := attach(gctx, r.layout, t.store(repository), h, r.Trust); err != nil || !t.LegacySignatures || r.Legacy == nil {
					return err
				}
				all, err := subjects(gctx, r.layout, h)
				for _, s := range all {
					var bundles []signing.Attachment
					if err == nil {
						bundles, err = signing.Bundles(gctx, r.layout, s)
					}
					if err == nil {
						err = r.Legacy(gctx, t.client, repository, s, bundles)
					}
				}
				return err
			})
		}
		for _, image := range r.release.Images {
			h, err := v1.NewHash(image.IndexDigest.String())
			if err != nil {
				return err
			}
			put(r.Config.Repository(image.Name), h)
		}
		put(r.Config.Releases, r.artifact)
		return g.Wait()
	})
}

func (r *run) checkRemote(ctx context.Context) error {
	return r.each(func(t *target) error {
		return r.check(ctx, func(repository string) signing.Store { return t.store(repository) })
	})
}

func (r *run) hook(ctx context.Context, name string, command []string) error {
	if len(command) == 0 || r.Hook == nil {
		r.Notice("no %s command is configured: skipped", name)
		return nil
	}
	var refs []Ref
	for _, t := range r.targets {
		for _, i := range r.release.Images {
			refs = append(refs, Ref{i.Name, t.store(r.Config.Repository(i.Name)).Name() + "@" + i.IndexDigest.String()})
		}
	}
	return r.Hook(ctx, name, command, refs)
}
