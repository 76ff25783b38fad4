package session

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// A workspace that was over its quota before this sidecar had it: nothing is
// written to it, and a long deletion is let be.
func TestQuotaOfAnEarlierSession(t *testing.T) {
	ws, err := workspace.New(t.TempDir(), "", os.Getuid(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	m := &Manager{cfg: Config{Workspaces: ws, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: time.Now}}
	open := func() *Session {
		held, err := ws.Take("p", "ws")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(held.Close)
		return &Session{Record: Record{Workspace: "ws"}, m: m, held: held}
	}
	s := open()
	if err := s.Quota(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(s.held.Path, name), make([]byte, 2<<20), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.held.Close()

	var over *ErrQuota
	s = open()
	if err := s.Quota(); !errors.As(err, &over) || over.Used < 4<<20 {
		t.Errorf("the reopened workspace is not over its quota: %v", err)
	}
	s.held.Close()
	for _, c := range []struct {
		script string
		killed bool
		first  func(path string) error // before the command begins
	}{
		{"rm a; sleep 2.5", false, nil},
		{"head -c 3000000 /dev/zero >c; sleep 30", true, nil},
		{"rm *; for i in {1..300}; do mkdir d && cd d; done; sleep 30", true, nil},
		{"sleep 30", true, nil}, // what it may write at the bottom is not seen
		{"sleep 2.5", false, func(path string) error { return os.RemoveAll(filepath.Join(path, "d")) }},
	} {
		s = open()
		if c.first != nil {
			if err := c.first(s.held.Path); err != nil {
				t.Fatal(err)
			}
		}
		ctx, stop := s.Guard(t.Context())
		cmd := exec.CommandContext(ctx, "bash", "-c", c.script)
		cmd.Dir = s.held.Path
		_ = cmd.Run()
		if errors.As(context.Cause(ctx), &over) != c.killed {
			t.Errorf("%s: %v", c.script, context.Cause(ctx))
		}
		stop()
		s.held.Close()
	}
}
