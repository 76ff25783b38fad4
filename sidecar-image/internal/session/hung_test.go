package session

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// hung is an engine that lists containers and answers nothing else.
type hung struct {
	has     []engine.State
	creates atomic.Int32
	removed chan string // asked for, if not nil
}

func (h *hung) List(context.Context, string) ([]engine.State, error) { return h.has, nil }
func (h *hung) Create(ctx context.Context, _ engine.Spec) (string, error) {
	h.creates.Add(1)
	<-ctx.Done()
	return "", ctx.Err()
}
func (h *hung) Start(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
func (h *hung) Attach(ctx context.Context, _ string) (io.ReadWriteCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
func (h *hung) Connect(ctx context.Context, _ string) (io.ReadWriteCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
func (h *hung) Inspect(ctx context.Context, _ string) (engine.State, bool, error) {
	<-ctx.Done()
	return engine.State{}, false, ctx.Err()
}
func (h *hung) Kill(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
func (h *hung) Remove(ctx context.Context, id string) error {
	if h.removed != nil {
		h.removed <- id
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// opened is the record of a session whose container is c.
func opened(ttl time.Duration) Record {
	now := time.Now()
	return Record{ID: NewID(), State: Open, Principal: "p", Key: "k", Container: "c", Created: now, LastUsed: now, Deadline: now.Add(ttl)}
}

// manage makes a manager over a store in which the records are.
func manage(t *testing.T, path string, c Config, records ...Record) *Manager {
	t.Helper()
	store, err := OpenStore(path, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	for _, r := range records {
		if err := store.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	c.Store, c.Log = store, slog.New(slog.DiscardHandler)
	m, err := New(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// An engine that takes calls and never answers: sessions end in their time, the
// pool is tried again, and an open is refused.
func TestHungEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		rec := opened(time.Minute)
		e := &hung{has: []engine.State{{ID: "c", Running: true, Labels: map[string]string{engine.LabelSession: rec.ID}}}}
		m := manage(t, path, Config{Engine: e,
			Limits:  Limits{Sessions: 5, PerPrincipal: 5, IdleTTL: time.Hour, WarmPool: 2, Opening: 1},
			Default: func(context.Context) (engine.Spec, error) { return engine.Spec{}, nil }}, rec)
		who := Caller{Principal: "p"}
		s, err := m.Get(who, rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := s.Conn(t.Context()); !errors.Is(err, errUnreached) || time.Since(began) > connTimeout {
			t.Errorf("after %v its connection is %v", time.Since(began), err)
		}
		time.Sleep(time.Minute + 2*tickEvery)
		if _, err := m.Get(who, rec.ID); err == nil {
			t.Error("the session lives on after its ttl")
		}
		if n := e.creates.Load(); n != 1 {
			t.Errorf("%d containers of the pool are started at once", n)
		}
		began = time.Now()
		if _, err := m.Open(t.Context(), who, Request{TTL: time.Hour}); !errors.Is(err, ErrSlow) || time.Since(began) > OpenTimeout+time.Second {
			t.Errorf("after %v the open ended with %v", time.Since(began), err)
		}
		before := e.creates.Load()
		time.Sleep(warmTimeout)
		if e.creates.Load() == before {
			t.Error("the pool is not tried again")
		}
	})
}

// The container that carries the agent to an engine has no session: one that an
// earlier sidecar left is removed, one that is at work now is not.
func TestCarriers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		e := &hung{removed: make(chan string, 10), has: []engine.State{{ID: "left", Labels: map[string]string{engine.LabelPool: "agent-copy"}}}}
		manage(t, path, Config{Engine: e})
		if id := <-e.removed; id != "left" {
			t.Errorf("removed %s", id)
		}
		time.Sleep(3 * reconcileEvery)
		if len(e.removed) > 0 {
			t.Errorf("a carrier at work was removed")
		}
	})
}

// listing is an engine whose lists take a while.
type listing struct {
	hung
	takes time.Duration
	fails atomic.Bool
	err   error // if it does
	lists atomic.Int32
}

func (l *listing) List(context.Context, string) ([]engine.State, error) {
	time.Sleep(l.takes)
	l.lists.Add(1)
	if l.fails.Load() {
		return nil, l.err
	}
	return nil, nil
}

// Containers are listed as often as it costs a hundredth of the time, but for an engine
// that does not answer.
func TestReconciliationRests(t *testing.T) {
	for _, c := range []struct {
		takes       time.Duration
		err         error
		least, most int // in an hour, beside the one at boot
	}{
		{time.Millisecond, nil, 110, 120},
		{time.Second, nil, 34, 36},
		{10 * time.Second, nil, 11, 12},
		{10 * time.Second, errors.New("the engine is away"), 80, 90},
	} {
		path := filepath.Join(t.TempDir(), "state")
		synctest.Test(t, func(t *testing.T) {
			e := &listing{takes: c.takes, err: c.err}
			manage(t, path, Config{Engine: e})
			booted := e.lists.Load()
			e.fails.Store(true)
			time.Sleep(time.Hour)
			if n := int(e.lists.Load() - booted); n < c.least || n > c.most {
				t.Errorf("a list takes %v (%v): %d in an hour", c.takes, c.err, n)
			}
		})
	}
}

// choosy removes containers by its own rule.
type choosy struct {
	hung
	remove func(ctx context.Context, id string) error
}

func (c *choosy) Remove(ctx context.Context, id string) error { return c.remove(ctx, id) }

// Containers that are stuck do not hold up the removal of others, and one that
// cannot be removed is tried by one.
func TestStuckRemovals(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		var tries atomic.Int32
		began, removed := time.Now(), make(chan time.Duration, 1)
		stray := engine.State{ID: "stray", Labels: map[string]string{engine.LabelSession: "s"}}
		e := &choosy{hung{has: []engine.State{stray}}, func(ctx context.Context, id string) error {
			switch id {
			case "stray":
				tries.Add(1)
				return errors.New("device or resource busy")
			case "well":
				removed <- time.Since(began)
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}}
		m := manage(t, path, Config{Engine: e})
		for _, id := range []string{"stuck", "stuck too", "well"} {
			m.remove(Record{ID: id, Container: id}, nil)
		}
		if after := <-removed; after > 2*removePatience {
			t.Errorf("a container waited %v for stuck ones", after)
		}
		time.Sleep(10 * reconcileEvery)
		before := tries.Load()
		time.Sleep(reconcileEvery)
		if n := tries.Load() - before; n < 3 || n > 15 { // every two seconds, when its turn comes
			t.Errorf("a stray is tried %d times in %v", n, reconcileEvery)
		}
	})
}

// A command that starts while its session is found idle either keeps the session
// or is refused: it is never killed by the close.
func TestIdleIsDecidedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		var ahead atomic.Int64 // of the clock, in nanoseconds
		rec := opened(24 * time.Hour)
		e := &hung{has: []engine.State{{ID: "c", Running: true, Labels: map[string]string{engine.LabelSession: rec.ID}}}}
		m := manage(t, path, Config{Engine: e, Limits: Limits{IdleTTL: time.Hour},
			Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }}, rec)
		who := Caller{Principal: "p"}
		s, err := m.Get(who, rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		done, err := s.Use()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Hour) // a long command
		if _, err := m.Get(who, rec.ID); err != nil {
			t.Fatalf("the session was closed under a command: %v", err)
		}
		done()
		time.Sleep(time.Hour)
		ahead.Store(int64(2 * time.Minute)) // found idle between two ticks
		m.Expire()
		if _, err := s.Use(); !errors.Is(err, overIdle) {
			t.Errorf("a command may start in a session that is being closed: %v", err)
		}
		if err := m.Touch(s); !errors.Is(err, overIdle) {
			t.Errorf("it can be touched: %v", err)
		}
		synctest.Wait()
		if _, err := m.Get(who, rec.ID); !errors.Is(err, overIdle) {
			t.Errorf("its owner is told %v", err)
		}
	})
}

// halting is an engine that makes containers, and neither starts nor removes them.
type halting struct{ hung }

func (h *halting) Create(context.Context, engine.Spec) (string, error) {
	h.creates.Add(1)
	return "c", nil
}
func (h *halting) Start(context.Context, string) error { return errors.New("no space left on device") }

// The pool is tried again, and fills no engine with what did not start.
func TestPoolOfAHaltingEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		const pool = 3
		e := &halting{}
		manage(t, path, Config{Engine: e, Limits: Limits{Sessions: 200, WarmPool: pool},
			Default: func(context.Context) (engine.Spec, error) { return engine.Spec{}, nil }})
		time.Sleep(time.Hour)
		if n := e.creates.Load(); n != pool+1 {
			t.Errorf("%d containers were made in an hour", n)
		}
	})
}
