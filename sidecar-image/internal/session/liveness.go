package session

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Liveness asks the runtime whether the runs that tag sessions still live, and
// closes the sessions of those that do not. It takes "dead" from a clear answer
// only: a runtime that is away, errs or makes no sense closes nothing.
type Liveness struct {
	URL    string // with {root_run_id}
	Token  string
	Client *http.Client

	missing map[string]int // consecutive 404s of each run
}

// forgotten is how many times in a row a runtime has to say 404 of a run: one
// that was just restarted may not have loaded its runs yet.
const forgotten = 3

// Over are the run states that end its sessions, in the spellings of the
// runtimes we know.
var over = map[string]bool{
	"completed": true, "complete": true, "succeeded": true, "success": true, "done": true, "finished": true,
	"failed": true, "error": true, "errored": true, "cancelled": true, "canceled": true, "aborted": true, "dead": true, "timed_out": true,
}

// Poll asks about every run once.
func (l *Liveness) Poll(ctx context.Context, m *Manager) {
	runs := map[string][]*Session{}
	for _, s := range m.All() {
		if s.RootRun != "" {
			runs[s.RootRun] = append(runs[s.RootRun], s)
		}
	}
	if l.missing == nil {
		l.missing = map[string]int{}
	}
	for run := range l.missing {
		if runs[run] == nil {
			delete(l.missing, run)
		}
	}
	for run, sessions := range runs {
		dead, err := l.dead(ctx, run)
		if err != nil {
			m.cfg.Log.Debug("a run's state is not known", "run", run, "error", err)
			continue
		}
		if !dead {
			continue
		}
		for _, s := range sessions {
			m.bury(s, fmt.Errorf("the session has ended with its run; open a new one with sandbox_open"))
			m.CloseSession(s, "run_ended")
		}
	}
}

func (l *Liveness) dead(ctx context.Context, run string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.ReplaceAll(l.URL, "{root_run_id}", url.PathEscape(run)), nil)
	if err != nil {
		return false, err
	}
	if l.Token != "" {
		req.Header.Set("Authorization", "Bearer "+l.Token)
	}
	resp, err := l.Client.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusGone:
		return true, nil
	case http.StatusNotFound:
		l.missing[run]++
		return l.missing[run] >= forgotten, nil
	case http.StatusOK:
	default:
		return false, fmt.Errorf("the runtime answered %s", resp.Status)
	}
	delete(l.missing, run)
	var body struct {
		Status string `json:"status"`
		State  string `json:"state"`
		Alive  *bool  `json:"alive"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&body); err != nil {
		return false, err
	}
	if body.Alive != nil {
		return !*body.Alive, nil
	}
	return over[strings.ToLower(body.Status)] || body.Status == "" && over[strings.ToLower(body.State)], nil
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
