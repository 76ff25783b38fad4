package session

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/unlinked"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// askPatience is what an agent has to say what it sees.
const askPatience = time.Second

// usage is what the workspace holds, with how much of it is in files that have no name
// any more and that processes of the session still have. The agent tells of those in
// any engine, but a process may hide from it, which has its uid; from a sidecar that is
// root and sees the engine's processes none may.
func (s *Session) usage() (used, nameless int64, err error) {
	s.mu.Lock()
	conn, nameless := s.conn, s.nameless
	s.mu.Unlock()
	told := make(chan int64, 1)
	ctx, cancel := context.WithTimeout(s.m.ctx, askPatience)
	defer cancel()
	go func() {
		n := nameless // of the last time, where it does not answer
		if conn != nil {
			if now, err := conn.Unlinked(ctx); err == nil {
				n = now
			}
		}
		told <- n
	}()
	used, err = s.held.Usage()
	if err != nil || used == workspace.Unmeasured {
		return used, 0, err
	}
	dev, err := s.held.Device()
	if err != nil {
		return 0, 0, err
	}
	seen := unlinked.Bytes(dev, s.m.census.of(s.Container))
	select {
	case nameless = <-told:
	case <-ctx.Done():
	}
	nameless = max(nameless, seen)
	return used + nameless, nameless, nil
}

// census knows the processes of each container, as far as the sidecar sees them. All
// sessions share one look at all processes.
type census struct {
	mu   sync.Mutex
	at   time.Time
	pids map[string][]string
}

// containerID finds containers in /proc/PID/cgroup: docker and podman name the cgroup of
// each by its id, and no process can leave it. A nested engine's lie below the sidecar's own.
var containerID = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

func (c *census) of(container string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.at) >= guardEvery/2 {
		c.pids = map[string][]string{}
		for _, pid := range unlinked.Processes() {
			text, err := os.ReadFile(filepath.Join("/proc", pid, "cgroup"))
			if err != nil {
				continue
			}
			ids := containerID.FindAllString(string(text), -1) // of each line, in cgroup v1
			slices.Sort(ids)
			for _, id := range slices.Compact(ids) {
				c.pids[id] = append(c.pids[id], pid)
			}
		}
		c.at = time.Now()
	}
	return c.pids[container]
}
