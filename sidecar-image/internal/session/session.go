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
	Principal string // owns sessions
	Tenant    string // a tag
	RootRun   string // a tag: the run tree
}

// ErrUnknown answers an id that the caller may not use, whether it is
// another's or never existed.
var ErrUnknown = errors.New("there is no such session: it has been closed, has expired, or never was; open one with sandbox_open")

// Limits bound a Manager.
type Limits struct {
	Sessions     int
	PerPrincipal int
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
	dialing  chan struct{} // closed when the dial under way has ended
	lastUsed time.Time
	saved    time.Time // when lastUsed was last written
	running  int
	closed   bool

	first     sync.Once // measures what the workspace held before this sidecar had it
	measuring sync.Mutex
	used      int64 // bytes in the workspace when last measured
}

// Use marks the session used and keeps it from idling until the returned
// function is called. It fails when the session has been closed.
func (s *Session) Use() (done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrUnknown
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

// close marks the session closed, once; only may keep it open.
func (s *Session) close(only func() bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || only != nil && !only() {
		return false
	}
	s.closed = true
	return true
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
		if s.closed {
			s.mu.Unlock()
			return nil, ErrUnknown
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
		s.mu.Lock()
		s.dialing = nil
		if err == nil {
			s.conn = c
			if s.closed {
				c.Close()
			}
		}
		s.mu.Unlock()
		close(done)
		if err != nil {
			if context.Cause(ctx) == errUnreached {
				err = fmt.Errorf("%w: %w", errUnreached, err)
			}
			return nil, err
		}
		s.m.watch(s, c)
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

// ErrQuota ends what makes a workspace grow above its quota.
type ErrQuota struct{ Used, Quota int64 }

func (e *ErrQuota) Error() string {
	if e.Used == workspace.Unmeasured {
		return fmt.Sprintf("the workspace is nested more than %d directories deep, which its quota (SANDBOX_WORKSPACE_QUOTA_MB) does not allow: delete the deepest", workspace.MaxDepth)
	}
	return fmt.Sprintf("the workspace holds %d MiB and may hold %d MiB (SANDBOX_WORKSPACE_QUOTA_MB): delete something", e.Used>>20, e.Quota>>20)
}

// Quota returns an *ErrQuota when the session's workspace is over its quota,
// by its last measurement.
func (s *Session) Quota() error {
	if s.held == nil || s.m.cfg.Workspaces.Quota() == 0 {
		return nil
	}
	s.first.Do(func() { s.measure() })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used <= s.m.cfg.Workspaces.Quota() {
		return nil
	}
	return &ErrQuota{s.used, s.m.cfg.Workspaces.Quota()}
}

// Guard measures the workspace while a command runs and ends its context with
// an *ErrQuota when it grows above the quota. A command that only deletes is
// let be, unless the tree is too deep to see that. stop ends the guard and measures once more.
func (s *Session) Guard(ctx context.Context) (guarded context.Context, stop func()) {
	if s.held == nil || s.m.cfg.Workspaces.Quota() == 0 {
		return ctx, func() {}
	}
	s.first.Do(func() { s.measure() })
	guarded, cancel := context.WithCancelCause(ctx)
	s.mu.Lock()
	before := s.used
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				s.measure()
				return
			case <-time.After(guardEvery):
				used := s.measure()
				if q := s.m.cfg.Workspaces.Quota(); used > q && (used > before || used == workspace.Unmeasured) {
					cancel(&ErrQuota{used, q})
				}
			}
		}
	}()
	return guarded, func() { close(done); cancel(nil) }
}

const guardEvery = time.Second

// measure walks the workspace, one walk at a time.
func (s *Session) measure() int64 {
	s.measuring.Lock()
	defer s.measuring.Unlock()
	used, err := s.held.Usage()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.used = used
	} else if !errors.Is(err, os.ErrClosed) { // closed under way
		s.m.logger(s).Error("a workspace could not be measured; its last size counts", "workspace", s.Workspace, "error", err)
	}
	return s.used
}
