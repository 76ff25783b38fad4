// Package host is the sidecar's end of the agent protocol. Everything it reads
// comes from inside a session container and is bounded: a frame too many, too
// large or out of turn ends the connection, never the sidecar.
package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
)

const (
	writeTimeout = 30 * time.Second
	// grace is how long after an exec's own limit the agent may take to kill it
	// and answer.
	grace = 20 * time.Second
	// fileTimeout is for the content of one file, either way.
	fileTimeout = 2 * time.Minute
	// readChunk is what a file that is read is first given, in bytes.
	readChunk = 64 << 10
	// outputChunk is the same for a command's output.
	outputChunk = 4 << 10
)

// ErrLost is wrapped by errors of operations whose connection ended under them.
var ErrLost = errors.New("the connection to the session's agent was lost")

// Conn is a connection to one agent. Safe for concurrent use.
type Conn struct {
	rw       io.ReadWriteCloser
	w        *wire.Writer
	unlinked bool // the agent knows TUnlinked

	mu      sync.Mutex
	streams map[uint32]*stream
	next    uint32
	err     error
	done    chan struct{}
}

type stream struct {
	credit *wire.Credit
	onData func(wire.Frame) error // called on the reader's goroutine; an error ends the connection
	sent   chan struct{}          // closed when the request has been written
	end    chan end
}

type end struct {
	payload []byte
	err     error
}

type deadliner interface{ SetWriteDeadline(time.Time) error }

type deadlineWriter struct {
	io.Writer
	d deadliner
}

func (w deadlineWriter) Write(p []byte) (int, error) {
	_ = w.d.SetWriteDeadline(time.Now().Add(writeTimeout))
	return w.Writer.Write(p)
}

// Dial says hello on rw and returns the connection once the agent has
// answered. It owns rw.
func Dial(ctx context.Context, rw io.ReadWriteCloser, key string, env map[string]string) (*Conn, error) {
	var w io.Writer = rw
	if d, ok := rw.(deadliner); ok {
		w = deadlineWriter{rw, d}
	}
	c := &Conn{rw: rw, w: wire.NewWriter(w), streams: map[uint32]*stream{}, done: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { rw.Close() })
	r := wire.NewReader(rw)
	err := c.w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: key, Env: env})
	var f wire.Frame
	if err == nil {
		f, err = r.Read()
	}
	var h wire.Hello
	switch {
	case err != nil:
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		err = fmt.Errorf("the session's agent did not answer: %w", err)
	case f.Type == wire.TError:
		err = fmt.Errorf("the session's agent refused the connection: %w", parseError(f.Payload))
	case f.Type != wire.THello || json.Unmarshal(f.Payload, &h) != nil || h.Version != wire.Version:
		err = errors.New("what answers in the session is not the session's agent")
	}
	if err != nil || !stop() {
		rw.Close()
		if err == nil {
			err = ctx.Err()
		}
		return nil, err
	}
	c.unlinked = h.Unlinked
	go c.loop(r)
	return c, nil
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Close ends the connection; the agent then kills the commands that it had
// under way.
func (c *Conn) Close() { c.fail(errors.New("closed")) }

// Shutdown tells the agent to kill everything and exit, and waits until the
// connection ends.
func (c *Conn) Shutdown(ctx context.Context) error {
	sent := make(chan error, 1)
	go func() { sent <- c.w.Write(wire.TShutdown, 0) }() // may wait behind what the agent does not read
	select {
	case err := <-sent:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	streams := c.streams
	c.streams = nil
	close(c.done)
	c.mu.Unlock()
	c.rw.Close()
	for _, s := range streams {
		s.credit.Close()
		s.end <- end{err: fmt.Errorf("%w: %w", ErrLost, err)}
	}
}

func (c *Conn) loop(r *wire.Reader) {
	for {
		f, err := r.Read()
		if err == nil {
			err = c.handle(f)
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}

func (c *Conn) handle(f wire.Frame) error {
	c.mu.Lock()
	s := c.streams[f.Stream]
	if s != nil && (f.Type == wire.TDone || f.Type == wire.TError) {
		delete(c.streams, f.Stream)
	}
	c.mu.Unlock()
	switch f.Type {
	case wire.TDone, wire.TError, wire.TData, wire.TOutput, wire.TGrant, wire.TLive:
	default:
		return fmt.Errorf("frame of type %d is not for the sidecar", f.Type)
	}
	if s == nil {
		return nil // the rest of an operation that was given up
	}
	switch f.Type {
	case wire.TDone:
		s.credit.Close()
		s.end <- end{payload: append([]byte(nil), f.Payload...)}
	case wire.TError:
		s.credit.Close()
		s.end <- end{err: parseError(f.Payload)}
	case wire.TGrant:
		n, err := wire.ParseGrant(f.Payload)
		if err != nil {
			return err
		}
		s.credit.Add(n)
	default:
		return s.onData(f)
	}
	return nil
}

func (c *Conn) open(onData func(wire.Frame) error) (uint32, *stream, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, fmt.Errorf("%w: %w", ErrLost, c.err)
	}
	for c.next++; c.next == 0 || c.streams[c.next] != nil; c.next++ {
	}
	s := &stream{credit: wire.NewCredit(), onData: onData, sent: make(chan struct{}), end: make(chan end, 1)}
	c.streams[c.next] = s
	return c.next, s, nil
}

// ask writes a stream's request, and then its content, without waiting: an agent that
// does not read holds up no caller for longer than that one likes.
func (c *Conn) ask(id uint32, s *stream, request func() error, content io.Reader) {
	go func() {
		err := request()
		close(s.sent)
		switch {
		case errors.Is(err, wire.ErrTooLong):
			if c.forget(id) {
				s.end <- end{err: err}
			}
		case err != nil:
			c.fail(err)
		case content != nil:
			c.send(id, s, content)
		}
	}()
}

// cancel tells the agent that nobody wants a stream's answer any more, after its request
// and without waiting.
func (c *Conn) cancel(id uint32, s *stream) {
	go func() {
		select {
		case <-s.sent:
		case <-c.done:
			return
		}
		if err := c.w.Write(wire.TCancel, id); err != nil {
			c.fail(err)
		}
	}()
}

// forget says whether the stream was open until now.
func (c *Conn) forget(id uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, open := c.streams[id]
	delete(c.streams, id)
	return open
}

// wait returns an operation's outcome. When ctx ends first it cancels the
// operation and still waits, up to grace, so that the caller knows that
// nothing of it is left.
func (c *Conn) wait(ctx context.Context, id uint32, s *stream, out any) error {
	var e end
	select {
	case e = <-s.end:
	case <-ctx.Done():
		if cause := context.Cause(ctx); errors.Is(cause, ErrLost) { // it has had its time, and the grace
			c.fail(errors.New("the agent did not keep the time"))
			return cause
		}
		c.cancel(id, s)
		t := time.NewTimer(grace)
		defer t.Stop()
		select {
		case e = <-s.end:
		case <-t.C:
			c.fail(errors.New("the agent did not answer"))
			return fmt.Errorf("%w: it did not answer a cancelled call", ErrLost)
		}
		if errors.Is(e.err, ErrLost) {
			return e.err
		}
		if e.err == nil {
			_ = json.Unmarshal(e.payload, out) // as far as it came
		}
		return context.Cause(ctx)
	}
	if e.err != nil {
		return e.err
	}
	if err := json.Unmarshal(e.payload, out); err != nil {
		err = fmt.Errorf("the agent's answer is not valid: %w", err)
		c.fail(err)
		return err
	}
	return nil
}

// send writes content as data frames within the stream's window.
func (c *Conn) send(id uint32, s *stream, r io.Reader) {
	buf := make([]byte, wire.MaxData)
	for {
		n, err := io.ReadFull(r, buf)
		for b := buf[:n]; len(b) > 0; {
			k := s.credit.Take(len(b))
			if k == 0 || c.w.Write(wire.TData, id, b[:k]) != nil {
				return
			}
			b = b[k:]
		}
		if err != nil {
			_ = c.w.Write(wire.TEnd, id)
			return
		}
	}
}

// Output is what a command wrote, in the order in which it arrived, with a gap
// of what was dropped between head and tail.
type Output struct {
	mu      sync.Mutex
	buf     []byte
	runs    []outputRun
	tail    int      // runs before the gap
	dropped [3]int64 // by Which; known at the end

	written uint64 // that the agent last told of, most of which it keeps until the end
	latest  []byte // the last of that
}

// outputRun is a run of bytes of one stream: twice their number, and 1 for
// stderr. Small, as an agent may change the stream with every byte.
type outputRun uint32

const maxRun = 1<<31 - 1 // bytes

func (r outputRun) n() int       { return int(r >> 1) }
func (r outputRun) stderr() bool { return r&1 == 1 }

// Len returns how many bytes there are, both streams together.
func (o *Output) Len() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.buf)
}

// Live returns the last of the bytes that were written so far, most at most, and
// how many there are, as far as the agent has told.
func (o *Output) Live(most int) ([]byte, uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	b, n := o.buf, uint64(len(o.buf))
	if o.written > n {
		n = o.written
		if gap := n - uint64(len(o.buf)); gap == uint64(len(o.latest)) {
			b = slices.Concat(b[max(0, len(b)-most):], o.latest)
		} else {
			b = o.latest
		}
	}
	return bytes.Clone(b[max(0, len(b)-most):]), n
}

func (o *Output) live(p []byte) error {
	if len(p) < 8 {
		return errors.New("live frame without a number")
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.written, o.latest = binary.BigEndian.Uint64(p), append(o.latest[:0], p[8:]...)
	return nil
}

func (o *Output) add(f wire.Frame, limit int) error {
	if len(f.Payload) < 2 {
		return errors.New("output frame without a channel or without output") // empty ones would count against no limit
	}
	ch, b := wire.Channel(f.Payload[0]), f.Payload[1:]
	if ch < wire.Stdout || ch > wire.StderrTail {
		return fmt.Errorf("output on unknown channel %d", ch)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	isTail := ch >= wire.StdoutTail
	if !isTail && o.tail >= 0 {
		return errors.New("output out of order")
	}
	if len(o.buf)+len(b) > limit {
		return fmt.Errorf("more than the %d bytes of output that were asked for", limit)
	}
	fresh := len(o.runs) == 0
	if isTail && o.tail < 0 {
		o.tail, fresh = len(o.runs), true
	}
	run := outputRun(len(b)) << 1
	if ch == wire.Stderr || ch == wire.StderrTail {
		run |= 1
	}
	if need := len(o.buf) + len(b); need > cap(o.buf) { // never to more than may come, as append does
		o.buf = append(make([]byte, 0, min(max(2*cap(o.buf), need, outputChunk), limit)), o.buf...)
	}
	o.buf = append(o.buf, b...)
	if last := len(o.runs) - 1; !fresh && o.runs[last].stderr() == run.stderr() && o.runs[last].n() <= maxRun-len(b) {
		o.runs[last] += run &^ 1
	} else {
		o.runs = append(o.runs, run)
	}
	return nil
}

// Which selects streams of an Output.
type Which int

// Selections.
const (
	Both Which = iota
	Stdout
	Stderr
)

// Dropped returns how many bytes of the selected output lay between head and tail.
// It is 0 until the command has ended.
func (o *Output) Dropped(w Which) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.dropped[w]
}

// end takes down what was dropped: of each stream what it wrote and is not here.
func (o *Output) end(e wire.Exit) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropped = [3]int64{Both: e.Dropped, Stdout: e.StdoutBytes, Stderr: e.StderrBytes}
	for _, r := range o.runs {
		w := Stdout
		if r.stderr() {
			w = Stderr
		}
		o.dropped[w] -= int64(r.n())
	}
	for w, n := range o.dropped { // an agent may claim anything
		o.dropped[w] = min(max(n, 0), e.Dropped)
	}
}

// Bytes returns the selected output, with gap between head and tail where
// bytes of it were dropped.
func (o *Output) Bytes(w Which, gap string) []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	size := len(gap)
	for _, r := range o.runs {
		if w == Both || (w == Stderr) == r.stderr() {
			size += r.n()
		}
	}
	out := make([]byte, 0, size)
	at, cut := 0, o.tail
	if cut < 0 {
		cut = len(o.runs)
	}
	for i, r := range append(o.runs[:len(o.runs):len(o.runs)], 0) {
		if o.dropped[w] > 0 && i == cut {
			out = append(out, gap...)
		}
		if w == Both || (w == Stderr) == r.stderr() {
			out = append(out, o.buf[at:at+r.n()]...)
		}
		at += r.n()
	}
	return out
}

// Exec runs a command and calls started with its growing output, then waits
// for its end. stdin may be nil. Of a command that was cancelled, output and exit
// are returned beside the cause.
func (c *Conn) Exec(ctx context.Context, m wire.Exec, stdin io.Reader, started func(*Output)) (*Output, wire.Exit, error) {
	out := &Output{tail: -1}
	var got int
	id, s, err := c.open(func(f wire.Frame) error {
		switch f.Type {
		case wire.TLive:
			if !m.Live {
				return errors.New("a live frame that nobody asked for")
			}
			return out.live(f.Payload)
		case wire.TData:
			return errors.New("file content in an exec's answer")
		}
		if err := out.add(f, m.MaxOutput); err != nil {
			return err
		}
		if got += len(f.Payload) - 1; got >= wire.Window/2 {
			n := got
			got = 0
			return c.grant(f.Stream, n)
		}
		return nil
	})
	if err != nil {
		return nil, wire.Exit{}, err
	}
	m.Stdin = stdin != nil
	if started != nil {
		started(out)
	}
	c.ask(id, s, func() error { return c.w.WriteJSON(wire.TExec, id, m) }, stdin)
	if m.Timeout > 0 {
		// The agent keeps the time; this is for an agent that does not.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, m.Timeout+grace, fmt.Errorf("%w: it did not end a command that was out of time", ErrLost))
		defer cancel()
	}
	var exit wire.Exit
	err = c.wait(ctx, id, s, &exit)
	exit = sane(exit)
	out.end(exit)
	return out, exit, err
}

var signalName = regexp.MustCompile(`^SIG[A-Z0-9+]{1,12}$`)

// sane bounds what a hostile agent may claim.
func sane(e wire.Exit) wire.Exit {
	e.Code &= 0xff
	if !signalName.MatchString(e.Signal) {
		e.Signal = ""
	}
	e.Duration = max(e.Duration, 0)
	for _, n := range []*int64{&e.PeakMemory, &e.StdoutBytes, &e.StderrBytes, &e.Dropped} {
		*n = max(*n, 0)
	}
	return e
}

// ReadFile returns up to m.Max bytes of a file and the size of the whole.
func (c *Conn) ReadFile(ctx context.Context, m wire.Read) ([]byte, int64, error) {
	var buf []byte
	var got int
	id, s, err := c.open(func(f wire.Frame) error {
		if f.Type != wire.TData {
			return errors.New("output in a file's answer")
		}
		if int64(len(buf)+len(f.Payload)) > m.Max {
			return fmt.Errorf("more than the %d bytes that were asked for", m.Max)
		}
		if need := len(buf) + len(f.Payload); need > cap(buf) { // doubled: append alone would copy a large file many times
			buf = slices.Grow(buf, int(min(max(int64(cap(buf)), readChunk), m.Max-int64(len(buf)))))
		}
		buf = append(buf, f.Payload...)
		if got += len(f.Payload); got >= wire.Window/2 {
			n := got
			got = 0
			return c.grant(f.Stream, n)
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	c.ask(id, s, func() error { return c.w.WriteJSON(wire.TRead, id, m) }, nil)
	ctx, cancel := inTime(ctx)
	defer cancel()
	var file wire.File
	if err := c.wait(ctx, id, s, &file); err != nil {
		return nil, 0, err
	}
	return buf, max(file.Size, 0), nil
}

// WriteFile replaces a file with content.
func (c *Conn) WriteFile(ctx context.Context, path string, mode uint32, content []byte) error {
	id, s, err := c.open(func(wire.Frame) error { return errors.New("data in a write's answer") })
	if err != nil {
		return err
	}
	m := wire.Write{Path: path, Mode: mode, Size: int64(len(content))}
	c.ask(id, s, func() error { return c.w.WriteJSON(wire.TWrite, id, m) }, bytes.NewReader(content))
	ctx, cancel := inTime(ctx)
	defer cancel()
	var file wire.File
	return c.wait(ctx, id, s, &file)
}

// Unlinked is what the agent sees, in bytes, of files on the file system of /work that
// have no name any more. It gives up an agent that does not answer when ctx ends, and is
// errors.ErrUnsupported where the agent is older than the question.
func (c *Conn) Unlinked(ctx context.Context) (int64, error) {
	if !c.unlinked {
		return 0, fmt.Errorf("the session's agent does not tell of files without a name: %w", errors.ErrUnsupported)
	}
	id, s, err := c.open(func(wire.Frame) error { return errors.New("data in an answer without any") })
	if err != nil {
		return 0, err
	}
	c.ask(id, s, func() error { return c.w.Write(wire.TUnlinked, id) }, nil)
	var file wire.File
	select {
	case e := <-s.end:
		if err = e.err; err == nil {
			err = json.Unmarshal(e.payload, &file)
		}
	case <-ctx.Done():
		c.forget(id)
		c.cancel(id, s)
		err = ctx.Err()
	}
	return min(max(file.Size, 0), maxUnlinked), err
}

// maxUnlinked keeps an agent's claim in a range that can be added to, in bytes.
const maxUnlinked = 1 << 50

// inTime gives up an agent that does not answer about a file.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, fileTimeout, fmt.Errorf("%w: a file took longer than %v", ErrLost, fileTimeout))
}

// grant must not wait for a peer that does not read: the reader calls it.
func (c *Conn) grant(id uint32, n int) error {
	go func() {
		if err := c.w.Grant(id, n); err != nil {
			c.fail(err)
		}
	}()
	return nil
}

func parseError(p []byte) error {
	var e wire.Error
	if json.Unmarshal(p, &e) != nil || e.Code == "" {
		return &wire.Error{Code: wire.CodeFailed, Message: "the agent gave no valid reason"}
	}
	e.Code, e.Message = printable(e.Code, 32), printable(e.Message, 1024)
	return &e
}

func printable(s string, limit int) string {
	s = string(bytes.ToValidUTF8([]byte(s[:min(len(s), limit)]), nil))
	return string(bytes.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, []byte(s)))
}
