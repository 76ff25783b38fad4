package engine

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"log/slog"
	"testing"

	"github.com/moby/moby/client"
)

// An agent that ends before it answers has said why.
func TestLastWordsOfAnAgent(t *testing.T) {
	for said, want := range map[string]string{
		"":                          "EOF",
		"session-agent: no /work\n": `EOF; it said "session-agent: no /work"`,
		"\x1b[2J":                   `EOF; it said "\x1b[2J"`,
	} {
		frames := []byte{}
		if said != "" {
			frames = append([]byte{2, 0, 0, 0, 0, 0, 0, byte(len(said))}, said...)
		}
		s := newStdio(client.HijackedResponse{Reader: bufio.NewReader(bytes.NewReader(frames))}, slog.New(slog.DiscardHandler), "c")
		if _, err := io.ReadFull(s, make([]byte, 1)); !errors.Is(err, io.EOF) || err.Error() != want {
			t.Errorf("%q: %v", said, err)
		}
	}
}
