package e2e

import (
	"fmt"
	"sync"
	"testing"
)

// Many sessions, and many commands at once, cost no call and little memory. What
// they cost in time, and two hundred of them, is TestSpeedTable's.
func TestLoad(t *testing.T) {
	const sessions, callers, calls = 40, 20, 5
	s := start(t, "runc", map[string]string{"SANDBOX_LOG_LEVEL": "warn", "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": fmt.Sprint(sessions)})
	c := s.as(map[string]string{"X-Loom-Root-Run": "load"})
	var wg sync.WaitGroup
	ids := make([]string, sessions)
	for worker := range 4 {
		wg.Go(func() {
			for i := worker; i < sessions; i += 4 {
				a, err := c.try(t.Context(), "sandbox_open", m{"mem_mb": 64, "tmpfs_mb": 16})
				if ids[i], _ = a.Structured["session_id"].(string); err != nil || ids[i] == "" {
					t.Errorf("open %d: %+v, %v", i, a, err)
				}
			}
		})
	}
	wg.Wait()
	for caller := range callers {
		wg.Go(func() {
			for i := range calls {
				want := fmt.Sprintf("%d of %d\n", i, caller)
				a, err := c.try(t.Context(), "sandbox_exec", m{"session_id": ids[(caller*calls+i*7)%sessions], "command": "printf '" + want + "'; head -c 1M /dev/zero >/dev/null"})
				if err != nil || a.IsError || a.Text != want {
					t.Errorf("a command: %+v, %v", a, err)
				}
			}
		})
	}
	wg.Wait()
	if rss := s.rss(t); rss >= 60 {
		t.Errorf("the sidecar has %d MiB", rss)
	}
	if a := c.call("sandbox_close_run", m{"root_run_id": "load"}); a.Structured["closed"] != float64(sessions) {
		t.Errorf("%+v", a)
	}
}
