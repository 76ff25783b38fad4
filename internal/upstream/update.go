package upstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/debian"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

func isNotFound(err error) bool { return errors.Is(err, mirror.ErrNotFound) }

// Suites are the Debian suites that groups are resolved from, in the order
// of preference for a package version that several of them hold: the main
// suite keeps its files longest.
func Suites() []lock.Suite {
	return []lock.Suite{
		{Name: "trixie", Archive: lock.Main, Components: []string{"main"}},
		{Name: "trixie-updates", Archive: lock.Main, Components: []string{"main"}},
		{Name: "trixie-security", Archive: lock.Security, Components: []string{"main"}},
		{Name: "trixie-backports", Archive: lock.Main, Components: []string{"main"}},
	}
}

// Update resolves every group against what the mirrors offer now, writes the
// new lock with its InRelease files to the lock's folder, and returns what
// changed. Nothing is written unless all of it succeeds.
func (c *Config) Update(ctx context.Context, suites []lock.Suite) ([]lock.Change, error) {
	root, err := cache.Temp(c.Env)
	if err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(root, "lock-update-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	old, err := lock.Load(c.Dir)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			c.say("replacing a lock that cannot be read: %v", err)
		}
		old = &lock.Lock{}
	}
	next := &lock.Lock{Debian: map[string][]lock.Package{}}
	var texts map[string][]byte
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		texts, err = c.updateDebian(gctx, tmp, suites, old.Suites, next)
		return err
	})
	g.Go(func() (err error) {
		next.Go, err = c.newestGo(gctx, tmp)
		return err
	})
	g.Go(func() (err error) {
		next.NPM, err = c.newestNPM(gctx, tmp)
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	if err := next.Validate(); err != nil {
		return nil, fmt.Errorf("the new lock is wrong: %w", err)
	}
	return lock.Diff(old, next), c.save(next, texts)
}

// save writes the lock and exactly its InRelease files.
func (c *Config) save(l *lock.Lock, texts map[string][]byte) error {
	dir := filepath.Join(c.Dir, lock.ReleaseDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	present, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range present {
		if texts[f.Name()] == nil {
			if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
				return err
			}
		}
	}
	for name, text := range texts {
		if err := atomicfile.Write(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	return l.Save(c.Dir)
}

// updateDebian fills in the lock's suites, epoch and packages and returns
// the InRelease files by suite.
func (c *Config) updateDebian(ctx context.Context, tmp string, suites, old []lock.Suite, l *lock.Lock) (map[string][]byte, error) {
	keyDir, err := filepath.Abs(filepath.Join(c.Dir, lock.KeyDir))
	if err != nil {
		return nil, err
	}
	keys, err := debian.LoadKeyring(keyDir)
	if err != nil {
		return nil, err
	}
	archives := filepath.Join(tmp, "archives")
	texts, releases := map[string][]byte{}, map[string]*debian.Release{}
	for _, s := range suites {
		text, from, err := c.Mirrors.Read(ctx, inRelease(s), "", 16<<20)
		if err != nil {
			return nil, err
		}
		r, err := debian.ReadInRelease(text, keys, s.Name, c.Now)
		if err != nil {
			return nil, fmt.Errorf("%w: %s serves it (%s): that mirror is stale or wrong, set %s to another one", err, from, digest.FromBytes(text), suiteKind(s).Variable())
		}
		file := filepath.Join(archives, string(s.Archive), "dists", s.Name, "InRelease")
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, text, 0o644)); err != nil {
			return nil, err
		}
		if err := goesBack(old, s, r.Date, from); err != nil {
			return nil, err
		}
		texts[s.Name], releases[s.Name] = text, r
		s.Date, s.Release = r.Date.Format(time.RFC3339), digest.FromBytes(text)
		l.Suites = append(l.Suites, s)
		l.Epoch = max(l.Epoch, r.Date.Unix())
	}
	all, err := indexes(suites, releases)
	if err != nil {
		return nil, err
	}
	known, err := c.readIndexes(ctx, all, archives)
	if err != nil {
		return nil, err
	}
	c.say("Debian: %d suites read, resolving with apt", len(suites))
	resolved := make([][]lock.Package, len(lock.Arches()))
	g, ctx := errgroup.WithContext(ctx)
	for n, arch := range lock.Arches() {
		g.Go(func() (err error) {
			resolved[n], err = c.resolve(ctx, filepath.Join(tmp, arch), archives, keyDir, arch, suites, known[arch])
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for n, arch := range lock.Arches() {
		l.Debian[arch] = resolved[n]
	}
	return texts, nil
}

// goesBack is an error when the archive's suite is older than the one that is
// locked: an old InRelease file is signed too, and trixie's own never expires.
func goesBack(old []lock.Suite, s lock.Suite, date time.Time, from string) error {
	for _, was := range old {
		locked, err := time.Parse(time.RFC3339, was.Date)
		if err == nil && was.Name == s.Name && date.Before(locked) {
			return fmt.Errorf("%s is of %s at %s, older than the locked one of %s: that mirror is behind, set %s to another one",
				s.Name, date.Format(time.RFC3339), from, was.Date, suiteKind(s).Variable())
		}
	}
	return nil
}

// resolve resolves every group for one architecture. Only names and versions
// come from apt; the rest from the indexes that the InRelease files vouch for.
func (c *Config) resolve(ctx context.Context, dir, archives, keyDir, arch string, suites []lock.Suite, known map[[2]string]found) ([]lock.Package, error) {
	a, err := newApt(ctx, dir, archives, keyDir, arch, suites)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", arch, err)
	}
	var out []lock.Package
	closures := map[string][][2]string{"": nil}
	for _, g := range c.Groups {
		below := closures[g.After]
		closures[g.Name] = below
		if len(g.Debian) == 0 {
			continue
		}
		own, err := a.group(ctx, g, below)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", arch, err)
		}
		closures[g.Name] = append(slices.Clone(below), own...)
		for _, p := range own {
			f, ok := known[p]
			if !ok {
				return nil, fmt.Errorf("%s: apt chose %s %s, which is in no index that the InRelease files vouch for", arch, p[0], p[1])
			}
			out = append(out, lock.Package{
				Group: g.Name, Name: f.Name, Version: f.Version, Arch: f.Arch, Suite: f.suite,
				Path: f.Path, Size: f.Size, SHA256: f.SHA256,
			})
		}
	}
	slices.SortFunc(out, func(a, b lock.Package) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Name, b.Name))
	})
	return out, nil
}
