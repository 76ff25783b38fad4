// Package wire is the framing protocol between the sidecar and the session
// agent (../PROTOCOL.md): bounded frames over one byte stream. It is shared by
// both ends, and both treat what they read as a hostile peer's.
package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// Version is the protocol's version; both ends refuse another one.
	Version = 1
	// MaxPayload bounds a frame in bytes. It leaves room for the longest
	// argument that execve takes (MaxArgument) in its JSON form.
	MaxPayload = 1 << 20
	// MaxArgument is the longest command, or NAME=VALUE of an environment, in bytes:
	// Linux's MAX_ARG_STRLEN without the NUL at its end.
	MaxArgument = 128<<10 - 1
	// MaxData bounds the payload of a data frame in bytes.
	MaxData = 32 << 10
	// MaxLive bounds the output in a live frame in bytes.
	MaxLive = 16 << 10
	// LiveEvery is how often an exec that asks for them sends one.
	LiveEvery = time.Second
	// Window is how many data bytes may be under way on a stream before the
	// receiver grants more.
	Window = 256 << 10
	// MaxStreams bounds the operations under way on a connection.
	MaxStreams = 64

	headerLen = 9
)

// ErrTooLong is wrapped when a message does not fit a frame; the connection
// stays good.
var ErrTooLong = errors.New("the message is too long")

// Type says what a frame's payload is.
type Type uint8

// Frame types. Those that carry JSON name their message.
const (
	THello    Type = 1  // both ways, first: Hello
	TExec     Type = 2  // to the agent: Exec
	TRead     Type = 3  // to the agent: Read
	TWrite    Type = 4  // to the agent: Write, then TData, then TEnd
	TCancel   Type = 5  // to the agent: ends the stream's operation, no payload
	TShutdown Type = 6  // to the agent: kill everything and exit, no payload
	_         Type = 7  // was an echo that nobody asked for
	TData     Type = 8  // both ways: file content, or an exec's stdin
	TEnd      Type = 9  // both ways: no more TData on this stream, no payload
	TOutput   Type = 10 // to the sidecar: one byte Channel, then output
	TDone     Type = 11 // to the sidecar: the operation's outcome (Exit, File) ends the stream
	TError    Type = 12 // to the sidecar: Error ends the stream
	TGrant    Type = 13 // both ways: uint32, more data bytes allowed on the stream
	TLive     Type = 14 // to the sidecar: uint64, bytes written so far; then the last of them
	TUnlinked Type = 15 // to the agent: how much of the disk of /work is in files without a name, as a File; no payload
)

// Channel says where output came from; the tail is what was kept from the end
// after the head was full.
type Channel uint8

// Output channels.
const (
	Stdout     Channel = 1
	Stderr     Channel = 2
	StdoutTail Channel = 3
	StderrTail Channel = 4
)

// Hello opens a connection. The first Hello that an agent hears sets its key
// and the session's environment; later ones must carry the same key and take
// the place of the connection before.
type Hello struct {
	Version  int               `json:"version"`
	Key      string            `json:"key,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	Agent    string            `json:"agent,omitempty"`    // the agent's build, in its answer
	Unlinked bool              `json:"unlinked,omitempty"` // in its answer: it knows TUnlinked, at which an older one ends the connection
}

// Exec runs Command under bash -c in /work.
type Exec struct {
	Command   string            `json:"command"`
	Env       map[string]string `json:"env,omitempty"`
	Timeout   time.Duration     `json:"timeout_ns"`
	MaxOutput int               `json:"max_output"` // bytes of stdout and stderr together
	Stdin     bool              `json:"stdin,omitempty"`
	Live      bool              `json:"live,omitempty"` // send live frames
}

// Exit is how an Exec ended.
type Exit struct {
	Code        int           `json:"code"` // 128+N after signal N, as shells say it
	Signal      string        `json:"signal,omitempty"`
	TimedOut    bool          `json:"timed_out,omitempty"`
	Cancelled   bool          `json:"cancelled,omitempty"`
	OOM         bool          `json:"oom,omitempty"`
	Duration    time.Duration `json:"duration_ns"`
	PeakMemory  int64         `json:"peak_memory"` // bytes, of the largest process, or of the agent, which starts them, where that is more
	StdoutBytes int64         `json:"stdout_bytes"`
	StderrBytes int64         `json:"stderr_bytes"`
	Dropped     int64         `json:"dropped"` // bytes cut from the middle
}

// Read asks for Max bytes of a file from Offset.
type Read struct {
	Path   string `json:"path"`
	Offset int64  `json:"offset,omitempty"`
	Max    int64  `json:"max"`
}

// Write replaces a file; its content follows as TData.
type Write struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode,omitempty"` // 0 keeps an existing file's mode, else 0644
	Size int64  `json:"size"`
}

// File ends a Read, a Write or a TUnlinked.
type File struct {
	Size int64 `json:"size"` // of the whole file, or of all files without a name, in bytes
}

// Error ends an operation that could not be done.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// Error codes.
const (
	CodeBad      = "bad_request"
	CodeNotFound = "not_found"
	CodeDenied   = "denied" // the path leaves /work, or the file's permissions refuse
	CodeIsDir    = "is_directory"
	CodeFull     = "no_space"
	CodeBusy     = "busy"
	CodeFailed   = "failed"
)

// Frame is one message. Payload is only valid until the next Read.
type Frame struct {
	Type    Type
	Stream  uint32
	Payload []byte
}

// Reader reads frames. Not safe for concurrent use. While it waits for a frame
// it holds no buffer, so that hundreds of idle connections cost little.
type Reader struct {
	r    io.Reader
	hdr  [headerLen]byte
	held *[]byte
}

// buffers hold a data frame each, header and all, for readers and writers.
var buffers = sync.Pool{New: func() any { b := make([]byte, headerLen+MaxData+1); return &b }}

// NewReader returns a Reader of r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Read returns the next frame. A frame above its bound is an error before any
// of it is stored; io.EOF comes only between frames.
func (r *Reader) Read() (Frame, error) {
	if r.held != nil {
		buffers.Put(r.held)
		r.held = nil
	}
	if _, err := io.ReadFull(r.r, r.hdr[:]); err != nil {
		return Frame{}, err
	}
	n := binary.BigEndian.Uint32(r.hdr[:4])
	f := Frame{Type: Type(r.hdr[4]), Stream: binary.BigEndian.Uint32(r.hdr[5:])}
	max := uint32(MaxPayload)
	switch f.Type {
	case TData:
		max = MaxData
	case TOutput:
		max = MaxData + 1
	case TLive:
		max = 8 + MaxLive
	case TCancel, TShutdown, TEnd, TUnlinked:
		max = 0
	case TGrant:
		max = 4
	case THello, TExec, TRead, TWrite, TDone, TError:
	default:
		return Frame{}, fmt.Errorf("frame of unknown type %d", f.Type)
	}
	if n > max {
		return Frame{}, fmt.Errorf("frame of type %d has %d bytes, more than the %d allowed", f.Type, n, max)
	}
	if n == 0 {
		return f, nil
	}
	if n > MaxData+1 {
		var err error
		f.Payload, err = readGrowing(r.r, int(n))
		return f, err
	}
	r.held = buffers.Get().(*[]byte)
	f.Payload = (*r.held)[:n]
	_, err := io.ReadFull(r.r, f.Payload)
	return f, noEOF(err)
}

// readGrowing reads a large payload into memory that grows as bytes arrive, so
// that a header alone cannot reserve a megabyte.
func readGrowing(r io.Reader, n int) ([]byte, error) {
	buf := make([]byte, 0, min(n, MaxData+1))
	for len(buf) < n {
		if len(buf) == cap(buf) {
			buf = append(make([]byte, 0, min(n, 2*cap(buf))), buf...)
		}
		m, err := io.ReadFull(r, buf[len(buf):min(n, cap(buf))])
		buf = buf[:len(buf)+m]
		if err != nil {
			return nil, noEOF(err)
		}
	}
	return buf, nil
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Writer writes frames, each with one Write call. Safe for concurrent use.
type Writer struct {
	turn chan struct{} // a lock; of one that is a channel testing/synctest knows who waits
	w    io.Writer
	err  error
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{turn: make(chan struct{}, 1), w: w} }

// Write sends a frame whose payload is the concatenation of parts. After an
// error every later Write fails with it: a broken frame cannot be mended.
func (w *Writer) Write(t Type, stream uint32, parts ...[]byte) error {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	if n > MaxPayload {
		return fmt.Errorf("%w: %d bytes, a frame carries %d", ErrTooLong, n, MaxPayload)
	}
	w.turn <- struct{}{}
	defer func() { <-w.turn }()
	if w.err != nil {
		return w.err
	}
	// From the pool, so that an idle connection keeps no buffer.
	held := buffers.Get().(*[]byte)
	defer buffers.Put(held)
	buf := binary.BigEndian.AppendUint32((*held)[:0], uint32(n))
	buf = append(buf, byte(t))
	buf = binary.BigEndian.AppendUint32(buf, stream)
	for _, p := range parts {
		buf = append(buf, p...)
	}
	_, w.err = w.w.Write(buf)
	return w.err
}

// WriteJSON sends v as a frame's payload.
func (w *Writer) WriteJSON(t Type, stream uint32, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // which would take six bytes for one < or &
	if err := e.Encode(v); err != nil {
		return err
	}
	return w.Write(t, stream, bytes.TrimSuffix(b.Bytes(), []byte("\n")))
}

// Grant allows the peer n more data bytes on a stream.
func (w *Writer) Grant(stream uint32, n int) error {
	return w.Write(TGrant, stream, binary.BigEndian.AppendUint32(nil, uint32(n)))
}

// ParseGrant reads a TGrant's payload.
func ParseGrant(p []byte) (int, error) {
	if len(p) != 4 {
		return 0, fmt.Errorf("a grant has %d bytes instead of 4", len(p))
	}
	n := binary.BigEndian.Uint32(p)
	if n > 16*Window {
		return 0, fmt.Errorf("a grant of %d bytes is more than %d", n, 16*Window)
	}
	return int(n), nil
}

// Credit is a sender's side of a stream's window. Its zero value is not ready;
// use NewCredit.
type Credit struct {
	mu     sync.Mutex
	cond   sync.Cond
	n      int
	closed bool
}

// NewCredit returns a Credit of one Window.
func NewCredit() *Credit {
	c := &Credit{n: Window}
	c.cond.L = &c.mu
	return c
}

// Take waits for credit and takes up to max bytes of it; 0 after Close.
func (c *Credit) Take(max int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.n <= 0 && !c.closed {
		c.cond.Wait()
	}
	if c.closed {
		return 0
	}
	n := min(max, c.n)
	c.n -= n
	return n
}

// Add returns credit, up to a bound that a well-behaved peer never reaches.
func (c *Credit) Add(n int) {
	c.mu.Lock()
	c.n = min(c.n+n, 16*Window)
	c.mu.Unlock()
	c.cond.Broadcast()
}

// Close wakes whoever waits.
func (c *Credit) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cond.Broadcast()
}
