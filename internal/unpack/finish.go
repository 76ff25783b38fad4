package unpack

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// owner is whose the files that finish writes are, in messages.
const owner = "finish"

// natives are the maintainer scripts' effects that need code; scripts.yaml
// names them.
var natives = map[string]func(*finish) error{
	"accounts":     (*finish).accounts,
	"certificates": (*finish).certificates,
	"ldconfig":     (*finish).ldconfig,
	"shells":       (*finish).shells,
}

// finish is the state of one run.
type finish struct {
	plan     plan.Finish
	filter   filter
	root     *os.Root // the merged groups, only read
	tree     *tree    // the new files
	packages []record
	scripts  map[string]script // of the installed packages
	table    map[string]script
	prepend  map[string]plan.File // not yet written: a script's effect is the rest
}

// Finish writes to the empty folder out the files that the maintainer scripts
// of the packages in root would have left, dpkg's database, and what the plan
// adds. root holds the merged groups; metas are what Group left beside them.
func Finish(ctx context.Context, p plan.Finish, root, out string, metas []string) error {
	table, err := loadScripts()
	if err != nil {
		return err
	}
	return runFinish(ctx, p, table, root, out, metas)
}

func runFinish(ctx context.Context, p plan.Finish, table map[string]script, root, out string, metas []string) error {
	f := &finish{plan: p, table: table, scripts: map[string]script{}, prepend: map[string]plan.File{}}
	var err error
	if f.filter, err = newFilter(p.Paths); err != nil {
		return err
	}
	if f.root, err = os.OpenRoot(root); err != nil {
		return err
	}
	defer f.root.Close()
	if f.tree, err = newTree(out, p.Epoch); err != nil {
		return err
	}
	f.tree.lower = func(p string) (meta, bool) {
		info, err := f.root.Lstat(p)
		if err != nil || !info.IsDir() {
			return meta{}, false
		}
		return fileMeta(info), true
	}
	if err := f.load(metas); err != nil {
		return err
	}
	steps := []func() error{
		f.planned,
		f.effects,
		f.system,
	}
	if p.Database == plan.Dpkg {
		steps = append(steps, f.alternatives, f.database)
	}
	for _, step := range append(steps, f.check, f.tree.close) {
		if err := errors.Join(ctx.Err(), step()); err != nil {
			return err
		}
	}
	return nil
}

// load reads the groups' records.
func (f *finish) load(metas []string) error {
	seen := map[string]bool{}
	for _, m := range metas {
		b, err := os.ReadFile(filepath.Join(m, recordsFile))
		if err != nil {
			return err
		}
		var rs []record
		if err := json.Unmarshal(b, &rs); err != nil {
			return fmt.Errorf("%s/%s: %w", m, recordsFile, err)
		}
		for _, r := range rs {
			if seen[r.Name] {
				return fmt.Errorf("package %s is in two groups", r.Name)
			}
			seen[r.Name] = true
			if r.Scripts {
				f.scripts[r.Name] = f.table[r.Name]
			}
		}
		f.packages = append(f.packages, rs...)
	}
	slices.SortFunc(f.packages, func(a, b record) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

// clean turns an absolute path of a plan or of scripts.yaml into a path of the tree.
func clean(p string) (string, error) {
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p || p == "/" {
		return "", fmt.Errorf("%q is not an absolute canonical path", p)
	}
	return merged(p[1:], false), nil
}

// exists reports whether the image holds the path (a tree path) so far.
func (f *finish) exists(p string) bool {
	if f.tree.has(p) {
		return true
	}
	_, err := f.root.Lstat(p)
	return err == nil
}

// put writes a file unless the image holds the path or leaves it out.
func (f *finish) put(p string, m meta, content []byte) error {
	if f.exists(p) || f.filter.skips(p) {
		return nil
	}
	return f.write(p, m, content)
}

// write writes a file, over one of the groups if need be.
func (f *finish) write(p string, m meta, content []byte) error {
	if m.mtime == 0 {
		m.mtime = f.plan.Epoch
	}
	if before, ok := f.prepend[p]; ok {
		delete(f.prepend, p)
		_, pm, err := place(before.Path, cmp.Or(before.Mode, "0644"), 0, 0)
		if err != nil {
			return err
		}
		pm.mtime = f.plan.Epoch
		m, content = pm, append([]byte(before.Content), content...)
	}
	if err := f.tree.file(p, owner, m, bytes.NewReader(content)); err != nil {
		return fmt.Errorf("/%s: %w", p, err)
	}
	return nil
}

// link writes a symbolic link unless the image holds the path or leaves it out.
func (f *finish) link(p, target string) error {
	if f.exists(p) || f.filter.skips(p) {
		return nil
	}
	if err := f.tree.symlink(p, owner, target, meta{mtime: f.plan.Epoch}); err != nil {
		return fmt.Errorf("/%s: %w", p, err)
	}
	return nil
}

// mkdir makes a folder unless the image holds the path or leaves it out.
func (f *finish) mkdir(p string, m meta) error {
	if f.exists(p) || f.filter.skips(p) {
		return nil
	}
	m.mtime = f.plan.Epoch
	if err := f.tree.dir(p, owner, m, false); err != nil {
		return fmt.Errorf("/%s: %w", p, err)
	}
	return nil
}

// planned writes the plan's own folders, files and links. They come first:
// what the plan says wins over what the packages would do.
func (f *finish) planned() error {
	for _, d := range f.plan.Dirs {
		p, m, err := place(d.Path, cmp.Or(d.Mode, "0755"), d.UID, d.GID)
		if err != nil {
			return err
		}
		m.mtime = f.plan.Epoch
		if err := f.tree.dir(p, owner, m, false); err != nil {
			return fmt.Errorf("%s: %w", d.Path, err)
		}
	}
	for _, file := range f.plan.Files {
		p, m, err := place(file.Path, cmp.Or(file.Mode, "0644"), 0, 0)
		if err != nil {
			return err
		}
		content := []byte(file.Content)
		if file.Prepend {
			f.prepend[p] = file
			if content, err = f.root.ReadFile(p); errors.Is(err, fs.ErrNotExist) {
				continue
			} else if err != nil {
				return err
			}
		}
		if err := f.write(p, m, content); err != nil {
			return err
		}
	}
	for _, l := range f.plan.Links {
		p, err := clean(l.Path)
		if err != nil {
			return err
		}
		if err := f.tree.symlink(p, owner, l.Target, meta{mtime: f.plan.Epoch}); err != nil {
			return fmt.Errorf("%s: %w", l.Path, err)
		}
	}
	return nil
}

func place(p, mode string, uid, gid int) (string, meta, error) {
	c, err := clean(p)
	if err != nil {
		return "", meta{}, err
	}
	m, err := strconv.ParseUint(mode, 8, 12)
	if err != nil {
		return "", meta{}, fmt.Errorf("%s: mode %q is not octal", p, mode)
	}
	return c, meta{mode: int64(m), uid: uid, gid: gid}, nil
}

// effects does what scripts.yaml says of each installed package.
func (f *finish) effects() error {
	for _, name := range slices.Sorted(maps.Keys(f.scripts)) {
		if err := f.effect(f.scripts[name]); err != nil {
			return fmt.Errorf("in place of the scripts of %s: %w", name, err)
		}
	}
	if _, ok := f.scripts["base-passwd"]; !ok && len(f.plan.Users) > 0 {
		return f.accounts()
	}
	return nil
}

func (f *finish) effect(s script) error {
	for _, to := range slices.Sorted(maps.Keys(s.Dirs)) {
		d := s.Dirs[to]
		p, m, err := place(to, d.Mode, d.UID, d.GID)
		if err == nil {
			err = f.mkdir(p, m)
		}
		if err != nil {
			return err
		}
	}
	for _, to := range slices.Sorted(maps.Keys(s.Copy)) {
		if err := f.copy(to, s.Copy[to], nil); err != nil {
			return err
		}
	}
	for _, to := range slices.Sorted(maps.Keys(s.Template)) {
		t := s.Template[to]
		if err := f.copy(to, t.From, t.Set); err != nil {
			return err
		}
	}
	for _, to := range slices.Sorted(maps.Keys(s.Files)) {
		n := s.Files[to]
		p, m, err := place(to, n.Mode, n.UID, n.GID)
		if err == nil {
			err = f.put(p, m, []byte(n.Content))
		}
		if err != nil {
			return err
		}
	}
	for _, to := range slices.Sorted(maps.Keys(s.Links)) {
		p, err := clean(to)
		if err == nil {
			err = f.link(p, s.Links[to])
		}
		if err != nil {
			return err
		}
	}
	for _, n := range s.Native {
		do, ok := natives[n]
		if !ok {
			return fmt.Errorf("scripts.yaml names the unknown native step %q", n)
		}
		if err := do(f); err != nil {
			return err
		}
	}
	return nil
}

// copy copies a file of the image as cp -p does. Lines that hold nothing but
// a placeholder of set become its value, or go away when that is empty.
func (f *finish) copy(to, from string, set map[string]string) error {
	p, err := clean(to)
	if err != nil {
		return err
	}
	if f.exists(p) || f.filter.skips(p) {
		return nil
	}
	src, err := clean(from)
	if err != nil {
		return err
	}
	info, err := f.root.Lstat(src)
	if err != nil {
		return err
	}
	content, err := f.root.ReadFile(src)
	if err != nil {
		return err
	}
	m := fileMeta(info)
	if set != nil {
		var b strings.Builder
		used := 0
		for line := range strings.Lines(string(content)) {
			v, ok := set[strings.TrimSpace(line)]
			switch {
			case !ok:
				b.WriteString(line)
			case v != "":
				b.WriteString(v + "\n")
			}
			if ok {
				used++
			}
		}
		if used != len(set) {
			return fmt.Errorf("%s does not hold each of the %d placeholders once", from, len(set))
		}
		content, m.mtime = []byte(b.String()), 0
	}
	return f.write(p, m, content)
}

// shells does what update-shells does: /etc/shells lists what the packages
// declare, also by the path behind the usr-merge.
func (f *finish) shells() error {
	const template, declared = "usr/share/debianutils/shells", "usr/share/debianutils/shells.d"
	files := []string{template}
	entries, err := fs.ReadDir(f.root.FS(), declared)
	if err != nil {
		return err
	}
	for _, e := range entries { // sorted by name
		files = append(files, declared+"/"+e.Name())
	}
	var state, etc []string
	for _, name := range files {
		b, err := f.root.ReadFile(name)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			line = strings.TrimSuffix(line, "\n")
			shell, _, _ := strings.Cut(line, "#")
			if name == template {
				etc = append(etc, line)
			}
			if shell == "" {
				continue
			}
			for _, s := range []string{shell, "/" + merged(shell[1:], false)} {
				if !slices.Contains(state, s) {
					state = append(state, s)
				}
			}
		}
	}
	for _, s := range state {
		if !slices.Contains(etc, s) {
			etc = append(etc, s)
		}
	}
	return errors.Join(
		f.put("etc/shells", meta{mode: 0o644}, lines(etc)),
		f.put("var/lib/shells.state", meta{mode: 0o644}, lines(state)))
}

func lines(l []string) []byte {
	if len(l) == 0 {
		return nil
	}
	return []byte(strings.Join(l, "\n") + "\n")
}

// system writes what makes an unpacked Debian a usable one and belongs to no
// package's script.
func (f *finish) system() error {
	if f.plan.Locale != "" {
		err := errors.Join(
			f.put("etc/locale.conf", meta{mode: 0o644}, []byte("LANG="+f.plan.Locale+"\n")),
			f.link("etc/default/locale", "../locale.conf"))
		if err != nil {
			return err
		}
	}
	if f.plan.Database == plan.Dpkg {
		// Empty, so that each machine or container that wants one makes its
		// own, machine-id(5).
		if err := f.put("etc/machine-id", meta{mode: 0o444}, nil); err != nil {
			return err
		}
	}
	if f.plan.AptSources {
		return f.aptSources()
	}
	return nil
}

// aptSources makes apt's own example of the standard sources the image's.
func (f *finish) aptSources() error {
	const example = "usr/share/doc/apt/examples/debian.sources"
	b, err := f.root.ReadFile(example)
	if err != nil {
		return fmt.Errorf("apt's example of its sources: %w", err)
	}
	text := string(b)
	if f.plan.Backports {
		// The same mirror, components and key as the first stanza.
		var backports []string
		for _, stanza := range strings.Split(text, "\n\n") {
			for line := range strings.SplitSeq(stanza, "\n") {
				if name, suites, ok := strings.Cut(line, ":"); ok && name == "Suites" && strings.Fields(suites) != nil {
					line = "Suites: " + strings.Fields(suites)[0] + "-backports"
				}
				if line != "" && line[0] != '#' {
					backports = append(backports, line)
				}
			}
			if len(backports) > 0 {
				break
			}
		}
		if len(backports) == 0 {
			return errors.New("apt's example of its sources has no stanza")
		}
		text = strings.TrimRight(text, "\n") + "\n\n" + string(lines(backports))
	}
	return f.put("etc/apt/sources.list.d/debian.sources", meta{mode: 0o644}, []byte(text))
}

// check finds what no single group can see: two groups with the same file,
// and a package whose licence is not in the image (Debian policy 12.5).
func (f *finish) check() error {
	for p := range f.prepend {
		return fmt.Errorf("the plan prepends to /%s, which no package has", p)
	}
	type claim struct{ name, by string }
	owners := map[string]claim{}
	for _, r := range f.packages {
		for _, name := range r.List {
			p := merged(strings.TrimPrefix(name, "/"), false)
			info, err := f.root.Lstat(p)
			if err != nil || info.IsDir() {
				continue
			}
			if c, twice := owners[p]; twice {
				return fmt.Errorf("packages %s and %s both have the file %s", c.by, r.Name, name)
			}
			owners[p] = claim{name, r.Name}
		}
	}
	for by := range f.scripts {
		for from := range f.scripts[by].diverts(f.plan.Arch) {
			if c, ok := owners[merged(from[1:], false)]; ok && c.name == from && c.by != by {
				return fmt.Errorf("package %s diverts %s of package %s in another group: put both into one group", by, from, c.by)
			}
		}
	}
	for _, r := range f.packages {
		if p := "usr/share/doc/" + r.Name + "/copyright"; !f.licensed(p) {
			return fmt.Errorf("package %s: its licence /%s is missing or a dangling link", r.Name, p)
		}
	}
	return nil
}

func (f *finish) licensed(p string) bool {
	_, ok := f.follow(p, 0)
	return ok
}

// follow follows links inside the image and returns where they end.
func (f *finish) follow(p string, depth int) (string, bool) {
	if depth > 20 {
		return "", false
	}
	done := "."
	for part := range strings.SplitSeq(p, "/") {
		next := path.Join(done, part)
		info, err := f.root.Lstat(next)
		if err != nil {
			return "", false
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			target, err := f.root.Readlink(next)
			if err != nil {
				return "", false
			}
			if !path.IsAbs(target) {
				target = path.Join("/", done, target)
			}
			rest := strings.TrimPrefix(p, next)
			return f.follow(strings.TrimPrefix(path.Clean(target+rest), "/"), depth+1)
		}
		done = next
	}
	return done, true
}
