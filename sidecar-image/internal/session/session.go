// Package session keeps the sandbox sessions: who owns which, when each ends,
// and that no container outlives its record or a record its container.
package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// Engine is what a Manager needs of a container engine.
type Engine interface {
	Create(ctx context.Context, s engine.Spec) (id string, err error)
	Start(ctx context.Context, id string) error
	Attach(ctx context.Context, id string) (io.ReadWriteCloser, error)
	Connect(ctx context.Context, id string) (io.ReadWriteCloser, error)
	Inspect(ctx context.Context, id string) (engine.State, bool, error)
	List(ctx context.Context, instance string) ([]engine.State, error)
	Kill(ctx context.Context, id string) error
	Remove(ctx context.Context, id string) error
}

// Caller is who makes a call, from its request alone.
type Caller struct {
	Principal string // owns sessions; TENANT/NAME where both are attested
	Tenant    string // a tag
	RootRun   string // a tag: the run tree
}

// Owners are those whose part of what all share a principal's use counts for: itself,
// and its tenant where that is attested. No tenant is named as a principal is.
func Owners(principal string) []string {
	if tenant, _, attested := strings.Cut(principal, "/"); attested {
		return []string{principal, tenant + "/"}
	}
	return []string{principal}
}

// ErrUnknown answers an id that the caller may not use, whether it is
// another's or never existed.
var ErrUnknown = errors.New("there is no such session: it has been closed, has expired, or never was; open one with sandbox_open")

// Ended says why a session is over.
type Ended struct {
	Reason string // one word, for metrics and the log
	asked  bool   // by a call of its owner, who needs no telling after
	why    error
}

func (e *Ended) Error() string { return e.why.Error() }
func (e *Ended) Unwrap() error { return e.why }

func ended(reason, format string, args ...any) *Ended {
	return &Ended{Reason: reason, why: fmt.Errorf(format, args...)}
}

// What calls close sessions with.
var (
	ByClose    = &Ended{"closed", true, errors.New("the session was closed with sandbox_close; open another with sandbox_open")}
	byCloseRun = &Ended{"run", true, errors.New("the session was closed with sandbox_close_run, as all of its run; open another with sandbox_open")}
)

// Limits bound a Manager.
type Limits struct {
	Sessions     int
	PerPrincipal int
	PerTenant    int // of those that are attested
	IdleTTL      time.Duration
	WarmPool     int
	Opening      int // containers started at once
}

// Request is what sandbox_open asks for, after its values have been clamped.
type Request struct {
	Spec      engine.Spec
	ImageName string
	Workspace string
	TTL       time.Duration
	Env       map[string]string
	Pooled    bool // a warm container will do
}

// Config is what a Manager is made of.
type Config struct {
	Engine     Engine
	Store      *Store
	Workspaces *workspace.Root // nil: no durable workspaces
	Limits     Limits
	Default    func(ctx context.Context) (engine.Spec, error) // the shape of warm containers
	Observe    Observer
	Log        *slog.Logger
	Now        func() time.Time
}

// Observer is told what happens, for metrics. Any field may be nil.
type Observer struct {
	Opened func(d time.Duration, warm bool, err error)
	Closed func(reason string)
}

// Session is one open session.
type Session struct {
	Record
	m    *Manager
	held *workspace.Held

	mu       sync.Mutex
	conn     *host.Conn
	dialing  chan struct{}                // closed when the dial under way has ended
	watched  map[*host.Conn]chan struct{} // closed when its end has been looked at
	lastUsed time.Time
	saved    time.Time // when lastUsed was last written
	running  int
	ended    *Ended // nil while it is open

	sized    bool          // the workspace has been measured
	used     int64         // bytes in it when last measured
	nameless int64         // of these, in files that were deleted and are still open
	claim    int64         // what the agent last told of those
	claimed  time.Time     // when it did
	least    int64         // bytes in it since it has been over its quota, at the least
	deep     time.Time     // since when it is nested too deep to be measured; zero when it is not
	walk     chan struct{} // closed when the next walk through it has ended; nil when none is asked for
	walking  chan struct{} // the same of the walk under way; nil when nobody makes any
	patrol   *time.Timer   // asks for the next when nobody does
	looking  sync.Mutex    // by lookAround
	began    time.Time     // the last walk that ended; zero when nobody knows what the file system held then
	level    int64         // bytes in the whole file system since then, at the least
}

// Use marks the session used and keeps it from idling until the returned
// function is called. It fails with an *Ended when the session is over.
func (s *Session) Use() (done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return nil, s.ended
	}
	s.running++
	s.lastUsed = s.m.cfg.Now()
	return func() {
		s.mu.Lock()
		s.running--
		s.lastUsed = s.m.cfg.Now()
		s.mu.Unlock()
	}, nil
}

// close marks the session as over, once; only may keep it open.
func (s *Session) close(why *Ended, only func() bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil || only != nil && !only() {
		return false
	}
	s.ended = why
	return true
}

// Over returns why the session is over, an *Ended, and nil while it is open.
func (s *Session) Over() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended == nil {
		return nil
	}
	return s.ended
}

// Lost is Over for a call that has lost the connection c: it waits until watch has
// looked what became of the container.
func (s *Session) Lost(ctx context.Context, c *host.Conn) error {
	s.mu.Lock()
	looked := s.watched[c]
	s.mu.Unlock()
	if looked != nil {
		select {
		case <-looked:
		case <-ctx.Done():
		}
	}
	return s.Over()
}

// LastUsed is when the session was last used.
func (s *Session) LastUsed() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lastUsed
}

// Expires is when the session ends if it is not used again.
func (s *Session) Expires() time.Time {
	idle := s.LastUsed().Add(s.m.cfg.Limits.IdleTTL)
	if s.Deadline.Before(idle) {
		return s.Deadline
	}
	return idle
}

// Conn returns a live connection to the session's agent, making a new one when
// the last was lost. It finds out when the container has died, and gives an engine
// that hangs no more than connTimeout.
func (s *Session) Conn(ctx context.Context) (*host.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, connTimeout, errUnreached)
	defer cancel()
	for {
		s.mu.Lock()
		if s.ended != nil {
			s.mu.Unlock()
			return nil, s.ended
		}
		if s.conn != nil {
			select {
			case <-s.conn.Done():
				s.conn = nil
			default:
				c := s.conn
				s.mu.Unlock()
				return c, nil
			}
		}
		if wait := s.dialing; wait != nil {
			s.mu.Unlock()
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		done := make(chan struct{})
		s.dialing = done
		s.mu.Unlock()
		c, err := s.reconnect(ctx)
		if err == nil {
			s.m.watch(s, c) // before anybody has it
		}
		s.mu.Lock()
		s.dialing = nil
		if err == nil {
			s.conn = c
			if s.ended != nil {
				c.Close()
			}
		}
		s.mu.Unlock()
		close(done)
		if err != nil {
			if over := s.Over(); over != nil {
				return nil, over // its container is being removed
			}
			if context.Cause(ctx) == errUnreached {
				err = fmt.Errorf("%w: %w", errUnreached, err)
			}
			return nil, err
		}
	}
}

func (s *Session) reconnect(ctx context.Context) (*host.Conn, error) {
	if err := s.m.died(ctx, s); err != nil {
		return nil, err
	}
	rw, err := s.m.cfg.Engine.Connect(ctx, s.Container)
	if err != nil {
		return nil, err
	}
	c, err := host.Dial(ctx, rw, s.Key, nil)
	if err != nil {
		return nil, fmt.Errorf("the session runs but cannot be reached: %w", err)
	}
	return c, nil
}

// ErrQuota ends what makes a workspace grow above its quota. All are in bytes.
type ErrQuota struct {
	Used, Quota int64
	Nameless    int64 // of Used, in files that were deleted and are still open
}

func (e *ErrQuota) Error() string {
	const mib = 1 << 20
	if e.Used == workspace.Unmeasured {
		return fmt.Sprintf("the workspace is nested more than %d directories deep, which its quota (SANDBOX_WORKSPACE_QUOTA_MB) does not allow: delete the deepest", workspace.MaxDepth)
	}
	held, remedy := "", "delete something"
	if n := e.Nameless / mib; n > 0 {
		held, remedy = fmt.Sprintf(", %d MiB of them in deleted files that are still open,", n), "end the processes that have those, or delete something"
	}
	return fmt.Sprintf("the workspace holds %d MiB (a file, directory or link counts %d KiB at least)%s and may hold %d MiB (SANDBOX_WORKSPACE_QUOTA_MB): %s",
		(e.Used+mib-1)/mib, workspace.MinEntry>>10, held, e.Quota/mib, remedy)
}

// overQuota says how much the workspace holds, with s.mu held.
func (s *Session) overQuota() *ErrQuota {
	return &ErrQuota{s.used, s.m.cfg.Workspaces.Quota(), s.nameless}
}

// errGrew is what the owner of a session is told that went on writing.
var errGrew = errors.New("the session was closed: its workspace was over its quota (SANDBOX_WORKSPACE_QUOTA_MB) and went on to grow; open a new session and delete something first")

// deepFor is how long a session may have a workspace that is too deep to be measured,
// to delete it: no longer than what is written between two patrols goes unseen.
const deepFor = patrolEvery

// errUnmeasured says that a command, or its caller, had no time to wait.
var errUnmeasured = errors.New("the workspace is still being measured for its quota; try again in a moment")

const (
	guardEvery     = time.Second
	settlePatience = 2 * time.Second
	measureTimeout = time.Minute
	// patrolEvery is how often a workspace is measured in which no command runs:
	// background processes may write. A large one is measured less often.
	patrolEvery  = 10 * time.Second
	patrolFactor = 20 // times what the last walk took
	// patrolAtLeast is how often it is while the file system does not fill, by which a
	// sidecar with many idle sessions would walk for nothing. Who grows meanwhile grows
	// into what others delete.
	patrolAtLeast = 10 * time.Minute
	// growth is the part of its quota by which a workspace that is over it may grow
	// further, so that a line of output or an index does not close the session.
	growth = 16
)

func (s *Session) limited() bool { return s.held != nil && s.m.cfg.Workspaces.Quota() > 0 }

// Quota returns an *ErrQuota when the session's workspace is over its quota,
// by its last measurement; it waits for the first one until ctx ends.
func (s *Session) Quota(ctx context.Context) error {
	if !s.limited() {
		return nil
	}
	s.mu.Lock()
	sized, first := s.sized, (<-chan struct{})(s.walking)
	s.mu.Unlock()
	if !sized {
		if first == nil {
			first = s.Measure()
		}
		select {
		case <-first:
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", errUnmeasured, context.Cause(ctx))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used <= s.m.cfg.Workspaces.Quota() {
		return nil
	}
	return s.overQuota()
}

// UseToWrite is Use for what makes the workspace grow. An *ErrQuota refuses it; for the
// first measurement it waits measureTimeout at most, where a command has its own time.
func (s *Session) UseToWrite(ctx context.Context) (done func(), err error) {
	if done, err = s.Use(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	if err := s.Quota(ctx); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// Settled is Quota after a command. What was measured under way may no longer be so: a
// workspace that was over its quota then is measured once more, if that takes no more
// than settlePatience.
func (s *Session) Settled(ctx context.Context) error {
	if err := s.Quota(ctx); err == nil || !s.limited() {
		return err
	}
	select {
	case <-s.Measure():
	case <-time.After(settlePatience):
	case <-ctx.Done():
	}
	return s.Quota(ctx)
}

// Guard measures the workspace while a command runs and ends its context with
// an *ErrQuota when it grows above the quota, or becomes too deep to be measured. A
// command that only deletes is let be. It waits for the first measurement until ctx
// ends, but no longer than patience. stop ends the guard and has the workspace
// measured once more.
func (s *Session) Guard(ctx context.Context, patience time.Duration) (guarded context.Context, stop func(), err error) {
	if !s.limited() {
		return ctx, func() {}, nil
	}
	waiting, cancelWait := context.WithTimeout(ctx, patience)
	defer cancelWait()
	if err := s.Quota(waiting); errors.Is(err, errUnmeasured) {
		return nil, nil, err
	}
	guarded, cancel := context.WithCancelCause(ctx)
	s.mu.Lock()
	before := s.used
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(guardEvery):
			}
			select {
			case <-done:
				return
			case <-s.Measure():
			case <-time.After(guardEvery): // what is known of a measurement that takes longer
			}
			s.mu.Lock()
			used, q := s.used, s.m.cfg.Workspaces.Quota()
			if used > q && used > before { // nothing is more than Unmeasured
				if before <= q {
					s.least = 0 // what it writes until it is dead is not held against it
				}
				cancel(s.overQuota())
			}
			s.mu.Unlock()
		}
	}()
	return guarded, func() { close(done); s.Measure(); cancel(nil) }, nil
}

// Measure asks for a walk through the workspace that begins after the call, and
// returns what is closed when it has ended. One walk is made at a time, and all
// who ask meanwhile share the next.
func (s *Session) Measure() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil || !s.limited() {
		done := make(chan struct{})
		close(done)
		return done
	}
	if s.walk == nil {
		s.walk = make(chan struct{})
		if s.walking == nil {
			s.walking = s.walk
			go s.walks()
		}
	}
	return s.walk
}

// walks makes the walks that are asked for, and rests after each for as long as
// it took: one session keeps half a CPU busy at most.
func (s *Session) walks() {
	var took time.Duration
	for {
		s.mu.Lock()
		done := s.walk
		s.walk, s.walking = nil, done
		if done == nil {
			s.lookIn(max(patrolEvery, patrolFactor*took))
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		began := time.Now()
		level, err := s.m.cfg.Workspaces.Level()
		why := s.size(s.usage())
		s.mu.Lock()
		s.began, s.level = began, level
		if err != nil {
			s.began = time.Time{}
		}
		s.mu.Unlock()
		close(done)
		took = time.Since(began)
		if why != nil {
			s.m.CloseSession(s, &Ended{Reason: "quota", why: why})
		}
		time.Sleep(took)
	}
}

// lookIn has lookAround called after a while, with s.mu held.
func (s *Session) lookIn(d time.Duration) {
	if s.patrol != nil {
		s.patrol.Reset(d)
	} else {
		s.patrol = time.AfterFunc(d, s.lookAround)
	}
}

// lookAround makes a walk that no call asks for. Over all sessions few are made at
// once; the walks of calls wait for none of them.
func (s *Session) lookAround() {
	if !s.looking.TryLock() {
		return // one waits for its turn
	}
	defer s.looking.Unlock()
	if s.quiet() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ended == nil {
			s.lookIn(patrolEvery)
		}
		return
	}
	select {
	case s.m.patrols <- struct{}{}:
	case <-s.m.ctx.Done():
		return
	}
	defer func() { <-s.m.patrols }()
	select {
	case <-s.Measure():
	case <-s.m.ctx.Done():
	}
}

// quiet tells whether the workspace can have grown by no more since its last measurement
// than one that is over its quota may: the whole file system has not.
func (s *Session) quiet() bool {
	level, err := s.m.cfg.Workspaces.Level()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.level = min(s.level, level)
	q := s.m.cfg.Workspaces.Quota()
	return err == nil && s.used <= q && level-s.level <= q/growth && time.Since(s.began) < patrolAtLeast
}

// size takes a measurement down, and says why the session has to be closed: its
// workspace grew further while it was over its quota, or stayed too deep.
func (s *Session) size(used, nameless int64, err error) (why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sized = true
	if err != nil {
		if !errors.Is(err, os.ErrClosed) { // closed under way
			s.m.logger(s).Error("a workspace could not be measured; its last size counts", "workspace", s.Workspace, "error", err)
		}
		return nil
	}
	s.used, s.nameless = used, nameless
	q, now := s.m.cfg.Workspaces.Quota(), s.m.cfg.Now()
	if used == workspace.Unmeasured {
		if s.deep.IsZero() {
			s.deep = now
		}
		if now.Sub(s.deep) >= deepFor { // it may have grown all the time
			return fmt.Errorf("the session was closed: %w", s.overQuota())
		}
		return nil
	}
	s.deep = time.Time{}
	switch {
	case used <= q:
		s.least = 0
	case s.least == 0:
		s.least = used
	default:
		if s.least = min(s.least, used); used-s.least > q/growth {
			return errGrew
		}
	}
	return nil
}
