package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// A sidecar that is killed at random moments under load loses no session that
// was running, be it of before or opened just now, leaks no container, gives no workspace
// to two sessions, and never touches another sidecar's.
func TestKilledSidecar(t *testing.T) {
	rounds := 30
	if testing.Short() {
		rounds = 3
	}
	s := start(t, "runc", map[string]string{"SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": "100", "SANDBOX_ALLOW_ENV_INJECTION": "1", "SANDBOX_WARM_POOL": "1", "SANDBOX_WORKSPACE_ROOT": filepath.Join(openDir(t), "ws")})
	c := s.as(map[string]string{"X-Loom-Root-Run": "run-1", "X-Loom-Sandbox-Env-Gh-Token": "s3cret"})
	const writes = "(while echo x >>log; do sleep 0.01; done) >/dev/null 2>&1 & disown"
	id := c.open(m{})
	c.exec(id, "echo kept > f; sleep 1000 & disown")
	another := s.podmanOut("--runtime", "runc", "run", "-d", "--label", "loomcycle.managed=1", "--label", "loomcycle.instance=another-"+s.env["SANDBOX_INSTANCE"], "--label", "loomcycle.session=sbx-another",
		"--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", s.env["SANDBOX_IMAGE"], "true") // and so it has stopped
	t.Cleanup(func() { _ = s.podman.Command("rm", "-f", another).Run() })
	sessions, lived := map[string]bool{id: true}, 0
	var mu sync.Mutex
	for round := range rounds {
		fresh, opened := "", make(chan struct{}) // one that is opened in this round, and left open
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					switch worker {
					case 0: // a command that is under way when the sidecar dies
						_, _ = c.try(ctx, "sandbox_exec", m{"session_id": id, "command": "exec -a orphan sleep 500"})
					case 1:
						_, _ = c.try(ctx, "sandbox_exec", m{"session_id": id, "command": "true"})
					case 2: // opens and closes all the time
						a, err := c.try(ctx, "sandbox_open", m{"mem_mb": 64, "tmpfs_mb": 8})
						if err != nil || a.IsError {
							continue
						}
						other := a.Structured["session_id"].(string)
						mu.Lock()
						sessions[other] = true
						mu.Unlock()
						if fresh == "" {
							fresh = other
							close(opened)
							continue
						}
						if _, err := c.try(ctx, "sandbox_close", m{"session_id": other}); err == nil {
							mu.Lock()
							delete(sessions, other)
							mu.Unlock()
						}
					case 3: // the same with a workspace, to which each session writes until it is gone
						a, err := c.try(ctx, "sandbox_open", m{"mem_mb": 64, "workspace": "w"})
						if err != nil || a.IsError {
							continue
						}
						writer := m{"session_id": a.Structured["session_id"]}
						_, _ = c.try(ctx, "sandbox_exec", m{"session_id": a.Structured["session_id"], "command": writes})
						_, _ = c.try(ctx, "sandbox_close", writer)
					}
				}
			})
		}
		time.Sleep(time.Duration(100+rand.IntN(900)) * time.Millisecond)
		if round%3 == 0 { // on a busy machine an open takes longer than that
			select {
			case <-opened:
			case <-time.After(time.Minute):
			}
		}
		s.kill()
		cancel()
		wg.Wait()
		s.run()
		if a := c.exec(id, "cat f; echo $GH_TOKEN; ps -eo args | grep -c '^[s]leep 1000'"); a.Text != "kept\ns3cret\n1\n" {
			t.Fatalf("round %d: the session answers %+v", round, a)
		}
		for _, open := range c.call("sandbox_list", m{}).Structured["sessions"].([]any) {
			if open := open.(map[string]any); open["workspace"] != nil {
				c.call("sandbox_close", m{"session_id": open["session_id"]})
			}
		}
		writer := ""
		eventually(t, time.Minute, "the workspace is free", func() bool {
			a := c.call("sandbox_open", m{"mem_mb": 64, "workspace": "w"})
			writer, _ = a.Structured["session_id"].(string)
			return !a.IsError
		})
		if a := c.exec(writer, "rm -f log; sleep 0.2; ls"); a.Text != "" {
			t.Errorf("round %d: another session has the workspace too: %+v", round, a)
		}
		c.exec(writer, writes)
		c.call("sandbox_close", m{"session_id": writer})
		if fresh != "" {
			lived++
			if a := c.exec(fresh, "echo $GH_TOKEN"); a.Text != "s3cret\n" {
				t.Fatalf("round %d: a session that was opened just before answers %+v", round, a)
			}
			c.call("sandbox_close", m{"session_id": fresh})
		}
		eventually(t, 30*time.Second, "the orphaned command is killed", func() bool {
			return strings.HasPrefix(c.exec(id, "ps -eo args | grep -c '^[o]rphan' || true").Text, "0")
		})
	}
	if t.Logf("a session was opened in %d of %d rounds", lived, rounds); lived == 0 {
		t.Error("too few sessions were opened to tell what became of them")
	}
	if a := c.call("sandbox_list", m{}); !strings.Contains(a.Text, `"root_run_id":"run-1"`) || strings.Contains(a.Text, "s3cret") {
		t.Errorf("the list after it all: %s", a.Text)
	}
	// Sessions whose close was cut off may still be there, as sessions: never as
	// containers that nobody knows.
	for other := range sessions {
		c.call("sandbox_close", m{"session_id": other})
	}
	for _, open := range c.call("sandbox_list", m{}).Structured["sessions"].([]any) {
		c.call("sandbox_close", m{"session_id": open.(map[string]any)["session_id"]})
	}
	eventually(t, 30*time.Second, "every container but the warm one is removed", func() bool { return len(s.containers()) <= 1 })
	eventually(t, 3*time.Minute, "what podman forgot when it was killed is removed", func() bool { return len(s.forgotten()) == 0 })
	if err := s.podman.Command("container", "exists", another).Run(); err != nil {
		t.Errorf("another sidecar's container was removed: %v", err)
	}
	if strings.Contains(s.log.String(), "s3cret") {
		t.Error("the injected secret is in the log")
	}
}

// forgotten are containers of the runtime that podman made in the storage of the test's
// podman, which does not know them.
func (s *sidecar) forgotten() (ids []string) {
	var all []struct {
		ID, Bundle  string
		Annotations map[string]string
	}
	var err error
	for range 20 { // it fails when another test's container goes while the list is made
		var out []byte
		if out, err = exec.Command("runc", "list", "--format", "json").Output(); err == nil {
			err = json.Unmarshal(out, &all)
			break
		}
	}
	if err != nil {
		s.t.Fatal(err)
	}
	storage := s.podman.Root()
	for _, c := range all {
		// Another manager's are the engine's tests'.
		if strings.HasPrefix(c.Bundle, storage+"/") && c.Annotations["io.container.manager"] == "libpod" && s.podman.Command("container", "exists", c.ID).Run() != nil {
			ids = append(ids, c.ID)
		}
	}
	return ids
}

// The engine goes away and comes back; so do the sessions.
func TestEngineRestart(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	c.exec(id, "echo kept > f")
	if err := syscall.Kill(process(t, s.processes("system service")), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the session answers again", func() bool {
		a := c.exec(id, "cat f")
		if a.IsError && !strings.Contains(a.Text, "engine") && !strings.Contains(a.Text, "session") {
			t.Fatalf("the error is not clear: %+v", a)
		}
		return a.Text == "kept\n"
	})
	if resp, err := http.Get(s.URL + "/readyz"); err != nil || resp.StatusCode != 200 {
		t.Errorf("not ready again: %v %v", resp, err)
	}
}

// A session that was killed with its monitor, as in a container that was, runs for
// podman. It is found to be over, by the next sidecar and by one that runs.
func TestKilledMonitor(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	kill := func(id string) {
		t.Helper()
		monitor, pid, _ := strings.Cut(s.podmanOut("inspect", "loomcycle-"+id, "--format", "{{.State.ConmonPid}} {{.State.Pid}}"), " ")
		for _, p := range []string{monitor, pid} {
			if err := syscall.Kill(process(t, p), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		if state := s.podmanOut("inspect", "loomcycle-"+id, "--format", "{{.State.Running}}"); state != "true" {
			t.Logf("this podman sees it by itself: %s", state)
		}
	}
	adopted, live := c.open(m{}), c.open(m{})
	s.kill()
	kill(adopted)
	s.run()
	kill(live)
	for what, id := range map[string]string{"an adopted one": adopted, "one in use": live} {
		eventually(t, 30*time.Second, what+" is told to be over", func() bool { return strings.Contains(c.exec(id, "true").Text, "the session has ended") })
	}
	eventually(t, 30*time.Second, "their containers are removed", func() bool { return len(s.containers()) == 0 })
}

// A session whose container ended while no sidecar ran, as with a nested podman's own
// container, is told to be lost: to the operator and to its owner alone.
func TestLostMeanwhile(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_AUTH_TOKENS": "other=" + otherToken})
	c := s.as(map[string]string{"X-Loom-Root-Run": "run-9"})
	id, short, kept := c.open(m{}), c.open(m{"ttl_seconds": 1}), c.open(m{})
	eventually(t, 30*time.Second, "the short one ends by its time", func() bool { return len(s.containers()) == 2 })
	s.stop()
	s.podmanOut("kill", "loomcycle-"+id)
	s.run()
	log := s.log.String()
	for _, want := range []string{`"msg":"session lost: its container ended while no sidecar ran`, `"session":"` + id + `","principal":"shared","run":"run-9"`, `"msg":"adopted the sessions of the last sidecar","sessions":1,"lost":1,"other_containers_removed":1`} {
		if !strings.Contains(log, want) {
			t.Errorf("the log does not say %s:\n%s", want, log)
		}
	}
	if strings.Count(log, "session lost") != 1 {
		t.Errorf("%s or %s is told to be lost too", short, kept)
	}
	if a := c.exec(id, "true"); !a.IsError || !strings.HasPrefix(a.Text, "the session has ended with its container, while the sidecar was restarted;") {
		t.Errorf("its owner is told %+v", a)
	}
	if a := s.as(map[string]string{"Authorization": "Bearer " + otherToken}).exec(id, "true"); !strings.HasPrefix(a.Text, "there is no such session") {
		t.Errorf("another is told %+v", a)
	}
	if a := c.exec(kept, "echo alive"); a.Text != "alive\n" {
		t.Errorf("the one that runs: %+v", a)
	}
}

// An engine that hangs is no reason for the sidecar to: it ends when it is told
// to, before it is killed with what it has not written, and the next has the session.
func TestHungEngine(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_WARM_POOL": "1"})
	c := s.client()
	eventually(t, time.Minute, "the pool fills", func() bool { return len(s.containers()) == 1 })
	id := c.open(m{})
	c.exec(id, "echo kept > f")
	pid := process(t, s.processes("system service"))
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	http.DefaultClient.CloseIdleConnections()
	began := time.Now()
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	s.ends(began)
	s.run()
	if a := c.exec(id, "cat f"); a.Text != "kept\n" {
		t.Errorf("the next sidecar's session: %+v", a)
	}
}

// processes lists the pids of the sidecar's children whose command line holds
// text.
func (s *sidecar) processes(text string) string {
	var out []string
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.cmd.Process.Pid))
	for _, task := range tasks {
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", s.cmd.Process.Pid, task.Name()))
		for _, pid := range strings.Fields(string(children)) {
			cmdline, _ := os.ReadFile("/proc/" + pid + "/cmdline")
			if strings.Contains(strings.ReplaceAll(string(cmdline), "\x00", " "), text) {
				out = append(out, pid)
			}
		}
	}
	return strings.Join(out, " ")
}

// process is the one process id that text holds: 0 would stand for the test's own group.
func process(t *testing.T, text string) int {
	t.Helper()
	pid, err := strconv.Atoi(text)
	if err != nil || pid <= 0 {
		t.Fatalf("%q is not the id of one process", text)
	}
	return pid
}

func TestContainerDiesUnderACommand(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	done := make(chan answer)
	go func() { done <- c.exec(id, "sleep 100") }()
	eventually(t, 30*time.Second, "the command runs", func() bool { return strings.Contains(c.exec(id, "ps -eo args").Text, "sleep 100") })
	s.podmanOut("kill", "loomcycle-"+id)
	select {
	case a := <-done:
		if !a.IsError || !strings.HasPrefix(a.Text, "the call was ended: the session has ended by itself (its container exited with 137)") {
			t.Errorf("%+v", a)
		}
	case <-time.After(time.Minute):
		t.Fatal("the call hangs")
	}
	if a := c.exec(id, "true"); !a.IsError || !strings.HasPrefix(a.Text, "the session has ended by itself") {
		t.Errorf("the next call: %+v", a)
	}
	eventually(t, 30*time.Second, "its container is removed", func() bool { return len(s.containers()) == 0 })
}

// Whoever has a command in a session that is closed hears what closed it, not that
// something broke.
func TestClosedUnderACommand(t *testing.T) {
	var over atomic.Bool
	rt := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"alive":%t}`, !over.Load() || !strings.HasSuffix(r.URL.Path, "/ends"))
	}))
	defer rt.Close()
	s := start(t, "runc", map[string]string{"SANDBOX_RUN_STATUS_URL": rt.URL + "/{root_run_id}", "SANDBOX_RUN_STATUS_INTERVAL_SECONDS": "1"})
	for _, tc := range []struct {
		name, run, want string
		args            m
		end             func(c *client, id string)
	}{
		{"sandbox_close", "", "the session was closed with sandbox_close;", nil, func(c *client, id string) { c.call("sandbox_close", m{"session_id": id}) }},
		{"sandbox_close_run", "closed", "the session was closed with sandbox_close_run,", nil, func(c *client, _ string) { c.call("sandbox_close_run", m{"root_run_id": "closed"}) }},
		{"its run's end", "ends", "the session has ended with its run;", nil, func(*client, string) { over.Store(true) }},
		{"its time", "", "the session has ended: its ttl is over;", m{"ttl_seconds": 15}, func(*client, string) {}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := s.as(map[string]string{"X-Loom-Root-Run": tc.run})
			id := c.open(tc.args)
			done := make(chan answer)
			go func() { done <- c.exec(id, "touch begun; sleep 100") }()
			eventually(t, 30*time.Second, "the command runs", func() bool { return c.exec(id, "ls begun").Text == "begun\n" })
			tc.end(c, id)
			select {
			case a := <-done:
				if !a.IsError || !strings.HasPrefix(a.Text, "the call was ended: "+tc.want) {
					t.Errorf("%+v", a)
				}
			case <-time.After(time.Minute):
				t.Fatal("the call hangs")
			}
		})
	}
}

func TestTimesToLive(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_IDLE_TTL_SECONDS": "20"})
	c := s.client()
	idle, short := c.open(m{}), c.open(m{"ttl_seconds": 2})
	busy := c.open(m{})
	if a := c.exec(busy, "sleep 25; echo lived"); a.Text != "lived\n" {
		t.Errorf("a session was reaped under a running command: %+v", a)
	}
	for id, want := range map[string]string{idle: "idle for too long", short: "its ttl is over"} {
		if a := c.exec(id, "true"); !a.IsError || !strings.Contains(a.Text, want) {
			t.Errorf("%+v does not say %q", a, want)
		}
	}
	for range 5 {
		time.Sleep(5 * time.Second)
		if a := c.call("sandbox_touch", m{"session_id": busy}); a.IsError {
			t.Fatalf("a touched session ended: %+v", a)
		}
	}
}

// The runtime is asked whether runs live; only a clear answer closes.
func TestRunLiveness(t *testing.T) {
	var mu sync.Mutex
	answer := func(w http.ResponseWriter, run string) {}
	set := func(f func(w http.ResponseWriter, run string)) { mu.Lock(); defer mu.Unlock(); answer = f }
	asked := make(chan string, 1000)
	rt := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		f := answer
		mu.Unlock()
		f(w, strings.TrimPrefix(r.URL.Path, "/v1/runs/"))
		asked <- r.URL.Path
	}))
	defer rt.Close()
	set(func(w http.ResponseWriter, _ string) { fmt.Fprint(w, `{"status":"running"}`) })
	s := start(t, "runc", map[string]string{"SANDBOX_RUN_STATUS_URL": rt.URL + "/v1/runs/{root_run_id}", "SANDBOX_RUN_STATUS_INTERVAL_SECONDS": "1"})
	one, two := s.as(map[string]string{"X-Loom-Root-Run": "one"}), s.as(map[string]string{"X-Loom-Root-Run": "two"})
	a, b, untagged := one.open(m{}), two.open(m{}), s.client().open(m{})
	polls := func(n int) {
		t.Helper()
		for len(asked) > 0 {
			<-asked
		}
		for range n {
			select {
			case <-asked:
			case <-time.After(time.Minute):
				t.Fatal("the runtime is not asked")
			}
		}
	}
	alive := func(id string) bool { return !s.client().exec(id, "true").IsError }
	for name, f := range map[string]func(http.ResponseWriter, string){
		"running":  func(w http.ResponseWriter, _ string) { fmt.Fprint(w, `{"status":"running"}`) },
		"failing":  func(w http.ResponseWriter, _ string) { w.WriteHeader(500) },
		"nonsense": func(w http.ResponseWriter, _ string) { fmt.Fprint(w, `<html>`) },
		"lying":    func(w http.ResponseWriter, _ string) { w.WriteHeader(302) },
		"empty":    func(w http.ResponseWriter, _ string) { fmt.Fprint(w, `{}`) },
	} {
		set(f)
		polls(3)
		if !alive(a) || !alive(b) || !alive(untagged) {
			t.Fatalf("a runtime that is %s closed a session", name)
		}
	}
	set(func(w http.ResponseWriter, run string) {
		if run == "one" {
			fmt.Fprint(w, `{"status":"completed"}`)
		} else {
			fmt.Fprint(w, `{"status":"running"}`)
		}
	})
	eventually(t, 30*time.Second, "the dead run's session is closed", func() bool { return !alive(a) })
	if !alive(b) || !alive(untagged) {
		t.Error("another run's session was closed")
	}
	rt.Close()
	time.Sleep(2500 * time.Millisecond)
	if !alive(b) {
		t.Error("a runtime that is down closed a session")
	}
}

func TestWarmPool(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_WARM_POOL": "2", "SANDBOX_ALLOW_ENV_INJECTION": "1"})
	eventually(t, time.Minute, "the pool fills", func() bool { return len(s.containers()) == 2 })
	time.Sleep(300 * time.Millisecond)
	c := s.as(map[string]string{"X-Loom-Sandbox-Env-Who": "first"})
	began := time.Now()
	id := c.open(m{})
	took := time.Since(began)
	t.Logf("an open from the pool took %v", took)
	if a := c.exec(id, "echo $WHO; touch used"); a.Text != "first\n" {
		t.Errorf("%+v", a)
	}
	c.call("sandbox_close", m{"session_id": id})
	other := s.client().open(m{})
	if other == id {
		t.Error("a taken container was given out again")
	}
	if a := s.client().exec(other, "echo ${WHO-unset}; ls"); a.Text != "unset\n" {
		t.Errorf("the second session sees %+v", a)
	}
	if a := s.client().call("sandbox_list", m{}); strings.Count(a.Text, "session_id") != 1 {
		t.Errorf("warm containers are listed: %s", a.Text)
	}
}

// openDir is a directory that other users may enter.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestDurableWorkspace(t *testing.T) {
	root := openDir(t)
	s := start(t, "runc", map[string]string{"SANDBOX_WORKSPACE_ROOT": filepath.Join(root, "ws"), "SANDBOX_WORKSPACE_QUOTA_MB": "20", "SANDBOX_MAX_WORKSPACES_PER_PRINCIPAL": "2", "SANDBOX_AUTH_TOKENS": "other=other-token-0123456789"})
	c := s.client()
	a := c.call("sandbox_open", m{"workspace": "w1"})
	if a.Structured["persistent"] != true || a.Structured["workspace"] != "w1" || a.Structured["workspace_path"] != "/work" {
		t.Fatalf("%+v", a)
	}
	id := a.Structured["session_id"].(string)
	if a := c.exec(id, "id -u; stat -c %u:%g /work; echo kept > f"); a.Text != "1000\n1000:1000\n" {
		t.Errorf("%+v", a)
	}
	if a := c.call("sandbox_open", m{"workspace": "w1"}); !a.IsError || !strings.Contains(a.Text, "another session is using this workspace") {
		t.Errorf("a second writer: %+v", a)
	}
	t.Run("another principal's of the same name", func(t *testing.T) {
		other := s.as(map[string]string{"Authorization": "Bearer other-token-0123456789"})
		if a := other.exec(other.open(m{"workspace": "w1"}), "ls -A"); a.Text != "" {
			t.Errorf("it holds %q", a.Text)
		}
	})
	s.kill()
	s.run()
	if a := c.call("sandbox_open", m{"workspace": "w1"}); !a.IsError {
		t.Errorf("a second writer after a restart: %+v", a)
	}
	c.call("sandbox_close", m{"session_id": id})
	again := c.open(m{"workspace": "w1"}) // waits for the first to be gone
	if a := c.exec(again, "cat f"); a.Text != "kept\n" {
		t.Errorf("reopened: %+v", a)
	}
	t.Run("one more than there may be", func(t *testing.T) {
		c.call("sandbox_close", m{"session_id": c.open(m{"workspace": "w2"})})
		if a := c.call("sandbox_open", m{"workspace": "w3"}); !a.IsError || !strings.HasPrefix(a.Text, "no more workspaces: SANDBOX_MAX_WORKSPACES_PER_PRINCIPAL is 2; use one that is there (w1, w2)") {
			t.Errorf("%+v", a)
		}
		c.call("sandbox_close", m{"session_id": c.open(m{"workspace": "w2"})})
		if made, err := os.ReadDir(filepath.Join(root, "ws", "shared")); err != nil || len(made) != 2 {
			t.Errorf("%v, %v", made, err)
		}
	})
	t.Run("a sidecar that is down", func(t *testing.T) {
		eventually(t, 30*time.Second, "closed sessions are gone", func() bool {
			records, _ := filepath.Glob(filepath.Join(s.env["SANDBOX_STATE_DIR"], "sessions", "*.json"))
			return len(records) == 2 // of w1, and of the other principal's
		})
		s.kill()
		defer s.run()
		bin, err := builder()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(bin, "workspaces", "prune", "--older-than", "0h")
		cmd.Env = []string{"SANDBOX_WORKSPACE_ROOT=" + filepath.Join(root, "ws"), "SANDBOX_STATE_DIR=" + s.env["SANDBOX_STATE_DIR"]}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "w2") || strings.Contains(string(out), "w1") {
			t.Errorf("prune leaves alone what its sessions have: %v\n%s", err, out)
		}
	})
	t.Run("closed by its owner", func(t *testing.T) {
		for _, use := range []struct {
			what string
			f    func() answer
		}{
			{"a command", func() answer { return c.exec(again, "cat f") }},
			{"a write", func() answer { return c.call("sandbox_write", m{"session_id": again, "path": "x", "content": "x"}) }},
			{"a read", func() answer { return c.call("sandbox_read", m{"session_id": again, "path": "f"}) }},
			{"the next sidecar", func() answer { s.kill(); s.run(); return c.exec(again, "cat f") }},
			{"the next session", func() answer {
				c.call("sandbox_close", m{"session_id": again})
				again = c.open(m{"workspace": "w1"})
				return c.exec(again, "cat f")
			}},
		} {
			if a := c.exec(again, "chmod 0 /work"); a.IsError {
				t.Fatalf("before %s: %+v", use.what, a)
			}
			if a := use.f(); a.IsError {
				t.Errorf("%s: %+v", use.what, a)
			}
		}
	})
	t.Run("quota", func(t *testing.T) {
		if a := c.call("sandbox_exec", m{"session_id": again, "command": "echo before; head -c 100M /dev/zero > big; sleep 30", "timeout_seconds": 20}); !a.IsError ||
			!strings.HasPrefix(a.Text, "before\n[killed: the workspace holds ") || !strings.Contains(a.Text, "SANDBOX_WORKSPACE_QUOTA_MB") ||
			a.Structured["over_quota"] != true || a.Structured["stdout"] != "before\n" || a.Structured["exit_code"] != 137.0 {
			t.Errorf("a filler: %+v", a)
		}
		if a := c.exec(again, "true"); a.IsError || !strings.HasPrefix(a.Text, "[note: the workspace holds ") {
			t.Errorf("a command above the quota: %+v", a)
		}
		if a := c.call("sandbox_write", m{"session_id": again, "path": "x", "content": "x"}); !a.IsError || !strings.Contains(a.Text, "QUOTA") {
			t.Errorf("a write above the quota: %+v", a)
		}
		if a := c.exec(again, "rm big"); a.IsError || a.Text != "" {
			t.Errorf("a command that deletes what was too much: %+v", a)
		}
		usable := func() bool {
			return !c.call("sandbox_write", m{"session_id": again, "path": "x", "content": "x"}).IsError
		}
		eventually(t, 30*time.Second, "the workspace is usable again", usable)
		for what, script := range map[string]string{
			"deleted and open":            "sleep 60",
			"of a process that is hidden": "cp /bin/sleep s; chmod 111 s; exec ./s 60", // what may not be read is not dumpable
		} {
			a := c.call("sandbox_exec", m{"session_id": again, "command": "exec 3>del; rm del; head -c 100M /dev/zero >&3; " + script, "timeout_seconds": 20})
			if !a.IsError || !strings.Contains(a.Text, "in deleted files that are still open") {
				t.Errorf("%s: %+v", what, a)
			}
			eventually(t, 30*time.Second, "they are gone with the command", usable)
		}
	})
}

// A client that hangs up, or cancels, ends its command.
func TestCancel(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	gone := func() bool { return !strings.Contains(c.exec(id, "ps -eo args").Text, "sleep 77") }
	for name, stop := range map[string]func(cancel context.CancelFunc){
		"hang up": func(cancel context.CancelFunc) { cancel() },
		"notification": func(context.CancelFunc) {
			resp, err := c.post(t.Context(), []byte(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1,"reason":"test"}}`))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			_, _ = c.try(ctx, "sandbox_exec", m{"session_id": id, "command": "setsid sleep 77 & sleep 77"})
			close(done)
		}()
		other := s.as(map[string]string{"Mcp-Session-Id": "other"}) // so that its ids are not the test's
		eventually(t, 30*time.Second, "the command runs", func() bool { return strings.Contains(other.exec(id, "ps -eo args").Text, "sleep 77") })
		stop(cancel)
		eventually(t, 30*time.Second, name+" ends the command", gone)
		<-done
		cancel()
	}

	// Two clients with the same token count their requests from 1: a session id tells
	// whose is cancelled.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	one, two, third := s.as(map[string]string{"Mcp-Session-Id": "one"}), s.as(map[string]string{"Mcp-Session-Id": "two"}), s.as(map[string]string{"Mcp-Session-Id": "third"})
	ended := map[*client]chan answer{one: make(chan answer, 1), two: make(chan answer, 1)}
	for c, command := range map[*client]string{one: "sleep 78", two: "until [ -f go ]; do sleep 0.05; done; echo well"} {
		go func() {
			a, err := c.try(ctx, "sandbox_exec", m{"session_id": id, "command": command})
			if err != nil {
				a.Text = err.Error()
			}
			ended[c] <- a
		}()
	}
	eventually(t, 30*time.Second, "both run", func() bool {
		running := third.exec(id, "ps -eo args").Text
		return strings.Contains(running, "\nsleep 78") && strings.Contains(running, "bash -c until")
	})
	resp, err := one.post(ctx, []byte(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if a := <-ended[one]; a.Text != "the call was cancelled" || !a.IsError || strings.Contains(third.exec(id, "ps -eo args").Text, "\nsleep 78") {
		t.Errorf("the cancelled call: %+v", a)
	}
	third.exec(id, "touch go")
	if a := <-ended[two]; a.Text != "well\n" || a.IsError {
		t.Errorf("the other's call: %+v", a)
	}
}

// small mounts a file system of a known size.
func small(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755,size="+size); err != nil {
		citest.Skip(t, "no file system of a known size can be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// A workspaces' disk that is full says so to who writes to it, costs the others
// nothing, and is as good as new when there is room again.
func TestFullWorkspaceDisk(t *testing.T) {
	dir := small(t, "8m")
	s := start(t, "runc", map[string]string{"SANDBOX_WORKSPACE_ROOT": filepath.Join(dir, "ws")})
	c := s.client()
	id, other := c.open(m{"workspace": "w1"}), c.open(m{})
	if a := c.exec(id, "echo kept > f; head -c 100M /dev/zero > big"); !a.IsError || !strings.Contains(a.Text, "No space left on device") {
		t.Errorf("a filler: %+v", a)
	}
	content := strings.Repeat("x", 1<<20)
	if a := c.call("sandbox_write", m{"session_id": id, "path": "f", "content": content}); !a.IsError || !strings.Contains(a.Text, "no space left on device") {
		t.Errorf("a write: %+v", a)
	}
	if a := c.call("sandbox_write", m{"session_id": other, "path": "f", "content": content}); a.IsError {
		t.Errorf("another session's write: %+v", a)
	}
	c.call("sandbox_close", m{"session_id": id})
	again := c.open(m{"workspace": "w1"})
	if a := c.exec(again, "cat f; ls; rm big"); a.Text != "kept\nbig\nf\n" {
		t.Errorf("the file that could not be replaced, and what lies beside it: %+v", a)
	}
	if a := c.call("sandbox_write", m{"session_id": again, "path": "f", "content": content}); a.IsError {
		t.Errorf("a write when there is room again: %+v", a)
	}
}

// A state disk that is full refuses new sessions with a sentence, costs the open
// ones nothing, leaves no container behind, and heals.
func TestFullStateDisk(t *testing.T) {
	dir := small(t, "1m")
	s := start(t, "runc", map[string]string{"SANDBOX_STATE_DIR": dir})
	c := s.client()
	id := c.open(m{})
	filler := filepath.Join(dir, "filler")
	fill := func() {
		f, err := os.Create(filler)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
	}
	fill()
	if a := c.call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "no space") || !strings.Contains(a.Text, "SANDBOX_STATE_DIR") || strings.Contains(a.Text, dir) {
		t.Fatalf("a full disk is no reason to refuse, not given as one, or told with the path: %+v", a)
	}
	if a := c.exec(id, "echo alive"); a.Text != "alive\n" {
		t.Errorf("an open session under a full disk: %+v", a)
	}
	open := len(c.call("sandbox_list", m{}).Structured["sessions"].([]any))
	eventually(t, time.Minute, "the refused open leaves no container", func() bool { return len(s.containers()) == open })
	c.call("sandbox_close", m{"session_id": id})
	eventually(t, time.Minute, "a closed session's container goes all the same", func() bool { return len(s.containers()) == open-1 })
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	fresh := c.open(m{})
	s.kill()
	s.run()
	if a := c.exec(fresh, "echo alive"); a.Text != "alive\n" {
		t.Errorf("a session that was opened after: %+v", a)
	}
	if a := c.exec(id, "true"); !a.IsError {
		t.Error("a session that was closed under a full disk is back")
	}
}
