package session

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

const (
	helloTimeout    = 30 * time.Second
	connTimeout     = 30 * time.Second
	warmTimeout     = 5 * time.Minute // with a pull of the image
	shutdownTimeout = 2 * time.Second
	removeTimeout   = time.Minute
	closeTimeout    = 500 * time.Millisecond
	removers        = 2
	discardsAtOnce  = 8
	patrolsAtOnce   = 2
	removePatience  = 5 * time.Second // then the next has its turn beside it
	leavePatience   = 10 * time.Second
	relockEvery     = 100 * time.Millisecond
	saveEvery       = 5 * time.Second
	maxEpitaphs     = 1024
	epitaphTTL      = 10 * time.Minute

	// OpenTimeout is for an open, with the look-up of its image.
	OpenTimeout = 2 * time.Minute
)

// Manager owns every session of this sidecar.
type Manager struct {
	cfg Config

	mu       sync.Mutex
	sessions map[string]*Session
	count    map[string]int // sessions of each of Owners, those being opened too
	total    int
	opens    map[*open]bool           // under way
	leaving  map[string]chan struct{} // workspaces whose last session is being removed
	pool     []warm
	epitaphs []epitaph
	filling  bool // the pool, by one of fills
	draining bool // so it is not filled again

	fills    sync.WaitGroup
	removals chan removal
	removing departures // by it, with those that are tried again
	openings chan struct{}
	patrols  chan struct{}
	census   census
	wg       sync.WaitGroup
	ctx      context.Context
	stop     context.CancelFunc
}

// open is a sandbox_open under way.
type open struct {
	who    Caller
	cancel context.CancelCauseFunc
}

// epitaph tells a session's owner, and nobody else, why it ended by itself.
type epitaph struct {
	id, principal string
	err           error
	until         time.Time
}

type removal struct {
	rec  Record
	done func()
}

// New returns a manager that has adopted the sessions that still run. Close
// ends its work, not the sessions.
func New(ctx context.Context, cfg Config) (*Manager, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	m := &Manager{cfg: cfg, sessions: map[string]*Session{}, count: map[string]int{}, leaving: map[string]chan struct{}{},
		removals: make(chan removal, 4096), openings: make(chan struct{}, max(1, cfg.Limits.Opening)), patrols: make(chan struct{}, patrolsAtOnce)}
	m.ctx, m.stop = context.WithCancel(context.WithoutCancel(ctx))
	for range removers {
		m.wg.Go(m.remover)
	}
	if err := m.adopt(ctx); err != nil {
		m.stop()
		return nil, err
	}
	m.wg.Go(m.tick)
	return m, nil
}

// Stopped is what the callers of a sidecar hear that ends.
var Stopped = ended("stopped", "the sidecar is being stopped; try again when the next one runs")

// Close stops the manager's work. Sessions stay open for the next sidecar, which also
// removes what Drain was not asked to, or had no time for.
func (m *Manager) Close() {
	m.stop()
	m.mu.Lock()
	sessions := m.sessions
	m.sessions = map[string]*Session{}
	m.draining = true
	m.mu.Unlock()
	for _, s := range sessions {
		m.save(s)
		s.close(Stopped, nil)
		s.mu.Lock()
		if s.conn != nil {
			s.conn.Close()
		}
		s.mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	m.fills.Wait()
	m.discard(ctx)
	m.wg.Wait()
	for _, s := range sessions {
		if s.held != nil {
			s.held.Close()
		}
	}
}

// NewID returns a session id of 130 random bits.
func NewID() string { return "sbx-" + strings.ToLower(rand.Text()) }

// LimitError says which cap refused a session.
type LimitError struct {
	Name  string
	Limit int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("no more sessions: %s is %d; close one with sandbox_close, or try again when one has ended", e.Name, e.Limit)
}

// ErrSlow is the cause of a context that ended with OpenTimeout.
var ErrSlow = fmt.Errorf("the session could not be opened within %v; the engine is busy or hangs, try again later", OpenTimeout)

var errUnreached = fmt.Errorf("the session could not be reached within %v; the engine is busy or hangs, try again later", connTimeout)

func (m *Manager) reserve(principal string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, owner := range Owners(principal) {
		l := []LimitError{{"SANDBOX_MAX_SESSIONS_PER_PRINCIPAL", m.cfg.Limits.PerPrincipal}, {"SANDBOX_MAX_SESSIONS_PER_TENANT", m.cfg.Limits.PerTenant}}[i]
		if m.count[owner] >= l.Limit {
			return &l
		}
	}
	if l := m.cfg.Limits.Sessions; m.total >= l {
		return &LimitError{"SANDBOX_MAX_SESSIONS", l}
	}
	m.counted(principal, 1)
	return nil
}

func (m *Manager) release(principal string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counted(principal, -1)
}

// counted counts n more sessions of a principal. m.mu is held, or nobody else there.
func (m *Manager) counted(principal string, n int) {
	m.total += n
	for _, owner := range Owners(principal) {
		if m.count[owner] += n; m.count[owner] <= 0 {
			delete(m.count, owner)
		}
	}
}

// Begin announces an Open, which is to have the context that it returns: from then on
// CloseRun ends it. done is to be called with the open's error, and returns the reason.
func (m *Manager) Begin(ctx context.Context, who Caller) (_ context.Context, done func(error) error) {
	ctx, cancel := context.WithCancelCause(ctx)
	o := &open{who, cancel}
	m.mu.Lock()
	if m.opens == nil {
		m.opens = map[*open]bool{}
	}
	m.opens[o] = true
	m.mu.Unlock()
	return ctx, func(err error) error {
		m.mu.Lock()
		delete(m.opens, o)
		m.mu.Unlock()
		if over := (*Ended)(nil); err != nil && errors.As(context.Cause(ctx), &over) {
			err = over
		}
		cancel(nil)
		return err
	}
}

// Open makes a session for the caller.
func (m *Manager) Open(ctx context.Context, who Caller, req Request) (s *Session, err error) {
	began, fromPool := time.Now(), false
	defer func() {
		if m.cfg.Observe.Opened != nil {
			m.cfg.Observe.Opened(time.Since(began), fromPool, err)
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, OpenTimeout, ErrSlow)
	defer cancel()
	defer func() {
		if err != nil && context.Cause(ctx) == ErrSlow {
			err = fmt.Errorf("%w: %w", ErrSlow, err)
		}
	}()
	if err := m.reserve(who.Principal); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.release(who.Principal)
		}
	}()
	if err := m.removing.wait(ctx, who.Principal, m.cfg.Limits); err != nil {
		return nil, err
	}
	var held *workspace.Held
	free := func() {} // the workspace, when no container of this open has it
	if req.Workspace != "" {
		if held, err = m.takeWorkspace(ctx, who.Principal, req.Workspace); err != nil {
			return nil, err
		}
		free = held.Discard
		req.Spec.Workspace = held.Path
	}
	now := m.cfg.Now()
	w, conn, fromPool, err := m.obtain(ctx, req, func(rec *Record) { req.describe(rec, who, now) }, free)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Session, error) {
		conn.Close()
		m.remove(w.rec, m.leave(w.rec, free))
		return nil, err
	}
	w.rec.State = Open
	if err = m.cfg.Store.Put(w.rec); err != nil {
		return fail(err)
	}
	s = &Session{Record: w.rec, m: m, held: held, conn: conn, lastUsed: now, saved: now}
	m.mu.Lock()
	// Looked at where CloseRun cancels it, so that it is either listed there or refused here.
	if err = ctx.Err(); err == nil {
		m.sessions[s.ID] = s
	}
	m.mu.Unlock()
	if err != nil {
		return fail(err)
	}
	m.watch(s, conn)
	if held != nil {
		held.Touch(now)
		s.Measure()
	}
	m.logger(s).Info("session opened", "network", s.Network, "workspace", s.Workspace, "image", s.Image, "warm", fromPool, "took", time.Since(began))
	return s, nil
}

// describe fills in a record of what was asked for.
func (r *Request) describe(rec *Record, who Caller, now time.Time) {
	rec.State, rec.Principal, rec.Tenant, rec.RootRun = Opening, who.Principal, who.Tenant, who.RootRun
	rec.Network, rec.Workspace, rec.Image = "none", r.Workspace, r.ImageName
	if r.Spec.Egress {
		rec.Network = "egress"
	}
	rec.MemMB = r.Spec.MemBytes >> 20
	rec.Created, rec.LastUsed, rec.Deadline = now, now, now.Add(r.TTL)
}

// obtain returns a container whose agent has been greeted: a warm one, if one fits
// and is alive, or a new one. If it fails, free is called when no container is left.
func (m *Manager) obtain(ctx context.Context, req Request, describe func(*Record), free func()) (w warm, conn *host.Conn, fromPool bool, err error) {
	if req.Pooled && req.Workspace == "" {
		if w, fromPool = m.takeWarm(req.Spec.Image); fromPool {
			describe(&w.rec)
			if conn, err = m.greet(ctx, w, req.Env); err == nil {
				return w, conn, true, nil
			}
			m.remove(w.rec, nil) // it died while it waited
		}
	}
	rec := Record{ID: NewID(), Key: rand.Text()}
	describe(&rec)
	select {
	case m.openings <- struct{}{}:
	case <-ctx.Done():
		free()
		return warm{}, nil, false, ctx.Err()
	}
	w, err = m.start(ctx, rec, req.Spec, free)
	<-m.openings
	if err != nil {
		return warm{}, nil, false, err
	}
	if conn, err = m.greet(ctx, w, req.Env); err != nil {
		m.remove(w.rec, m.leave(w.rec, free))
	}
	return w, conn, false, err
}

func (m *Manager) takeWorkspace(ctx context.Context, principal, name string) (*workspace.Held, error) {
	if m.cfg.Workspaces == nil {
		return nil, errors.New("durable workspaces are off: the operator has not set SANDBOX_WORKSPACE_ROOT; open the session without workspace")
	}
	key := workspace.Key(principal, name)
	m.mu.Lock()
	leaving := m.leaving[key]
	m.mu.Unlock()
	if leaving != nil {
		// Its last session was closed and its container is about to be gone.
		select {
		case <-leaving:
		case <-time.After(leavePatience):
			return nil, workspace.ErrBusy
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	held, err := m.cfg.Workspaces.Take(ctx, principal, name)
	if err != nil {
		return nil, err
	}
	// An adopted session may have it without its lock.
	m.mu.Lock()
	taken := m.leaving[key] != nil
	for _, s := range m.sessions {
		taken = taken || s.Principal == principal && s.Workspace == name
	}
	m.mu.Unlock()
	if taken {
		held.Discard()
		return nil, workspace.ErrBusy
	}
	return held, nil
}

// leave keeps a record's workspace from other sessions until its container is gone; the
// returned function, to be called then, gives it free.
func (m *Manager) leave(rec Record, free func()) (gone func()) {
	if rec.Workspace == "" {
		return free
	}
	key, left := workspace.Key(rec.Principal, rec.Workspace), make(chan struct{})
	m.mu.Lock()
	m.leaving[key] = left
	m.mu.Unlock()
	return func() {
		free()
		m.mu.Lock()
		if m.leaving[key] == left {
			delete(m.leaving, key)
		}
		m.mu.Unlock()
		close(left)
	}
}

// start writes the record, then makes and starts its container. If it fails, free is
// called when none is left.
func (m *Manager) start(ctx context.Context, rec Record, spec engine.Spec, free func()) (warm, error) {
	spec.Name = "loomcycle-" + rec.ID
	spec.Labels = map[string]string{
		engine.LabelManaged: "1", engine.LabelInstance: m.cfg.Store.Instance, engine.LabelSession: rec.ID,
		engine.LabelPrincipal: rec.Principal, engine.LabelRun: rec.RootRun,
	}
	if rec.State == Pooled {
		spec.Labels[engine.LabelPool] = "1"
	}
	if err := m.cfg.Store.Put(rec); err != nil {
		free()
		return warm{}, err
	}
	fail := func(err error) (warm, error) {
		m.remove(rec, m.leave(rec, free))
		if spec.Workspace != "" && strings.Contains(err.Error(), filepath.Dir(filepath.Dir(spec.Workspace))) {
			err = &pathless{err, spec.Workspace}
		}
		return warm{}, err
	}
	id, err := m.cfg.Engine.Create(ctx, spec)
	if err != nil {
		rec.Container = spec.Name // it may be there all the same
		return fail(err)
	}
	rec.Container = id
	if err := m.cfg.Engine.Start(ctx, id); err != nil {
		return fail(err)
	}
	rw, err := m.cfg.Engine.Attach(ctx, id)
	if err != nil {
		return fail(err)
	}
	return warm{rec, rw, spec.Image}, nil
}

// pathless keeps a workspace's path, in the engine's words, for the log: the caller of
// sandbox_open need not know it.
type pathless struct {
	err  error
	path string // ROOT/PRINCIPAL/NAME
}

func (e *pathless) Error() string { return e.err.Error() }
func (e *pathless) Unwrap() error { return e.err }

// Public is what the caller is told.
func (e *pathless) Public() string {
	text := e.Error()
	if p := (interface{ Public() string })(nil); errors.As(e.err, &p) {
		text = p.Public()
	}
	for path := e.path; ; path = filepath.Dir(path) {
		text = strings.ReplaceAll(text, path, "the workspace's directory")
		if path == filepath.Dir(filepath.Dir(e.path)) {
			return text
		}
	}
}

func (m *Manager) greet(ctx context.Context, w warm, env map[string]string) (*host.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	return host.Dial(ctx, w.rw, w.rec.Key, env)
}

// Get returns the caller's session. Another's is looked up and refused in the
// same way and time as one that does not exist.
func (m *Manager) Get(who Caller, id string) (*Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sessions[id]; s != nil && s.Principal == who.Principal {
		return s, nil
	}
	for _, e := range m.epitaphs {
		if e.id == id && e.principal == who.Principal {
			return nil, e.err
		}
	}
	return nil, ErrUnknown
}

// List returns the caller's sessions, oldest first.
func (m *Manager) List(who Caller) []*Session {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*Session
	for _, s := range m.sessions {
		if s.Principal == who.Principal {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b *Session) int { return a.Created.Compare(b.Created) })
	return out
}

// CloseRun closes the caller's sessions of a run tree and says how many it closed. What
// is being opened in it fails.
func (m *Manager) CloseRun(who Caller, rootRun string) int {
	if rootRun == "" {
		return 0
	}
	m.mu.Lock()
	for o := range m.opens {
		if o.who.Principal == who.Principal && o.who.RootRun == rootRun {
			o.cancel(byCloseRun)
		}
	}
	m.mu.Unlock()
	var wg sync.WaitGroup
	var n atomic.Int64
	for _, s := range m.List(who) {
		if s.RootRun == rootRun {
			wg.Go(func() {
				if m.CloseSession(s, byCloseRun) {
					n.Add(1)
				}
			})
		}
	}
	wg.Wait()
	return int(n.Load())
}

// CloseSession ends a session: its processes before it returns, its container
// soon after. It says whether this call did: closing it again does nothing.
func (m *Manager) CloseSession(s *Session, why *Ended) bool {
	if !s.close(why, nil) {
		return false
	}
	m.finish(s)
	return true
}

// finish ends a session that was just marked as over.
func (m *Manager) finish(s *Session) {
	s.mu.Lock()
	conn, why := s.conn, s.ended
	s.mu.Unlock()
	if !why.asked {
		m.bury(s, why)
	}
	gone := m.leave(s.Record, func() {
		if s.held != nil {
			s.held.Touch(m.cfg.Now())
			s.held.Close()
		}
	})
	m.mu.Lock()
	delete(m.sessions, s.ID)
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(m.ctx, shutdownTimeout)
	defer cancel()
	rec := s.Record
	rec.State = Closing
	if err := m.cfg.Store.Put(rec); err != nil {
		m.logger(s).Error("a closing session's record was not written", "error", err)
	}
	if conn == nil || conn.Shutdown(ctx) != nil {
		kctx, cancel := context.WithTimeout(m.ctx, shutdownTimeout)
		if err := m.cfg.Engine.Kill(kctx, s.Container); err != nil {
			m.logger(s).Warn("killing a closed session's container is left to its removal", "error", err)
		}
		cancel()
	}
	if conn != nil {
		conn.Close()
	}
	m.release(s.Principal)
	if m.cfg.Observe.Closed != nil {
		m.cfg.Observe.Closed(why.Reason)
	}
	m.logger(s).Info("session closed", "reason", why.Reason, "age", m.cfg.Now().Sub(s.Created))
	m.remove(rec, gone)
}

// remove hands a container to the removers; done is called when it is gone.
func (m *Manager) remove(rec Record, done func()) {
	if rec.Container == "" {
		rec.Container = "loomcycle-" + rec.ID
	}
	if done == nil {
		done = func() {}
	}
	m.removing.add(rec)
	select {
	case m.removals <- removal{rec, done}:
	default:
		m.wg.Go(func() {
			select {
			case m.removals <- removal{rec, done}:
			case <-m.ctx.Done(): // the record is left for the next sidecar
			}
		})
	}
}

// remover removes one container after the other, and waits for none that is stuck.
func (m *Manager) remover() {
	for {
		select {
		case <-m.ctx.Done():
			return
		case r := <-m.removals:
			ended := make(chan struct{})
			m.wg.Go(func() {
				defer close(ended)
				m.removeNow(r)
			})
			select {
			case <-ended:
			case <-time.After(removePatience):
			}
		}
	}
}

// removeNow removes a container, then its record. It is tried again for as long as
// the engine does not let it.
func (m *Manager) removeNow(r removal) {
	ctx, cancel := context.WithTimeout(m.ctx, removeTimeout)
	defer cancel()
	err := m.cfg.Engine.Remove(ctx, r.rec.Container)
	if err == nil {
		err = m.cfg.Store.Delete(r.rec.ID)
	}
	if err == nil {
		m.removing.gone(r.rec)
		r.done()
		return
	}
	if m.ctx.Err() != nil {
		return
	}
	m.cfg.Log.Warn("a session's container could not be removed yet", "session", r.rec.ID, "error", err)
	m.wg.Go(func() {
		select {
		case <-time.After(2 * time.Second):
			m.remove(r.rec, r.done)
		case <-m.ctx.Done():
		}
	})
}

// watch looks at a session whose connection ended by itself: either its
// container died, or the engine let go of it and the next use reconnects.
func (m *Manager) watch(s *Session, c *host.Conn) {
	looked := make(chan struct{})
	s.mu.Lock()
	if s.watched == nil {
		s.watched = map[*host.Conn]chan struct{}{}
	}
	s.watched[c] = looked
	s.mu.Unlock()
	m.wg.Go(func() {
		defer func() {
			s.mu.Lock()
			delete(s.watched, c)
			s.mu.Unlock()
			close(looked)
		}()
		select {
		case <-m.ctx.Done():
			return
		case <-c.Done():
		}
		if s.Over() != nil {
			return
		}
		ctx, cancel := context.WithTimeout(m.ctx, 10*time.Second)
		defer cancel()
		// The engine notices a dead container a moment after its stdio has ended.
		for range 20 {
			if m.died(ctx, s) != nil {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			s.mu.Lock()
			healed := s.conn != nil && s.conn != c
			s.mu.Unlock()
			if healed {
				return
			}
		}
	})
}

// died returns why a session is over when its container does not run, and
// closes it then. An engine that does not answer proves nothing.
func (m *Manager) died(ctx context.Context, s *Session) error {
	st, ok, err := m.cfg.Engine.Inspect(ctx, s.Container)
	if err != nil {
		if errors.Is(err, engine.ErrUnavailable) {
			return err
		}
		return fmt.Errorf("the session cannot be looked at: %w", err)
	}
	if ok && st.Running {
		return nil
	}
	why := ended("died", "the session has ended: its container is gone; open a new one with sandbox_open")
	switch {
	case ok && st.OOMKilled:
		why = ended("oom", "the session has ended: it ran out of its %d MiB of memory; open a new one, with a larger mem_mb if the operator allows it", s.MemMB)
	case ok && st.GVisor:
		why = ended("died", "the session has ended (its container exited with %d): under gVisor that mostly comes of using up its %d MiB of memory (mem_mb) or its processes and threads (pids); open a new one with sandbox_open, with more if the operator allows it", st.ExitCode, s.MemMB)
	case ok:
		why = ended("died", "the session has ended by itself (its container exited with %d); open a new one with sandbox_open", st.ExitCode)
	}
	m.CloseSession(s, why)
	return s.Over() // maybe it was being closed
}

func (m *Manager) bury(s *Session, why error) {
	now := m.cfg.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.epitaphs = slices.DeleteFunc(m.epitaphs, func(e epitaph) bool { return e.until.Before(now) || e.id == s.ID })
	if len(m.epitaphs) >= maxEpitaphs {
		m.epitaphs = m.epitaphs[1:]
	}
	m.epitaphs = append(m.epitaphs, epitaph{s.ID, s.Principal, why, now.Add(epitaphTTL)})
}

// Touch resets the idle timer.
func (m *Manager) Touch(s *Session) error {
	done, err := s.Use()
	if err == nil {
		done()
	}
	return err
}

func (m *Manager) save(s *Session) {
	s.mu.Lock()
	used := s.lastUsed
	dirty := !used.Equal(s.saved)
	s.saved = used
	s.mu.Unlock()
	if dirty {
		if err := m.cfg.Store.Touch(s.ID, used); err != nil {
			m.logger(s).Error("a session's last use was not written", "error", err)
		}
	}
}

func (m *Manager) logger(s *Session) *slog.Logger {
	return m.cfg.Log.With("session", s.ID, "principal", s.Principal, "run", s.RootRun)
}

// Count returns how many sessions are open and how many warm containers wait.
func (m *Manager) Count() (open, pooled int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.sessions), len(m.pool)
}

// All returns every open session.
func (m *Manager) All() []*Session {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*Session, 0, len(m.sessions))
	for _, s := range m.sessions {
		out = append(out, s)
	}
	return out
}
