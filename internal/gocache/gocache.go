// Package gocache makes a go command's first build fast: it speaks the
// GOCACHEPROG protocol (cmd/go/internal/cacheprog) over two caches, a
// read-only one that an image ships and the user's own GOCACHE above it.
// It uses nothing but the standard library, since images carry it.
package gocache

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// HashSize is the length of action and output ids in bytes.
const HashSize = 32

// ID is an action's or an output's hash.
type ID [HashSize]byte

// Entry is what an action left: a file with its hash and size.
type Entry struct {
	Output ID
	Size   int64 // bytes
	Time   time.Time
	Path   string
}

// request and response are the messages of cmd/go/internal/cacheprog.
type request struct {
	ID       int64
	Command  string
	ActionID []byte
	OutputID []byte
	BodySize int64
}

type response struct {
	ID            int64
	Err           string     `json:",omitempty"`
	KnownCommands []string   `json:",omitempty"`
	Miss          bool       `json:",omitempty"`
	OutputID      []byte     `json:",omitempty"`
	Size          int64      `json:",omitempty"`
	Time          *time.Time `json:",omitempty"`
	DiskPath      string     `json:",omitempty"`
}

// Serve answers a go command until it says close or goes away. The lower
// cache may be nil. Requests are answered one by one: each costs
// microseconds, less than handing it to another goroutine.
func Serve(r io.Reader, w io.Writer, lower *Lower, upper Upper) error {
	in, out := bufio.NewReaderSize(r, 64<<10), bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	send := func(res response) error {
		if err := enc.Encode(res); err != nil {
			return err
		}
		if in.Buffered() > 0 {
			return nil // the next request is here: answer both in one write
		}
		return out.Flush()
	}
	if err := send(response{KnownCommands: []string{"get", "put", "close"}}); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil // go was killed
		}
		if err != nil {
			return err
		}
		if len(line) <= 1 {
			if in.Buffered() == 0 {
				if err := out.Flush(); err != nil {
					return err
				}
			}
			continue
		}
		var req request
		if err := json.Unmarshal(line, &req); err != nil {
			return fmt.Errorf("go sent a request that is no JSON object: %w", err)
		}
		res := response{ID: req.ID}
		var e Entry
		found := true
		switch req.Command {
		case "get":
			if e, found = lower.get(req.ActionID); !found {
				e, found = upper.get(req.ActionID)
			}
			res.Miss = !found
		case "put":
			e, err = upper.put(req, in)
			if req.BodySize > 0 {
				in.Discard(1) // the body's closing quote; a read error comes again
			}
		case "close":
			upper.trim(time.Now())
			return errors.Join(enc.Encode(res), out.Flush())
		default:
			err = fmt.Errorf("unknown command %q", req.Command)
		}
		switch {
		case err != nil:
			res.Err = err.Error()
		case found:
			res.OutputID, res.Size, res.DiskPath, res.Time = e.Output[:], e.Size, e.Path, &e.Time
		}
		if err := send(res); err != nil {
			return err
		}
	}
}

// body is a request's body: a JSON string of base64 on a line of its own.
func body(req request, in *bufio.Reader) io.Reader {
	if req.BodySize == 0 {
		return eof{}
	}
	for { // the blank line after the request
		if c, err := in.ReadByte(); err != nil {
			return failed{err}
		} else if c == '"' {
			break
		}
	}
	text := io.LimitReader(in, int64(base64.StdEncoding.EncodedLen(int(req.BodySize))))
	return base64.NewDecoder(base64.StdEncoding, text)
}

type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

type failed struct{ err error }

func (f failed) Read([]byte) (int, error) { return 0, f.err }
