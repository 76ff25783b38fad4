package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// quotas opens sessions over workspaces of 1 MiB, one at a time.
func quotas(t *testing.T) (open func() *Session) {
	t.Helper()
	ws, err := workspace.New(t.TempDir(), "", os.Getuid(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return func() *Session {
		rec := opened(time.Hour)
		rec.Workspace = "ws"
		e := &hung{removed: make(chan string, 10), has: []engine.State{{ID: "c", Running: true, Labels: map[string]string{engine.LabelSession: rec.ID}}}}
		m := manage(t, filepath.Join(t.TempDir(), "state"), Config{Engine: e, Workspaces: ws, Limits: Limits{IdleTTL: time.Hour}}, rec)
		s, err := m.Get(Caller{Principal: "p"}, rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.held.Close)
		return s
	}
}

// told is what the owner of a session is told of it.
func told(s *Session) string {
	if _, err := s.m.Get(Caller{Principal: "p"}, s.ID); err != nil {
		return err.Error()
	}
	return ""
}

// A workspace that was over its quota before this sidecar had it: nothing is
// written to it, and a long deletion is let be. What goes on to grow is killed, and in
// the end its session too.
func TestQuotaOfAnEarlierSession(t *testing.T) {
	open := quotas(t)
	s := open()
	if err := s.Quota(t.Context()); err != nil {
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
	if err := s.Quota(t.Context()); !errors.As(err, &over) || over.Used < 4<<20 {
		t.Errorf("the reopened workspace is not over its quota: %v", err)
	}
	s.held.Close()
	for _, c := range []struct {
		script         string
		killed, closed bool
	}{
		{"rm a; sleep 2.5", false, false},
		{"echo result >result; sleep 2.5", true, false},
		{"head -c 3000000 /dev/zero >c; sleep 30", true, true},
		{"head -c 3000000 /dev/zero >d", false, true}, // before anybody looked
		{"(sleep 0.1; head -c 3000000 /dev/zero >e) & sleep 0.2", false, true},
		{"rm *", false, false},
		{"head -c 3000000 /dev/zero >f; sleep 1.5; head -c 3000000 /dev/zero >g", true, false}, // for the first time
		{"rm *; for i in {1..300}; do mkdir d && cd d; done; sleep 30", true, true},
		{"sleep 30", true, true}, // what it may write at the bottom is not seen
		{"rm -r d; sleep 2.5", false, false},
		{"for i in {1..300}; do touch $i; done; sleep 30", true, false}, // each takes an inode
	} {
		s = open()
		ctx, stop, err := s.Guard(t.Context(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(ctx, "bash", "-c", c.script)
		cmd.Dir = s.held.Path
		_ = cmd.Run()
		if errors.As(context.Cause(ctx), &over) != c.killed {
			t.Errorf("%s: %v", c.script, context.Cause(ctx))
		}
		stop()
		<-s.Measure()
		for end := time.Now().Add(5 * time.Second); c.closed && told(s) == "" && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		if why := told(s); (why != "") != c.closed || c.closed && !strings.Contains(why, "went on to grow") {
			t.Errorf("%s: its owner is told %q", c.script, why)
		}
		s.held.Close()
	}
}

// However many commands end while a walk is under way, one more is made; and nobody
// waits for the first longer than it wants to.
func TestWalksAreShared(t *testing.T) {
	open := quotas(t)
	s := open()
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(s.held.Path, fmt.Sprint(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.held.Close()
	s = open()
	if _, _, err := s.Guard(t.Context(), 0); !errors.Is(err, errUnmeasured) {
		t.Errorf("a command with no time to wait: %v", err)
	}
	before := runtime.NumGoroutine()
	walks := map[<-chan struct{}]bool{}
	for range 1000 {
		_, stop, err := s.Guard(t.Context(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		stop()
		walks[s.Measure()] = true
	}
	// The guards' own end as they are scheduled.
	for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before+10; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("there are %d goroutines, and were %d", runtime.NumGoroutine(), before)
		}
	}
	if len(walks) > 20 {
		t.Errorf("1000 commands had the workspace walked through %d times", len(walks))
	}
	for walk := range walks {
		<-walk
	}
	if err := s.Quota(t.Context()); err == nil {
		t.Error("3000 empty files are within a quota of 1 MiB")
	}
}
