// Package workspace keeps durable /work directories: one per principal and
// name below one root, made and walked through os.Root so that the kernel, not
// a string check, keeps them there, and locked so that each has one writer.
package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/reason"
	"golang.org/x/sys/unix"
)

// Name is what a workspace may be called.
var Name = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

// ErrBusy is returned when a session, of this sidecar or another on the same
// root, has the workspace.
var ErrBusy = errors.New("another session is using this workspace; close it first, or choose another name")

// LimitError refuses a principal one workspace more than it may have.
type LimitError struct {
	Limit int
	Has   []string // names
}

func (e *LimitError) Error() string {
	const told = 20
	names := strings.Join(e.Has[:min(told, len(e.Has))], ", ")
	if len(e.Has) > told {
		names += ", ..."
	}
	return fmt.Sprintf("no more workspaces: SANDBOX_MAX_WORKSPACES_PER_PRINCIPAL is %d; use one that is there (%s), or have the operator remove some (loomcycle-builder workspaces prune)", e.Limit, names)
}

// Root is the directory that holds the workspaces.
type Root struct {
	Most int // workspaces of one principal, 0 for no limit

	dir   string // as the sidecar sees it
	host  string // as the engine sees it
	uid   int
	quota int64 // bytes, 0 for none
}

// New returns the workspaces under dir, which the engine knows as host (empty
// for the same path), owned by the session uid. quota is in bytes. It makes dir, but not
// what that lies in: a typo, or a volume that is not mounted, would have the
// workspaces go with the sidecar's container.
func New(dir, host string, uid int, quota int64) (*Root, error) {
	if host == "" {
		host = dir
	}
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("SANDBOX_WORKSPACE_ROOT=%s must be an absolute path", dir)
	}
	if !filepath.IsAbs(host) {
		return nil, fmt.Errorf("SANDBOX_WORKSPACE_HOST_ROOT=%s must be an absolute path", host)
	}
	if err := os.Mkdir(dir, 0o711); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("SANDBOX_WORKSPACE_ROOT=%s: there is no directory %s to make it in: mount the volume, or make that directory", dir, filepath.Dir(dir))
	} else if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("making SANDBOX_WORKSPACE_ROOT: %w", err)
	}
	return Existing(dir, host, uid, quota)
}

// Existing is New for a directory that has to be there.
func Existing(dir, host string, uid int, quota int64) (*Root, error) {
	switch st, err := os.Stat(dir); {
	case err != nil:
		return nil, fmt.Errorf("looking for SANDBOX_WORKSPACE_ROOT: %w", err)
	case !st.IsDir():
		return nil, fmt.Errorf("SANDBOX_WORKSPACE_ROOT=%s is no directory", dir)
	}
	return &Root{dir: dir, host: host, uid: uid, quota: quota}, nil
}

// Quota is the limit of each workspace in bytes, 0 for none.
func (r *Root) Quota() int64 { return r.quota }

// Level is what the whole file system of the workspaces holds, in bytes as Usage counts
// them: it grows at least as they do.
func (r *Root) Level() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(r.dir, &st); err != nil {
		return 0, fmt.Errorf("looking how full the file system of SANDBOX_WORKSPACE_ROOT is: %w", err)
	}
	return int64(st.Blocks-st.Bfree)*cmp.Or(st.Frsize, st.Bsize) + int64(st.Files-st.Ffree)*MinEntry, nil
}

// Dir is the directory name of a principal: itself where that is plain, with
// every other byte as =xx, so that no two principals share one.
func Dir(principal string) string {
	var b strings.Builder
	for i := range len(principal) {
		c := principal[i]
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-' && i > 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "=%02x", c)
		}
	}
	return b.String()
}

// Key names a workspace as List and Prune know it.
func Key(principal, name string) string { return Dir(principal) + "/" + name }

// Held is a workspace that a session has. Close lets the next one have it.
type Held struct {
	Path string // on the engine's host

	in   *Root
	name string
	made bool     // by Take
	mine *os.Root // the principal's
	dir  *os.File
	root *os.Root
}

// Close gives the workspace free.
func (h *Held) Close() {
	h.mine.Close()
	h.dir.Close()
	if h.root != nil {
		h.root.Close()
	}
}

// Discard is Close for a session that has not come about: a workspace that was made for it
// goes too, unless something is in it.
func (h *Held) Discard() {
	defer h.Close()
	if h.made && h.mine.Remove(h.name) == nil {
		h.in.leave(filepath.Base(h.mine.Name()))
	}
}

// leave removes a principal's directory when nothing is in it.
func (r *Root) leave(principal string) {
	if top, err := os.OpenRoot(r.dir); err == nil {
		_ = top.Remove(principal)
		top.Close()
	}
}

// Lock keeps every other session from the workspace until Close. ErrBusy says that
// another has it, or that it is no longer what its name stands for.
func (h *Held) Lock() error {
	err := flock(h.dir, syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return ErrBusy
	}
	if err != nil {
		return fmt.Errorf("locking workspace %s: %w", h.name, reason.Of(err))
	}
	// Prune may have taken it away between opening and locking.
	named, err := h.mine.Lstat(h.name)
	opened, err2 := h.dir.Stat()
	if err != nil || err2 != nil || !os.SameFile(named, opened) {
		_ = flock(h.dir, syscall.LOCK_UN)
		return ErrBusy
	}
	return nil
}

// flock does so while f is open: a closed one's number may be another file's.
func flock(f *os.File, how int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var locked error
	if raw.Control(func(fd uintptr) {
		for locked = syscall.EINTR; locked == syscall.EINTR; {
			locked = syscall.Flock(int(fd), how)
		}
	}) != nil {
		return fs.ErrClosed
	}
	return locked
}

const (
	// busyFor is how long Take waits for whoever has the workspace: list and prune look
	// whether a session does by locking it for a moment.
	busyFor   = 250 * time.Millisecond
	busyEvery = 5 * time.Millisecond
)

// Take makes the workspace if needed and locks it.
func (r *Root) Take(ctx context.Context, principal, name string) (*Held, error) {
	ended := time.After(busyFor)
	for made, last := false, false; ; {
		h, err := r.open(principal, name, true)
		if err == nil {
			made = made || h.made
			h.made = made
			if err = h.Lock(); err == nil {
				if err = h.enter(); err == nil {
					return h, nil
				}
				h.Discard() // or one that no session can have would count as its principal's
			} else {
				h.Close()
			}
		}
		if !errors.Is(err, ErrBusy) && !errors.Is(err, fs.ErrNotExist) { // it was pruned under way
			return nil, err
		}
		if last {
			return nil, err
		}
		select {
		case <-time.After(busyEvery):
		case <-ended:
			last = true // once more: on a machine that stalls it has long been free
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Adopt returns the workspace that a session has had since an earlier sidecar. It is not
// locked: the session writes to it whether it can be or not, so Lock may come later. One
// that is gone is fs.ErrNotExist.
func (r *Root) Adopt(principal, name string) (*Held, error) {
	h, err := r.open(principal, name, false)
	if err != nil {
		return nil, err
	}
	if err := h.enter(); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// open finds a workspace, or makes it.
func (r *Root) open(principal, name string, making bool) (_ *Held, err error) {
	if !Name.MatchString(name) {
		return nil, fmt.Errorf("workspace %q: a name has 1 to 64 characters of a-z, 0-9, _ and -, and starts with a letter or digit", name)
	}
	p := Dir(principal)
	if p == "" || len(p) > 255 {
		return nil, errors.New("the caller's principal is too long to name a directory")
	}
	top, err := os.OpenRoot(r.dir)
	if err != nil {
		return nil, fmt.Errorf("opening SANDBOX_WORKSPACE_ROOT: %w", reason.Of(err))
	}
	defer top.Close()
	if making {
		if err := mkdir(top, p, 0o711); err != nil {
			return nil, err
		}
	}
	h := &Held{Path: filepath.Join(r.host, p, name), in: r, name: name}
	if h.mine, err = top.OpenRoot(p); err != nil {
		return nil, fmt.Errorf("opening the principal's directory: %w", err)
	}
	defer func() {
		if err != nil {
			h.mine.Close()
		}
	}()
	if making {
		if h.made, err = r.make(h.mine, name); err != nil {
			return nil, err
		}
	}
	// The engine mounts it by path and would follow a link: there must be none.
	h.dir, err = h.mine.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("workspace %s may not be opened: its owner, or root, has to give it the mode 0755: %w", name, err)
	}
	if err != nil {
		return nil, fmt.Errorf("workspace %s is not a plain directory: %w", name, err)
	}
	return h, nil
}

// make makes a workspace that is not there, if its principal may have one more.
func (r *Root) make(mine *os.Root, name string) (made bool, err error) {
	if _, err := mine.Lstat(name); err == nil {
		return false, nil
	}
	if r.Most > 0 {
		all, err := mine.Open(".")
		if err != nil {
			return false, fmt.Errorf("reading the principal's directory: %w", reason.Of(err))
		}
		defer all.Close()
		// So that two at once are counted. No session reaches this directory, and nobody has it for long.
		if err := flock(all, syscall.LOCK_EX); err != nil {
			return false, fmt.Errorf("locking the principal's directory: %w", reason.Of(err))
		}
		entries, err := all.ReadDir(-1)
		if err != nil {
			return false, fmt.Errorf("reading the principal's directory: %w", reason.Of(err))
		}
		limit := LimitError{Limit: r.Most}
		for _, e := range entries {
			if e.IsDir() && Name.MatchString(e.Name()) {
				limit.Has = append(limit.Has, e.Name())
			}
		}
		if slices.Sort(limit.Has); len(limit.Has) >= r.Most && !slices.Contains(limit.Has, name) {
			return false, &limit
		}
	}
	err = mine.Mkdir(name, 0o755)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return false, fmt.Errorf("making workspace %s: %w", name, err)
	}
	return err == nil, nil
}

// enter gives the workspace to the session and opens it for what the sidecar does in it.
func (h *Held) enter() error {
	opened, err := h.dir.Stat()
	if err == nil {
		err = h.in.give(h.dir, opened)
	}
	if err != nil {
		return fmt.Errorf("giving workspace %s to the session's user (it has to belong to uid %d, with the mode 0755): %w", h.name, h.in.uid, reason.Of(err))
	}
	h.root, err = h.mine.OpenRoot(h.name)
	return err
}

// give makes a workspace the session's, also one that a sidecar was killed over
// before it had, and one that an earlier session closed to itself. One that the session may
// enter and list stays as it is: an operator may have made it read-only.
func (r *Root) give(f *os.File, st fs.FileInfo) error {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) == r.uid {
		if st.Mode()&0o500 == 0o500 {
			return nil
		}
		return f.Chmod(st.Mode() | 0o700)
	}
	err := f.Chown(r.uid, r.uid)
	if err == nil || st.Mode().Perm()&0o007 == 0o007 {
		return nil
	}
	// A sidecar without root cannot give it away, so it lets the session in;
	// the directories above keep others of the host out.
	return f.Chmod(0o777)
}

func mkdir(r *os.Root, name string, mode fs.FileMode) error {
	if err := r.Mkdir(name, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("making the principal's directory: %w", err)
	}
	if st, err := r.Lstat(name); err != nil || !st.IsDir() {
		return errors.New("the principal's directory is not a plain directory")
	}
	return nil
}

// Usage is the size on disk of the workspace in bytes, where each file,
// directory and link counts MinEntry at least. Directories that the sidecar may
// not read are left out; a tree that is nested more than MaxDepth directories
// deep has Unmeasured bytes.
func (h *Held) Usage() (int64, error) {
	u, err := measure(h.root)
	return u.bytes, err
}

// Device is the number of the file system that the workspace is on, as stat(2) has it.
func (h *Held) Device() (uint64, error) {
	st, err := h.dir.Stat()
	if err != nil {
		return 0, err
	}
	return st.Sys().(*syscall.Stat_t).Dev, nil
}

const (
	// MaxDepth is how many directories deep a workspace is measured.
	MaxDepth = 256
	// Unmeasured is the size of a workspace that is nested deeper: more than any
	// quota.
	Unmeasured = math.MaxInt64
	// MinEntry is what an entry counts that has fewer blocks, or none, in bytes:
	// an inode is used up all the same, and a file system may run out of them first.
	MinEntry = 4096
	// batch is how many names of a directory are held at once.
	batch = 1024
	// hold is how many levels share one open directory: what is below is opened
	// by its path from there, so that a deep tree takes few descriptors.
	hold = 16
)

// walk goes through a workspace by descriptors and single names, which may be
// any bytes: fs.FS refuses those that are not UTF-8.
type walk struct {
	bytes    int64
	unread   int  // directories that may not be read
	emptying bool // ends with an error at a directory that may not be emptied
}

func measure(root *os.Root) (walk, error) {
	var w walk
	if st, err := root.Lstat("."); err == nil {
		w.add(st)
	}
	err := w.dir(root, ".", 1)
	return w, err
}

func (w *walk) add(st fs.FileInfo) {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		w.bytes += max(sys.Blocks*512, MinEntry)
	}
}

// dir adds what lies in a directory below base. What changes under way is no
// error.
func (w *walk) dir(base *os.Root, name string, depth int) error {
	if depth > MaxDepth {
		w.bytes = Unmeasured
		return nil
	}
	dir, err := base.OpenRoot(name)
	if err != nil {
		return w.skip(err)
	}
	defer dir.Close()
	list, err := dir.Open(".")
	if err != nil {
		return w.skip(err)
	}
	defer list.Close()
	if depth%hold == 0 {
		base, name = dir, "."
	}
	for more, checked := true, !w.emptying; more; {
		names, err := list.Readdirnames(batch)
		if err != nil && err != io.EOF {
			return w.skip(err)
		}
		if len(names) > 0 && !checked {
			if err := emptiable(dir); err != nil {
				return err
			}
			checked = true
		}
		var below []string
		for _, n := range names {
			st, err := dir.Lstat(n)
			if err != nil {
				if err := w.skip(err); err != nil {
					return err
				}
				continue
			}
			w.add(st)
			if st.IsDir() {
				below = append(below, n)
			}
		}
		if more = len(names) == batch; !more { // it is mostly small: open no longer than needed
			list.Close()
			if base != dir {
				dir.Close()
			}
		}
		for _, n := range below {
			if err := w.dir(base, filepath.Join(name, n), depth+1); err != nil || w.bytes == Unmeasured {
				return err
			}
		}
	}
	return nil
}

// skip says which errors a walk goes on after.
func (w *walk) skip(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission) && !w.emptying:
		w.unread++
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG): // gone, or another thing by now
	case !errors.Is(err, fs.ErrClosed) && !errors.As(err, new(syscall.Errno)): // not of the kernel but of os.Root: a link out by now
	default:
		return err
	}
	return nil
}

func readNames(dir *os.Root) ([]string, error) {
	f, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// Info describes a workspace for the operator.
type Info struct {
	Principal string    `json:"principal_dir"`
	Name      string    `json:"name"`
	Bytes     int64     `json:"bytes"`
	LastUsed  time.Time `json:"last_used"`
	InUse     bool      `json:"in_use"`
	Unread    int       `json:"unread,omitempty"` // directories that are not in Bytes: they may not be read
	Error     string    `json:"error,omitempty"`  // why the rest is not known
}

// Records tells which workspaces sessions have by the sidecar's records, by their Key: a
// sidecar that is down holds no locks, and its sessions may run on.
type Records func() (map[string]bool, error)

// List returns every workspace, ordered by principal and name. One that cannot
// be looked at has the reason in its Error. InUse is by the locks, and by the records
// where they are not nil.
func (r *Root) List(records Records) ([]Info, error) {
	top, err := os.OpenRoot(r.dir)
	if err != nil {
		return nil, fmt.Errorf("opening SANDBOX_WORKSPACE_ROOT: %w", err)
	}
	defer top.Close()
	var recorded map[string]bool
	if records != nil {
		if recorded, err = records(); err != nil {
			return nil, err
		}
	}
	var out []Info
	err = each(top, func(principal string, mine *os.Root, names []string, err error) {
		if err != nil {
			out = append(out, Info{Principal: principal, Error: err.Error()})
		}
		for _, name := range names {
			if !Name.MatchString(name) {
				continue
			}
			if st, err := mine.Lstat(name); err != nil || !st.IsDir() {
				continue
			}
			info := inspect(mine, principal, name)
			info.InUse = info.InUse || recorded[info.key()]
			out = append(out, info)
		}
	})
	return out, err
}

func (i Info) key() string { return i.Principal + "/" + i.Name }

// each calls f with each principal's directory and the names in it, or with why
// they cannot be read.
func each(top *os.Root, f func(principal string, mine *os.Root, names []string, err error)) error {
	principals, err := readNames(top)
	if err != nil {
		return fmt.Errorf("reading SANDBOX_WORKSPACE_ROOT: %w", err)
	}
	for _, p := range principals {
		if st, err := top.Lstat(p); err != nil || !st.IsDir() {
			continue
		}
		mine, err := top.OpenRoot(p)
		if err != nil {
			f(p, nil, nil, err)
			continue
		}
		names, err := readNames(mine)
		f(p, mine, names, err)
		mine.Close()
	}
	return nil
}

func inspect(mine *os.Root, principal, name string) Info {
	info := Info{Principal: principal, Name: name}
	fail := func(err error) Info {
		info.Error = err.Error()
		return info
	}
	root, err := mine.OpenRoot(name)
	if err != nil {
		return fail(err)
	}
	defer root.Close()
	f, err := root.Open(".")
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fail(err)
	}
	info.LastUsed = st.ModTime()
	// For no longer than it takes: a session that wants it meanwhile waits a little.
	if info.InUse = flock(f, syscall.LOCK_EX|syscall.LOCK_NB) != nil; !info.InUse {
		_ = flock(f, syscall.LOCK_UN)
	}
	u, err := measure(root)
	info.Bytes, info.Unread = u.bytes, u.unread
	if err != nil {
		return fail(err)
	}
	if u.bytes == Unmeasured {
		return fail(fmt.Errorf("it is nested more than %d directories deep", MaxDepth))
	}
	return info
}

// Prune removes the workspaces whose top directory was last changed before
// the given time and that no session has, by the locks and the records; dry only names
// them. One that cannot be removed stays as it is: the error names each, beside those
// that were removed. What an earlier Prune left half removed goes too.
func (r *Root) Prune(before time.Time, dry bool, records Records) ([]Info, error) {
	all, err := r.List(records)
	if err != nil {
		return nil, err
	}
	var out []Info
	var errs []error
	for _, info := range all {
		if info.InUse || info.LastUsed.IsZero() || !info.LastUsed.Before(before) {
			continue
		}
		if !dry {
			if err := r.remove(info, before, records); err != nil {
				if !errors.Is(err, ErrBusy) {
					errs = append(errs, fmt.Errorf("removing workspace %s/%s: %w", info.Principal, info.Name, err))
				}
				continue
			}
		}
		out = append(out, info)
	}
	if !dry {
		errs = append(errs, r.sweep())
	}
	return out, errors.Join(errs...)
}

// doomed is what a workspace is called while it is removed: no workspace's Name.
func doomed(name string) string { return "." + name + ".pruned" }

// sweep removes what a Prune that was killed had renamed.
func (r *Root) sweep() error {
	top, err := os.OpenRoot(r.dir)
	if err != nil {
		return err
	}
	defer top.Close()
	var errs []error
	err = each(top, func(principal string, mine *os.Root, names []string, _ error) {
		for _, n := range names {
			name, ok := strings.CutSuffix(strings.TrimPrefix(n, "."), ".pruned")
			if !ok || n != doomed(name) || !Name.MatchString(name) {
				continue
			}
			if err := mine.RemoveAll(n); err != nil {
				errs = append(errs, fmt.Errorf("removing what is left of workspace %s/%s: %w", principal, name, err))
			}
		}
	})
	return errors.Join(append(errs, err)...)
}

// remove renames the workspace away under its lock, so that no session can
// open it half removed. What takes long is done before or after that.
func (r *Root) remove(info Info, before time.Time, records Records) error {
	top, err := os.OpenRoot(filepath.Join(r.dir, info.Principal))
	if err != nil {
		return gone(err)
	}
	defer top.Close()
	root, err := top.OpenRoot(info.Name)
	if err != nil {
		return gone(err)
	}
	defer root.Close()
	if err := removable(root); err != nil {
		return err
	}
	away := doomed(info.Name)
	if err := top.RemoveAll(away); err != nil {
		return err
	}
	f, err := root.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	if flock(f, syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return ErrBusy
	}
	// Sessions may have come and gone since it was listed.
	named, err := top.Lstat(info.Name)
	opened, err2 := f.Stat()
	if err != nil || err2 != nil || !os.SameFile(named, opened) || !opened.ModTime().Before(before) {
		return ErrBusy
	}
	if records != nil {
		recorded, err := records()
		if err != nil {
			return err
		}
		if recorded[info.key()] {
			return ErrBusy
		}
	}
	if err := top.Rename(info.Name, away); err != nil {
		return err
	}
	if err := top.RemoveAll(away); err != nil {
		return errors.Join(err, back(top, away, info.Name))
	}
	r.leave(info.Principal)
	return nil
}

// gone takes what another prune has removed meanwhile for what is in use.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return ErrBusy
	}
	return err
}

// back brings in view again what could not be removed, with what is left of it, unless
// the name is another's by now: an empty directory would be replaced, under its session.
func back(top *os.Root, away, name string) error {
	dir, err := top.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	fd := int(dir.Fd())
	if err := unix.Renameat2(fd, away, fd, name, unix.RENAME_NOREPLACE); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("renaming %s back: %w", away, err)
	}
	return nil
}

// removable says whether this process may empty every directory of a workspace.
// One that is not root may not empty what sessions made.
func removable(root *os.Root) error {
	w := walk{emptying: true}
	err := w.dir(root, ".", 1)
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: a session made directories there that this user may not empty; prune as root", err)
	}
	return err
}

func emptiable(dir *os.Root) error {
	f, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Faccessat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.W_OK|unix.X_OK, unix.AT_EACCESS)
}

// Touch marks the workspace as used, for Prune.
func (h *Held) Touch(at time.Time) { _ = h.root.Chtimes(".", at, at) }
