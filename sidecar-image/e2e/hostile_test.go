package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Sessions in which the agent itself is the attacker. Each call ends in its own
// time, with nothing that the agent made up; the sidecar's memory and log stay
// small and it serves the next session.
func TestHostileAgentBinary(t *testing.T) {
	agent := filepath.Join(t.TempDir(), "hostile")
	build := exec.Command("go", "build", "-o", agent, "./testdata/hostile")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s := start(t, "runc", map[string]string{"SANDBOX_AGENT": agent})
	c := s.client()
	before := s.rss(t)
	for command, want := range map[string]string{
		"flood": "went away", "garbage": "went away", "giant": "went away", "empty": "went away", "exit": "", "drip": "", "mute": "", "noise": "", "streams": "", "claims": "",
	} {
		t.Run(command, func(t *testing.T) {
			id := c.open(m{})
			// A session's own time; the agent that keeps none is given up 20 s after it.
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			began := time.Now()
			a, err := c.try(ctx, "sandbox_exec", m{"session_id": id, "command": command, "timeout_seconds": 1, "max_output_bytes": 100000})
			cancel()
			if err != nil {
				t.Fatalf("the call hangs: %v", err)
			}
			if !strings.Contains(a.Text, want) || len(a.Text) > 110000 || strings.Contains(a.Text, "[exit: 0]") {
				t.Errorf("%.300q", a.Text)
			}
			for _, n := range []string{"peak_memory_bytes", "dropped_bytes"} {
				if v, ok := a.Structured[n].(float64); ok && v < 0 {
					t.Errorf("%s is %v", n, v)
				}
			}
			closing := time.Now()
			c.call("sandbox_close", m{"session_id": id})
			t.Logf("%v, closed in %v", closing.Sub(began), time.Since(closing))
			if took := time.Since(closing); took > 30*time.Second {
				t.Errorf("closing its session took %v", took)
			}
		})
	}
	eventually(t, 30*time.Second, "no container is left", func() bool { return len(s.containers()) == 0 })
	eventually(t, 30*time.Second, fmt.Sprintf("the sidecar's memory is below %d+30 MiB", before), func() bool { return s.rss(t) <= before+30 })
	if n := len(s.log.String()); n > 1<<20 {
		t.Errorf("the sidecar's log has %d bytes", n)
	}
	if strings.Contains(s.log.String(), "\x1b[31m") {
		t.Error("an escape sequence of the agent is in the log")
	}
}
