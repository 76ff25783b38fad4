package guest

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"golang.org/x/sys/unix"
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
	if n, last := c.live(); n != 20 || string(last) != "56789" {
		t.Errorf("so far %q of %d", last, n)
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
// on its socket, might: bytes of no meaning. Commands are not run: there is no
// shell.
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
		attack(t, func(_ *wire.Writer, raw io.Writer) { _, _ = raw.Write(b) })
	})
}

// FuzzGuestFrames sends well-formed frames in any order: each byte chooses one.
func FuzzGuestFrames(f *testing.F) {
	f.Add([]byte("\x00\x10\x20\x30\x40\x50\x60\x70"))
	f.Add([]byte{0x02, 0x06, 0x07, 0x01, 0x08})             // a whole write, then its read and a grant
	f.Add([]byte{0x03, 0x06, 0x07, 0x13, 0x16, 0x17})       // two of another's file
	f.Add([]byte{0x02, 0x12, 0x06, 0x16, 0x04, 0x14, 0x00}) // two writes, cancelled
	f.Fuzz(func(t *testing.T, choices []byte) {
		attack(t, func(w *wire.Writer, raw io.Writer) {
			for i, c := range choices[:min(len(choices), 200)] {
				stream := uint32(c >> 4)
				var err error
				switch c & 15 {
				case 0:
					err = w.WriteJSON(wire.TExec, stream, wire.Exec{Command: "x", Stdin: i%2 == 0, Timeout: time.Duration(i), MaxOutput: i - 100})
				case 1:
					err = w.WriteJSON(wire.TRead, stream, wire.Read{Path: "f", Offset: int64(i - 50), Max: int64(i)})
				case 2:
					err = w.WriteJSON(wire.TWrite, stream, wire.Write{Path: "f", Size: 8, Mode: uint32(i)})
				case 3:
					err = w.WriteJSON(wire.TWrite, stream, wire.Write{Path: "../f", Size: int64(8 - 9*(i%2))})
				case 4:
					err = w.Write(wire.TCancel, stream)
				case 5:
					err = w.Write(wire.TUnlinked, stream)
				case 6:
					err = w.Write(wire.TData, stream, bytes.Repeat([]byte{c}, 8))
				case 7:
					err = w.Write(wire.TEnd, stream)
				case 8:
					err = w.Grant(stream, i*1000)
				case 9:
					err = w.Write(wire.TData, stream, make([]byte, wire.MaxData))
				case 10:
					err = w.WriteJSON(wire.TRead, stream, []int{1})
				case 11:
					err = w.Write(wire.TGrant, stream, []byte{1})
				case 12:
					err = w.WriteJSON(wire.THello, stream, wire.Hello{Version: wire.Version, Key: "other"})
				case 13:
					err = w.WriteJSON(wire.TDone, stream, wire.Exit{})
				case 14:
					err = w.Write(wire.TOutput, stream, []byte{1, c})
				case 15:
					err = w.Write(wire.TShutdown, 0)
				}
				if err != nil {
					return // it has hung up on us
				}
			}
		})
	})
}

// attack greets an agent, says what it likes and hangs up. However it went, the
// agent is done with the connection then, no stream is left, and it serves the next one.
func attack(t *testing.T, say func(w *wire.Writer, raw io.Writer)) {
	dir := t.TempDir()
	a, err := New(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer a.work.Close()
	a.shell = ""
	connect := func(say func(*wire.Writer, net.Conn)) {
		ours, theirs := net.Pipe()
		ended := make(chan struct{})
		go func() { a.Serve(theirs); close(ended) }()
		w := wire.NewWriter(ours)
		_ = w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: "k"})
		say(w, ours)
		ours.Close()
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			t.Fatal("the agent hung")
		}
	}
	connect(func(w *wire.Writer, c net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, c) }()
		say(w, c)
	})
	connect(func(w *wire.Writer, c net.Conn) {
		r := wire.NewReader(c)
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		if f, err := r.Read(); err != nil || f.Type != wire.THello {
			t.Fatalf("the next connection is answered %d, %v", f.Type, err)
		}
		go func() { _ = w.WriteJSON(wire.TRead, 1, wire.Read{Path: "none", Max: 1}) }()
		if f, err := r.Read(); err != nil || f.Type != wire.TError || f.Stream != 1 || !bytes.Contains(f.Payload, []byte(wire.CodeNotFound)) {
			t.Fatalf("the next connection's read is answered %d %q, %v", f.Type, f.Payload, err)
		}
	})
	if _, err := os.Stat(filepath.Join(filepath.Dir(dir), "f")); err == nil {
		t.Fatal("it wrote outside of its directory")
	}
}

// Each way out of the session's directory is refused, and nothing is read or made
// at its end, though the agent may do either there.
func TestOutside(t *testing.T) {
	base := t.TempDir()
	dir, out := filepath.Join(base, "work"), filepath.Join(base, "out")
	for _, d := range []string{dir, out, filepath.Join(dir, "d")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(out, "f"), []byte("secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"abs": out, "rel": "../out", "file": out + "/f", "new": out + "/new", "up": ".."} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	a, err := New(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	defer ours.Close()
	go a.Serve(theirs)
	_ = ours.SetDeadline(time.Now().Add(30 * time.Second))
	w, r := wire.NewWriter(ours), wire.NewReader(ours)
	// end is the last frame of what was asked for on the stream.
	end := func(stream uint32) wire.Type {
		for {
			f, err := r.Read()
			if err != nil {
				t.Fatal(err)
			}
			if f.Stream == stream && (f.Type == wire.TDone || f.Type == wire.TError) {
				return f.Type
			}
		}
	}
	_ = w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: "k"})
	stream := uint32(0)
	for path, want := range map[string]wire.Type{
		"d/f": wire.TDone, "../out/f": wire.TError, "d/../../out/f": wire.TError, out + "/f": wire.TError, "abs/f": wire.TError, "rel/f": wire.TError, "file": wire.TError, "up/out/f": wire.TError,
		"../out/new": wire.TError, "abs/new": wire.TError, "abs/d/new": wire.TError, "rel/new": wire.TError, "new": wire.TError,
	} {
		for _, what := range []string{"write", "read"} {
			stream++
			go func(stream uint32) {
				if what == "read" {
					_ = w.WriteJSON(wire.TRead, stream, wire.Read{Path: path, Max: 10})
					return
				}
				_ = w.WriteJSON(wire.TWrite, stream, wire.Write{Path: path, Size: 1})
				_ = w.Write(wire.TData, stream, []byte("x"))
				_ = w.Write(wire.TEnd, stream)
			}(stream)
			if got := end(stream); got != want {
				t.Errorf("the %s of %s is answered with a frame of type %d", what, path, got)
			}
		}
	}
	left, err := os.ReadDir(out)
	if b, _ := os.ReadFile(filepath.Join(out, "f")); err != nil || len(left) != 1 || string(b) != "secret" {
		t.Errorf("outside there are now %v, and %q", left, b)
	}
}

// One operation too many is told of which kind there are too many, and how many there may be.
// Nothing is run: an agent that ends commands looks at all processes that it sees.
func TestTooMany(t *testing.T) {
	for _, tc := range []struct {
		what     wire.Type
		ops, run int
		scans    int // beside the operations
		want     string
	}{
		{wire.TExec, maxExecs, maxExecs, 0, "already runs 16 commands, as many as it may at once"},
		{wire.TExec, wire.MaxStreams, 0, 0, "already has 64 commands and file operations under way, as many as it may"},
		{wire.TRead, wire.MaxStreams, maxExecs, 1, "already has 64 commands and file operations under way, as many as it may"},
		{wire.TRead, maxExecs, maxExecs, 0, ""},
		{wire.TExec, maxExecs, maxExecs - 1, 0, ""},
		{wire.TRead, wire.MaxStreams - 1, 0, 1, ""},
		{wire.TUnlinked, wire.MaxStreams, maxExecs, 0, ""},
		{wire.TUnlinked, 0, 0, 1, "already looks for files without a name"},
	} {
		var buf bytes.Buffer
		c := &conn{w: wire.NewWriter(&buf), a: &Agent{dir: t.TempDir()}, ops: map[uint32]*op{}, kinds: map[wire.Type]int{wire.TExec: tc.run, wire.TUnlinked: tc.scans}}
		for i := range tc.ops + tc.scans {
			c.ops[uint32(100+i)] = &op{}
		}
		ran := false
		err := start(c, wire.Frame{Type: tc.what, Stream: 1, Payload: []byte("{}")}, &struct{}{}, func(*op) { ran = true })
		c.wg.Wait()
		if err != nil || ran != (tc.want == "") || !strings.Contains(buf.String(), tc.want) {
			t.Errorf("%d beside %d operations, %d of them commands: run %v, %v, %q", tc.what, tc.ops, tc.run, ran, err, buf.String())
		}
	}
}

func TestHello(t *testing.T) {
	a, err := New(t.TempDir(), "test")
	if err != nil {
		t.Fatal(err)
	}
	dial := func(h any) (wire.Frame, net.Conn) {
		ours, theirs := net.Pipe()
		go a.Serve(theirs)
		_ = ours.SetDeadline(time.Now().Add(30 * time.Second))
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
	if f.Type != wire.THello || !bytes.Contains(f.Payload, []byte(`"unlinked":true`)) {
		t.Fatalf("answered with %d, %s", f.Type, f.Payload)
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

// At the end what is under way is answered, and nothing new begun; then the bridge is told that
// nothing follows, and is waited for.
func TestSettle(t *testing.T) {
	a, err := New(t.TempDir(), "test")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	go a.Serve(theirs)
	_ = ours.SetDeadline(time.Now().Add(time.Minute))
	w, r := wire.NewWriter(ours), wire.NewReader(ours)
	next := func(want wire.Type, stream uint32) wire.Frame {
		t.Helper()
		for {
			f, err := r.Read()
			if err != nil {
				t.Fatal(err)
			}
			if f.Type == want && f.Stream == stream {
				return f
			}
		}
	}
	_ = w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: "k"})
	next(wire.THello, 0)
	_ = w.WriteJSON(wire.TWrite, 1, wire.Write{Path: "f", Size: 2})
	_ = w.Write(wire.TData, 1, []byte("x"))
	next(wire.TGrant, 1)
	settled := make(chan struct{})
	a.settling.Store(true)
	go func() { a.settle(time.Now().Add(time.Minute)); close(settled) }()
	_ = w.WriteJSON(wire.TRead, 2, wire.Read{Path: "f", Max: 1})
	if f := next(wire.TError, 2); !bytes.Contains(f.Payload, []byte("is being stopped")) {
		t.Errorf("a new one is answered %s", f.Payload)
	}
	_ = w.Write(wire.TData, 1, []byte("y"))
	_ = w.Write(wire.TEnd, 1)
	next(wire.TDone, 1)
	if f, err := r.Read(); err != io.EOF {
		t.Errorf("after the last there is %+v, %v", f, err)
	}
	_ = w.WriteJSON(wire.TRead, 3, wire.Read{Path: "f", Max: 1}) // which can't be answered any more
	time.Sleep(50 * time.Millisecond)                            // nothing tells when it was read
	select {
	case <-settled:
		t.Error("the bridge is not waited for")
	default:
	}
	ours.Close()
	select {
	case <-settled:
	case <-time.After(30 * time.Second):
		t.Error("it waits for a bridge that is gone")
	}
	// One that nobody has greeted has nobody to tell.
	(&Agent{}).settle(time.Now())
}

// The bridge runs beside the session's commands, under their uid.
func TestConnectIsHidden(t *testing.T) {
	t.Cleanup(func() { _ = unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) })
	_ = Connect(strings.NewReader(""), io.Discard)
	if dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); err != nil || dumpable != 0 {
		t.Errorf("a process of the same uid may open its stdio: dumpable is %d, %v", dumpable, err)
	}
}
