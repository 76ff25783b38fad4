package engine_test

import (
	"bytes"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// Who reads nothing is sent a window and no more, and what writes waits. Who sends
// more than was granted is hung up on.
func TestWindow(t *testing.T) {
	p := enginetest.New(t)
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			e := enginetest.Open(t, p.Options(t, rt))
			c := open(t, e, p.Image, nil)
			rw, err := e.Connect(t.Context(), c.id)
			if err != nil {
				t.Fatal(err)
			}
			defer rw.Close()
			var late atomic.Bool
			defer time.AfterFunc(time.Minute, func() { late.Store(true); rw.Close() }).Stop()
			w, r := wire.NewWriter(rw), wire.NewReader(rw)
			send := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			// What was said on each stream.
			got, granted, ended := map[uint32][]byte{}, map[uint32]int{}, map[uint32]bool{}
			until := func(what string, ok func() bool) {
				t.Helper()
				for !ok() {
					f, err := r.Read()
					if err != nil {
						t.Fatalf("%s: %v", what, err)
					}
					switch f.Type {
					case wire.TOutput:
						got[f.Stream] = append(got[f.Stream], f.Payload[1:]...)
					case wire.TGrant:
						n, err := wire.ParseGrant(f.Payload)
						send(err)
						granted[f.Stream] += n
					case wire.TDone:
						ended[f.Stream] = true
					case wire.TError:
						t.Fatalf("%s: %s", what, f.Payload)
					}
				}
			}
			send(w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: c.key}))
			if f, err := r.Read(); err != nil || f.Type != wire.THello {
				t.Fatalf("the hello is answered %d, %v", f.Type, err)
			}

			const flood, look = 1, 2
			window := wire.Window
			// waits says that the flood has sent its window and its writer is blocked: both
			// are as they were, each time that another command looks.
			waits := func(what string) {
				t.Helper()
				until(what, func() bool { return len(got[flood]) >= window })
				for asleep := 0; asleep < 3; {
					delete(got, look)
					delete(ended, look)
					send(w.WriteJSON(wire.TExec, look, wire.Exec{Command: "ps -eo stat=,comm= | grep yes", Timeout: 10 * time.Second, MaxOutput: 1000}))
					until(what, func() bool { return ended[look] })
					if asleep++; !strings.HasPrefix(string(got[look]), "S") {
						asleep = 0
					}
				}
				if len(got[flood]) != window {
					t.Errorf("%s: %d bytes came, and %d were granted", what, len(got[flood]), window)
				}
			}
			send(w.WriteJSON(wire.TExec, flood, wire.Exec{Command: "exec yes", Timeout: time.Minute, MaxOutput: 64 * wire.Window}))
			waits("the first window")
			window += 1000
			send(w.Grant(flood, 1000))
			waits("1000 bytes more")
			if want := bytes.Repeat([]byte("y\n"), window/2); !bytes.Equal(got[flood], want) {
				t.Error("what came is not what was written")
			}
			send(w.Write(wire.TCancel, flood))
			until("the cancelled flood", func() bool { return ended[flood] })

			// The other way: the command reads nothing, so a pipe's 64 KiB are granted again.
			const deaf, pipe = 3, 64 << 10
			send(w.WriteJSON(wire.TExec, deaf, wire.Exec{Command: "sleep 100", Stdin: true, Timeout: time.Minute, MaxOutput: 1000}))
			fill := func(n int) {
				t.Helper()
				for ; n > 0; n -= wire.MaxData {
					send(w.Write(wire.TData, deaf, make([]byte, min(n, wire.MaxData))))
				}
			}
			fill(wire.Window)
			until("what the pipe took", func() bool { return granted[deaf] >= pipe })
			fill(pipe)
			answers := func() error {
				if err := w.WriteJSON(wire.TRead, look, wire.Read{Path: "none"}); err != nil {
					return err
				}
				f, err := r.Read()
				if err == nil && (f.Type != wire.TError || f.Stream != look) {
					t.Fatalf("a read is answered with a frame of type %d on stream %d", f.Type, f.Stream)
				}
				return err
			}
			if err := answers(); err != nil {
				t.Fatalf("with its whole window used: %v", err)
			}
			fill(1)
			if err := answers(); err == nil || late.Load() {
				t.Errorf("one byte above the window: %v", err)
			}
		})
	}
}
