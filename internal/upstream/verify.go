package upstream

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/mod/sumdb/dirhash"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Verify re-checks every link from an authority to the lock: archive key,
// InRelease signature, Packages index, package entry; the checksum database
// and the Go toolchains; the npm registry's integrity and the tarballs. The
// last two authorities vouch for another hash than the sha256 that a build
// checks, so these few files (270 MB) are downloaded and both hashes computed;
// with full every Debian package is downloaded too. Expiry is judged at the
// lock's own time.
func (c *Config) Verify(ctx context.Context, full bool) error {
	l, err := lock.Load(c.Dir)
	if err != nil {
		return err
	}
	root, err := cache.Temp(c.Env)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(root, "lock-verify-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	for _, check := range []func() error{
		func() error { return c.verifyDebian(ctx, l, tmp) },
		func() error { return c.verifyGo(ctx, l) },
		func() error { return c.verifyNPM(ctx, l) },
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return c.verifyBytes(ctx, l, tmp, full)
}

func (c *Config) verifyDebian(ctx context.Context, l *lock.Lock, tmp string) error {
	releases, err := l.Releases(c.Dir)
	if err != nil {
		return err
	}
	all, err := indexes(l.Suites, releases)
	if err != nil {
		return err
	}
	known, err := c.readIndexes(ctx, all, tmp)
	if err != nil {
		return err
	}
	entries := 0
	for _, arch := range lock.Arches() {
		for _, p := range l.Debian[arch] {
			f, ok := known[arch][[2]string{p.Name, p.Version}]
			if !ok {
				return fmt.Errorf("%s is locked, but no index that the locked InRelease files vouch for has it: run lock:update", p)
			}
			vouched := lock.Package{Group: p.Group, Name: f.Name, Version: f.Version, Arch: f.Arch, Suite: f.suite, Path: f.Path, Size: f.Size, SHA256: f.SHA256}
			if vouched != p {
				return fmt.Errorf("%s differs from what suite %s vouches for: expected %s, %d bytes, %s; the lock has %s, %d bytes, %s: run lock:update", p, f.suite, f.Path, f.Size, f.SHA256, p.Path, p.Size, p.SHA256)
			}
			entries++
		}
	}
	c.say("Debian: %d InRelease signatures, %d indexes, %d package entries right", len(l.Suites), len(all), entries)
	return nil
}

func (c *Config) verifyGo(ctx context.Context, l *lock.Lock) error {
	db, err := c.checksumDB(ctx)
	if err != nil {
		return err
	}
	if db.off != "" {
		return nil
	}
	for _, arch := range lock.Arches() {
		if err := db.check(l.Go[arch], arch); err != nil {
			return err
		}
	}
	c.say("Go: %s is as the checksum database knows it, on %d platforms", l.Go[lock.Arches()[0]].Version, len(l.Go))
	return nil
}

func (c *Config) verifyNPM(ctx context.Context, l *lock.Lock) error {
	for _, arch := range lock.Arches() {
		for _, p := range l.NPM[arch] {
			m, _, err := c.manifest(ctx, p)
			if err != nil {
				return err
			}
			if m.Dist.Integrity != p.Integrity {
				return fmt.Errorf("%s: the registry publishes %s, the lock has %s: set %s to another registry or run lock:update", p, m.Dist.Integrity, p.Integrity, lock.KindNPM.Variable())
			}
		}
	}
	c.say("npm: integrity of Node and npm as the registry publishes it")
	return nil
}

// verifyBytes downloads the Go toolchains, Node and npm, with full every
// source, checks size and sha256, and computes the hashes that the checksum
// database and the registry vouch for.
func (c *Config) verifyBytes(ctx context.Context, l *lock.Lock, tmp string, full bool) error {
	byPath := map[string]func(file string) error{}
	for _, m := range l.Go {
		byPath[m.Path] = func(file string) error {
			h1, err := dirhash.HashZip(file, dirhash.Hash1)
			if err == nil && h1 != m.H1 {
				err = fmt.Errorf("%s has %s, the lock says %s: run lock:update", m, h1, m.H1)
			}
			return err
		}
	}
	for _, packages := range l.NPM {
		for _, p := range packages {
			byPath[p.Path] = func(file string) error { return checkIntegrity(p, file) }
		}
	}
	sources := slices.DeleteFunc(l.Sources(), func(s lock.Source) bool { return !full && byPath[s.Path] == nil })
	var total int64
	g, ctx := parallel(ctx)
	for _, s := range sources {
		total += s.Size
		g.Go(func() error {
			check := byPath[s.Path]
			if check == nil {
				_, err := c.Mirrors.Diagnose(ctx, s)
				return err
			}
			file := filepath.Join(tmp, s.Digest.Encoded())
			defer os.Remove(file)
			if err := c.Mirrors.Fetch(ctx, s, file); err != nil {
				return err
			}
			return check(file)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	c.say("bytes: %d sources downloaded, %d MB right", len(sources), total/1e6)
	return nil
}
