// Package upstream asks the archives and registries behind a lock: what is
// newest (Update), whether they still vouch for what is locked (Verify), and
// for a copy of it all (Copy). A build needs none of it, only the lock.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/debian"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

// Config is what the operations of this package have in common.
type Config struct {
	Dir     string // the lock's folder: images/lock
	Groups  lock.Groups
	Mirrors *mirror.Mirrors
	Env     func(string) string
	Now     time.Time
	Out     io.Writer // notes on progress, for people
}

func (c *Config) say(format string, args ...any) { fmt.Fprintf(c.Out, format+"\n", args...) }

// parallel is how many downloads run at once: enough to hide a mirror's
// latency, few enough to be a polite client.
func parallel(ctx context.Context) (*errgroup.Group, context.Context) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(4 + 2*runtime.NumCPU())
	return g, ctx
}

// suiteKind is the kind of a suite's own files.
func suiteKind(s lock.Suite) lock.Kind {
	if s.Archive == lock.Security {
		return lock.KindSecurity
	}
	return lock.KindDebian
}

// inRelease is the source of a suite's current InRelease file.
func inRelease(s lock.Suite) lock.Source {
	return lock.Source{Kind: suiteKind(s), Name: "the InRelease file of " + s.Name, Path: path.Join("dists", s.Name, "InRelease")}
}

// index is a Packages index of a suite: plain and by hash.
type index struct {
	suite  lock.Suite
	arch   string
	plain  lock.Source
	byHash lock.Source // Path is empty when the archive has none
}

// indexes lists the Packages indexes of the suites in the order of
// preference in which a package that is in several of them is looked up.
func indexes(suites []lock.Suite, releases map[string]*debian.Release) ([]index, error) {
	var all []index
	for _, s := range suites {
		for _, component := range s.Components {
			for _, arch := range lock.Arches() {
				name, byHash, file, err := releases[s.Name].PackagesIndex(component, arch)
				if err != nil {
					return nil, err
				}
				src := lock.Source{
					Kind: suiteKind(s), Name: fmt.Sprintf("the Packages index of %s %s %s", s.Name, component, arch),
					Path: path.Join("dists", s.Name, name), Size: file.Size, Digest: file.SHA256,
				}
				i := index{suite: s, arch: arch, plain: src}
				if byHash != "" {
					i.byHash = src
					i.byHash.Path = path.Join("dists", s.Name, byHash)
				}
				all = append(all, i)
			}
		}
	}
	return all, nil
}

// fetchIndex stores an index at file. The path by hash is tried first, since
// an archive replaces the plain one with each change of the suite; a
// snapshot archive may have the plain one alone.
func (c *Config) fetchIndex(ctx context.Context, i index, file string) error {
	if i.byHash.Path == "" {
		return c.Mirrors.Fetch(ctx, i.plain, file)
	}
	err := c.Mirrors.Fetch(ctx, i.byHash, file)
	if !isNotFound(err) && !errors.Is(err, mirror.ErrRefused) {
		return err
	}
	if plain := c.Mirrors.Fetch(ctx, i.plain, file); plain != nil {
		return fmt.Errorf("%w; and by its plain name: %w", err, plain)
	}
	return nil
}

// packages holds what the archives vouch for, by architecture, then name and
// version; the first suite that has a package wins.
type packages map[string]map[[2]string]found

type found struct {
	debian.Entry
	suite string
}

// readIndexes fetches the indexes into root, laid out as an archive is, and
// reads them.
func (c *Config) readIndexes(ctx context.Context, all []index, root string) (packages, error) {
	lists := make([][]debian.Entry, len(all))
	g, ctx := parallel(ctx)
	for n, i := range all {
		g.Go(func() error {
			file := filepath.Join(root, string(i.suite.Archive), filepath.FromSlash(i.plain.Path))
			if err := c.fetchIndex(ctx, i, file); err != nil {
				return err
			}
			f, err := os.Open(file)
			if err != nil {
				return err
			}
			defer f.Close()
			err = debian.ReadPackages(f, func(e debian.Entry) error {
				lists[n] = append(lists[n], e)
				return nil
			})
			if err != nil {
				return fmt.Errorf("%s: %w", i.plain.Name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	out := packages{}
	for n, i := range all {
		if out[i.arch] == nil {
			out[i.arch] = map[[2]string]found{}
		}
		for _, e := range lists[n] {
			key := [2]string{e.Name, e.Version}
			if _, ok := out[i.arch][key]; !ok {
				out[i.arch][key] = found{e, i.suite.Name}
			}
		}
	}
	return out, nil
}
