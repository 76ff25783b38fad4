// Package guest is the session agent: PID 1 of a session container. It reaps,
// forwards signals, and does what the sidecar asks over its stdio, or over an
// abstract unix socket once that is lost. It trusts neither the sidecar's
// frames nor the processes beside it, which run under the same uid.
package guest

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"golang.org/x/sys/unix"
)

// Socket is the abstract unix socket on which a running agent takes the
// connection of a restarted sidecar (see Connect). It lives in the container's
// network namespace, so nothing in the file system can shadow it, and it is
// bound before any other process runs.
const Socket = "@loomcycle-session-agent"

const (
	helloTimeout  = 10 * time.Second
	maxPending    = 4 // connections that have not said Hello
	termGrace     = 2 * time.Second
	spareThreads  = 6
	maxExecs      = 16
	maxLingerings = 64
)

// Agent is one session's agent.
type Agent struct {
	work  *os.Root
	dir   string
	build string
	shell string
	procs *procs

	mu      sync.Mutex
	key     string // set by the first Hello
	env     map[string]string
	current *conn
	exit    chan struct{}
	once    sync.Once

	settling atomic.Bool // the container is being stopped: nothing begins any more

	linger chan struct{} // a place for each pipe drained after its exec ended
}

// New returns an agent for the session directory dir.
func New(dir, build string) (*Agent, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("looking for the session's directory: %w", err)
	}
	admit(dir)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the session's directory: %w", err)
	}
	a := &Agent{work: root, dir: dir, build: build, shell: "/bin/bash", exit: make(chan struct{}), linger: make(chan struct{}, maxLingerings)}
	a.procs = newProcs(a.shutdown)
	if _, err := os.Stat(a.shell); err != nil {
		a.shell = "/usr/bin/bash"
	}
	return a, nil
}

// Main runs the agent as PID 1 until it is told to stop, by a frame or a
// signal.
func Main(ctx context.Context, dir, build string) error {
	if err := hide(); err != nil {
		return err
	}
	// Below an engine's --init it must still get orphans. PID 1 gets them anyway,
	// and gVisor refuses the call to any thread but the first.
	if os.Getpid() != 1 {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("becoming the reaper of orphans: %w", err)
		}
	}
	a, err := New(dir, build)
	if err != nil {
		return err
	}
	reserveThreads(spareThreads)
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, syscall.SIGCHLD)
	go func() {
		for range chld {
			a.procs.reap()
		}
	}()
	// Handled, not ignored: an ignored SIGPIPE would be inherited by commands.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	stop := make(chan os.Signal, 4)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP)

	l, err := net.Listen("unix", Socket)
	if err != nil {
		return fmt.Errorf("listening on %s: %w", Socket, err)
	}
	go a.accept(l)
	go a.stdio()
	select {
	case s := <-stop:
		end := time.Now().Add(termGrace)
		a.settling.Store(true)
		a.procs.forward(s.(syscall.Signal), end)
		a.settle(end)
	case <-a.exit:
	case <-ctx.Done():
	}
	return nil
}

// hide keeps processes of the same uid from /proc/PID/fd and /proc/PID/mem of
// this one: they would speak to the sidecar in its place.
func hide() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making the agent undumpable: %w", err)
	}
	return nil
}

// reserveThreads makes the runtime create its threads now: later a fork bomb
// may have used up the container's pids, and a Go program that cannot have
// another thread dies.
func reserveThreads(n int) {
	var ready, done sync.WaitGroup
	gate := make(chan struct{})
	for range n {
		ready.Add(1)
		done.Add(1)
		go func() {
			defer done.Done()
			runtime.LockOSThread()
			ready.Done()
			<-gate
			runtime.UnlockOSThread()
		}()
	}
	ready.Wait()
	close(gate)
	done.Wait()
}

// stdio serves the connection that the container was started with. Its end is
// the sidecar's, or the engine's, not the session's.
func (a *Agent) stdio() {
	var f [2]*os.File
	for fd := range f {
		// Non-blocking, so that closing them wakes whoever reads or writes.
		if err := syscall.SetNonblock(fd, true); err != nil {
			log.Printf("stdio: %v", err)
			return
		}
		f[fd] = os.NewFile(uintptr(fd), "stdio")
	}
	a.Serve(struct {
		io.Reader
		io.Writer
		io.Closer
	}{f[0], f[1], closers{f[0], f[1]}})
}

type closers []io.Closer

func (c closers) Close() error {
	for _, x := range c {
		_ = x.Close()
	}
	return nil
}

func (a *Agent) accept(l net.Listener) {
	pending := make(chan struct{}, maxPending)
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // out of descriptors: let some be closed
			continue
		}
		select {
		case pending <- struct{}{}:
			_ = c.SetDeadline(time.Now().Add(helloTimeout))
			go func() {
				a.serveHello(c, func() { <-pending; _ = c.SetDeadline(time.Time{}) })
			}()
		default:
			_ = c.Close()
		}
	}
}

// Serve serves one connection of a sidecar until it ends. It owns rw.
func (a *Agent) Serve(rw io.ReadWriteCloser) { a.serveHello(rw, func() {}) }

// serveHello serves one connection; greeted is called once, when it has said
// Hello or ended without.
func (a *Agent) serveHello(rw io.ReadWriteCloser, greeted func()) {
	defer rw.Close()
	c := &conn{a: a, rw: rw, r: wire.NewReader(rw), w: wire.NewWriter(rw), ops: map[uint32]*op{}, kinds: map[wire.Type]int{}, over: make(chan struct{})}
	defer close(c.over)
	err := a.hello(c)
	greeted()
	if err == nil {
		err = c.loop()
	}
	c.end()
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
		log.Printf("connection ended: %v", err)
	}
}

func (a *Agent) hello(c *conn) error {
	f, err := c.r.Read()
	if err != nil {
		return err
	}
	var h wire.Hello
	if f.Type != wire.THello || json.Unmarshal(f.Payload, &h) != nil {
		return errors.New("the first frame was not a hello")
	}
	if h.Version != wire.Version {
		_ = c.w.WriteJSON(wire.TError, 0, wire.Error{Code: wire.CodeBad,
			Message: fmt.Sprintf("protocol version %d is not spoken here, %d is", h.Version, wire.Version)})
		return fmt.Errorf("hello with protocol version %d", h.Version)
	}
	a.mu.Lock()
	if a.key == "" {
		a.key, a.env = h.Key, h.Env
	}
	if h.Key == "" || subtle.ConstantTimeCompare([]byte(h.Key), []byte(a.key)) != 1 {
		a.mu.Unlock()
		_ = c.w.WriteJSON(wire.TError, 0, wire.Error{Code: wire.CodeDenied, Message: "that is not this session's key"})
		return errors.New("hello with a wrong key")
	}
	old := a.current
	a.current = c
	a.mu.Unlock()
	if old != nil {
		_ = old.rw.Close()
	}
	return c.w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Agent: a.build, Unlinked: true})
}

func (a *Agent) shutdown() { a.once.Do(func() { close(a.exit) }) }

// conn is one sidecar connection.
type conn struct {
	a  *Agent
	rw io.ReadWriteCloser
	r  *wire.Reader
	w  *wire.Writer

	mu    sync.Mutex
	ops   map[uint32]*op
	kinds map[wire.Type]int // of them
	wg    sync.WaitGroup    // the operations
	over  chan struct{}     // closed when the peer is gone, and all of them
}

// op is an operation under way on a stream.
type op struct {
	ctx    context.Context
	cancel context.CancelFunc
	credit *wire.Credit
	in     chan []byte // data for it; closed by TEnd
	inEnd  bool
	room   int // data bytes that the peer may still send
	kind   wire.Type
}

func (c *conn) loop() error {
	for {
		f, err := c.r.Read()
		if err != nil {
			return err
		}
		switch f.Type {
		case wire.TShutdown:
			c.a.shutdown()
			return nil
		case wire.TExec:
			var m wire.Exec
			err = start(c, f, &m, func(o *op) { c.exec(f.Stream, o, m) })
		case wire.TRead:
			var m wire.Read
			err = start(c, f, &m, func(o *op) { c.read(f.Stream, o, m) })
		case wire.TWrite:
			var m wire.Write
			err = start(c, f, &m, func(o *op) { c.write(f.Stream, o, m) })
		case wire.TUnlinked:
			err = start(c, f, nil, func(o *op) { c.unlinked(f.Stream, o) })
		case wire.TCancel:
			if o := c.op(f.Stream); o != nil {
				o.cancel()
			}
		case wire.TGrant:
			var n int
			if n, err = wire.ParseGrant(f.Payload); err == nil {
				if o := c.op(f.Stream); o != nil {
					o.credit.Add(n)
				}
			}
		case wire.TData, wire.TEnd:
			err = c.data(f)
		default:
			err = fmt.Errorf("frame of type %d is not for an agent", f.Type)
		}
		if err != nil {
			return err
		}
	}
}

func (c *conn) op(stream uint32) *op {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ops[stream]
}

// admit gives the session back the right to enter its directory and to list it. Of a
// workspace it is the owner, and may have taken both from itself (chmod 0 /work): then no
// command would start there any more, not even the one that mends it. One that is merely
// read-only stays so.
func admit(dir string) {
	if st, err := os.Stat(dir); err == nil && st.Mode()&0o500 != 0o500 {
		_ = os.Chmod(dir, st.Mode()|0o700) // who may not tells of it in what is done next
	}
}

// start decodes a request into m, if it has any, and runs it on its stream.
func start(c *conn, f wire.Frame, m any, run func(*op)) error {
	if m != nil {
		if err := json.Unmarshal(f.Payload, m); err != nil {
			return c.fail(f.Stream, wire.CodeBad, "the request is not valid JSON: "+err.Error())
		}
	}
	admit(c.a.dir)
	c.mu.Lock()
	switch {
	case c.a.settling.Load():
		c.mu.Unlock()
		// When the last has been said this can't be: that must not end the connection.
		_ = c.fail(f.Stream, wire.CodeFailed, "the session ends: its container is being stopped")
		return nil
	case c.ops[f.Stream] != nil:
		c.mu.Unlock()
		return fmt.Errorf("stream %d is in use", f.Stream)
	case f.Type == wire.TUnlinked: // counts against no limit of the session's own
		if c.kinds[f.Type] > 0 {
			c.mu.Unlock()
			return c.fail(f.Stream, wire.CodeBusy, "the agent already looks for files without a name")
		}
	case len(c.ops)-c.kinds[wire.TUnlinked] >= wire.MaxStreams:
		c.mu.Unlock()
		return c.fail(f.Stream, wire.CodeBusy, fmt.Sprintf("the session already has %d commands and file operations under way, as many as it may; wait for one to end", wire.MaxStreams))
	case f.Type == wire.TExec && c.kinds[f.Type] >= maxExecs:
		c.mu.Unlock()
		return c.fail(f.Stream, wire.CodeBusy, fmt.Sprintf("the session already runs %d commands, as many as it may at once; wait for one to end", maxExecs))
	}
	o := &op{credit: wire.NewCredit(), in: make(chan []byte, wire.Window/wire.MaxData*4), room: wire.Window, kind: f.Type}
	o.ctx, o.cancel = context.WithCancel(context.Background())
	c.ops[f.Stream] = o
	c.kinds[f.Type]++
	c.wg.Add(1) // while settle does not wait yet
	c.mu.Unlock()
	context.AfterFunc(o.ctx, o.credit.Close)
	go func() {
		defer c.wg.Done()
		run(o)
	}()
	return nil
}

// finish ends a stream with its last frame. The stream is free for reuse only
// when the peer has seen that frame.
func (c *conn) finish(stream uint32, o *op, t wire.Type, v any) {
	o.cancel()
	c.mu.Lock()
	delete(c.ops, stream)
	c.kinds[o.kind]--
	c.mu.Unlock()
	_ = c.w.WriteJSON(t, stream, v)
}

func (c *conn) fail(stream uint32, code, msg string) error {
	return c.w.WriteJSON(wire.TError, stream, wire.Error{Code: code, Message: msg})
}

func (c *conn) data(f wire.Frame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.ops[f.Stream]
	if o == nil || o.inEnd {
		return nil // late data of an operation that has ended
	}
	if f.Type == wire.TEnd {
		o.inEnd = true
		close(o.in)
		return nil
	}
	if o.room -= len(f.Payload); o.room < 0 {
		return fmt.Errorf("stream %d was sent more than its window", f.Stream)
	}
	select {
	case o.in <- keep(f.Payload):
		return nil
	default:
		return fmt.Errorf("stream %d was sent too many small frames", f.Stream)
	}
}

// consumed gives the peer back the room of data that keep has kept.
func (c *conn) consumed(stream uint32, o *op, b []byte) {
	c.mu.Lock()
	o.room += len(b)
	c.mu.Unlock()
	_ = c.w.Grant(stream, len(b))
	if cap(b) == wire.MaxData {
		chunks.Put((*[wire.MaxData]byte)(b[:wire.MaxData]))
	}
}

// chunks hold the data frames of a large file one after the other.
var chunks = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}

// keep copies a frame's payload, which lives until the next is read. A small
// one takes no whole chunk, or many would take more than their window.
func keep(p []byte) []byte {
	if len(p) < wire.MaxData/2 {
		return append(make([]byte, 0, len(p)), p...)
	}
	chunk := chunks.Get().(*[wire.MaxData]byte)
	return chunk[:copy(chunk[:], p)]
}

// end cancels what the lost connection had under way, as nobody is left to hear
// how it ended, and returns when all of it has.
func (c *conn) end() {
	_ = c.rw.Close()
	c.mu.Lock()
	for _, o := range c.ops {
		o.cancel()
	}
	c.mu.Unlock()
	c.wg.Wait()
}

// settle lets the commands that a signal has ended say so, and what they wrote last, until
// end. What a bridge has not passed on would be lost with the container, so it is told that
// nothing follows, and hangs up when it has passed on all.
func (a *Agent) settle(end time.Time) {
	a.mu.Lock()
	c := a.current
	a.mu.Unlock()
	if c == nil {
		return
	}
	c.mu.Lock() // what has been let in is counted now
	bridge, ok := c.rw.(*net.UnixConn)
	c.mu.Unlock()
	said := make(chan struct{})
	go func() {
		defer close(said)
		c.wg.Wait()
		if ok && bridge.CloseWrite() == nil {
			<-c.over
		}
	}()
	select {
	case <-said:
	case <-time.After(time.Until(end)):
	}
}

// Connect bridges stdio to a running agent's socket: what a restarted sidecar
// runs through the engine's exec API when the first stdio is lost.
func Connect(in io.Reader, out io.Writer) error {
	if err := hide(); err != nil {
		return err
	}
	// Those that a command may send to all that it sees.
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP)
	c, err := net.Dial("unix", Socket)
	if err != nil {
		return fmt.Errorf("the session's agent does not listen: %w", err)
	}
	defer c.Close()
	done := make(chan error, 2)
	go func() { _, err := io.Copy(out, c); done <- err }()
	go func() { _, err := io.Copy(c, in); done <- err }()
	return <-done
}
