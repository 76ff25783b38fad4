package unpack

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// meta is what a file system records of a file besides its content.
type meta struct {
	mode     int64 // permission bits with setuid, setgid and sticky
	uid, gid int
	mtime    int64 // seconds since 1970
}

type kind byte

const (
	regular kind = 'f'
	dir     kind = 'd'
	symlink kind = 'l'
)

// node is a path that this process has written or, for a folder, may write.
type node struct {
	meta
	kind  kind
	owner string // whose member it is; "" for a folder that no member declared
	made  bool   // folders are made when something in them is
}

// tree writes below one folder. It remembers all that it wrote, so that no
// member replaces another and none is written through a link; the root is an
// os.Root, so that the kernel enforces the same.
type tree struct {
	root  *os.Root
	epoch int64
	// lower tells what the layers below know of a folder, for the folders that
	// are made only because something is in them.
	lower func(p string) (meta, bool)
	mu    sync.Mutex
	nodes map[string]*node
	// buffers are what files are copied with: File.ReadFrom would make one for each.
	buffers sync.Pool
}

const copySize = 128 << 10 // bytes

func newTree(dirname string, epoch int64) (*tree, error) {
	if epoch < 0 {
		return nil, fmt.Errorf("the plan's epoch %d lies before 1970", epoch)
	}
	root, err := os.OpenRoot(dirname)
	if err != nil {
		return nil, err
	}
	t := &tree{root: root, epoch: epoch, nodes: map[string]*node{}}
	t.buffers.New = func() any { return new([copySize]byte) }
	t.nodes["."] = &node{meta: meta{0o755, 0, 0, epoch}, kind: dir, made: true}
	return t, nil
}

// claim registers a path for its owner and makes the folders above it.
func (t *tree) claim(p string, k kind, owner string, m meta) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nodes[p]; n != nil {
		return fmt.Errorf("%s has the path already", cmp.Or(n.owner, "a folder"))
	}
	if err := t.parents(path.Dir(p)); err != nil {
		return err
	}
	t.nodes[p] = &node{meta: m, kind: k, owner: owner, made: true}
	return nil
}

// parents makes a folder and those above it.
func (t *tree) parents(p string) error {
	n := t.nodes[p]
	if n == nil {
		n = &node{meta: meta{0o755, 0, 0, t.epoch}, kind: dir}
		if t.lower != nil {
			if m, ok := t.lower(p); ok {
				n.meta = m
			}
		}
		t.nodes[p] = n
	}
	if n.kind != dir {
		return fmt.Errorf("/%s, through which it would be written, is not a folder", p)
	}
	if n.made {
		return nil
	}
	if err := t.parents(path.Dir(p)); err != nil {
		return err
	}
	n.made = true
	return t.root.Mkdir(p, 0o700)
}

// dir declares a folder. Unless lazy, it is made at once. Of several owners
// the first by name decides, whatever the order of the calls.
func (t *tree) dir(p, owner string, m meta, lazy bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[cmp.Or(p, ".")]
	switch {
	case n == nil:
		n = &node{meta: t.clamp(m), kind: dir, owner: owner}
		t.nodes[p] = n
	case n.kind != dir:
		return fmt.Errorf("%s has the path already, not as a folder", n.owner)
	case n.owner == "" || owner < n.owner:
		n.owner, n.meta = owner, t.clamp(m)
	}
	if lazy {
		return nil
	}
	return t.parents(cmp.Or(p, "."))
}

func (t *tree) clamp(m meta) meta {
	m.mtime = min(max(m.mtime, 0), t.epoch)
	return m
}

// file writes a regular file.
func (t *tree) file(p, owner string, m meta, content io.Reader) error {
	if err := t.claim(p, regular, owner, m); err != nil {
		return err
	}
	f, err := t.root.OpenFile(p, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	b := t.buffers.Get().(*[copySize]byte)
	defer t.buffers.Put(b)
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, content, b[:]) // the wrapping hides ReadFrom
	return errors.Join(err, t.seal(f, m), f.Close())
}

// seal sets what the file system records; the order matters, since chown
// clears setuid and writing changes the time.
func (t *tree) seal(f *os.File, m meta) error {
	fd := int(f.Fd())
	if err := unix.Fchown(fd, m.uid, m.gid); err != nil {
		return fmt.Errorf("chown to %d:%d (the unpacker must run as root): %w", m.uid, m.gid, err)
	}
	if err := unix.Fchmod(fd, uint32(m.mode)); err != nil {
		return err
	}
	return unix.Futimes(fd, []unix.Timeval{{Sec: t.clamp(m).mtime}, {Sec: t.clamp(m).mtime}})
}

// symlink writes a symbolic link. The target may be absolute (Debian policy
// 10.5), since nothing here follows it, but must not climb above the root.
func (t *tree) symlink(p, owner, target string, m meta) error {
	depth := strings.Count(p, "/")
	for _, part := range strings.Split(target, "/") {
		switch {
		case strings.HasPrefix(target, "/"), part == "", part == ".":
		case part == "..":
			depth--
		default:
			depth++
		}
		if depth < 0 {
			return fmt.Errorf("its target %q climbs above the root", target)
		}
	}
	if target == "" || strings.ContainsRune(target, 0) {
		return errors.New("it has no valid target")
	}
	if err := t.claim(p, symlink, owner, m); err != nil {
		return err
	}
	if err := t.root.Symlink(target, p); err != nil {
		return err
	}
	parent, err := t.root.Open(path.Dir(p))
	if err != nil {
		return err
	}
	defer parent.Close()
	at, base := int(parent.Fd()), path.Base(p)
	if err := unix.Fchownat(at, base, m.uid, m.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("chown to %d:%d (the unpacker must run as root): %w", m.uid, m.gid, err)
	}
	ts := unix.Timespec{Sec: t.clamp(m).mtime}
	return unix.UtimesNanoAt(at, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

// hardlink gives an owner's own regular file another name.
func (t *tree) hardlink(p, owner, target string) error {
	t.mu.Lock()
	n := t.nodes[target]
	t.mu.Unlock()
	if n == nil || n.kind != regular || n.owner != owner {
		return fmt.Errorf("its target %q is not an earlier file of the same package", target)
	}
	if err := t.claim(p, regular, owner, n.meta); err != nil {
		return err
	}
	return t.root.Link(target, p)
}

// has reports whether the path was written.
func (t *tree) has(p string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[p]
	return n != nil && n.made
}

// close gives the folders their modes, owners and times, the deepest first.
func (t *tree) close() error {
	defer t.root.Close()
	var dirs []string
	for p, n := range t.nodes {
		if n.kind == dir && n.made {
			dirs = append(dirs, p)
		}
	}
	slices.SortFunc(dirs, func(a, b string) int { return strings.Compare(b, a) })
	for _, p := range dirs {
		f, err := t.root.Open(p)
		if err != nil {
			return err
		}
		if err := errors.Join(t.seal(f, t.nodes[p].meta), f.Close()); err != nil {
			return fmt.Errorf("/%s: %w", p, err)
		}
	}
	return nil
}

// fileMeta returns what a file system says of a file.
func fileMeta(info fs.FileInfo) meta {
	st := info.Sys().(*syscall.Stat_t)
	return meta{int64(st.Mode & 0o7777), int(st.Uid), int(st.Gid), info.ModTime().Unix()}
}
