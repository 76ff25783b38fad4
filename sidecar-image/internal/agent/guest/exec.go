package guest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"golang.org/x/sys/unix"
)

const (
	// Together less than what the sidecar waits (host.grace), which then gives up all
	// that the session has under way.
	killLimit = 10 * time.Second
	reapLimit = 2 * time.Second
	// After the command itself has exited its output is complete when the pipes
	// close. A background process may hold them open: then it is complete when
	// they have been quiet this long.
	quiet    = 50 * time.Millisecond
	quietMax = time.Second
)

func (c *conn) exec(stream uint32, o *op, m wire.Exec) {
	exit, err := c.run(stream, o, m)
	if err != nil {
		c.finish(stream, o, wire.TError, err)
		return
	}
	c.finish(stream, o, wire.TDone, exit)
}

// command is a bash that runs.
type command struct {
	pid   int
	id    uint64
	done  <-chan waited
	out   *collector
	pipes chan struct{} // one for each that has been read to its end
	began time.Time
	oom   int64 // kills before it
}

func (c *conn) run(stream uint32, o *op, m wire.Exec) (wire.Exit, *wire.Error) {
	cmd, err := c.start(stream, o, m)
	if err != nil {
		return wire.Exit{}, err
	}
	over := make(chan struct{})
	var live sync.WaitGroup
	if m.Live {
		live.Go(func() { c.live(stream, cmd.out, over) })
	}
	exit := c.await(cmd, o, m.Timeout)
	close(over)
	live.Wait() // nothing may follow the outcome: the stream's number is free then
	cmd.out.close(&exit)
	return exit, nil
}

func (c *conn) start(stream uint32, o *op, m wire.Exec) (*command, *wire.Error) {
	bad := func(code, format string, args ...any) (*command, *wire.Error) {
		return nil, &wire.Error{Code: code, Message: fmt.Sprintf(format, args...)}
	}
	if len(m.Command) > wire.MaxArgument {
		return bad(wire.CodeBad, "command has %d bytes, Linux allows %d in one argument; write it to a file and run that", len(m.Command), wire.MaxArgument)
	}
	if strings.IndexByte(m.Command, 0) >= 0 {
		return bad(wire.CodeBad, "command holds a NUL byte")
	}
	in, inW, err := stdin(m.Stdin)
	if err != nil {
		return bad(wire.CodeFailed, "opening the command's stdin: %v", err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		closeAll(in, inW)
		return bad(wire.CodeFailed, "making a pipe: %v", err)
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		closeAll(in, inW, outR, outW)
		return bad(wire.CodeFailed, "making a pipe: %v", err)
	}
	cmd := &command{oom: oomKills(), began: time.Now(), pipes: make(chan struct{}, 2)}
	cmd.pid, cmd.id, cmd.done, err = c.a.procs.start(c.a.shell, []string{"bash", "-c", m.Command}, &syscall.ProcAttr{
		Dir: c.a.dir, Env: c.environ(m.Env),
		// Fd also makes our copy of the child's ends blocking, as commands expect.
		Files: []uintptr{in.Fd(), outW.Fd(), errW.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	closeAll(in, outW, errW)
	if err != nil {
		closeAll(inW, outR, errR)
		if err == syscall.EAGAIN {
			return bad(wire.CodeBusy, "the session is at its limit of processes, so bash does not start (%v): wait until some have ended; if none do, close it with sandbox_close and open another", err)
		}
		if st, serr := os.Stat(c.a.dir); serr == nil {
			return bad(wire.CodeFailed, "starting bash in %s (%v): %v", c.a.dir, st.Mode(), err)
		}
		return bad(wire.CodeFailed, "starting bash in %s: %v", c.a.dir, err)
	}
	cmd.out = newCollector(m.MaxOutput, func(ch wire.Channel, b []byte) bool { return c.output(stream, o, ch, b) })
	stdout := newSource(outR, wire.Stdout, nil)
	for _, src := range []*source{stdout, newSource(errR, wire.Stderr, stdout)} {
		go func() { c.a.drain(src, cmd.out); cmd.pipes <- struct{}{} }()
	}
	if m.Stdin {
		go c.feed(stream, o, inW)
	}
	return cmd, nil
}

// await waits until a command and its output have ended, or ends it.
func (c *conn) await(cmd *command, o *op, limit time.Duration) (exit wire.Exit) {
	var timeout <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		timeout = t.C
	}
	var w waited
	select {
	case w = <-cmd.done:
	case <-timeout:
		exit.TimedOut = true
	case <-o.ctx.Done():
		exit.Cancelled = true
	}
	if exit.TimedOut || exit.Cancelled {
		c.a.procs.kill(cmd.id, cmd.pid, killLimit)
		select {
		case w = <-cmd.done:
		case <-time.After(reapLimit): // stuck in the kernel; it is dead to us
			w.status = syscall.WaitStatus(syscall.SIGKILL)
		}
	}
	for open, limit := 2, time.After(quietMax); open > 0; {
		select {
		case <-cmd.pipes:
			open--
			continue
		case <-cmd.out.active:
			continue
		case <-time.After(quiet):
		case <-limit:
		}
		break
	}
	exit.Duration = time.Since(cmd.began)
	exit.PeakMemory = max(w.maxRSS, c.a.procs.peak(cmd.id))
	exit.Code = w.status.ExitStatus()
	if w.status.Signaled() {
		exit.Code = 128 + int(w.status.Signal())
		exit.Signal = unix.SignalName(w.status.Signal())
	}
	exit.OOM = oomKills() > cmd.oom
	return exit
}

// live tells what has been written of which nothing else is sent before the end.
func (c *conn) live(stream uint32, out *collector, over <-chan struct{}) {
	t := time.NewTicker(wire.LiveEvery)
	defer t.Stop()
	for told := int64(0); ; {
		select {
		case <-over:
			return
		case <-t.C:
		}
		n, last := out.live()
		if len(last) == 0 || n == told {
			continue
		}
		told = n
		if c.w.Write(wire.TLive, stream, binary.BigEndian.AppendUint64(nil, uint64(n)), last) != nil {
			return
		}
	}
}

func closeAll(fs ...*os.File) {
	for _, f := range fs {
		if f != nil {
			_ = f.Close()
		}
	}
}

// stdin returns what the command reads: a pipe, or the null device.
func stdin(pipe bool) (r, w *os.File, err error) {
	if pipe {
		return os.Pipe()
	}
	r, err = os.Open(os.DevNull)
	return r, nil, err
}

// environ is the container's environment, overlaid with the session's and the
// exec's own.
func (c *conn) environ(own map[string]string) []string {
	env := os.Environ()
	c.a.mu.Lock()
	session := c.a.env
	c.a.mu.Unlock()
	for _, layer := range []map[string]string{session, own} {
		for k, v := range layer {
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
				continue
			}
			env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, k+"=") })
			env = append(env, k+"="+v)
		}
	}
	return env
}

// feed copies the stream's data to the command's stdin until either ends.
func (c *conn) feed(stream uint32, o *op, w *os.File) {
	defer w.Close()
	stop := make(chan struct{})
	defer close(stop)
	go func() { // wakes a write that a command, which does not read, holds up
		select {
		case <-o.ctx.Done():
			_ = w.SetDeadline(time.Now())
		case <-stop:
		}
	}()
	broken := false
	for {
		select {
		case b, ok := <-o.in:
			if !ok {
				return
			}
			if !broken {
				if _, err := w.Write(b); err != nil {
					broken = true // as a pipe into `head`: the rest is nobody's
				}
			}
			c.consumed(stream, o, b)
		case <-o.ctx.Done():
			return
		}
	}
}

// output sends one piece, waiting for the stream's window.
func (c *conn) output(stream uint32, o *op, ch wire.Channel, b []byte) bool {
	for len(b) > 0 {
		n := o.credit.Take(min(len(b), wire.MaxData))
		if n == 0 {
			return false
		}
		if c.w.Write(wire.TOutput, stream, []byte{byte(ch)}, b[:n]) != nil {
			return false
		}
		b = b[n:]
	}
	return true
}

// source is the read end of one of a command's output pipes. Two pipes carry no
// common order, so before a piece of stderr is taken, what stdout already holds
// is: `echo a; echo b >&2` comes out as it was written.
type source struct {
	f      *os.File
	raw    syscall.RawConn
	ch     wire.Channel
	before *source
	spare  []byte // what before is read into
}

func newSource(f *os.File, ch wire.Channel, before *source) *source {
	raw, _ := f.SyscallConn() // fails only for a nil file
	return &source{f: f, raw: raw, ch: ch, before: before}
}

// take reads once from the non-blocking fd and passes it on; taken is false
// when the pipe is empty.
func (s *source) take(fd int, buf []byte, out *collector) (taken, more, wanted bool) {
	n, err := syscall.Read(fd, buf)
	for err == syscall.EINTR {
		n, err = syscall.Read(fd, buf)
	}
	if err == syscall.EAGAIN {
		return false, true, true
	}
	if err != nil || n <= 0 {
		return true, false, true
	}
	if s.before != nil {
		if s.spare == nil {
			s.spare = make([]byte, len(buf))
		}
		_ = s.before.raw.Control(func(fd uintptr) {
			for taken, more := true, true; taken && more; {
				taken, more, _ = s.before.take(int(fd), s.spare, out)
			}
		})
	}
	return true, true, out.add(s.ch, buf[:n])
}

// drain reads a pipe to its end. It goes on after the exec has ended, because
// closing it would kill a background process at its next line of log.
func (a *Agent) drain(s *source, out *collector) {
	defer s.f.Close()
	buf := make([]byte, wire.MaxData)
	kept := false
	for more, wanted := true, true; more; {
		err := s.raw.Read(func(fd uintptr) (taken bool) {
			out.order.Lock()
			defer out.order.Unlock()
			taken, more, wanted = s.take(int(fd), buf, out)
			return taken
		})
		if err != nil {
			return
		}
		if !wanted && !kept {
			select {
			case a.linger <- struct{}{}:
				defer func() { <-a.linger }()
				kept = true
			default:
				return
			}
		}
	}
}

// collector keeps the head of the output, sent as it comes, and the tail, kept
// in a ring until the end.
type collector struct {
	order  sync.Mutex // held from reading a piece to adding it
	mu     sync.Mutex
	head   int // bytes that may still be sent live
	tail   ring
	send   func(wire.Channel, []byte) bool
	bytes  [2]int64
	closed bool
	active chan struct{} // signalled on output
}

func newCollector(limit int, send func(wire.Channel, []byte) bool) *collector {
	limit = max(limit, 0)
	return &collector{head: limit / 2, tail: ring{max: limit - limit/2}, send: send, active: make(chan struct{}, 1)}
}

// add takes output; false after close.
func (c *collector) add(ch wire.Channel, b []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.bytes[ch-wire.Stdout] += int64(len(b))
	if n := min(c.head, len(b)); n > 0 {
		c.send(ch, b[:n])
		c.head -= n
		b = b[n:]
	}
	c.tail.add(ch, b)
	select {
	case c.active <- struct{}{}:
	default:
	}
	return true
}

// live returns how much was written, and the last of the tail so far.
func (c *collector) live() (int64, []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes[0] + c.bytes[1], bytes.Clone(c.tail.buf[max(c.tail.start, len(c.tail.buf)-wire.MaxLive):])
}

// close sends the tail and completes the exit.
func (c *collector) close(e *wire.Exit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.tail.each(func(ch wire.Channel, b []byte) { c.send(ch+(wire.StdoutTail-wire.Stdout), b) })
	e.StdoutBytes, e.StderrBytes, e.Dropped = c.bytes[0], c.bytes[1], c.tail.dropped
	c.tail = ring{}
}

// ring keeps the last max bytes and which channel each came from. Live bytes
// are buf[start:]; the dead ones before them are squeezed out when they are as
// many, so that a flood costs linear time.
type ring struct {
	max     int
	buf     []byte
	start   int
	runs    []run
	dropped int64
}

type run struct {
	n  int32
	ch wire.Channel
}

func (r *ring) add(ch wire.Channel, b []byte) {
	if cut := len(b) - r.max; cut > 0 {
		r.dropped += int64(cut)
		b = b[cut:]
	}
	if len(b) == 0 {
		return
	}
	r.drop(len(r.buf) - r.start + len(b) - r.max)
	if last := len(r.runs) - 1; last >= 0 && r.runs[last].ch == ch {
		r.runs[last].n += int32(len(b))
	} else {
		r.runs = append(r.runs, run{int32(len(b)), ch})
	}
	if r.start > r.max {
		r.buf = r.buf[:copy(r.buf, r.buf[r.start:])]
		r.start = 0
	}
	r.buf = append(r.buf, b...)
}

func (r *ring) drop(n int) {
	if n <= 0 {
		return
	}
	r.dropped += int64(n)
	r.start += n
	for n > 0 {
		k := min(n, int(r.runs[0].n))
		n -= k
		if r.runs[0].n -= int32(k); r.runs[0].n == 0 {
			r.runs = r.runs[1:]
		}
	}
}

func (r *ring) each(f func(wire.Channel, []byte)) {
	at := r.start
	for _, run := range r.runs {
		f(run.ch, r.buf[at:at+int(run.n)])
		at += int(run.n)
	}
}
