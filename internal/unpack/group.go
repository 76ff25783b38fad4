package unpack

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/md5"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// record is what finish must know of an unpacked package and cannot see in
// the rootfs.
type record struct {
	Name      string     `json:"name"`
	Arch      string     `json:"arch"`
	Control   string     `json:"control"`
	Conffiles []conffile `json:"conffiles,omitempty"`
	Triggers  string     `json:"triggers,omitempty"`
	Scripts   bool       `json:"scripts,omitempty"`
	List      []string   `json:"list"`
}

type conffile struct{ Path, MD5, Flag string }

const recordsFile = "packages.json"

// Group unpacks the plan's packages, which are below in, to the empty folder
// out, parallel packages at a time, and leaves in meta what Finish needs.
func Group(ctx context.Context, p plan.Group, in, out, meta string, parallel int) error {
	table, err := loadScripts()
	if err != nil {
		return err
	}
	f, err := newFilter(p.Paths)
	if err != nil {
		return err
	}
	src, err := os.OpenRoot(in)
	if err != nil {
		return err
	}
	defer src.Close()
	t, err := newTree(out, p.Epoch)
	if err != nil {
		return err
	}
	g := &group{plan: p, table: table, filter: f, tree: t}
	if g.diverted, err = diversions(table, p); err != nil {
		return err
	}
	if p.Database != plan.Dpkg && p.Database != plan.StatusD {
		return fmt.Errorf("database %q is neither %q nor %q", p.Database, plan.Dpkg, plan.StatusD)
	}
	// The largest first, so that no core waits for it at the end.
	order := slices.Clone(p.Packages)
	size := func(p plan.Package) int64 {
		if info, err := src.Stat(p.File); err == nil {
			return info.Size()
		}
		return 0
	}
	slices.SortStableFunc(order, func(a, b plan.Package) int { return cmp.Compare(size(b), size(a)) })
	records := make([]record, len(order))
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(max(parallel, 1))
	for i, pkg := range order {
		work.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			b, err := readInput(src, pkg.Input)
			if err == nil {
				records[i], err = g.unpack(ctx, pkg, b)
			}
			if err != nil {
				return fmt.Errorf("package %s %s (%s): %w", pkg.Name, pkg.Version, pkg.File, err)
			}
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		return err
	}
	if err := t.close(); err != nil {
		return err
	}
	slices.SortFunc(records, func(a, b record) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Arch, b.Arch)) })
	b, err := json.Marshal(records)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(meta, recordsFile), b, 0o644)
}

// readInput reads a file and checks it against the plan, which is what makes
// its bytes the ones that were locked.
func readInput(src *os.Root, in plan.Input) ([]byte, error) {
	b, err := src.ReadFile(in.File)
	if err != nil {
		return nil, err
	}
	if err := in.SHA256.Validate(); err != nil || in.SHA256.Algorithm() != digest.SHA256 {
		return nil, fmt.Errorf("%s: the plan holds no sha256 digest for it", in.File)
	}
	if got := digest.FromBytes(b); got != in.SHA256 {
		return nil, fmt.Errorf("%s: its digest is %s, the plan says %s", in.File, got, in.SHA256)
	}
	return b, nil
}

type group struct {
	plan     plan.Group
	table    map[string]script
	filter   filter
	tree     *tree
	diverted map[string]diversion
}

type diversion struct{ to, by string }

// diversions returns, by the path without its leading slash, what the group's
// packages divert. The names are dpkg's, before the usr-merge.
func diversions(table map[string]script, g plan.Group) (map[string]diversion, error) {
	all := map[string]diversion{}
	for _, p := range g.Packages {
		for from, to := range table[p.Name].diverts(g.Arch) {
			key := strings.TrimPrefix(from, "/")
			if d, twice := all[key]; twice && d.by != p.Name {
				return nil, fmt.Errorf("packages %s and %s both divert %s", d.by, p.Name, from)
			}
			all[key] = diversion{strings.TrimPrefix(to, "/"), p.Name}
		}
	}
	return all, nil
}

// unpack writes one package.
func (g *group) unpack(ctx context.Context, pkg plan.Package, b []byte) (record, error) {
	d, err := openDeb(b)
	if err != nil {
		return record{}, err
	}
	for name, want := range map[string]string{"Package": pkg.Name, "Version": pkg.Version, "Architecture": pkg.Arch} {
		if got := d.stanza.get(name); got != want {
			return record{}, fmt.Errorf("its control file says %s: %s, the plan says %s", name, got, want)
		}
	}
	if pkg.Arch != "all" && pkg.Arch != g.plan.Arch {
		return record{}, fmt.Errorf("it is for %s, the plan is for %s", pkg.Arch, g.plan.Arch)
	}
	s, err := lookup(g.table, d)
	if err != nil {
		return record{}, err
	}
	u := &unpacking{group: g, pkg: pkg, script: s, conf: map[string]string{}, seen: map[string]bool{}}
	for line := range strings.Lines(string(d.control["conffiles"].data)) {
		if path, flag := conffileLine(line); path != "" && flag == "" {
			u.conf[strings.TrimPrefix(path, "/")] = ""
		}
	}
	err = d.each(func(h *tar.Header, content io.Reader) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return u.member(h, content)
	})
	if err != nil {
		return record{}, err
	}
	r := record{
		Name: pkg.Name, Arch: pkg.Arch, Control: string(d.control["control"].data),
		Triggers: string(d.control["triggers"].data), Scripts: d.fingerprint() != "", List: u.present(),
	}
	for line := range strings.Lines(string(d.control["conffiles"].data)) {
		path, flag := conffileLine(line)
		if path == "" || u.filter.skips(strings.TrimPrefix(path, "/")) {
			continue
		}
		name := strings.TrimPrefix(path, "/")
		sum := u.conf[name]
		if sum == "" && g.filter.skips(name) {
			continue
		}
		if flag == "remove-on-upgrade" {
			sum = "newconffile"
		} else if sum == "" {
			return r, fmt.Errorf("its conffile %s is not among its files", path)
		}
		r.Conffiles = append(r.Conffiles, conffile{path, sum, flag})
	}
	if g.plan.Database == plan.StatusD {
		return r, u.statusD(d)
	}
	return r, u.info(d)
}

// conffileLine reads a line of conffiles, deb-conffiles(5).
func conffileLine(line string) (path, flag string) {
	switch f := strings.Fields(line); len(f) {
	case 1:
		return f[0], ""
	case 2:
		return f[1], f[0]
	}
	return "", ""
}

// unpacking is the state of one package.
type unpacking struct {
	*group
	pkg    plan.Package
	script script
	list   []listed          // the archive's members, in its order
	conf   map[string]string // conffile: md5
	seen   map[string]bool
}

func (u *unpacking) member(h *tar.Header, content io.Reader) error {
	name, err := memberPath(h.Name)
	if err != nil {
		return err
	}
	if u.seen[name] {
		return errors.New("it is there twice")
	}
	u.seen[name] = true
	m := meta{mode: h.Mode & 0o7777, mtime: h.ModTime.Unix()}
	if m.uid, err = ownerID(users, h.Uname, h.Uid); err != nil {
		return err
	}
	if m.gid, err = ownerID(groups, h.Gname, h.Gid); err != nil {
		return err
	}
	if o, ok := u.script.Mode["/"+name]; ok {
		m.uid, m.gid = o.UID, o.GID
		if m.mode, err = strconv.ParseInt(o.Mode, 8, 64); err != nil {
			return fmt.Errorf("scripts.yaml: mode %q is not octal", o.Mode)
		}
	}
	owner, skip, original := u.pkg.Name, u.filter.skips(name), name
	if h.Typeflag == tar.TypeSymlink {
		skip = skip && !u.filter.leads(name)
	}
	u.list = append(u.list, listed{original, skip})
	if dv, ok := u.diverted[name]; ok && dv.by != owner && h.Typeflag != tar.TypeDir {
		name = dv.to
	}
	p := merged(name, h.Typeflag == tar.TypeDir)
	if target, ok := u.script.Replace["/"+original]; ok && !skip {
		return u.tree.symlink(p, owner, target, m)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.tree.dir(p, owner, m, skip)
	case tar.TypeReg:
		if skip {
			return nil
		}
		if _, ok := u.conf[original]; ok {
			sum := md5.New() // dpkg's own choice for conffiles
			if err := u.tree.file(p, owner, m, io.TeeReader(content, sum)); err != nil {
				return err
			}
			u.conf[original] = hex.EncodeToString(sum.Sum(nil))
			return nil
		}
		return u.tree.file(p, owner, m, content)
	case tar.TypeLink:
		target, err := memberPath(h.Linkname)
		if err != nil {
			return fmt.Errorf("its target %q: %w", h.Linkname, err)
		}
		if skip {
			return nil
		}
		return u.tree.hardlink(p, owner, merged(target, false))
	case tar.TypeSymlink:
		if skip {
			return nil
		}
		return u.tree.symlink(p, owner, h.Linkname, m)
	}
	return fmt.Errorf("it is a device, a pipe or of an unknown type (%q): no package has a reason to ship one", h.Typeflag)
}

// info writes what dpkg keeps of a package below /var/lib/dpkg/info. The
// names carry the architecture where several may be installed at once.
func (u *unpacking) info(d *deb) error {
	base := "var/lib/dpkg/info/" + u.pkg.Name
	if d.stanza.get("Multi-Arch") == "same" {
		base += ":" + u.pkg.Arch
	}
	for _, name := range d.names {
		if name == "control" {
			continue
		}
		if name == "list" {
			return errors.New("its control archive holds a file named list, which is dpkg's own")
		}
		c := d.control[name]
		if name == "md5sums" {
			c.data = u.sums(c.data)
		}
		if err := u.tree.file(base+"."+name, u.pkg.Name, meta{mode: c.mode & 0o755, mtime: c.mtime}, bytes.NewReader(c.data)); err != nil {
			return fmt.Errorf("control file %s: %w", name, err)
		}
	}
	return u.tree.file(base+".list", u.pkg.Name, meta{mode: 0o644, mtime: u.plan.Epoch}, bytes.NewReader(lines(u.present())))
}

// listed is a member as dpkg's list of the package's files has it.
type listed struct {
	name string
	skip bool // left out; a folder may come back by what is in it
}

// present returns dpkg's list without what was left out. dpkg itself lists
// all, and its --verify then reports each as missing: it knows nothing of
// path-exclude (dpkg 1.22).
func (u *unpacking) present() []string {
	needed := map[string]bool{"": true}
	for _, l := range u.list {
		for p := l.name; !l.skip && p != "." && p != "/"; p = path.Dir(p) {
			needed[p] = true
		}
	}
	var list []string
	for _, l := range u.list {
		if needed[l.name] {
			list = append(list, "/"+cmp.Or(l.name, "."))
		}
	}
	return list
}

// sums returns the package's md5sums without the lines of files left out.
func (u *unpacking) sums(md5sums []byte) []byte {
	var kept bytes.Buffer
	for line := range bytes.Lines(md5sums) {
		if _, name, ok := bytes.Cut(bytes.TrimSpace(line), []byte("  ")); ok && !u.filter.skips(path.Clean(string(name))) {
			kept.Write(line)
		}
	}
	return kept.Bytes()
}

// statusD writes the package's entry in the convention of distroless images,
// with the sums of the files that are there.
func (u *unpacking) statusD(d *deb) error {
	base := "var/lib/dpkg/status.d/" + u.pkg.Name
	c := d.control["control"]
	if err := u.tree.file(base, u.pkg.Name, meta{mode: 0o644, mtime: c.mtime}, bytes.NewReader(c.data)); err != nil {
		return err
	}
	data := u.sums(d.control["md5sums"].data)
	// This form has no field for conffiles, so their sums are with the others:
	// a scanner can then say of every file whose it is.
	for _, name := range slices.Sorted(maps.Keys(u.conf)) {
		if u.conf[name] != "" {
			data = fmt.Appendf(data, "%s  %s\n", u.conf[name], name)
		}
	}
	if len(data) == 0 {
		return nil
	}
	return u.tree.file(base+".md5sums", u.pkg.Name, meta{mode: 0o644, mtime: c.mtime}, bytes.NewReader(data))
}
