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

// Files that have lost their name are measured; the walk over /work does not find them.
func TestUnlinked(t *testing.T) {
	dir := t.TempDir()
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
	defer c.Close()
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	const size = 64 << 20 // what other tests have on this file system changes meanwhile
	before, err := c.Unlinked(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		t.Fatal(err)
	}
	if after, err := c.Unlinked(t.Context()); err != nil || after < before+size/2 {
		t.Errorf("%d bytes and, with %d more, %d, %v", before, size, after, err)
	}
}
