package session_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// slow is a real engine that removes nothing, and kills nothing, until its gate is open,
// and makes containers in its own time.
type slow struct {
	*engine.Engine
	gate    chan struct{}
	started func() // called when a container has been started
	removes atomic.Int32
}

func (s *slow) wait(ctx context.Context) error {
	select {
	case <-s.gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *slow) Remove(ctx context.Context, id string) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	defer s.removes.Add(1)
	return s.Engine.Remove(ctx, id)
}

func (s *slow) Start(ctx context.Context, id string) error {
	if s.started != nil {
		defer s.started()
	}
	return s.Engine.Start(ctx, id)
}

// rig is a real engine with a store and workspaces, and the managers that are made of them.
type rig struct {
	*slow
	t     *testing.T
	store *session.Store
	ws    *workspace.Root
	spec  engine.Spec
	dir   string // of the workspaces
	max   int
}

func newRig(t *testing.T, max int) *rig {
	t.Helper()
	p := enginetest.New(t)
	e := enginetest.Open(t, p.Options(t, "runc"))
	img, err := e.ResolveImage(t.Context(), p.Image, false)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{slow: &slow{Engine: e, gate: make(chan struct{})}, t: t, max: max,
		spec: engine.Spec{Image: img.ID, WorkBytes: 16 << 20, TmpBytes: 16 << 20, MemBytes: 128 << 20, CPUs: 1, Pids: 64}}
	if r.store, err = session.OpenStore(filepath.Join(t.TempDir(), "state"), ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.store.Close)
	base := t.TempDir()
	for _, dir := range []string{base, filepath.Dir(base)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	r.dir = filepath.Join(base, "ws")
	if r.ws, err = workspace.New(r.dir, "", engine.SessionUser, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		left, _ := e.List(context.Background(), r.store.Instance)
		for _, c := range left {
			_ = e.Remove(context.Background(), c.ID)
		}
	})
	return r
}

func (r *rig) manager() *session.Manager {
	r.t.Helper()
	m, err := session.New(r.t.Context(), session.Config{Engine: r.slow, Store: r.store, Workspaces: r.ws, Log: slog.New(slog.NewTextHandler(r.t.Output(), nil)),
		Limits:  session.Limits{Sessions: 10, PerPrincipal: r.max, IdleTTL: time.Hour, Opening: 4},
		Default: func(context.Context) (engine.Spec, error) { return r.spec, nil }})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(m.Close)
	return m
}

func (r *rig) containers() int {
	r.t.Helper()
	all, err := r.List(r.t.Context(), r.store.Instance)
	if err != nil {
		r.t.Fatal(err)
	}
	return len(all)
}

func (r *rig) run(s *session.Session, command string) error {
	c, err := s.Conn(r.t.Context())
	if err != nil {
		return err
	}
	_, exit, err := c.Exec(r.t.Context(), wire.Exec{Command: command, Timeout: 30 * time.Second, MaxOutput: 1024}, nil, nil)
	if err == nil && exit.Code != 0 {
		err = errors.New("it fails")
	}
	return err
}

var alice = session.Caller{Principal: "alice"}

// A sidecar that was killed between the record of a close and the kill: the workspace is
// nobody's until the container that still writes to it is gone.
func TestNoTwoWritersAfterAKilledClose(t *testing.T) {
	r := newRig(t, 5)
	m := r.manager()
	s, err := m.Open(t.Context(), alice, session.Request{Spec: r.spec, Workspace: "ws", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.run(s, "(while echo x >>log; do sleep 0.02; done) >/dev/null 2>&1 & disown"); err != nil {
		t.Fatal(err)
	}
	rec := s.Record
	m.Close()
	rec.State = session.Closing
	if err := r.store.Put(rec); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(r.dir, "alice", "ws", "log")
	size := func() int64 {
		st, err := os.Stat(log)
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	m = r.manager()
	before := size()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := m.Open(ctx, alice, session.Request{Spec: r.spec, Workspace: "ws", TTL: time.Hour}); err == nil {
		t.Error("the next session has the workspace beside the last one")
	}
	if size() == before {
		t.Error("the last session does not write, so this test tells nothing")
	}
	close(r.gate)
	if s, err = m.Open(t.Context(), alice, session.Request{Spec: r.spec, Workspace: "ws", TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	before = size()
	if err := r.run(s, "sleep 0.5; test -s log"); err != nil {
		t.Error(err)
	}
	if size() != before {
		t.Error("another session still writes")
	}
}

// Who opens and closes faster than the engine removes waits for it, and no other does.
func TestRemovalsBoundOpens(t *testing.T) {
	const most = 2
	r := newRig(t, most)
	m := r.manager()
	opened := 0
	for range 3 * most {
		patience := 2 * time.Minute
		if opened > most { // there is no room
			patience = 5 * time.Second
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		s, err := m.Open(ctx, alice, session.Request{Spec: r.spec, TTL: time.Hour})
		cancel()
		if err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			break
		}
		opened++
		m.CloseSession(s, session.ByClose)
	}
	if n := r.containers(); opened != most+1 || n != opened {
		t.Errorf("%d were opened and closed, and there are %d containers", opened, n)
	}
	other, err := m.Open(t.Context(), session.Caller{Principal: "bob"}, session.Request{Spec: r.spec, TTL: time.Hour})
	if err != nil {
		t.Errorf("another's: %v", err)
	} else if err := r.run(other, "true"); err != nil {
		t.Error(err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := m.Open(t.Context(), alice, session.Request{Spec: r.spec, TTL: time.Hour})
		waiting <- err
	}()
	select {
	case err := <-waiting:
		t.Fatalf("it does not wait: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	close(r.gate)
	if err := <-waiting; err != nil {
		t.Error(err)
	}
}

// A run that is closed while a session of it is being opened, up to the last moment, has
// none after, nor a container, nor a workspace that was made for it.
func TestRunClosedUnderAnOpen(t *testing.T) {
	r := newRig(t, 5)
	close(r.gate)
	m := r.manager()
	who := session.Caller{Principal: "alice", RootRun: "run"}
	r.started = func() {
		if n := m.CloseRun(who, "run"); n != 0 {
			t.Errorf("%d sessions were closed", n)
		}
	}
	ctx, done := m.Begin(t.Context(), who)
	_, err := m.Open(ctx, who, session.Request{Spec: r.spec, Workspace: "ws", TTL: time.Hour})
	if over := (*session.Ended)(nil); !errors.As(done(err), &over) || over.Reason != "run" {
		t.Errorf("its caller is told %v", err)
	}
	if left := m.List(who); len(left) > 0 {
		t.Errorf("%d sessions of it are open", len(left))
	}
	for end := time.Now().Add(2 * time.Minute); r.removes.Load() == 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		_, err := os.Stat(filepath.Join(r.dir, "alice", "ws"))
		if os.IsNotExist(err) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the workspace is still there (%v)", err)
		}
	}
	if n := r.containers(); n != 0 {
		t.Errorf("%d containers are left", n)
	}
	r.started = nil
	ctx, done = m.Begin(t.Context(), who)
	s, err := m.Open(ctx, who, session.Request{Spec: r.spec, TTL: time.Hour})
	if err = done(err); err != nil {
		t.Fatalf("the next of the run: %v", err)
	}
	if err := r.run(s, "true"); err != nil {
		t.Error(err)
	}
	if n := m.CloseRun(who, "run"); n != 1 {
		t.Errorf("%d sessions were closed", n)
	}
}

// A container that dies under a write leaves the old file in its workspace, and nothing else
// where the file system can make files without a name.
func TestKilledUnderAWrite(t *testing.T) {
	r := newRig(t, 5)
	close(r.gate)
	m := r.manager()
	s, err := m.Open(t.Context(), alice, session.Request{Spec: r.spec, Workspace: "ws", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.run(s, "echo old >f"); err != nil {
		t.Fatal(err)
	}
	rw, err := r.Connect(t.Context(), s.Container)
	if err != nil {
		t.Fatal(err)
	}
	defer rw.Close()
	out, in := wire.NewWriter(rw), wire.NewReader(rw)
	half := make([]byte, wire.MaxData)
	for _, err := range []error{
		out.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: s.Key}),
		out.WriteJSON(wire.TWrite, 1, wire.Write{Path: "f", Size: int64(2 * len(half))}),
		out.Write(wire.TData, 1, half),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for {
		f, err := in.Read()
		if err != nil || f.Type == wire.TError {
			t.Fatalf("%s, %v", f.Payload, err)
		}
		if f.Type == wire.TGrant {
			break // half of it is in the file
		}
	}
	if err := r.Kill(t.Context(), s.Container); err != nil {
		t.Fatal(err)
	}
	for _, err := in.Read(); err == nil; _, err = in.Read() {
	}
	most := 1
	if f, err := os.OpenFile(r.dir, os.O_WRONLY|unix.O_TMPFILE, 0o600); err == nil {
		f.Close()
	} else {
		t.Logf("files without a name: %v", err)
		most = 2
	}
	left, err := os.ReadDir(filepath.Join(r.dir, "alice", "ws"))
	if b, _ := os.ReadFile(filepath.Join(r.dir, "alice", "ws", "f")); err != nil || len(left) != most || string(b) != "old\n" {
		t.Errorf("there are %v with %q, %v", left, b, err)
	}
}

// An engine that cannot mount a workspace names its path to the operator alone.
func TestUnmountableWorkspaceTellsNoPath(t *testing.T) {
	r := newRig(t, 5)
	close(r.gate)
	host := filepath.Join(t.TempDir(), "elsewhere") // podman makes what is not there
	if err := os.WriteFile(host, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.ws, err = workspace.New(r.dir, host, engine.SessionUser, 0); err != nil {
		t.Fatal(err)
	}
	_, err = r.manager().Open(t.Context(), alice, session.Request{Spec: r.spec, Workspace: "ws", TTL: time.Hour})
	var p interface{ Public() string }
	if err == nil || !strings.Contains(err.Error(), host) || !errors.As(err, &p) || strings.Contains(p.Public(), host) || !strings.Contains(p.Public(), "the workspace's directory") {
		t.Errorf("%v", err)
	}
}
