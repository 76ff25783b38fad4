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

const (
	// askPatience is what an agent has to say what it sees, and the sidecar to look itself.
	askPatience = time.Second
	// claimFor is how long an agent that answers no more is taken at its last word.
	claimFor = 2 * patrolEvery
)

// usage is what the workspace holds, with how much of it is in files that have no name
// any more and that processes of the session still have. The agent tells of those in
// any engine, but a process may hide from it, which has its uid; from a sidecar that is
// root and sees the engine's processes none may.
func (s *Session) usage() (used, nameless int64, err error) {
	s.mu.Lock()
	conn := s.conn
	s.mu.Unlock()
	told := make(chan int64, 1)
	asking, cancel := context.WithTimeout(s.m.ctx, askPatience)
	defer cancel()
	go func() {
		defer close(told)
		if conn != nil {
			if n, err := conn.Unlinked(asking); err == nil {
				told <- n
			}
		}
	}()
	used, err = s.held.Usage()
	if err != nil || used == workspace.Unmeasured {
		return used, 0, err
	}
	dev, err := s.held.Device()
	if err != nil {
		return 0, 0, err
	}
	s.mu.Lock()
	s.used = max(s.used, used) // for those who cannot wait for the rest
	s.mu.Unlock()
	pids := s.m.census.of(s.Container)
	looking, cancel := context.WithTimeout(s.m.ctx, askPatience)
	defer cancel()
	seen := unlinked.Bytes(looking, dev, pids)
	var claim int64
	var answered bool
	select {
	case claim, answered = <-told:
	case <-asking.Done():
		select {
		case claim, answered = <-told: // before
		default:
		}
	}
	nameless = s.hidden(claim, answered, seen, os.Geteuid() == 0 && len(pids) > 0)
	return used + nameless, nameless, nil
}

// hidden is how much is in files without a name, in bytes, of what the agent claims, if it
// answered, and what the sidecar has seen, which is all there is where it sees the session's
// processes. An agent that does not answer is taken at its last word, for a while: the
// session's writes are refused meanwhile, also when those files are gone.
func (s *Session) hidden(claim int64, answered bool, seen int64, sees bool) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.m.cfg.Now()
	switch {
	case answered:
		s.claim, s.claimed = claim, now
	case sees || now.Sub(s.claimed) >= claimFor:
		s.claim = 0
	}
	return max(s.claim, seen)
}

// census knows the processes of each container, as far as the sidecar sees them. All
// sessions share one look at all processes.
type census struct {
	mu   sync.Mutex
	at   time.Time
	pids map[string][]string
}

var containerID = regexp.MustCompile(`(?:conmon-)?\b[0-9a-f]{64}\b`)

// containersOf are the ids in a process's /proc/PID/cgroup: docker and podman name the
// cgroup of each container by its id, and no process can leave it. A nested engine's may
// lie below the sidecar's own.
func containersOf(cgroup string) []string {
	ids := slices.DeleteFunc(containerID.FindAllString(cgroup, -1), // of each line, in cgroup v1
		func(id string) bool { return len(id) > 64 }) // the container's monitor, which is podman's
	slices.Sort(ids)
	return slices.Compact(ids)
}

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
			for _, id := range containersOf(string(text)) {
				c.pids[id] = append(c.pids[id], pid)
			}
		}
		c.at = time.Now()
	}
	return c.pids[container]
}
