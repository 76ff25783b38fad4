package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func root(t *testing.T, quota int64) (*Root, string) {
	t.Helper()
	dir := t.TempDir()
	r, err := New(dir, "", os.Getuid(), quota)
	if err != nil {
		t.Fatal(err)
	}
	return r, dir
}

func TestTake(t *testing.T) {
	r, dir := root(t, 0)
	h, err := r.Take(t.Context(), "acme/p1", "ws")
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(dir, "acme=2fp1", "ws"); h.Path != want {
		t.Errorf("it is at %s instead of %s", h.Path, want)
	}
	if _, err := r.Take(t.Context(), "acme/p1", "ws"); !errors.Is(err, ErrBusy) {
		t.Errorf("a second writer: %v", err)
	}
	if other, err := r.Take(t.Context(), "acme/p2", "ws"); err != nil || other.Path == h.Path {
		t.Errorf("another principal's workspace of the same name: %v", err)
	}
	h.Close()
	if h, err = r.Take(t.Context(), "acme/p1", "ws"); err != nil {
		t.Fatalf("after it was given free: %v", err)
	}
	h.Close()
}

// Whoever looks whether a session has a workspace has it for a moment alone, not for as
// long as it is measured: a session that is opened meanwhile, or adopted, gets it.
func TestListHoldsNothing(t *testing.T) {
	r, dir := root(t, 0)
	h, err := r.Take(t.Context(), "p", "ws")
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(dir, "p", "ws", fmt.Sprint(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	free, busy := 0, 0
	for range 20 {
		done := make(chan error, 1)
		go func() {
			_, err := r.Prune(time.Now().Add(time.Hour), true, nil)
			done <- err
		}()
		for listing := true; listing; {
			select {
			case err := <-done:
				if listing = false; err != nil {
					t.Fatal(err)
				}
			default:
				h, err := r.open("p", "ws", true)
				if err != nil {
					t.Fatal(err)
				}
				switch err := h.Lock(); {
				case err == nil:
					free++
				case errors.Is(err, ErrBusy):
					busy++
				default:
					t.Fatal(err)
				}
				h.Close()
			}
		}
	}
	if t.Logf("free %d times, busy %d times", free, busy); busy > free/10 {
		t.Errorf("under a list the workspace was busy %d times, and free %d times", busy, free)
	}
}

// A session that comes while a list looks waits for it, up to the last moment; for another's
// session it does not, nor longer than its caller.
func TestTakeWaitsALittle(t *testing.T) {
	r, _ := root(t, 0)
	synctest.Test(t, func(t *testing.T) {
		h, err := r.Take(t.Context(), "p", "ws")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 40 {
			freed := busyFor / 5
			if i > 0 { // between the last tries, when both timers are due at once
				freed = busyFor - 1
			}
			time.AfterFunc(freed, h.Close)
			if h, err = r.Take(t.Context(), "p", "ws"); err != nil {
				t.Fatalf("free after %v: %v", freed, err)
			}
		}
		defer h.Close()
		began := time.Now()
		if _, err := r.Take(t.Context(), "p", "ws"); !errors.Is(err, ErrBusy) || time.Since(began) > busyFor+busyEvery {
			t.Errorf("another's session, after %v: %v", time.Since(began), err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := r.Take(ctx, "p", "ws"); !errors.Is(err, context.Canceled) {
			t.Errorf("whose caller has gone: %v", err)
		}
	})
}

// A principal has so many workspaces, however many are asked for at once; those that are
// there stay open to it, and one whose session does not come about leaves nothing behind.
func TestMost(t *testing.T) {
	r, dir := root(t, 0)
	r.Most = 3
	var made, refused atomic.Int32
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			h, err := r.Take(t.Context(), "p", fmt.Sprintf("w%02d", i))
			var limit *LimitError
			switch {
			case err == nil:
				made.Add(1)
				h.Close()
			case errors.As(err, &limit) && limit.Limit == 3 && len(limit.Has) == 3:
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	names, err := os.ReadDir(filepath.Join(dir, "p"))
	if err != nil || len(names) != 3 || made.Load() != 3 || refused.Load() != 17 {
		t.Fatalf("%d were made and %d refused: there are %v, %v", made.Load(), refused.Load(), names, err)
	}
	has := names[0].Name()
	if _, err := r.Take(t.Context(), "p", "more"); err == nil || !strings.Contains(err.Error(), "SANDBOX_MAX_WORKSPACES_PER_PRINCIPAL is 3") || !strings.Contains(err.Error(), has) {
		t.Errorf("one more: %v", err)
	}
	h, err := r.Take(t.Context(), "p", has)
	if err != nil {
		t.Fatal(err)
	}
	h.Discard() // it was there before
	for what, put := range map[string]func(path string) error{
		"empty": func(string) error { return nil },
		"used":  func(path string) error { return os.WriteFile(filepath.Join(path, "f"), nil, 0o644) },
	} {
		if h, err = r.Take(t.Context(), what, "new"); err != nil {
			t.Fatal(err)
		}
		if err := put(h.Path); err != nil {
			t.Fatal(err)
		}
		h.Discard()
		if _, err := os.Stat(filepath.Join(dir, what)); (err == nil) != (what == "used") {
			t.Errorf("a workspace that is %s when its session does not come about: %v", what, err)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "p")); len(left) != 3 {
		t.Errorf("left are %v", left)
	}
}

// refuse has the kernel refuse some system calls of this goroutine for good, as a file system
// may that is not the kernel's own.
func refuse(calls ...uint32) error {
	runtime.LockOSThread()                                                       // which ends with the goroutine
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // seccomp_data begins with the call's number
	for _, nr := range calls {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: nr},
			unix.SockFilter{Code: unix.BPF_RET, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET, K: unix.SECCOMP_RET_ALLOW})
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0)
}

// A workspace that cannot be given to a session leaves nothing behind that counts, unless it
// was there before.
func TestTakeThatIsRefused(t *testing.T) {
	r, dir := root(t, 0)
	r.uid, r.Most = os.Getuid()+1, 1
	h, err := r.Take(t.Context(), "old", "ws")
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	if err := os.Chmod(h.Path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(h.Path, os.Getuid(), -1); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := refuse(unix.SYS_FCHMOD, unix.SYS_FCHOWN); err != nil {
			t.Error(err)
			return
		}
		for _, who := range []string{"new", "old"} {
			if h, err := r.Take(t.Context(), who, "ws"); err == nil || !strings.Contains(err.Error(), "giving workspace ws") {
				t.Errorf("%s: it is given: %v", who, err)
				if err == nil {
					h.Close()
				}
			}
		}
	}()
	<-done
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "old" {
		t.Errorf("left are %v, %v", left, err)
	}
	if h, err = r.Take(t.Context(), "new", "another"); err != nil {
		t.Fatal(err)
	}
	h.Close()
}

// Prune leaves alone what a record names, while nobody has the lock, and what a session
// has used since it was listed. What it cannot remove does not take the place of another.
func TestPruneLeavesSessionsAlone(t *testing.T) {
	r, dir := root(t, 0)
	old, before := time.Now().Add(-48*time.Hour), time.Now().Add(-24*time.Hour)
	for _, name := range []string{"named", "used", "old"} {
		h, err := r.Take(t.Context(), "acme/p", name)
		if err != nil {
			t.Fatal(err)
		}
		h.Touch(old)
		h.Close()
	}
	asked := 0
	records := func() (map[string]bool, error) {
		if asked++; asked == 2 { // under the first lock
			h, err := r.open("acme/p", "used", false)
			if err != nil {
				t.Fatal(err)
			}
			if err := h.enter(); err != nil {
				t.Fatal(err)
			}
			h.Touch(time.Now())
			h.Close()
		}
		return map[string]bool{Key("acme/p", "named"): true}, nil
	}
	if infos, err := r.List(records); err != nil || len(infos) != 3 || !infos[0].InUse || infos[1].InUse {
		t.Errorf("%+v, %v", infos, err)
	}
	asked = 0
	if pruned, err := r.Prune(before, false, records); err != nil || len(pruned) != 1 || pruned[0].Name != "old" {
		t.Errorf("pruned %+v, %v", pruned, err)
	}
	if _, err := r.Prune(time.Now().Add(time.Hour), false, func() (map[string]bool, error) { return nil, os.ErrNotExist }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without records: %v", err)
	}
	mine := filepath.Join(dir, "acme=2fp")
	if left, err := os.ReadDir(mine); err != nil || len(left) != 2 {
		t.Errorf("left are %v, %v", left, err)
	}
	top, err := os.OpenRoot(mine)
	if err != nil {
		t.Fatal(err)
	}
	defer top.Close()
	for _, name := range []string{doomed("gone"), doomed("used")} {
		if err := top.Mkdir(name, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	was, _ := top.Lstat("used")
	for _, name := range []string{"gone", "used"} {
		if err := back(top, doomed(name), name); err != nil {
			t.Error(err)
		}
	}
	if is, err := top.Lstat("used"); err != nil || !os.SameFile(was, is) {
		t.Errorf("what was pruned took the place of another: %v", err)
	}
	if _, err := top.Lstat("gone"); err != nil {
		t.Errorf("it is not in view again: %v", err)
	}
}

// A session may do to its directory what it likes; the next one can enter it.
func TestClosedByItsOwner(t *testing.T) {
	r, _ := root(t, 0)
	for _, mode := range []os.FileMode{0, 0o077, 0o555, os.ModeSetgid | os.ModeSticky} {
		h, err := r.Take(t.Context(), "p", "ws")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(h.Path, mode); err != nil {
			t.Fatal(err)
		}
		h.Close()
		if os.Getuid() != 0 && mode&0o400 == 0 {
			if _, err := r.Take(t.Context(), "p", "ws"); err == nil || !strings.Contains(err.Error(), "has to give it the mode") {
				t.Errorf("%v: %v", mode, err)
			}
			_ = os.Chmod(h.Path, 0o755)
			continue
		}
		if h, err = r.Take(t.Context(), "p", "ws"); err != nil {
			t.Fatal(err)
		}
		want := mode
		if mode&0o500 != 0o500 {
			want |= 0o700
		}
		if st, err := os.Stat(h.Path); err != nil || st.Mode() != os.ModeDir|want {
			t.Errorf("%v became %v, %v", mode, st.Mode(), err)
		}
		h.Close()
	}
}

func TestNames(t *testing.T) {
	r, _ := root(t, 0)
	for _, name := range []string{"", ".", "..", "../x", "a/b", "/etc", "A", "-a", "a.b", "a\x00", strings.Repeat("a", 65), "é"} {
		if h, err := r.Take(t.Context(), "p", name); err == nil {
			t.Errorf("%q was made at %s", name, h.Path)
		}
	}
	dirs := map[string]string{}
	for _, p := range []string{"a", "A", "a/b", "a=2fb", "..", ".", "/", "-a", "a b", "é", "a\x00b"} {
		d := Dir(p)
		if other, ok := dirs[d]; ok {
			t.Errorf("%q and %q share the directory %s", p, other, d)
		}
		dirs[d] = p
		if strings.ContainsAny(d, "/\x00") || strings.HasPrefix(d, ".") || strings.HasPrefix(d, "-") {
			t.Errorf("%q became %q", p, d)
		}
	}
}

// A link in place of the workspace or of the principal's directory would have
// the engine mount what it points to.
func TestSymlinks(t *testing.T) {
	r, dir := root(t, 0)
	secret := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "p"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{filepath.Join(dir, "p", "ws"), filepath.Join(dir, "q")} {
		if err := os.Symlink(secret, link); err != nil {
			t.Fatal(err)
		}
	}
	if h, err := r.Take(t.Context(), "p", "ws"); err == nil {
		t.Errorf("a linked workspace was taken: %s", h.Path)
	}
	if h, err := r.Take(t.Context(), "q", "ws"); err == nil {
		t.Errorf("a workspace below a linked directory was taken: %s", h.Path)
	}
	if left, _ := os.ReadDir(secret); len(left) > 0 {
		t.Errorf("%v was made behind the link", left)
	}
}

// What a session may make of its workspace: neither hides a byte from the quota,
// nor takes the list of all from the operator.
func TestHostileTrees(t *testing.T) {
	r, dir := root(t, 0)
	var all []*Held
	for name, c := range map[string]struct {
		grow string
		want int64
	}{
		"utf8": {"mkdir $'\\xff' && head -c 1000000 /dev/urandom >$'\\xff'/$'\\xfe'", 1 << 20},
		"fifo": {"mkfifo p && ln -s / up && ln -s . self && head -c 1000000 /dev/urandom >f", 1 << 20},
		"deep": {"for i in {1..100}; do mkdir d && cd d; done; head -c 1000000 /dev/urandom >f", 2 << 20},
		"many": {"touch f{1..5000}; for i in {1..250}; do ln -s f l$i; mkdir d$i; touch d$i/f; done", 24 << 20},
		"pit":  {"for i in {1..300}; do mkdir d && cd d; done; head -c 1000000 /dev/urandom >f", Unmeasured},
	} {
		h, err := r.Take(t.Context(), "p", name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
		cmd := exec.Command("bash", "-ec", c.grow)
		cmd.Dir = h.Path
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if used, err := h.Usage(); err != nil || used < 1e6 || used > c.want || name == "many" && used < 5751*MinEntry {
			t.Errorf("%s: %d bytes, %v", name, used, err)
		} else if c.want == Unmeasured && used != Unmeasured {
			t.Errorf("%s: measured as %d", name, used)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "\xff"), 0o755); err != nil {
		t.Fatal(err)
	}
	infos, err := r.List(nil)
	if err != nil || len(infos) != 5 {
		t.Fatalf("%+v, %v", infos, err)
	}
	for _, info := range infos {
		if (info.Error != "") != (info.Name == "pit") {
			t.Errorf("%+v", info)
		}
	}
	if pruned, err := r.Prune(time.Now().Add(time.Hour), false, nil); err != nil || len(pruned) != 0 {
		t.Errorf("while they are in use: %+v, %v", pruned, err)
	}
	for _, h := range all {
		h.Close()
	}
	if pruned, err := r.Prune(time.Now().Add(time.Hour), false, nil); err != nil || len(pruned) != 5 {
		t.Errorf("pruned %+v, %v", pruned, err)
	}
}

// A session swaps directories, at three depths, for links out of its workspace and to
// no possible name, as fast as it can: the walk and Prune never go through one, and to
// the walk, which the quota hangs on, it is no error.
func TestSwappedLinks(t *testing.T) {
	r, dir := root(t, 0)
	outside := filepath.Join(t.TempDir(), "outside")
	const kept = 100
	for i := range kept {
		if err := os.MkdirAll(filepath.Join(outside, "in", fmt.Sprint(i)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	met := map[bool]int{}
	for range 8 {
		h, err := r.Take(t.Context(), "p", "ws")
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "p", "ws")
		for i := range 10 {
			if err := os.MkdirAll(filepath.Join(path, "x", "in", fmt.Sprint(i)), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for link, to := range map[string]string{filepath.Join(path, "y"): outside, filepath.Join(path, "x", "out"): filepath.Join(outside, "in"), filepath.Join(path, "x", "in", "long"): strings.Repeat("n", 300)} {
			if err := os.Symlink(to, link); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		var swaps sync.WaitGroup
		for _, in := range []struct{ dir, one, other string }{{"x/in", "0", "long"}, {"x", "in", "out"}, {".", "x", "y"}} {
			d, err := os.Open(filepath.Join(path, in.dir)) // held: by path it might soon be the outer link's
			if err != nil {
				t.Fatal(err)
			}
			swaps.Go(func() {
				defer d.Close()
				for ctx.Err() == nil {
					_ = unix.Renameat2(int(d.Fd()), in.one, int(d.Fd()), in.other, unix.RENAME_EXCHANGE)
				}
			})
		}
		for range 50 {
			used, err := h.Usage()
			if err != nil || used > 60*MinEntry { // all of it twice over
				t.Errorf("usage %d, %v", used, err)
			}
			met[used > 10*MinEntry]++
		}
		h.Close()
		// RemoveAll may find another thing than it saw, and says so: then it is tried again.
		for try := 0; ; try++ {
			pruned, err := r.Prune(time.Now().Add(time.Hour), false, nil)
			if err == nil && len(pruned) == 1 {
				break
			}
			if try == 100 {
				t.Fatalf("pruned %v, %v", pruned, err)
			}
		}
		cancel()
		swaps.Wait()
	}
	t.Logf("the whole tree was seen and not: %v", met)
	if met[true] == 0 || met[false] == 0 {
		t.Error("they did not change places under the walk")
	}
	if left, err := os.ReadDir(filepath.Join(outside, "in")); err != nil || len(left) != kept {
		t.Errorf("%d of %d entries are left outside, %v", len(left), kept, err)
	}
}

func TestListAndPrune(t *testing.T) {
	r, dir := root(t, 0)
	outside := filepath.Join(t.TempDir(), "keep")
	if err := os.WriteFile(outside, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-48 * time.Hour)
	var busy *Held
	for _, name := range []string{"old", "new", "busy"} {
		h, err := r.Take(t.Context(), "p", name)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "p", name)
		if err := os.WriteFile(filepath.Join(path, "f"), make([]byte, 8192), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(outside, filepath.Join(path, "link")); err != nil {
			t.Fatal(err)
		}
		if used, err := h.Usage(); err != nil || used < 8192 || used > 64<<10 {
			t.Errorf("usage %d, %v", used, err)
		}
		if name != "new" {
			h.Touch(old)
		}
		if name == "busy" {
			busy = h
		} else {
			h.Close()
		}
	}
	defer busy.Close()
	infos, err := r.List(nil)
	if err != nil || len(infos) != 3 || !infos[0].InUse || infos[1].InUse {
		t.Fatalf("%+v, %v", infos, err)
	}
	for _, dry := range []bool{true, false} {
		pruned, err := r.Prune(time.Now().Add(-24*time.Hour), dry, nil)
		if err != nil || len(pruned) != 1 || pruned[0].Name != "old" {
			t.Fatalf("dry %v: %+v, %v", dry, pruned, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "p", "old")); !os.IsNotExist(err) {
		t.Error("the old workspace is still there")
	}
	if _, err := os.Stat(outside); err != nil {
		t.Error("prune followed a link out of the workspace")
	}
}

// Two at once take nothing for an error that the other does, and remove all.
func TestTwoPrunes(t *testing.T) {
	r, dir := root(t, 0)
	const all = 100
	for i := range all {
		h, err := r.Take(t.Context(), fmt.Sprint("p", i%10), fmt.Sprint("w", i))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(h.Path, "f"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		h.Close()
	}
	var removed atomic.Int32
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			pruned, err := r.Prune(time.Now().Add(time.Hour), false, nil)
			if err != nil {
				t.Error(err)
			}
			removed.Add(int32(len(pruned)))
		})
	}
	both.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || removed.Load() != all {
		t.Errorf("%d were removed, left are %v, %v", removed.Load(), left, err)
	}
}

// A sidecar that is not root: what sessions made is another user's, and closed to
// it. Where it cannot remove a workspace that stays as it was, and the others go.
func TestPruneWithoutRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("making files of two users needs root")
	}
	const sidecar, session = 65532, 1000
	dir, err := os.MkdirTemp("/tmp", "workspaces") // t.TempDir is closed to other users
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	script := `install -d -o $1 -m 711 p && cd p
install -d -o $1 -m 777 stuck easy && install -d -o $1 .gone.pruned .not-ours
echo x >easy/f && echo x >.gone.pruned/f
install -d -o $2 stuck/made && install -d -o $2 -m 700 stuck/closed && echo x >stuck/made/f && echo x >stuck/f && chown $2 stuck/f stuck/made/f
touch -d '3 days ago' stuck easy`
	cmd := exec.Command("sh", "-ec", script, "sh", fmt.Sprint(sidecar), fmt.Sprint(session))
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Chown(dir, sidecar, sidecar); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	r, err := New(dir, "", session, 0)
	if err != nil {
		t.Fatal(err)
	}
	var infos []Info
	as(t, sidecar, func() { infos, err = r.List(nil) })
	if err != nil || len(infos) != 2 || infos[0].Unread != 0 || infos[1].Unread != 1 || infos[1].Error != "" {
		t.Errorf("%+v, %v", infos, err)
	}
	var pruned []Info
	as(t, sidecar, func() { pruned, err = r.Prune(time.Now().Add(-24*time.Hour), false, nil) })
	if err == nil || !strings.Contains(err.Error(), "removing workspace p/stuck") || !strings.Contains(err.Error(), "as root") {
		t.Errorf("the error is %v", err)
	}
	if len(pruned) != 1 || pruned[0].Name != "easy" {
		t.Errorf("pruned %+v", pruned)
	}
	for path, want := range map[string]bool{"stuck/f": true, "stuck/made/f": true, "easy": false, ".gone.pruned": false, ".not-ours": true, ".stuck.pruned": false} {
		if _, err := os.Lstat(filepath.Join(dir, "p", path)); (err == nil) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	if pruned, err = r.Prune(time.Now().Add(-24*time.Hour), false, nil); err != nil || len(pruned) != 1 {
		t.Errorf("as root: %+v, %v", pruned, err)
	}
}

// as runs f as another user: on a thread of its own, that ends with it.
func as(t *testing.T, uid int, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		_, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
		if errno == 0 {
			f()
			done <- nil
			return
		}
		done <- errno
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// A sidecar that was killed between making a workspace and giving it away.
func TestWorkspaceOfRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("giving a directory away needs root")
	}
	dir := t.TempDir()
	r, err := New(dir, "", 1000, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "p", "ws"), 0o755); err != nil {
		t.Fatal(err)
	}
	h, err := r.Take(t.Context(), "p", "ws")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	var st syscall.Stat_t
	if err := syscall.Stat(h.Path, &st); err != nil || st.Uid != 1000 || st.Gid != 1000 {
		t.Errorf("it belongs to %d:%d, %v", st.Uid, st.Gid, err)
	}
}

// A sidecar that is not root takes the session's workspace as it is. Where it may not mend
// it, it says so without the path, which the caller of sandbox_open need not know.
func TestWithoutRootOverTheSessionsWorkspace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("giving a directory away needs root")
	}
	dir := filepath.Join(t.TempDir(), "root")
	r, err := New(dir, "", 1000, 0)
	if err != nil {
		t.Fatal(err)
	}
	h, err := r.Take(t.Context(), "p", "ws")
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	for _, d := range []string{dir, filepath.Join(dir, "p")} {
		if err := os.Chown(d, 65532, 65532); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{filepath.Dir(dir), filepath.Dir(filepath.Dir(dir))} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for mode, fails := range map[os.FileMode]bool{0o755: false, 0o555: false, 0o577: false, 0o077: true} {
		if err := os.Chmod(h.Path, mode); err != nil {
			t.Fatal(err)
		}
		as(t, 65532, func() {
			h, err := r.Take(t.Context(), "p", "ws")
			if err == nil {
				h.Close()
			}
			if (err != nil) != fails || fails && (strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "workspace ws")) {
				t.Errorf("%v: %v", mode, err)
			}
		})
		if st, err := os.Stat(h.Path); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%v became %v, %v", mode, st.Mode(), err)
		}
	}
}
