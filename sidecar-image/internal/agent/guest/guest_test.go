package guest

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
)

func TestRing(t *testing.T) {
	for _, max := range []int{0, 1, 2, 7, 100} {
		r := ring{max: max}
		var all strings.Builder
		for i := range 500 {
			piece := strings.Repeat(string(rune('a'+i%26)), i%9)
			ch := wire.Channel(1 + i%2)
			r.add(ch, []byte(piece))
			all.WriteString(piece)
			if len(r.buf) > 2*max+9 {
				t.Fatalf("a ring of %d holds %d bytes", max, len(r.buf))
			}
		}
		var got strings.Builder
		r.each(func(_ wire.Channel, b []byte) { got.Write(b) })
		want := all.String()[all.Len()-min(max, all.Len()):]
		if got.String() != want || r.dropped != int64(all.Len()-len(want)) {
			t.Errorf("max %d: kept %q, dropped %d; want %q", max, got.String(), r.dropped, want)
		}
	}
}

func TestCollector(t *testing.T) {
	var sent strings.Builder
	c := newCollector(10, func(ch wire.Channel, b []byte) bool { fmt.Fprintf(&sent, "%d:%s ", ch, b); return true })
	for i := range 20 {
		c.add(wire.Channel(1+i/10), fmt.Append(nil, i%10))
	}
	var e wire.Exit
	c.close(&e)
	if e.Dropped != 10 || e.StdoutBytes != 10 || e.StderrBytes != 10 {
		t.Errorf("%+v", e)
	}
	if got := sent.String(); !strings.HasPrefix(got, "1:0 1:1 1:2 1:3 1:4 ") || !strings.HasSuffix(got, "4:56789 ") {
		t.Errorf("sent %s", got)
	}
	if c.add(wire.Stdout, []byte("late")) {
		t.Error("it takes output after its end")
	}
}

// FuzzGuest sends an agent what a hostile sidecar, or a process of the session
// on its socket, might. Commands are not run: there is no shell.
func FuzzGuest(f *testing.F) {
	var buf bytes.Buffer
	w := wire.NewWriter(&buf)
	_ = w.WriteJSON(wire.TWrite, 1, wire.Write{Path: "a/b", Size: 3})
	_ = w.Write(wire.TData, 1, []byte("abc"))
	_ = w.Write(wire.TEnd, 1)
	_ = w.WriteJSON(wire.TRead, 2, wire.Read{Path: "a/b", Max: 10})
	_ = w.WriteJSON(wire.TExec, 3, wire.Exec{Command: "x", MaxOutput: 10})
	_ = w.Write(wire.TCancel, 3)
	_ = w.Grant(2, 100)
	f.Add(buf.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := New(t.TempDir(), "test")
		if err != nil {
			t.Fatal(err)
		}
		defer a.work.Close()
		a.shell = ""
		ours, theirs := net.Pipe()
		ended := make(chan struct{})
		go func() { a.serve(theirs); close(ended) }()
		go func() { _, _ = io.Copy(io.Discard, ours) }()
		_ = wire.NewWriter(ours).WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: "k"})
		_, _ = ours.Write(b)
		ours.Close()
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			t.Fatal("the agent hung")
		}
	})
}

func TestHello(t *testing.T) {
	a, err := New(t.TempDir(), "test")
	if err != nil {
		t.Fatal(err)
	}
	dial := func(h any) (wire.Frame, net.Conn) {
		ours, theirs := net.Pipe()
		go a.serve(theirs)
		_ = ours.SetDeadline(time.Now().Add(5 * time.Second))
		_ = wire.NewWriter(ours).WriteJSON(wire.THello, 0, h)
		f, _ := wire.NewReader(ours).Read()
		return f, ours
	}
	if f, _ := dial(wire.Hello{Version: 2, Key: "k"}); f.Type != wire.TError {
		t.Errorf("another version was answered with %d", f.Type)
	}
	if f, _ := dial(wire.Hello{Version: 1}); f.Type != wire.TError {
		t.Errorf("no key was answered with %d", f.Type)
	}
	f, first := dial(wire.Hello{Version: 1, Key: "k"})
	if f.Type != wire.THello {
		t.Fatalf("answered with %d", f.Type)
	}
	if f, _ := dial(wire.Hello{Version: 1, Key: "other"}); f.Type != wire.TError {
		t.Errorf("a wrong key was answered with %d", f.Type)
	}
	if f, _ := dial(wire.Hello{Version: 1, Key: "k"}); f.Type != wire.THello {
		t.Errorf("a second connection was answered with %d", f.Type)
	}
	if _, err := wire.NewReader(first).Read(); err == nil {
		t.Error("the first connection lives on beside the second")
	}
}
