package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/client"
)

const (
	// sweepEvery is how often the OCI runtime is asked for containers that podman
	// has forgotten. One goes when it was found so twice.
	sweepEvery     = 30 * time.Second
	runtimeTimeout = 20 * time.Second
)

// A sweeper removes what podman forgot: one that dies between the start of a
// container and writing that down (4.3) takes it for one that never started,
// removes it without telling the runtime, and its process stays for ever.
type sweeper struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func (e *Engine) startSweeper() {
	if e.child == nil || os.Geteuid() != 0 { // a rootless podman's containers are in another user namespace
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	e.sweep = &sweeper{cancel: cancel}
	e.sweep.wg.Go(func() {
		seen := map[string]bool{}
		for ctx.Err() == nil {
			seen = e.sweepOnce(ctx, seen)
			select {
			case <-ctx.Done():
			case <-time.After(sweepEvery):
			}
		}
	})
}

func (s *sweeper) stop() {
	if s != nil {
		s.cancel()
		s.wg.Wait()
	}
}

// recent is a list of this sidecar's containers that was made not long ago. One costs
// podman milliseconds for each container.
type recent struct {
	sync.Mutex
	at  time.Time
	all []State
}

func (r *recent) keep(all []State) {
	r.Lock()
	defer r.Unlock()
	r.at, r.all = time.Now(), all
}

// fresh is how long a list is good enough to tell which containers need not be looked at
// one by one. One that podman has forgotten since is found by the next.
const fresh = 2 * time.Minute

func (e *Engine) lately(ctx context.Context) []State {
	e.last.Lock()
	at, all := e.last.at, e.last.all
	e.last.Unlock()
	if time.Since(at) > fresh {
		all, _ = e.List(ctx, e.opts.Instance)
	}
	return all
}

// sweepOnce removes the forgotten containers that were seen before, and returns
// those that are there.
func (e *Engine) sweepOnce(ctx context.Context, seen map[string]bool) map[string]bool {
	found := map[string]bool{}
	system, err := e.api.Info(ctx, client.InfoOptions{})
	if err != nil {
		return found
	}
	info := system.Info
	runtime := e.opts.Runtime
	if runtime == "" {
		runtime = info.DefaultRuntime
	}
	var all []struct{ ID, Bundle string }
	if out, err := ask(ctx, runtime, "list", "--format", "json"); err != nil || json.Unmarshal(out, &all) != nil {
		return found
	}
	ours := e.lately(ctx)
	storage := filepath.Join(info.DockerRootDir, info.Driver+"-containers") + "/"
	for _, c := range all {
		if !strings.HasPrefix(c.Bundle, storage) || slices.ContainsFunc(ours, func(s State) bool { return s.ID == c.ID }) {
			continue
		}
		if _, ok, err := e.Inspect(ctx, c.ID); ok || err != nil {
			continue
		}
		// Others have their containers in that storage too, CRI-O for one.
		var state struct{ Annotations map[string]string }
		out, err := ask(ctx, runtime, "state", c.ID)
		if err != nil || json.Unmarshal(out, &state) != nil || state.Annotations["io.container.manager"] != "libpod" {
			continue
		}
		found[c.ID] = true
		if seen[c.ID] {
			if _, err := ask(ctx, runtime, "delete", "--force", c.ID); err != nil {
				e.opts.Log.Error("a container that a killed podman had forgotten cannot be removed; it is tried again", "container", c.ID, "error", err)
				continue
			}
			e.opts.Log.Warn("removed a container that a killed podman had forgotten", "container", c.ID)
		}
	}
	return found
}

// ask runs the OCI runtime, for no longer than runtimeTimeout.
func ask(ctx context.Context, runtime string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, runtimeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, runtime, args...)
	cmd.WaitDelay = time.Second // what it started may hold its output open
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	return out, err
}
