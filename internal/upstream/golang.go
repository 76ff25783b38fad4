package upstream

import (
	"context"
	"errors"
	"fmt"
	"go/version"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb"
	"golang.org/x/mod/sumdb/dirhash"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

// newestGo locks the newest stable release that both platforms have.
func (c *Config) newestGo(ctx context.Context, tmp string) (map[string]lock.Module, error) {
	list, from, err := c.Mirrors.Read(ctx, lock.Source{Kind: lock.KindGo, Name: "the list of Go toolchains", Path: lock.Toolchain + "/@v/list"}, "", 16<<20)
	if err != nil {
		return nil, err
	}
	has := map[string]bool{}
	for v := range strings.FieldsSeq(string(list)) {
		has[v] = true
	}
	newest := ""
	for v := range has {
		release, ok := strings.CutSuffix(strings.TrimPrefix(v, "v0.0.1-"), ".linux-amd64")
		// A stable release is go1.N.M; betas and candidates have letters there.
		if !ok || !version.IsValid(release) || strings.Count(release, ".") != 2 || strings.ContainsAny(release[2:], "abcdefghijklmnopqrstuvwxyz-") {
			continue
		}
		if has[lock.ToolchainVersion(release, "arm64")] && (newest == "" || version.Compare(release, newest) > 0) {
			newest = release
		}
	}
	if newest == "" {
		return nil, fmt.Errorf("the Go module proxy lists no stable toolchain for linux-amd64 and linux-arm64 at %s: set %s to a complete one", from, lock.KindGo.Variable())
	}
	db, err := c.checksumDB(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]lock.Module{}
	for _, arch := range lock.Arches() {
		m, from, err := c.hashModule(ctx, lock.Module{Version: newest, Path: lock.ToolchainPath(newest, arch)}, tmp)
		if err != nil {
			return nil, err
		}
		if err := db.check(m, arch); err != nil {
			return nil, fmt.Errorf("%w (from %s)", err, from)
		}
		out[arch] = m
	}
	return out, nil
}

// hashModule downloads a module zip to learn its size and hashes.
func (c *Config) hashModule(ctx context.Context, m lock.Module, tmp string) (_ lock.Module, from string, err error) {
	c.say("Go: downloading %s", m)
	file := filepath.Join(tmp, filepath.Base(m.Path))
	if m.Size, m.SHA256, from, err = c.Mirrors.Download(ctx, m.Source(), file); err != nil {
		return m, "", err
	}
	if m.H1, err = dirhash.HashZip(file, dirhash.Hash1); err != nil {
		return m, "", fmt.Errorf("%s from %s is no module zip: %w", m, from, err)
	}
	return m, from, nil
}

// checksums is the Go checksum database, or the reason why it is not asked.
type checksums struct {
	client *sumdb.Client
	ops    *sumOps
	off    string
}

// goDatabaseKey is the public key of the Go project's checksum database,
// which the go command has built in; the database's name is what
// `go env GOSUMDB` gives, and part of the key's own hash.
const goDatabaseKey = "033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"

// checksumDB connects to the checksum database that the go command would
// use, through the first GOPROXY that offers it, else directly. It says so when
// the database is not to be asked.
// https://go.dev/ref/mod#checksum-database
func (c *Config) checksumDB(ctx context.Context) (*checksums, error) {
	off := func(why string) (*checksums, error) {
		c.say("Go: not checked against the checksum database: %s", why)
		return &checksums{off: why}, nil
	}
	setting, err := mirror.GoEnv(ctx, c.Env, "GOSUMDB")
	if err != nil {
		return nil, err
	}
	if setting == "off" {
		return off("GOSUMDB=off")
	}
	skip, err := mirror.GoEnv(ctx, c.Env, "GONOSUMDB") // its default is GOPRIVATE
	if err != nil {
		return nil, err
	}
	if module.MatchPrefixPatterns(skip, lock.Toolchain) {
		return off("GONOSUMDB matches " + lock.Toolchain)
	}
	fields := strings.Fields(setting)
	if len(fields) == 0 || len(fields) > 2 {
		return nil, fmt.Errorf("GOSUMDB is %q, which is not of the form \"NAME[+KEY] [URL]\"", mirror.Redact(setting))
	}
	key, direct := fields[0], ""
	if !strings.Contains(key, "+") {
		key += "+" + goDatabaseKey
	}
	name, _, _ := strings.Cut(key, "+")
	if direct = "https://" + name; len(fields) == 2 {
		direct = fields[1]
	}
	ops := &sumOps{ctx: ctx, mirrors: c.Mirrors, key: key, name: name, direct: direct, read: map[string][]byte{}}
	return &checksums{client: sumdb.NewClient(ops), ops: ops}, nil
}

// check compares a toolchain's h1 with the checksum database.
func (d *checksums) check(m lock.Module, arch string) error {
	if d.off != "" {
		return nil
	}
	moduleVersion := lock.ToolchainVersion(m.Version, arch)
	lines, err := d.client.Lookup(lock.Toolchain, moduleVersion)
	if err != nil {
		if d.ops.security != "" {
			err = errors.New(d.ops.security)
		}
		return fmt.Errorf("%s cannot be checked against the checksum database: %w", m, err)
	}
	prefix := lock.Toolchain + " " + moduleVersion + " "
	for _, line := range lines {
		if h1, ok := strings.CutPrefix(line, prefix); ok {
			if h1 != m.H1 {
				return fmt.Errorf("%s has another content than the checksum database knows: expected %s, found %s: set %s to another proxy", m, h1, m.H1, lock.KindGo.Variable())
			}
			return nil
		}
	}
	return fmt.Errorf("the checksum database has no line for %s %s", lock.Toolchain, moduleVersion)
}

// sumOps is how the database's client reaches it. It keeps nothing between
// runs: a lookup proves itself by the signed tree.
type sumOps struct {
	ctx               context.Context
	mirrors           *mirror.Mirrors
	key, name, direct string

	mu       sync.Mutex
	latest   []byte
	read     map[string][]byte // what was read, by path
	security string
}

// proxied is a path of the database as a module proxy serves it.
func (o *sumOps) proxied(p string) string { return "sumdb/" + o.name + p }

func (o *sumOps) ReadRemote(p string) ([]byte, error) {
	src := lock.Source{Kind: lock.KindGo, Name: "the checksum database", Path: o.proxied(p)}
	data, _, err := o.mirrors.Read(o.ctx, src, "", 1<<20)
	if isNotFound(err) {
		data, err = o.mirrors.ReadURL(o.ctx, o.direct+p, 1<<20)
	}
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.read[p] = data
	return data, nil
}

func (o *sumOps) ReadConfig(file string) ([]byte, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if file == "key" {
		return []byte(o.key), nil
	}
	return o.latest, nil
}

func (o *sumOps) WriteConfig(_ string, old, now []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if string(o.latest) != string(old) {
		return sumdb.ErrWriteConflict
	}
	o.latest = now
	return nil
}

func (o *sumOps) ReadCache(string) ([]byte, error) { return nil, errors.New("nothing is cached") }
func (o *sumOps) WriteCache(string, []byte)        {}
func (o *sumOps) Log(string)                       {}

func (o *sumOps) SecurityError(text string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.security = text
}
