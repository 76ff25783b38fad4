// Package agent_test runs both ends of the protocol against each other, over a
// line that fails and lies.
package agent_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/guest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"golang.org/x/sys/unix"
)

// line carries what one end writes to the other, damaged: from the byte at on
// it flips mask into every stride-th, and after cut bytes it is dead.
type line struct {
	net.Conn
	at, stride, cut int
	mask            byte
	n               int
}

func (l *line) Write(p []byte) (int, error) {
	out := bytes.Clone(p)
	for i := range out {
		if l.n++; l.n > l.cut {
			l.Conn.Close()
			return 0, io.ErrClosedPipe
		}
		if l.n > l.at && (l.n-l.at)%l.stride == 0 {
			out[i] ^= l.mask
		}
	}
	return l.Conn.Write(out)
}

// FuzzBothEnds writes and reads files while the line between the ends damages
// what either says. Each call ends, with the right content or an error.
func FuzzBothEnds(f *testing.F) {
	f.Add(uint16(1000), uint16(7), uint16(60000), byte(1), true)
	f.Add(uint16(60000), uint16(1), uint16(60000), byte(0), false) // an honest line
	f.Add(uint16(0), uint16(1), uint16(50), byte(255), true)
	f.Add(uint16(75), uint16(30000), uint16(60000), byte(8), false)
	f.Add(uint16(300), uint16(40), uint16(400), byte(128), false)
	f.Fuzz(func(t *testing.T, at, stride, cut uint16, mask byte, toGuest bool) {
		a, err := guest.New(t.TempDir(), "test")
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := net.Pipe()
		bad := func(c net.Conn) net.Conn {
			return &line{Conn: c, at: int(at), stride: int(stride) + 1, cut: int(cut), mask: mask}
		}
		var up, down net.Conn = ours, theirs
		if toGuest {
			up = bad(ours)
		} else {
			down = bad(theirs)
		}
		served := make(chan struct{})
		go func() { a.Serve(down); close(served) }()
		defer func() {
			ours.Close()
			select {
			case <-served:
			case <-time.After(20 * time.Second):
				t.Fatal("the agent hung")
			}
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		// A damaged length leaves an end waiting for the rest of a frame, as an end
		// that hangs would: then the line is cut, and nothing may wait any longer.
		context.AfterFunc(ctx, func() { ours.Close() })
		c, err := host.Dial(ctx, up, "key", nil)
		if err != nil {
			return
		}
		defer c.Close()
		content := bytes.Repeat([]byte("0123456789abcdef"), 2048)
		honest := mask == 0 && int(cut) > 2*len(content)-1000
		began := time.Now()
		err = c.WriteFile(ctx, "f", 0, content)
		if err == nil {
			var got []byte
			got, _, err = c.ReadFile(ctx, wire.Read{Path: "f", Max: 1 << 20})
			if int64(len(got)) > 1<<20 {
				t.Fatal("more than was asked for")
			}
			if mask == 0 && err == nil && !bytes.Equal(got, content) {
				t.Fatal("read something else than was written")
			}
		}
		if honest && err != nil && ctx.Err() == nil {
			t.Fatalf("over an honest line: %v", err)
		}
		if time.Since(began) > 8*time.Second {
			t.Fatalf("the calls took %v", time.Since(began))
		}
	})
}

// dial connects a host to an agent for dir.
func dial(t *testing.T, dir string) *host.Conn {
	t.Helper()
	a, err := guest.New(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	go a.Serve(theirs)
	c, err := host.Dial(t.Context(), ours, "key", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Links lead where they do for the session's own commands, as long as that is in its directory.
func TestLinks(t *testing.T) {
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	work, outside := filepath.Join(base, "work"), filepath.Join(base, "work2")
	for _, d := range []string{filepath.Join(work, "d", "e"), outside} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{filepath.Join(work, "d", "f"), filepath.Join(outside, "f")} {
		if err := os.WriteFile(f, []byte("old"), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{
		"abs": work + "/d/f", "slashes": "//" + work + "//d/./f", "dir": work + "/d", "top": work, "d/up": work + "/d/..", "rel": "d/f", "d/rel": "../abs", "twice": "top/d/up/dir/f", "new": work + "/d/new", "deep": work + "/d/e/new/f",
		"out": outside + "/f", "outdir": outside, "beside": work + "/../work2/f", "back": outside + "/../work/d/f", "through": "top/../work2/f", "etc": "/etc/passwd", "proc": "/proc/self/cwd", "loop": work + "/loop",
	} {
		if err := os.Symlink(to, filepath.Join(work, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(work, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := dial(t, work)
	deep := strings.Repeat("p/", 300) + "f"
	const leads = "it leads out of /work, through a symbolic link or .."
	for _, tc := range []struct{ path, at, refused string }{
		{"abs", "d/f", ""}, {"slashes", "d/f", ""}, {"dir/f", "d/f", ""}, {"top/d/f", "d/f", ""}, {"d/up/d/f", "d/f", ""}, {"rel", "d/f", ""}, {"d/rel", "d/f", ""}, {"twice", "d/f", ""},
		{"new", "d/new", ""}, {"deep", "d/e/new/f", ""}, {"dir/more/f", "d/more/f", ""},
		{"out", "", leads}, {"outdir/f", "", leads}, {"outdir/new", "", leads}, {"beside", "", leads}, {"back", "", leads}, {"through", "", leads}, {"etc", "", leads}, {"proc/x", "", leads},
		{"loop", "", "too many levels of symbolic links"}, {"top", "", "is a directory"}, {"fifo/f", "", "not a directory"}, {"fifo", "", "not a regular file"}, {deep, deep, ""},
	} {
		err := c.WriteFile(t.Context(), tc.path, 0, []byte(tc.path))
		if tc.refused == "" && err != nil || tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused)) {
			t.Errorf("writing %s: %v, want %q", tc.path, err, tc.refused)
		}
		got, _, err := c.ReadFile(t.Context(), wire.Read{Path: tc.path, Max: 1 << 10})
		if tc.refused != "" {
			if err == nil || !strings.Contains(err.Error(), tc.refused) {
				t.Errorf("reading %s: %q, %v, want %q", tc.path, got, err, tc.refused)
			}
			continue
		}
		if on, _ := os.ReadFile(filepath.Join(work, tc.at)); err != nil || string(got) != tc.path || string(on) != tc.path {
			t.Errorf("%s reads %q, %v, and %s holds %q", tc.path, got, err, tc.at, on)
		}
		if to, err := os.Readlink(filepath.Join(work, tc.path)); err != nil && !strings.HasSuffix(tc.path, "/f") {
			t.Errorf("%s is no link any more: %q, %v", tc.path, to, err)
		}
	}
	if st, err := os.Stat(filepath.Join(work, "d/f")); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("the target has not kept its mode: %v, %v", st.Mode(), err)
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 1 {
		t.Errorf("outside there are now %v, %v", left, err)
	}
	if b, _ := os.ReadFile(filepath.Join(outside, "f")); string(b) != "old" {
		t.Errorf("outside was written to: %q", b)
	}
}

// Files that have lost their name are measured; the walk over /work does not find them.
func TestUnlinked(t *testing.T) {
	dir := t.TempDir()
	c := dial(t, dir)
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	const size = 64 << 20 // what other tests have on this file system changes meanwhile
	var before, after int64
	for range 3 {
		if err := f.Truncate(0); err != nil {
			t.Fatal(err)
		}
		if before, err = c.Unlinked(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
			t.Fatal(err)
		}
		if after, err = c.Unlinked(t.Context()); err != nil {
			t.Fatal(err)
		}
		if after >= before+size/2 {
			return
		}
	}
	t.Errorf("%d bytes and, with %d more, %d", before, size, after)
}
