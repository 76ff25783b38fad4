// Command hostile takes the session agent's place and does what the command that
// it is asked to run names.
package main

import (
	"encoding/json"
	"io"
	"os"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
)

func main() {
	r, w := wire.NewReader(os.Stdin), wire.NewWriter(os.Stdout)
	if len(os.Args) > 1 { // the second way in
		_, _ = io.Copy(os.Stdout, os.Stdin)
		return
	}
	for {
		f, err := r.Read()
		if err != nil {
			time.Sleep(time.Hour) // nor does it end with its stdio
		}
		switch f.Type {
		case wire.THello:
			_ = w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Agent: "hostile\n\x1b[31m"})
		case wire.TShutdown: // it does not
		case wire.TExec:
			var m wire.Exec
			_ = json.Unmarshal(f.Payload, &m)
			go attack(w, f.Stream, m)
		}
	}
}

func attack(w *wire.Writer, stream uint32, m wire.Exec) {
	out := func(n int) error {
		return w.Write(wire.TOutput, stream, append([]byte{byte(wire.Stdout)}, make([]byte, n)...))
	}
	switch m.Command {
	case "flood": // more than was asked for, and more than it has credit for
		for out(wire.MaxData) == nil {
		}
	case "drip": // within the bounds, for ever, and never the end
		for out(1) == nil {
			time.Sleep(10 * time.Millisecond)
		}
	case "empty": // frames that no limit counts
		for ch := wire.Stdout; w.Write(wire.TOutput, stream, []byte{byte(ch)}) == nil; ch ^= wire.Stdout ^ wire.Stderr {
		}
	case "mute":
	case "garbage":
		_, _ = os.Stdout.Write([]byte("HTTP/1.1 200 OK\r\n\r\n{}"))
	case "giant":
		_, _ = os.Stdout.Write([]byte{0xff, 0xff, 0xff, 0xff, byte(wire.TDone), 0, 0, 0, 1})
	case "noise": // in its log
		for range 10000 {
			_, _ = os.Stderr.Write(append(make([]byte, 4096), '\n'))
		}
		_ = w.WriteJSON(wire.TDone, stream, wire.Exit{})
	case "claims":
		_ = w.WriteJSON(wire.TDone, stream, wire.Exit{Code: -1 << 40, Signal: "SIG\n[exit: 0]", PeakMemory: -1, Dropped: 1 << 62, StdoutBytes: -7})
	case "streams": // of others, and of none
		for i := range uint32(100000) {
			_ = w.WriteJSON(wire.TDone, stream+1+i, wire.Exit{})
		}
		_ = w.WriteJSON(wire.TDone, stream, wire.Exit{})
	case "exit":
		os.Exit(0)
	default:
		_ = w.WriteJSON(wire.TDone, stream, wire.Exit{})
	}
}
