package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// free are workspaces of at most so many bytes, 0 for any, of which the principal p has ws.
func free(t *testing.T, most int64) *workspace.Root {
	t.Helper()
	ws, err := workspace.New(t.TempDir(), "", os.Getuid(), most)
	if err != nil {
		t.Fatal(err)
	}
	h, err := ws.Take(t.Context(), "p", "ws")
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	return ws
}

// quotas opens sessions over workspaces of 1 MiB, one at a time.
func quotas(t *testing.T) (open func() *Session) {
	t.Helper()
	ws := free(t, 1<<20)
	return func() *Session {
		rec := opened(time.Hour)
		rec.Workspace = "ws"
		e := &hung{removed: make(chan string, 10), has: []engine.State{{ID: "c", Running: true, Labels: map[string]string{engine.LabelSession: rec.ID}}}}
		m := manage(t, filepath.Join(t.TempDir(), "state"), Config{Engine: e, Workspaces: ws, Limits: Limits{IdleTTL: time.Hour}}, rec)
		s, err := m.Get(Caller{Principal: "p"}, rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.held.Close)
		return s
	}
}

// told is what the owner of a session is told of it.
func told(s *Session) string {
	if _, err := s.m.Get(Caller{Principal: "p"}, s.ID); err != nil {
		return err.Error()
	}
	return ""
}

// What is told of a workspace is never that it holds no more than it may.
func TestQuotaWords(t *testing.T) {
	const mib = 1 << 20
	for want, e := range map[string]ErrQuota{
		"holds 21 MiB (a file, directory or link counts 4 KiB at least) and may hold 20 MiB":                                                                                    {20*mib + 1, 20 * mib, 0},
		"holds 60 MiB (a file, directory or link counts 4 KiB at least) and may hold 20 MiB (SANDBOX_WORKSPACE_QUOTA_MB): delete something":                                     {60 * mib, 20 * mib, mib - 1},
		"holds 60 MiB (a file, directory or link counts 4 KiB at least), 59 MiB of them in deleted files that are still open, and may hold 20 MiB (SANDBOX_WORKSPACE_QUOTA_MB)": {60 * mib, 20 * mib, 59*mib + 1},
		"nested more than 256 directories deep": {workspace.Unmeasured, 20 * mib, 0},
	} {
		if got := e.Error(); !strings.Contains(got, want) {
			t.Errorf("%q says nothing of %q", got, want)
		}
	}
}

// A session's processes are found by its container, in each layout of cgroups.
func TestContainersOf(t *testing.T) {
	a, b := strings.Repeat("a1", 32), strings.Repeat("b2", 32)
	for cgroup, want := range map[string][]string{
		"0::/libpod_parent/libpod-" + a + "\n":                          {a},
		"0::/machine.slice/libpod-" + a + ".scope/container\n":          {a},
		"0::/system.slice/docker-" + a + ".scope\n":                     {a},
		"12:pids:/docker/" + a + "\n1:name=systemd:/docker/" + a + "\n": {a},
		"0::/docker/" + b + "/libpod_parent/libpod-" + a + "\n":         {a, b}, // nested
		"0::/user.slice/session-1.scope\n":                              nil,
		"0::/machine.slice/libpod-conmon-" + a + ".scope\n":             nil, // no process of the session
	} {
		if got := containersOf(cgroup); !slices.Equal(got, want) {
			t.Errorf("%q: %v", cgroup, got)
		}
	}
}

// Whether a command is killed. One that ends before anybody looks is not, unless it
// takes longer than it should.
const (
	no = iota
	yes
	either
)

// A workspace that was over its quota before this sidecar had it: nothing is
// written to it, and a long deletion is let be. What goes on to grow is killed, and in
// the end its session too.
func TestQuotaOfAnEarlierSession(t *testing.T) {
	open := quotas(t)
	s := open()
	if err := s.Quota(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(s.held.Path, name), make([]byte, 2<<20), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.held.Close()

	var over *ErrQuota
	s = open()
	if err := s.Quota(t.Context()); !errors.As(err, &over) || over.Used < 4<<20 {
		t.Errorf("the reopened workspace is not over its quota: %v", err)
	}
	s.held.Close()
	for _, c := range []struct {
		script string
		killed int
		closed bool
	}{
		{"rm a; sleep 2.5", no, false},
		{"echo result >result; sleep 30", yes, false},
		{"head -c 3000000 /dev/zero >c; sleep 30", yes, true},
		{"head -c 3000000 /dev/zero >d", either, true}, // before anybody looked
		{"(sleep 0.1; head -c 3000000 /dev/zero >e) & sleep 0.2", either, true},
		{"rm *", no, false},
		{"head -c 3000000 /dev/zero >f; sleep 30; head -c 3000000 /dev/zero >g", yes, false}, // for the first time
		{"rm *; for i in {1..300}; do mkdir d && cd d; done; sleep 30", yes, false},
		{"sleep 2.5", no, false}, // it may be deleting
		{"rm -r d; sleep 2.5", no, false},
		{"for i in {1..300}; do touch $i; done; sleep 30", yes, false}, // each takes an inode
	} {
		s = open()
		ctx, stop, err := s.Guard(t.Context(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(ctx, "bash", "-c", c.script)
		cmd.Dir = s.held.Path
		_ = cmd.Run()
		if killed := errors.As(context.Cause(ctx), &over); c.killed != either && killed != (c.killed == yes) {
			t.Errorf("%s: %v", c.script, context.Cause(ctx))
		}
		stop()
		<-s.Measure()
		for end := time.Now().Add(30 * time.Second); c.closed && told(s) == "" && time.Now().Before(end); {
			<-s.Measure() // what is left of the command may have written since
			time.Sleep(time.Millisecond)
		}
		if why := told(s); (why != "") != c.closed || c.closed && !strings.Contains(why, "went on to grow") {
			t.Errorf("%s: its owner is told %q", c.script, why)
		}
		s.held.Close()
	}
}

// A workspace that is too deep to be measured takes nothing, may be deleted, and closes
// its session when it stays, which is not said to hold too much.
func TestDeepWorkspace(t *testing.T) {
	s := quotas(t)()
	if err := exec.Command("bash", "-c", "cd '"+s.held.Path+"'; for i in {1..300}; do mkdir d && cd d; done").Run(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		<-s.Measure()
	}
	if err := s.Quota(t.Context()); err == nil || !strings.Contains(err.Error(), "nested") || told(s) != "" {
		t.Errorf("a write is told %v, the owner %q", err, told(s))
	}
	s.mu.Lock()
	s.deep = s.deep.Add(-deepFor)
	s.mu.Unlock()
	<-s.Measure()
	for end := time.Now().Add(30 * time.Second); told(s) == "" && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if why := told(s); !strings.Contains(why, "closed: the workspace is nested") {
		t.Errorf("its owner is told %q", why)
	}
}

// The walks that no call asks for are few at once, and no call waits for them.
func TestPatrolsAreFew(t *testing.T) {
	first := quotas(t)()
	// Over its quota, so that it is walked through.
	if err := os.WriteFile(filepath.Join(first.held.Path, "a"), make([]byte, 2<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	for range patrolsAtOnce {
		first.m.patrols <- struct{}{}
	}
	s, ended := &Session{Record: first.Record, m: first.m, held: first.held}, make(chan struct{})
	<-s.Measure()
	go func() { s.lookAround(); close(ended) }()
	<-s.Measure()
	select {
	case <-ended:
		t.Error("one more is made")
	case <-time.After(50 * time.Millisecond):
	}
	<-s.m.patrols
	<-ended
}

// A workspace in which nobody works is walked through when its file system has filled,
// when it is over its quota, and every ten minutes.
func TestQuietWorkspaces(t *testing.T) {
	s := quotas(t)()
	<-s.Measure()
	idle := func() { // no walk is under way, and the next look is set
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			s.mu.Lock()
			ok := s.walking == nil && s.patrol != nil
			s.mu.Unlock()
			if ok && s.looking.TryLock() {
				s.looking.Unlock()
				return
			}
			if time.Now().After(end) {
				t.Fatal("a walk does not end")
			}
		}
	}
	const empty, full = 0, 1 << 62 // file systems: what other tests do to the real one is no matter
	for _, c := range []struct {
		what   string
		level  int64 // at the last walk
		ago    time.Duration
		used   int64
		walked bool
	}{
		{"nothing has changed", full, 0, 0, false},
		{"for some time", full, patrolAtLeast / 2, 1 << 20, false},
		{"for long", full, patrolAtLeast, 0, true},
		{"the file system has filled", empty, 0, 0, true},
		{"the workspace is over its quota", full, 0, 1<<20 + 1, true},
		{"it was not measured", full, 0, workspace.Unmeasured, true},
	} {
		idle()
		began := time.Now().Add(-c.ago)
		s.mu.Lock()
		s.began, s.level, s.used = began, c.level, c.used
		s.patrol.Stop()
		s.mu.Unlock()
		s.lookAround()
		idle()
		s.mu.Lock()
		if walked := s.began != began; walked != c.walked {
			t.Errorf("%s: walked is %v", c.what, walked)
		}
		if s.level == full {
			t.Errorf("%s: what was deleted since is not known", c.what)
		}
		if !s.patrol.Stop() {
			t.Errorf("%s: nobody looks again", c.what)
		}
		s.patrol.Reset(patrolEvery)
		s.mu.Unlock()
	}
}

// However many commands end while a walk is under way, one more is made; and nobody
// waits for the first longer than it wants to.
func TestWalksAreShared(t *testing.T) {
	open := quotas(t)
	s := open()
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(s.held.Path, fmt.Sprint(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.held.Close()
	adopted := open()
	s = &Session{Record: adopted.Record, m: adopted.m, held: adopted.held} // which nobody has measured
	s.walking = make(chan struct{})                                        // a walk that takes long
	if _, _, err := s.Guard(t.Context(), 0); !errors.Is(err, errUnmeasured) {
		t.Errorf("a command with no time to wait: %v", err)
	}
	s.walking = nil
	before := runtime.NumGoroutine()
	walks := map[<-chan struct{}]bool{}
	for range 1000 {
		_, stop, err := s.Guard(t.Context(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		stop()
		walks[s.Measure()] = true
	}
	// The guards' own end as they are scheduled.
	for end := time.Now().Add(30 * time.Second); runtime.NumGoroutine() > before+10; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("there are %d goroutines, and were %d", runtime.NumGoroutine(), before)
		}
	}
	if len(walks) > 20 {
		t.Errorf("1000 commands had the workspace walked through %d times", len(walks))
	}
	for walk := range walks {
		<-walk
	}
	if err := s.Quota(t.Context()); err == nil {
		t.Error("3000 empty files are within a quota of 1 MiB")
	}
}

// An agent that answers no more is taken at its last word for a while, and not at all where
// the sidecar sees the session's processes: files that are gone keep no writes away.
func TestLastWord(t *testing.T) {
	now := time.Now()
	s := &Session{m: &Manager{cfg: Config{Now: func() time.Time { return now }}}}
	for i, step := range []struct {
		after    time.Duration
		claim    int64
		answered bool
		seen     int64
		sees     bool
		want     int64
	}{
		{0, 0, false, 0, false, 0},
		{0, 0, false, 5, true, 5},
		{0, 100, true, 0, false, 100},
		{claimFor - 1, 0, false, 7, false, 100},
		{1, 0, false, 7, false, 7},
		{0, 100, true, 200, true, 200},
		{1, 100, true, 0, true, 100}, // of processes that the sidecar does not see
		{1, 0, false, 7, true, 7},
		{1, 0, false, 0, false, 0},
		{1, 100, true, 0, false, 100},
		{1, 0, true, 0, false, 0},
	} {
		now = now.Add(step.after)
		if got := s.hidden(step.claim, step.answered, step.seen, step.sees); got != step.want {
			t.Errorf("step %d: %d, not %d", i, got, step.want)
		}
	}
}

// What the walk found is known before the agent is waited for, which may say nothing.
func TestUsageWithAMuteAgent(t *testing.T) {
	s := quotas(t)()
	if err := s.Quota(t.Context()); err != nil { // its first measurement has ended
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	defer theirs.Close()
	go func() {
		r := wire.NewReader(theirs)
		_, _ = r.Read()
		_ = wire.NewWriter(theirs).WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Unlinked: true})
		for _, err := r.Read(); err == nil; _, err = r.Read() {
		}
	}()
	c, err := host.Dial(t.Context(), ours, "key", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := os.WriteFile(filepath.Join(s.held.Path, "f"), make([]byte, 2<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.conn = c
	s.mu.Unlock()
	began := time.Now()
	if used, nameless, err := s.usage(); err != nil || used < 2<<20 || nameless != 0 {
		t.Errorf("%d bytes, %d of them without a name, %v", used, nameless, err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used < 2<<20 { // usage publishes the walk alone; the rest is size's
		t.Errorf("%d bytes are known", s.used)
	}
}

// A write to a workspace that takes long to be measured has a time of its own, in which
// its session is in use.
func TestWriteToAnUnmeasuredWorkspace(t *testing.T) {
	ws, err := workspace.New(t.TempDir(), "", os.Getuid(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		s := &Session{m: &Manager{cfg: Config{Workspaces: ws, Now: time.Now}}, held: &workspace.Held{}, walking: make(chan struct{})}
		running := func() int {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.running
		}
		began, ended := time.Now(), make(chan error, 1)
		go func() {
			_, err := s.UseToWrite(t.Context())
			ended <- err
		}()
		synctest.Wait()
		if running() != 1 {
			t.Errorf("in use by %d while it waits", running())
		}
		if err := <-ended; !errors.Is(err, errUnmeasured) || time.Since(began) != measureTimeout || running() != 0 {
			t.Errorf("after %v, in use by %d: %v", time.Since(began), running(), err)
		}
		s.sized, s.used = true, 1<<20+1
		var over *ErrQuota
		if _, err := s.UseToWrite(t.Context()); !errors.As(err, &over) || running() != 0 {
			t.Errorf("over its quota: %v", err)
		}
		s.used = 0
		done, err := s.UseToWrite(t.Context())
		if err != nil || running() != 1 {
			t.Fatalf("within its quota: %v", err)
		}
		done()
		if s.close(ByClose, nil); running() != 0 {
			t.Errorf("in use by %d", running())
		}
		if _, err := s.UseToWrite(t.Context()); !errors.Is(err, ByClose) {
			t.Errorf("when it is over: %v", err)
		}
	})
}
