package upstream

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/sumdb/dirhash"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Copy fills dir with everything that the lock names and what Verify reads:
// a mirror for a machine without a network. Its folders are called as the
// kinds of sources are (debian, debian-security, go, npm). What is there and
// right already is kept, so an interrupted copy goes on where it stopped.
// toolchains are releases of Go (go1.26.8) that are kept beside the locked one: an
// error when the checksum database, which alone vouches for them, is not asked.
func (c *Config) Copy(ctx context.Context, dir string, toolchains ...string) error {
	l, err := lock.Load(c.Dir)
	if err != nil {
		return err
	}
	releases, err := l.Releases(c.Dir)
	if err != nil {
		return err
	}
	db, err := c.checksumDB(ctx)
	if err != nil {
		return err
	}
	more, err := others(l, db, toolchains)
	if err != nil {
		return err
	}
	place := func(kind lock.Kind, p string) string {
		return filepath.Join(dir, string(kind), filepath.FromSlash(p))
	}
	all, err := indexes(l.Suites, releases)
	if err != nil {
		return err
	}
	g, gctx := parallel(ctx)
	var files, bytes atomic.Int64
	for _, i := range all {
		g.Go(func() error {
			file := place(i.plain.Kind, i.plain.Path)
			if err := c.fetchIndex(gctx, i, file); err != nil {
				return err
			}
			if i.byHash.Path == "" {
				return nil
			}
			return linkFile(file, place(i.byHash.Kind, i.byHash.Path))
		})
	}
	sources := l.Sources()
	for _, s := range sources {
		g.Go(func() error {
			if err := c.Mirrors.Fetch(gctx, s, place(s.Kind, s.Path)); err != nil {
				return err
			}
			bytes.Add(s.Size)
			if n := files.Add(1); n%100 == 0 {
				c.say("%d of %d sources, %d MB", n, len(sources), bytes.Load()/1e6)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	// What follows names the rest, so it comes last: a copy that has an
	// InRelease file is complete.
	for _, step := range []func() error{
		func() error { return c.copyGo(ctx, l, db, place, more) },
		func() error { return c.copyManifests(ctx, l, place) },
		func() error { return c.copyReleases(l, place) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	c.say("%d sources, %d MB in %s", files.Load(), bytes.Load()/1e6, dir)
	return nil
}

// others are the toolchains that are not locked. The go command asks the
// database for one that it downloads whatever GOSUMDB and GONOSUMDB say, so
// without its answers a copy would be of no use either
// (https://go.dev/ref/mod#checksum-database).
func others(l *lock.Lock, db *checksums, toolchains []string) (map[string][]lock.Module, error) {
	out := map[string][]lock.Module{}
	for _, arch := range lock.Arches() {
		for _, release := range toolchains {
			if release == l.Go[arch].Version {
				continue
			}
			if db.off != "" {
				return nil, fmt.Errorf("%s is not locked, and what could vouch for it, the checksum database, is not asked: %s: set it otherwise, the go command asks for a toolchain's sum too", release, db.off)
			}
			out[arch] = append(out[arch], lock.Module{Version: release, Path: lock.ToolchainPath(release, arch)})
		}
	}
	return out, nil
}

// copyGo keeps more toolchains, and what the checksum database answers to
// Verify and to a go command that takes one of them. It is asked for all in one
// go, so that its answers are of one tree.
func (c *Config) copyGo(ctx context.Context, l *lock.Lock, db *checksums, place func(lock.Kind, string) string, more map[string][]lock.Module) error {
	for _, arch := range lock.Arches() {
		if err := db.check(l.Go[arch], arch); err != nil {
			return err
		}
		for _, m := range more[arch] {
			if err := c.copyToolchain(ctx, db, m, arch, place(lock.KindGo, m.Path)); err != nil {
				return err
			}
		}
	}
	if db.off != "" {
		return nil
	}
	for p, data := range db.ops.read {
		if err := writeFile(place(lock.KindGo, db.ops.proxied(p)), data); err != nil {
			return err
		}
	}
	// The go command asks a proxy for this file before it uses it for the database.
	return writeFile(place(lock.KindGo, db.ops.proxied("/supported")), nil)
}

// copyToolchain stores a toolchain that is not locked at file, once the
// checksum database vouches for it.
func (c *Config) copyToolchain(ctx context.Context, db *checksums, m lock.Module, arch, file string) error {
	var err error
	if m.H1, err = dirhash.HashZip(file, dirhash.Hash1); err == nil && db.check(m, arch) == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(file), ".*.tmp")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	m, from, err := c.hashModule(ctx, m, tmp)
	if err != nil {
		return err
	}
	if err := db.check(m, arch); err != nil {
		return fmt.Errorf("%w (from %s)", err, from)
	}
	return os.Rename(filepath.Join(tmp, filepath.Base(file)), file)
}

// Toolchains are the releases of Go (go1.26.8) that modules ask for, by their
// go.mod files.
func Toolchains(gomods ...string) ([]string, error) {
	var out []string
	for _, name := range gomods {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		f, err := modfile.Parse(name, text, nil)
		if err != nil {
			return nil, err
		}
		release := ""
		if f.Go != nil {
			release = "go" + f.Go.Version
		}
		if f.Toolchain != nil && f.Toolchain.Name != "default" {
			release = f.Toolchain.Name
		}
		if release != "" && !slices.Contains(out, release) {
			out = append(out, release)
		}
	}
	return out, nil
}

// copyManifests keeps the registry's entries of the locked versions.
func (c *Config) copyManifests(ctx context.Context, l *lock.Lock, place func(lock.Kind, string) string) error {
	for _, packages := range l.NPM {
		for _, p := range packages {
			_, text, err := c.manifest(ctx, p)
			if err != nil {
				return err
			}
			if err := writeFile(place(lock.KindNPM, path.Join(p.Name, p.Version)), text); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Config) copyReleases(l *lock.Lock, place func(lock.Kind, string) string) error {
	for _, s := range l.Suites {
		text, err := os.ReadFile(filepath.Join(c.Dir, lock.ReleaseDir, s.Name))
		if err != nil {
			return err
		}
		src := inRelease(s)
		if err := writeFile(place(src.Kind, src.Path), text); err != nil {
			return err
		}
	}
	return nil
}

// Modules is where CopyModules leaves a module proxy in a folder.
const Modules = "modules/cache/download"

// Variables make the folder of Copy and CopyModules the mirror of everything, as
// NAME=value.
func Variables(dir string) ([]string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, kind := range lock.Kinds() {
		at := fileURL(filepath.Join(abs, string(kind)))
		if kind == lock.KindGo {
			at += "," + fileURL(filepath.Join(abs, filepath.FromSlash(Modules)))
		}
		out = append(out, kind.Variable()+"="+at)
	}
	return out, nil
}

// fileURL names a folder in a list, which spaces and commas separate.
func fileURL(dir string) string {
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(dir)}
	return strings.ReplaceAll(u.String(), ",", "%2C")
}

// CopyModules adds to a folder the Go modules that building the module in root
// and those in tools (folders below it) asks for, as a module proxy at Modules.
func (c *Config) CopyModules(ctx context.Context, dir, root string, tools ...string) error {
	cache, err := filepath.Abs(filepath.Join(dir, "modules"))
	if err != nil {
		return err
	}
	for _, module := range append([]string{"."}, tools...) {
		c.say("copying the Go modules of %s", module)
		cmd := exec.CommandContext(ctx, "go", "mod", "download")
		cmd.Dir = filepath.Join(root, module)
		cmd.Env = append(os.Environ(), "GOMODCACHE="+cache, "GOFLAGS=-modcacherw", "GOWORK=off")
		for _, name := range []string{"GOPROXY", "GOSUMDB", "GONOSUMDB"} {
			if v := c.Env(name); v != "" {
				cmd.Env = append(cmd.Env, name+"="+v)
			}
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go mod download in %s, with GOPROXY of this machine: %w\n%s", cmd.Dir, err, out)
		}
	}
	// The go command unpacks what it downloads; a proxy serves the archives.
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == "cache" {
			continue
		}
		if err := os.RemoveAll(filepath.Join(cache, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(name string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return atomicfile.Write(name, data, 0o644)
}

// linkFile gives a file a second name, replacing what has that name. Where
// there are no hard links, as on a memory stick, it is a copy.
func linkFile(file, name string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if err := os.Remove(name); err != nil && !os.IsNotExist(err) {
		return err
	}
	if os.Link(file, name) == nil {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return atomicfile.Write(name, text, 0o644)
}
