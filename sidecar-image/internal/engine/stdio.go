package engine

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/client"
)

// stdio is an attached container's stdin and stdout. The engine interleaves
// stdout and stderr in frames of its own (8 bytes of header: stream, three
// zeros, length); stderr is the agent's log and goes to ours.
type stdio struct {
	conn net.Conn
	r    *bufio.Reader
	left int // bytes of the current stdout frame
	log  *slog.Logger
	id   string

	mu    sync.Mutex
	lines int
	said  string // last
}

const maxAgentLines = 100

func newStdio(h client.HijackedResponse, log *slog.Logger, id string) *stdio {
	return &stdio{conn: h.Conn, r: h.Reader, log: log, id: id}
}

func (s *stdio) Write(p []byte) (int, error) {
	n, err := s.conn.Write(p)
	return n, bare(err)
}

func (s *stdio) SetWriteDeadline(t time.Time) error { return s.conn.SetWriteDeadline(t) }

func (s *stdio) Close() error { return s.conn.Close() }

func (s *stdio) Read(p []byte) (int, error) {
	for s.left == 0 {
		var h [8]byte
		if _, err := io.ReadFull(s.r, h[:]); err != nil {
			return 0, s.why(err)
		}
		n := int64(binary.BigEndian.Uint32(h[4:]))
		switch h[0] {
		case 0, 1:
			s.left = int(n)
		case 2:
			if err := s.logged(n); err != nil {
				return 0, bare(err)
			}
		default:
			return 0, fmt.Errorf("the engine's stream has a frame of unknown kind %d", h[0])
		}
	}
	n, err := s.r.Read(p[:min(len(p), s.left)])
	s.left -= n
	return n, bare(err)
}

// logged passes on what the agent said, bounded in length and number: a
// hostile one must not fill the operator's log.
func (s *stdio) logged(n int64) error {
	line := make([]byte, min(n, 512))
	if _, err := io.ReadFull(s.r, line); err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, s.r, n-int64(len(line))); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = strings.TrimSpace(string(line))
	if s.lines++; s.lines <= maxAgentLines {
		s.log.Warn("session agent", "container", s.id[:min(12, len(s.id))], "says", string(line))
	}
	return nil
}

// why adds to the end of the stream what the agent said last: it ends with its reason.
func (s *stdio) why(err error) error {
	err = bare(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.said == "" {
		return err
	}
	return fmt.Errorf("%w; it said %q", err, s.said)
}
