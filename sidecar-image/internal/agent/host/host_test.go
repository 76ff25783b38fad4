package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
)

// hostile answers the hello as an agent does and then says what it likes.
func hostile(t testing.TB, say func(w *wire.Writer, r *wire.Reader, raw net.Conn)) *Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { theirs.Close() })
	go func() {
		r, w := wire.NewReader(theirs), wire.NewWriter(theirs)
		if _, err := r.Read(); err != nil {
			return
		}
		_ = w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Unlinked: true})
		say(w, r, theirs)
		theirs.Close()
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := Dial(ctx, ours, "key", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func output(ch wire.Channel, s string) []byte { return append([]byte{byte(ch)}, s...) }

// Whatever the agent says, the call ends with an error that says so.
func TestHostileAgent(t *testing.T) {
	for name, say := range map[string]func(w *wire.Writer, id uint32, raw net.Conn){
		"nothing more": func(*wire.Writer, uint32, net.Conn) {},
		"no frames":    func(_ *wire.Writer, _ uint32, raw net.Conn) { _, _ = io.WriteString(raw, "HTTP/1.1 200 OK\r\n\r\n") },
		"a gigabyte frame": func(_ *wire.Writer, _ uint32, raw net.Conn) {
			_, _ = raw.Write(binary.BigEndian.AppendUint32(nil, 1<<30))
			_, _ = raw.Write(make([]byte, 5))
		},
		"more than was asked": func(w *wire.Writer, id uint32, _ net.Conn) {
			_ = w.Write(wire.TOutput, id, output(wire.Stdout, strings.Repeat("x", 101)))
		},
		"an unknown channel": func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.Write(wire.TOutput, id, output(9, "x")) },
		"empty alternating frames": func(w *wire.Writer, id uint32, _ net.Conn) {
			for ch := wire.Stdout; w.Write(wire.TOutput, id, output(ch, "")) == nil; ch ^= wire.Stdout ^ wire.Stderr {
			}
		},
		"no channel": func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.Write(wire.TOutput, id, nil) },
		"head after tail": func(w *wire.Writer, id uint32, _ net.Conn) {
			_ = w.Write(wire.TOutput, id, output(wire.StdoutTail, "x"))
			_ = w.Write(wire.TOutput, id, output(wire.Stdout, "x"))
		},
		"a live frame":          func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.Write(wire.TLive, id, make([]byte, 9)) },
		"file data":             func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.Write(wire.TData, id, []byte("x")) },
		"an outcome of garbage": func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.Write(wire.TDone, id, []byte("[1]")) },
		"an endless grant": func(w *wire.Writer, id uint32, _ net.Conn) {
			_ = w.Write(wire.TGrant, id, []byte{0xff, 0xff, 0xff, 0xff})
		},
		"a request":           func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.WriteJSON(wire.TExec, id, wire.Exec{Command: "id"}) },
		"a second hello":      func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.WriteJSON(wire.THello, 0, wire.Hello{Version: 1}) },
		"an error of garbage": func(w *wire.Writer, id uint32, _ net.Conn) { _ = w.Write(wire.TError, id, []byte("\x00\xff")) },
	} {
		t.Run(name, func(t *testing.T) {
			c := hostile(t, func(w *wire.Writer, r *wire.Reader, raw net.Conn) {
				f, err := r.Read()
				if err == nil {
					say(w, f.Stream, raw)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			if _, _, err := c.Exec(ctx, wire.Exec{Command: "true", MaxOutput: 100}, nil, nil); err == nil || ctx.Err() != nil {
				t.Errorf("the call ended with %v", err)
			}
		})
	}
}

func TestClaimsAreBounded(t *testing.T) {
	c := hostile(t, func(w *wire.Writer, r *wire.Reader, _ net.Conn) {
		f, _ := r.Read()
		_ = w.WriteJSON(wire.TDone, f.Stream+1, wire.Exit{Code: 1}) // of no stream
		_ = w.WriteJSON(wire.TDone, f.Stream, wire.Exit{Code: 1 << 20, Signal: "SIG\n[exit: 0]", PeakMemory: -1, Dropped: -5})
		_, _ = r.Read()
	})
	_, exit, err := c.Exec(t.Context(), wire.Exec{MaxOutput: 100}, nil, nil)
	if err != nil || exit.Code != 0 || exit.Signal != "" || exit.PeakMemory != 0 || exit.Dropped != 0 {
		t.Errorf("%+v, %v", exit, err)
	}
}

// What an agent claims of files without a name can be added to, and one that claims
// nothing is waited for no longer than its caller likes.
func TestUnlinkedClaims(t *testing.T) {
	for claim, want := range map[int64]int64{-1: 0, 7: 7, math.MaxInt64: maxUnlinked} {
		c := hostile(t, func(w *wire.Writer, r *wire.Reader, _ net.Conn) {
			f, _ := r.Read()
			_ = w.WriteJSON(wire.TDone, f.Stream, wire.File{Size: claim})
			_, _ = r.Read()
		})
		if n, err := c.Unlinked(t.Context()); err != nil || n != want {
			t.Errorf("%d is taken for %d, %v", claim, n, err)
		}
	}
	seen := make(chan wire.Frame, 10)
	c := hostile(t, func(_ *wire.Writer, r *wire.Reader, _ net.Conn) {
		for f, err := r.Read(); err == nil; f, err = r.Read() {
			seen <- f
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.Unlinked(ctx); !errors.Is(err, context.DeadlineExceeded) || len(c.streams) > 0 {
		t.Errorf("a mute one: %v, and %d streams are left", err, len(c.streams))
	}
	if asked, then := <-seen, <-seen; asked.Type != wire.TUnlinked || then.Type != wire.TCancel || then.Stream != asked.Stream {
		t.Errorf("it was sent %+v and %+v", asked, then)
	}
}

// An agent of before the question ends the connection at it, so it is not asked.
func TestUnlinkedOfAnOlderAgent(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	go func() {
		r, w := wire.NewReader(theirs), wire.NewWriter(theirs)
		_, _ = r.Read()
		_ = w.Write(wire.THello, 0, []byte(`{"version":1,"agent":"older"}`))
		f, err := r.Read()
		if err == nil && f.Type == wire.TExec {
			_ = w.WriteJSON(wire.TDone, f.Stream, wire.Exit{Code: 3})
			_, _ = r.Read()
		}
		theirs.Close()
	}()
	c, err := Dial(t.Context(), ours, "key", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Unlinked(t.Context()); n != 0 || !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%d, %v", n, err)
	}
	if _, exit, err := c.Exec(t.Context(), wire.Exec{MaxOutput: 1}, nil, nil); err != nil || exit.Code != 3 {
		t.Errorf("a command after that: %+v, %v", exit, err)
	}
}

// An agent that goes mute, and one that hears nothing more, as when its process is
// stopped: whoever waits for it gets an answer all the same, and in the time that is his.
func TestMuteAgent(t *testing.T) {
	read := func(ctx context.Context, c *Conn) error {
		_, _, err := c.ReadFile(ctx, wire.Read{Path: "f", Max: 1 << 20})
		return err
	}
	write := func(size int) func(context.Context, *Conn) error {
		return func(ctx context.Context, c *Conn) error { return c.WriteFile(ctx, "f", 0, make([]byte, size)) }
	}
	run := func(ctx context.Context, c *Conn) error {
		_, _, err := c.Exec(ctx, wire.Exec{Command: "true", MaxOutput: 1}, nil, nil)
		return err
	}
	const soon = 2 * time.Second
	// hurried is op for a caller who has no more time than soon.
	hurried := func(op func(context.Context, *Conn) error) func(context.Context, *Conn) error {
		return func(ctx context.Context, c *Conn) error {
			ctx, cancel := context.WithTimeout(ctx, soon)
			defer cancel()
			return op(ctx, c)
		}
	}
	for name, tc := range map[string]struct {
		op   func(context.Context, *Conn) error
		want error
		most time.Duration
	}{
		"read":              {read, ErrLost, fileTimeout + grace},
		"write":             {write(1), ErrLost, fileTimeout + grace},
		"large write":       {write(1 << 20), ErrLost, fileTimeout + grace},
		"cancelled command": {hurried(run), ErrLost, soon + grace},
		"cancelled read":    {hurried(read), ErrLost, soon + grace},
		"cancelled write":   {hurried(write(1 << 20)), ErrLost, soon + grace},
		"shutdown":          {hurried(func(ctx context.Context, c *Conn) error { return c.Shutdown(ctx) }), context.DeadlineExceeded, soon},
		"shutdown behind writes": {hurried(func(ctx context.Context, c *Conn) error {
			for range 3 {
				go func() { _ = write(1<<20)(context.WithoutCancel(ctx), c) }()
			}
			synctest.Wait()
			return c.Shutdown(ctx)
		}), context.DeadlineExceeded, soon},
		"question": {hurried(func(ctx context.Context, c *Conn) error {
			_, err := c.Unlinked(ctx)
			return err
		}), context.DeadlineExceeded, soon},
	} {
		for _, frames := range []int{0, 1, 1000} { // that it still hears
			t.Run(fmt.Sprintf("%s, %d frames", name, frames), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					gone := make(chan struct{})
					c := hostile(t, func(_ *wire.Writer, r *wire.Reader, _ net.Conn) {
						for range frames {
							if _, err := r.Read(); err != nil {
								break
							}
						}
						<-gone
					})
					began := time.Now()
					if err := tc.op(t.Context(), c); !errors.Is(err, tc.want) {
						t.Errorf("it ended with %v", err)
					}
					if took := time.Since(began); took > tc.most {
						t.Errorf("it took %v", took)
					}
					if tc.want != ErrLost {
						c.Close() // as who shuts down does
					}
					<-c.Done()
					close(gone)
				})
			})
		}
	}
}

// An agent that reads nothing and answers nothing must not hold a cancelled
// call for longer than the connection's own limits.
func TestCancelReachesTheAgent(t *testing.T) {
	seen := make(chan wire.Type, 2)
	c := hostile(t, func(w *wire.Writer, r *wire.Reader, _ net.Conn) {
		for {
			f, err := r.Read()
			if err != nil {
				return
			}
			seen <- f.Type
			if f.Type == wire.TCancel {
				_ = w.WriteJSON(wire.TDone, f.Stream, wire.Exit{Code: 137, Cancelled: true})
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-seen; cancel() }()
	if _, _, err := c.Exec(ctx, wire.Exec{MaxOutput: 1}, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled call ended with %v", err)
	}
}

func TestOutput(t *testing.T) {
	frames := [][]byte{output(wire.Stdout, "a"), output(wire.Stderr, "B"), output(wire.Stdout, "c"), output(wire.StdoutTail, "y"), output(wire.StderrTail, "Z")}
	for name, tc := range map[string]struct {
		frames               [][]byte
		exit                 wire.Exit
		both, stdout, stderr string
		dropped              [3]int64
	}{
		"uncut":                 {frames, wire.Exit{StdoutBytes: 3, StderrBytes: 2}, "aBcyZ", "acy", "BZ", [3]int64{}},
		"both streams cut":      {frames, wire.Exit{StdoutBytes: 6, StderrBytes: 6, Dropped: 7}, "aBc|yZ", "ac|y", "B|Z", [3]int64{7, 3, 4}},
		"stdout alone is cut":   {frames, wire.Exit{StdoutBytes: 10, StderrBytes: 2, Dropped: 7}, "aBc|yZ", "ac|y", "BZ", [3]int64{7, 7, 0}},
		"stderr alone is cut":   {frames, wire.Exit{StdoutBytes: 3, StderrBytes: 9, Dropped: 7}, "aBc|yZ", "acy", "B|Z", [3]int64{7, 0, 7}},
		"without a tail":        {frames[:1], wire.Exit{StdoutBytes: 4, Dropped: 3}, "a|", "a|", "", [3]int64{3, 3, 0}},
		"all of one is cut":     {frames[:1], wire.Exit{StdoutBytes: 1, StderrBytes: 3, Dropped: 3}, "a|", "a", "|", [3]int64{3, 0, 3}},
		"a claim without sense": {frames, wire.Exit{StdoutBytes: 1 << 60, Dropped: 7}, "aBc|yZ", "ac|y", "BZ", [3]int64{7, 7, 0}},
	} {
		o := &Output{tail: -1}
		for _, f := range tc.frames {
			if err := o.add(wire.Frame{Payload: f}, 100); err != nil {
				t.Fatal(err)
			}
		}
		o.end(tc.exit)
		for w, want := range map[Which]string{Both: tc.both, Stdout: tc.stdout, Stderr: tc.stderr} {
			if got := string(o.Bytes(w, "|")); got != want || o.Dropped(w) != tc.dropped[w] {
				t.Errorf("%s, %d: %q without %d bytes, want %q without %d", name, w, got, o.Dropped(w), want, tc.dropped[w])
			}
		}
	}
}

// What a call tells while it runs: the end of all that was written, as far as it is known.
func TestLive(t *testing.T) {
	live := func(n uint64, last string) []byte { return append(binary.BigEndian.AppendUint64(nil, n), last...) }
	for _, tc := range []struct {
		head string
		live [][]byte
		want string
		n    uint64
	}{
		{"", nil, "", 0},
		{"head", nil, "head", 4},
		{"head and more", nil, "and more", 13},
		{"head", [][]byte{live(7, "abc")}, "headabc", 7},
		{"head", [][]byte{live(7, "abc"), live(11, "abcdefg")}, "eadabcdefg"[2:], 11},
		{"head", [][]byte{live(7, "abc"), live(99, "xyz")}, "xyz", 99},
		{"", [][]byte{live(5, "y")}, "y", 5},
		{"head", [][]byte{live(1<<64-1, "x")}, "x", 1<<64 - 1},
		{"head", [][]byte{live(0, "x")}, "head", 4},
	} {
		o := &Output{tail: -1}
		if tc.head != "" {
			if err := o.add(wire.Frame{Payload: output(wire.Stdout, tc.head)}, 100); err != nil {
				t.Fatal(err)
			}
		}
		for _, p := range tc.live {
			if err := o.live(p); err != nil {
				t.Fatal(err)
			}
		}
		if got, n := o.Live(8); string(got) != tc.want || n != tc.n {
			t.Errorf("%q and %q: %q of %d, want %q of %d", tc.head, tc.live, got, n, tc.want, tc.n)
		}
	}
	if err := new(Output).live([]byte("1234567")); err == nil {
		t.Error("a frame without a whole number is taken")
	}
}

// The stream may change with every byte: what is kept of that is bounded by the
// output.
func TestOutputOfManyRuns(t *testing.T) {
	const limit = 1 << 20
	o := &Output{tail: -1}
	ch := wire.Stdout
	for range limit {
		if err := o.add(wire.Frame{Payload: output(ch, "x")}, limit); err != nil {
			t.Fatal(err)
		}
		ch ^= wire.Stdout ^ wire.Stderr
	}
	if err := o.add(wire.Frame{Payload: output(ch, "x")}, limit); err == nil {
		t.Error("more than the limit is taken")
	}
	if size := cap(o.runs) * int(unsafe.Sizeof(o.runs[0])); size > 6*limit {
		t.Errorf("%d bytes of output take %d more", limit, size)
	}
	if b := o.Bytes(Stderr, ""); len(b) != limit/2 || cap(b) > limit/2 || o.Len() != limit || cap(o.buf) > limit {
		t.Errorf("stderr has %d bytes in %d, all %d in %d", len(b), cap(b), o.Len(), cap(o.buf))
	}
}

func FuzzHost(f *testing.F) {
	var buf bytes.Buffer
	w := wire.NewWriter(&buf)
	_ = w.Write(wire.TOutput, 1, output(wire.Stdout, "hello"))
	_ = w.WriteJSON(wire.TDone, 1, wire.Exit{Code: 1})
	f.Add(buf.Bytes())
	f.Add([]byte{0, 0, 0, 1, byte(wire.TGrant), 0, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := hostile(t, func(_ *wire.Writer, r *wire.Reader, raw net.Conn) {
			_, _ = r.Read()
			go func() { _, _ = io.Copy(io.Discard, raw) }()
			_, _ = raw.Write(b)
		})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		out, _, err := c.Exec(ctx, wire.Exec{MaxOutput: 1000}, nil, nil)
		if ctx.Err() != nil {
			t.Fatal("the call hung")
		}
		if err == nil && len(out.Bytes(Both, "")) > 1000 {
			t.Fatal("more output than was asked for")
		}
	})
}
