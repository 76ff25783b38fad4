package session_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
)

// jumpy is a clock that is set at will, and has no monotonic reading.
type jumpy struct {
	mu sync.Mutex
	at time.Time
}

func (j *jumpy) now() time.Time { j.mu.Lock(); defer j.mu.Unlock(); return j.at }
func (j *jumpy) jump(d time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.at = j.at.Add(d)
}

// A clock that jumps between two lives of the sidecar, or under it, on a real
// engine.
func TestClockJumps(t *testing.T) {
	p := enginetest.New(t)
	e := enginetest.Open(t, p.Options(t, "runc"))
	img, err := e.ResolveImage(t.Context(), p.Image, false)
	if err != nil {
		t.Fatal(err)
	}
	spec := engine.Spec{Image: img.ID, WorkBytes: 16 << 20, TmpBytes: 16 << 20, MemBytes: 128 << 20, CPUs: 1, Pids: 64}
	who := session.Caller{Principal: "p"}
	store, err := session.OpenStore(filepath.Join(t.TempDir(), "state"), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	t.Cleanup(func() {
		left, _ := e.List(context.Background(), store.Instance)
		for _, c := range left {
			_ = e.Remove(context.Background(), c.ID)
		}
	})
	manage := func(now func() time.Time) *session.Manager {
		t.Helper()
		m, err := session.New(t.Context(), session.Config{Engine: e, Store: store, Now: now, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			Limits:  session.Limits{Sessions: 5, PerPrincipal: 5, IdleTTL: time.Hour, Opening: 1},
			Default: func(context.Context) (engine.Spec, error) { return spec, nil }})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	alive := func(m *session.Manager, id string) string {
		s, err := m.Get(who, id)
		if err != nil {
			return err.Error()
		}
		c, err := s.Conn(t.Context())
		if err == nil {
			_, _, err = c.Exec(t.Context(), wire.Exec{Command: "true", Timeout: 10 * time.Second, MaxOutput: 1}, nil, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		return ""
	}

	clock := &jumpy{at: time.Now().Round(0)}
	m := manage(clock.now)
	s, err := m.Open(t.Context(), who, session.Request{Spec: spec, TTL: 2 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	id := s.ID

	clock.jump(-48 * time.Hour) // under it
	m.Expire()
	if why := alive(m, id); why != "" {
		t.Fatalf("a clock that was set back closed the session: %s", why)
	}
	clock.jump(48 * time.Hour)
	m.Close()

	clock.jump(-48 * time.Hour) // between two lives
	m = manage(clock.now)
	if s, err = m.Get(who, id); err != nil {
		t.Fatal(err)
	}
	if left := s.Deadline.Sub(clock.now()); left > 2*time.Hour {
		t.Errorf("a clock that was set back lets it live for %v of its 2h", left)
	}
	if idle := clock.now().Sub(s.LastUsed()); idle < 0 || idle > time.Minute {
		t.Errorf("it has been idle for %v", idle)
	}
	clock.jump(59 * time.Minute)
	m.Expire()
	if why := alive(m, id); why != "" {
		t.Errorf("before its idle time was over: %s", why)
	}
	clock.jump(61 * time.Minute)
	m.Expire()
	for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) { // it closes at its leisure
		_, err = m.Get(who, id)
	}
	if err == nil || !strings.Contains(err.Error(), "the session has ended") {
		t.Errorf("after its idle time: %v", err)
	}
	m.Close()

	// With the machine's clock every time that a decision is made of is monotonic,
	// so that a jump under a running sidecar changes nothing; after an adoption too.
	m = manage(nil)
	if s, err = m.Open(t.Context(), who, session.Request{Spec: spec, TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for what, at := range map[string]time.Time{"last use": s.LastUsed(), "deadline": s.Deadline} {
			if !strings.Contains(at.String(), " m=") {
				t.Errorf("the %s %v is of the wall clock alone", what, at)
			}
		}
		m.Close()
		m = manage(nil)
		if s, err = m.Get(who, s.ID); err != nil {
			t.Fatal(err)
		}
	}
	m.CloseSession(s, session.ByClose)
	m.Close()
}
