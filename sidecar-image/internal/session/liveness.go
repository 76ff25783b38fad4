package session

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// Liveness asks the runtime whether the runs that tag sessions still live, and
// closes the sessions of those that do not. It takes "dead" from a clear answer
// only: a runtime that is away, errs or makes no sense closes nothing.
type Liveness struct {
	URL    string // with {root_run_id}
	Token  string
	Client *http.Client

	mu      sync.Mutex
	missing map[string]int // consecutive 404s of each run
}

// asked is how many runs are asked about at once.
const asked = 8

// forgotten is how many times in a row a runtime has to say 404 of a run, with
// no other answer and no failure between: one that was just restarted may not
// have loaded its runs yet.
const forgotten = 3

// Over are the run states that end its sessions, in the spellings of the
// runtimes we know.
var over = map[string]bool{
	"completed": true, "complete": true, "succeeded": true, "success": true, "done": true, "finished": true,
	"failed": true, "error": true, "errored": true, "cancelled": true, "canceled": true, "aborted": true, "dead": true, "timed_out": true,
}

var overRun = ended("run_ended", "the session has ended with its run; open a new one with sandbox_open")

// Poll asks about every run once.
func (l *Liveness) Poll(ctx context.Context, m *Manager) {
	runs := map[string][]*Session{}
	for _, s := range m.All() {
		if s.RootRun != "" {
			runs[s.RootRun] = append(runs[s.RootRun], s)
		}
	}
	l.ask(ctx, slices.Collect(maps.Keys(runs)), func(run string, dead bool, err error) {
		if err != nil {
			m.cfg.Log.Debug("a run's state is not known", "run", run, "error", err)
		}
		if !dead {
			return
		}
		for _, s := range runs[run] {
			m.CloseSession(s, overRun)
		}
	})
}

// ask tells of each run what is known of it, as the answers come, some of them
// at once.
func (l *Liveness) ask(ctx context.Context, runs []string, tell func(run string, dead bool, err error)) {
	l.mu.Lock()
	if l.missing == nil {
		l.missing = map[string]int{}
	}
	maps.DeleteFunc(l.missing, func(run string, _ int) bool { return !slices.Contains(runs, run) })
	l.mu.Unlock()
	var g errgroup.Group
	g.SetLimit(asked)
	for _, run := range runs {
		g.Go(func() error {
			dead, missing, err := l.dead(ctx, run)
			l.mu.Lock()
			if missing {
				l.missing[run]++
				dead = l.missing[run] >= forgotten
			} else {
				delete(l.missing, run)
			}
			l.mu.Unlock()
			tell(run, dead, err)
			return nil
		})
	}
	_ = g.Wait()
}

// dead says whether a run has ended, or whether the runtime knows no such run.
func (l *Liveness) dead(ctx context.Context, run string) (dead, missing bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.ReplaceAll(l.URL, "{root_run_id}", url.PathEscape(run)), nil)
	if err != nil {
		return false, false, err
	}
	if l.Token != "" {
		req.Header.Set("Authorization", "Bearer "+l.Token)
	}
	resp, err := l.Client.Do(req)
	if err != nil {
		return false, false, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusGone:
		return true, false, nil
	case http.StatusNotFound:
		// A proxy with nothing behind it says 404 too, in HTML or plain text.
		t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
		if t != "application/json" && !strings.HasSuffix(t, "+json") {
			return false, false, fmt.Errorf("404 with the content type %q is not taken for the runtime's word: that is JSON", t)
		}
		return false, true, nil
	case http.StatusOK:
	default:
		return false, false, fmt.Errorf("the runtime answered %s", resp.Status)
	}
	var body struct {
		Status string `json:"status"`
		State  string `json:"state"`
		Alive  *bool  `json:"alive"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&body); err != nil {
		return false, false, err
	}
	if body.Alive != nil {
		return !*body.Alive, false, nil
	}
	return over[strings.ToLower(body.Status)] || body.Status == "" && over[strings.ToLower(body.State)], false, nil
}

// Run polls until ctx ends.
func (l *Liveness) Run(ctx context.Context, m *Manager, every time.Duration) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			l.Poll(ctx, m)
		}
	}
}
