package session

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"sync"
	"sync/atomic"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// warm is a container that waits for its session. Its agent has not been
// greeted, so nothing runs in it and its environment is still open.
type warm struct {
	rec   Record
	rw    io.ReadWriteCloser
	image string // its id
}

// takeWarm takes a container of an image from the pool and asks for another in
// its place. Those of an image that the name no longer stands for are removed.
func (m *Manager) takeWarm(image string) (warm, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(m.pool) > 0 {
		w := m.pool[0]
		m.pool = m.pool[1:]
		if w.image == image {
			m.refill()
			return w, true
		}
		w.rw.Close()
		m.remove(w.rec, nil)
	}
	return warm{}, false
}

// refill fills the pool on a goroutine of its own, unless one is at it. m.mu is held.
func (m *Manager) refill() {
	if m.filling || m.draining {
		return
	}
	m.filling = true
	m.fills.Go(m.fill)
}

// fill starts containers until the pool is full, one at a time, so that it
// never delays an open by more than one start.
func (m *Manager) fill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer func() { m.filling = false }()
	for m.ctx.Err() == nil && !m.draining && len(m.pool) < m.cfg.Limits.WarmPool {
		m.mu.Unlock()
		w, err := m.warmUp()
		m.mu.Lock()
		if err == nil {
			m.pool = append(m.pool, w)
		} else {
			if m.ctx.Err() == nil {
				m.cfg.Log.Warn("the warm pool could not be filled; it is tried again later", "error", err)
			}
			return
		}
	}
}

// Drain removes the containers of no session, as far as it gets before ctx ends: the
// pool's, with the one that is being started for it, and those of closed sessions.
// Nothing is added to the pool any more. Sessions go on.
func (m *Manager) Drain(ctx context.Context) {
	m.mu.Lock()
	m.draining = true
	m.mu.Unlock()
	m.discard(ctx)
	filled := make(chan struct{})
	go func() { m.fills.Wait(); close(filled) }()
	select {
	case <-filled:
		m.discard(ctx)
	case <-ctx.Done(): // its start ends with Close
	}
	_ = m.removing.until(ctx, func(d *departures) bool { return len(d.ids) == 0 })
}

// discard removes what is in the pool.
func (m *Manager) discard(ctx context.Context) {
	m.mu.Lock()
	pool := m.pool
	m.pool = nil
	m.mu.Unlock()
	var wg sync.WaitGroup
	var left atomic.Int64
	places := make(chan struct{}, discardsAtOnce)
	for _, w := range pool {
		wg.Go(func() {
			defer w.rw.Close()
			var err error
			select {
			case places <- struct{}{}:
				err = m.cfg.Engine.Remove(ctx, w.rec.Container)
				<-places
			case <-ctx.Done():
				err = ctx.Err()
			}
			if err == nil {
				err = m.cfg.Store.Delete(w.rec.ID)
			}
			if err != nil {
				left.Add(1)
				w.shutdown()
			}
		})
	}
	wg.Wait()
	if n := left.Load(); n > 0 {
		m.cfg.Log.Warn("containers of the warm pool were ended, and are left for the next sidecar to remove: there was no time", "containers", n)
	}
}

// shutdown ends a container's agent, and so the container, without the engine.
func (w warm) shutdown() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if c, err := host.Dial(ctx, w.rw, w.rec.Key, nil); err == nil {
		_ = c.Shutdown(ctx)
		c.Close()
	}
}

func (m *Manager) warmUp() (warm, error) {
	ctx, cancel := context.WithTimeout(m.ctx, warmTimeout)
	defer cancel()
	if err := m.removing.wait(ctx, "", m.cfg.Limits); err != nil {
		return warm{}, err
	}
	spec, err := m.cfg.Default(ctx)
	if err != nil {
		return warm{}, err
	}
	now := m.cfg.Now()
	return m.start(ctx, Record{ID: NewID(), State: Pooled, Key: rand.Text(), Created: now, LastUsed: now}, spec, func() {})
}

// adopt takes over what an earlier sidecar of this instance left: sessions
// that still run, with their owner and timers; everything else of this
// instance is removed. Containers of other instances are not even listed.
func (m *Manager) adopt(ctx context.Context) error {
	records, err := m.cfg.Store.All()
	if err != nil {
		return err
	}
	containers, err := m.cfg.Engine.List(ctx, m.cfg.Store.Instance)
	if err != nil {
		return err
	}
	found := map[string]engine.State{}
	for _, c := range containers {
		found[c.Labels[engine.LabelSession]] = c
	}
	now, lost := m.cfg.Now(), 0
	known := map[string]bool{}
	for _, rec := range records {
		known[rec.ID] = true
		c, ok := found[rec.ID]
		s := &Session{Record: atNow(rec, now), m: m}
		s.lastUsed, s.saved = s.Record.LastUsed, s.Record.LastUsed
		if rec.State == Open && !(ok && c.Running) && now.Before(s.Deadline) {
			lost++
			m.logger(s).Warn("session lost: its container ended while no sidecar ran, as those of a nested podman do with the sidecar's own", "workspace", rec.Workspace, "opened", rec.Created, "last_used", rec.LastUsed)
			m.bury(s, errLost)
			if m.cfg.Observe.Closed != nil {
				m.cfg.Observe.Closed(errLost.Reason)
			}
		}
		live := rec.State == Open && ok && c.Running
		free := func() {}
		if rec.Workspace != "" && m.cfg.Workspaces != nil {
			s.held, err = m.cfg.Workspaces.Adopt(rec.Principal, rec.Workspace)
			switch {
			case err == nil: // also of one that is over, whose container may run and write until it is gone
				free = s.held.Close
				m.lock(s)
			case live:
				m.logger(s).Error("a running session's workspace cannot be opened; the session is closed", "workspace", rec.Workspace, "error", err)
				m.bury(s, errNoWorkspace)
				if m.cfg.Observe.Closed != nil {
					m.cfg.Observe.Closed(errNoWorkspace.Reason)
				}
				live = false
			}
		}
		if !live {
			m.remove(rec, m.leave(rec, free))
			continue
		}
		m.mu.Lock()
		m.sessions[rec.ID] = s
		m.counted(rec.Principal, 1)
		m.mu.Unlock()
		if s.limited() {
			m.wg.Go(s.lookAround)
		}
	}
	for _, c := range containers {
		if id := c.Labels[engine.LabelSession]; !known[id] {
			m.remove(Record{ID: id, Container: c.ID}, nil)
		}
	}
	if open, _ := m.Count(); open > 0 || lost > 0 || len(containers) > 0 {
		m.cfg.Log.Info("adopted the sessions of the last sidecar", "sessions", open, "lost", lost, "other_containers_removed", len(containers)-open)
	}
	m.wg.Go(m.reach)
	return nil
}

var errLost = ended("lost", "the session has ended with its container, while the sidecar was restarted; open a new one with sandbox_open")

var errNoWorkspace = ended("lost", "the session has ended: its workspace could not be opened when the sidecar was restarted, and the operator's log says why; open a new one with sandbox_open")

// lock locks the workspace of an adopted session. While no sidecar did, another or a
// process of the session may have: that closes nothing, and is tried until it succeeds.
func (m *Manager) lock(s *Session) {
	err := s.held.Lock()
	if err == nil {
		return
	}
	m.logger(s).Warn("the workspace of an adopted session is locked by another; its own lock is waited for", "workspace", s.Workspace, "error", err)
	m.wg.Go(func() {
		for err != nil && !errors.Is(err, fs.ErrClosed) {
			select {
			case <-time.After(relockEvery):
			case <-m.ctx.Done():
				return
			}
			err = s.held.Lock()
		}
	})
}

// atNow puts a record's times on the clock of this process: now and what is
// made of it hold a monotonic reading, which no later jump of the wall clock
// touches. One that was set back since they were written makes nothing live longer
// than it was to.
func atNow(rec Record, now time.Time) Record {
	left := min(rec.Deadline.Sub(now), rec.Deadline.Sub(rec.Created))
	rec.Deadline = now.Add(left)
	rec.LastUsed = now.Add(-max(0, now.Sub(rec.LastUsed)))
	return rec
}

// reach connects to the adopted sessions: that also ends the commands whose
// callers went with the old sidecar.
func (m *Manager) reach() {
	places := make(chan struct{}, 4)
	for _, s := range m.All() {
		select {
		case places <- struct{}{}:
		case <-m.ctx.Done():
			return
		}
		m.wg.Go(func() {
			defer func() { <-places }()
			if _, err := s.Conn(m.ctx); err != nil && m.ctx.Err() == nil {
				m.logger(s).Warn("an adopted session is not reached yet; its next use tries again", "error", err)
			}
		})
	}
}

const (
	tickEvery      = time.Second
	reconcileEvery = 30 * time.Second
	// reconcileFactor is how many times as long as its list took a reconciliation rests:
	// of two hundred containers podman makes one in a second, idle as they may be.
	reconcileFactor  = 100
	reconcileAtLeast = 5 * time.Minute
)

// tick ends what is over, writes down what was used, and looks for sessions
// whose containers are gone.
func (m *Manager) tick() {
	t := time.NewTicker(tickEvery)
	defer t.Stop()
	next := time.Now().Add(reconcileEvery)
	for {
		m.Expire()
		if m.cfg.Limits.WarmPool > 0 {
			m.mu.Lock()
			m.refill()
			m.mu.Unlock()
		}
		if time.Now().After(next) {
			took := m.reconcile()
			next = time.Now().Add(max(reconcileEvery, min(reconcileFactor*took, reconcileAtLeast)))
		}
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
		}
	}
}

var (
	overTTL  = ended("ttl", "the session has ended: its ttl is over; open a new one with sandbox_open")
	overIdle = ended("idle", "the session has ended: it was idle for too long; open a new one, and sandbox_touch it to keep it")
)

// Expire closes the sessions whose time is over.
func (m *Manager) Expire() {
	now := m.cfg.Now()
	for _, s := range m.All() {
		s.mu.Lock()
		stale := s.lastUsed.Sub(s.saved) > saveEvery
		s.mu.Unlock()
		switch {
		case now.After(s.Deadline):
			if s.close(overTTL, nil) {
				m.wg.Go(func() { m.finish(s) })
			}
		// Looked at and closed in one: a command that starts either keeps it or is refused.
		case s.close(overIdle, func() bool { return s.running == 0 && now.Sub(s.lastUsed) > m.cfg.Limits.IdleTTL }):
			m.wg.Go(func() { m.finish(s) })
		case stale:
			m.save(s)
		}
	}
}

// reconcile compares sessions with the engine's containers, and tells how long those
// took to be listed.
func (m *Manager) reconcile() (took time.Duration) {
	ctx, cancel := context.WithTimeout(m.ctx, 20*time.Second)
	defer cancel()
	began := time.Now()
	cs, err := m.cfg.Engine.List(ctx, m.cfg.Store.Instance)
	if err != nil {
		return 0 // an engine that is away says nothing of its containers
	}
	took = time.Since(began)
	running, strays := map[string]bool{}, map[string]string{}
	for _, c := range cs {
		id := c.Labels[engine.LabelSession]
		if id == "" {
			continue // it carries the agent: to a new image now, or until adopt finds it
		}
		running[id] = c.Running
		strays[id] = c.ID
	}
	// A record is written before its container is made, so records read after the
	// list cover it. What they do not, an engine finished for a sidecar that died.
	if records, err := m.cfg.Store.All(); err != nil {
		m.cfg.Log.Error("strays are not looked for: nobody knows whose a container is", "error", err)
	} else {
		for _, rec := range records {
			delete(strays, rec.ID)
		}
		for id, container := range strays {
			if !m.removing.has(id) {
				m.remove(Record{ID: id, Container: container}, nil)
			}
		}
	}
	for _, s := range m.All() {
		if !running[s.ID] {
			_ = m.died(ctx, s) // asks again, for this one alone
		}
	}
	return took
}
