package buildkit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/client/llb"
	digest "github.com/opencontainers/go-digest"
	ocispecs "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/tonistiigi/fsutil"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// fresh is a private daemon in an empty cache folder, stopped after the test. The
// program alone comes from the project's own cache: compiling it takes minutes.
func fresh(t *testing.T, kv map[string]string) (*Daemon, Options, *syncbuf.Buffer) {
	t.Helper()
	canRun(t)
	root, err := TempRoot(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	dir := citest.CacheDir(t, root)
	log := &syncbuf.Buffer{}
	opts := Options{Getenv: env(kv), Log: log, CacheDir: dir, Root: "../.."}
	d, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Remove(context.Background()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("output:\n%s", log)
		}
	})
	return d, opts, log
}

// canRun skips the test where an ordinary user can run no private daemon: root
// gets what is missing.
func canRun(t *testing.T) {
	t.Helper()
	if programs, ids := lacking(); os.Geteuid() != 0 && (len(programs) > 0 || ids != nil) {
		citest.Skip(t, "missing: %q, %v", programs, ids)
	}
}

func shareProgram(t *testing.T, dir string) {
	t.Helper()
	shared, err := cache.Dir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(shared, "bin")
	if err := errors.Join(os.MkdirAll(bin, 0o755), os.Symlink(bin, filepath.Join(dir, "bin"))); err != nil {
		t.Fatal(err)
	}
}

func up(t *testing.T, d *Daemon) *Node {
	t.Helper()
	n, err := d.Up(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func connected(t *testing.T, opts Options) *Builder {
	t.Helper()
	b, err := Connect(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// eventually polls a fact that the kernel or the daemon makes true soon.
func eventually(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %s still not so: %s", limit, what)
		}
	}
}

// leftovers are processes, mounts, cgroups and sockets of a daemon's folder.
func leftovers(t *testing.T, d *Daemon) (found []string) {
	t.Helper()
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		data, _ := os.ReadFile(p)
		if bytes.Contains(data, []byte(d.dir)) {
			found = append(found, "process "+p+": "+string(bytes.ReplaceAll(data, []byte{0}, []byte{' '})))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(mounts, []byte(d.dir)) {
		found = append(found, "a mount below "+d.dir)
	}
	for _, pattern := range []string{"/sys/fs/cgroup/" + d.cgroup(), "/sys/fs/cgroup/*/" + d.cgroup(), d.sock, d.recordPath()} {
		files, _ := filepath.Glob(pattern)
		found = append(found, files...)
	}
	return found
}

func TestDaemonLivesAndHeals(t *testing.T) {
	d, opts, log := fresh(t, nil)
	up(t, d)
	if homes := cache.Daemons(filepath.Dir(opts.CacheDir)); !slices.Equal(homes, []string{d.dir}) {
		t.Errorf("when this test is killed nobody finds its daemon but %q", homes)
	}
	first, ok := d.running()
	if !ok {
		t.Fatal("no process is recorded")
	}
	start := time.Now()
	up(t, d)
	if r, _ := d.running(); r != first {
		t.Fatalf("a second Up started another daemon: %+v, %+v", first, r)
	}
	t.Logf("Up of a running daemon: %s", time.Since(start))

	syscall.Kill(process(t, first.PID), syscall.SIGKILL)
	eventually(t, time.Minute, "the killed daemon is gone", func() bool { return !alive(first) })
	if _, err := os.Stat(d.sock); err != nil {
		t.Fatalf("the test wants a stale socket: %v", err)
	}
	start = time.Now()
	n := up(t, d)
	t.Logf("healed in %s", time.Since(start))
	if second, ok := d.running(); !ok || second.PID == first.PID {
		t.Fatalf("no new daemon after the kill: %+v", second)
	}
	if !strings.HasPrefix(n.Version, "v0.") || n.Arch() == "" || n.Snapshotter == "" {
		t.Errorf("the node is not described: %+v", n)
	}
	if err := d.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := leftovers(t, d); len(l) > 0 {
		t.Errorf("down left %q", l)
	}
	if err := d.Down(t.Context()); err != nil {
		t.Errorf("a second down: %v", err)
	}
	if s := log.String(); strings.Count(s, "started buildkitd") != 2 {
		t.Errorf("not two starts in the log:\n%s", s)
	}
}

// A pid in the record that is somebody else's by now must not be killed.
func TestForeignPidIsLeftAlone(t *testing.T) {
	d, _, _ := fresh(t, nil)
	other := exec.Command("sleep", "infinity") // while buildkitd is compiled, perhaps
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- other.Wait() }()
	defer other.Process.Kill()
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeJSON(d.recordPath(), record{PID: other.Process.Pid, Started: "an earlier boot/1"}); err != nil {
		t.Fatal(err)
	}
	up(t, d)
	if err := d.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-exited:
		t.Errorf("the foreign process was ended: %v", err)
	default:
	}
}

// A daemon in a temporary folder outlives who was killed; it goes with the
// folder, unless somebody uses it.
func TestTempRootStopsDaemons(t *testing.T) {
	_, opts, _ := fresh(t, nil)
	old := filepath.Join(opts.CacheDir, "tmp", "old")
	opts.CacheDir = filepath.Join(old, "cache")
	opts.Private = "killed"
	if err := os.MkdirAll(opts.CacheDir, 0o755); err != nil {
		t.Fatal(err)
	}
	shareProgram(t, opts.CacheDir)
	d, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	n := up(t, d)
	day := time.Now().Add(-25 * time.Hour)
	if err := os.Chtimes(old, day, day); err != nil {
		t.Fatal(err)
	}
	getenv := env(map[string]string{"LOOMCYCLE_CACHE": filepath.Dir(filepath.Dir(old))})
	if _, err := TempRoot(getenv); err != nil || d.PID() == 0 {
		t.Errorf("a daemon in use was stopped, or %v", err)
	}
	n.Close()
	if _, err := TempRoot(getenv); err != nil || d.PID() != 0 {
		t.Errorf("pid %d lives, %v", d.PID(), err)
	}
	if found := leftovers(t, d); len(found) > 0 {
		t.Errorf("left behind: %q", found)
	}
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}

func TestStaleSocketHeals(t *testing.T) {
	d, _, _ := fresh(t, nil)
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.sock, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	up(t, d)
}

// A daemon that is stopped (SIGSTOP) lives but does not answer.
func TestWedgedDaemonIsReplaced(t *testing.T) {
	d, _, _ := fresh(t, nil)
	up(t, d).Close()
	r, _ := d.running()
	tell(t, r.PID, syscall.SIGSTOP)
	up(t, d)
	if again, _ := d.running(); again.PID == r.PID {
		t.Error("the wedged daemon was not replaced")
	}
}

// One that another process builds on may be slow to answer.
func TestBusyDaemonIsWaitedFor(t *testing.T) {
	d, opts, log := fresh(t, nil)
	up(t, d)
	r, _ := d.running()
	tell(t, r.PID, syscall.SIGSTOP)
	opts.Log = writerFunc(func(line []byte) (int, error) {
		if strings.Contains(string(line), "is in use: waiting") {
			tell(t, r.PID, syscall.SIGCONT)
		}
		return log.Write(line)
	})
	other, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	up(t, other)
	if again, _ := d.running(); again != r || !strings.Contains(log.String(), "is in use: waiting") {
		t.Errorf("a daemon in use was replaced: %+v, %+v", r, again)
	}
}

// One that does not answer is not waited for longer than somebody uses it.
func TestWedgedDaemonIsReplacedWhenItsUserLeaves(t *testing.T) {
	d, opts, log := fresh(t, nil)
	user := up(t, d)
	r, _ := d.running()
	tell(t, r.PID, syscall.SIGSTOP)
	left := make(chan time.Time, 1)
	opts.Log = writerFunc(func(line []byte) (int, error) {
		if strings.Contains(string(line), "is in use: waiting") {
			user.Close()
			left <- time.Now()
		}
		return log.Write(line)
	})
	other, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	up(t, other)
	select {
	case at := <-left:
		if took := time.Since(at); took >= usedTimeout {
			t.Errorf("it was replaced %s after its user had left", took)
		}
	default:
		t.Error("it was not waited for while it was in use")
	}
	if again, _ := d.running(); again == r {
		t.Error("the wedged daemon was not replaced")
	}
}

// process is pid, which is one process's: 0 would stand for the test's own group.
func process(t *testing.T, pid int) int {
	t.Helper()
	if pid <= 0 {
		t.Fatalf("%d is not the id of one process", pid)
	}
	return pid
}

// tell sends a signal to a process and what it started: a rootless daemon is a grandchild.
func tell(t *testing.T, pid int, signal syscall.Signal) {
	t.Helper()
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", process(t, pid)))
	for _, thread := range threads {
		children, _ := os.ReadFile(thread)
		for _, c := range strings.Fields(string(children)) {
			var p int
			fmt.Sscan(c, &p)
			tell(t, p, signal)
		}
	}
	if err := syscall.Kill(pid, signal); err != nil {
		t.Fatal(err)
	}
}

func TestConcurrentStartsShareOneDaemon(t *testing.T) {
	d, opts, log := fresh(t, nil)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			b, err := Connect(t.Context(), opts)
			if err != nil {
				t.Error(err)
				return
			}
			b.Close()
		})
	}
	wg.Wait()
	if n := strings.Count(log.String(), "started buildkitd"); n != 1 {
		t.Errorf("%d daemons were started", n)
	}
	if d.PID() == 0 {
		t.Error("the daemon is not up")
	}
}

func TestCancelledStartLeavesNothing(t *testing.T) {
	d, _, _ := fresh(t, nil)
	if _, err := d.plan(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancelled := func() error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			for d.PID() == 0 && ctx.Err() == nil { // as soon as the process is there
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		n, err := d.Up(ctx)
		if err == nil { // it was up before it could be cancelled
			n.Close()
			if err := d.Down(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return err
	}
	err := cancelled()
	for try := 1; err == nil; try++ {
		if try == 20 {
			t.Fatal("the daemon is always up before it can be cancelled")
		}
		err = cancelled()
	}
	if l := leftovers(t, d); len(l) > 0 {
		t.Errorf("%v; left %q", err, l)
	}
	up(t, d)
}

// Who finds the daemon reserved for a stop is told so.
func TestJoinOfAReservedDaemon(t *testing.T) {
	opts := Options{Getenv: env(nil), Log: t.Output(), CacheDir: t.TempDir(), Root: "../.."}
	d, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	release, used := d.reserve()
	if used {
		t.Fatal("nobody has joined, and it is in use")
	}
	if _, err := d.join(); err == nil || !strings.HasSuffix(err.Error(), "another process is about to stop this buildkitd: try again") {
		t.Errorf("error %v", err)
	}
	release()
	leave, err := d.join()
	if err != nil {
		t.Fatal(err)
	}
	leave()
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A changed configuration replaces a daemon that nobody uses.
func TestChangedConfigurationRestarts(t *testing.T) {
	d, opts, log := fresh(t, nil)
	user := up(t, d)
	before, _ := d.running()
	opts.Getenv = env(map[string]string{"BUILDKIT_MAX_USED_SPACE": "7GB"})
	opts.Log = writerFunc(func(line []byte) (int, error) {
		if strings.Contains(string(line), "restarting") {
			if leave, err := d.join(); err == nil {
				leave()
				t.Error("a process can join a daemon that is about to be stopped")
			}
		}
		return log.Write(line)
	})
	changed, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	up(t, changed).Close()
	if after, _ := d.running(); after != before || !strings.Contains(log.String(), "in use") {
		t.Error("a daemon in use was restarted")
	}
	user.Close()
	n := up(t, changed)
	if after, _ := d.running(); after.PID == before.PID {
		t.Error("the daemon was not restarted")
	}
	workers, err := n.Client.ListWorkers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(workers[0].GCPolicy, func(p client.PruneInfo) bool { return p.MaxUsedSpace == 7<<30 }) {
		t.Errorf("the limit is not in force: %+v", workers[0].GCPolicy)
	}
}

func TestFailedStartSaysWhy(t *testing.T) {
	d, _, _ := fresh(t, map[string]string{"BUILDKIT_MAX_USED_SPACE": "lots"})
	_, err := d.Up(t.Context())
	if err == nil || !strings.Contains(err.Error(), "invalid disk space lots") || !strings.Contains(err.Error(), d.Log()) {
		t.Errorf("%v", err)
	}
	if l := leftovers(t, d); len(l) > 0 {
		t.Errorf("left %q", l)
	}
}

func TestLongSocketPath(t *testing.T) {
	_, opts, _ := fresh(t, nil)
	opts.CacheDir = filepath.Join(opts.CacheDir, strings.Repeat("a-long-folder/", 9))
	if err := os.MkdirAll(opts.CacheDir, 0o755); err != nil {
		t.Fatal(err)
	}
	shareProgram(t, opts.CacheDir)
	if os.Geteuid() != 0 {
		opts.Getenv = env(map[string]string{"XDG_RUNTIME_DIR": t.TempDir()})
	}
	d, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(d.sock, d.dir) || len(d.sock) > 100 {
		t.Fatalf("socket %s for folder %s", d.sock, d.dir)
	}
	t.Cleanup(func() { d.Remove(context.Background()) })
	up(t, d)
	if err := d.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := leftovers(t, d); len(l) > 0 {
		t.Errorf("down left %q", l)
	}
}

// steps compiles the test's program and returns how to run it in a step, and the
// local folders that such a job needs.
func steps(t *testing.T) (run func(name string, args []string, opts ...llb.RunOption) llb.ExecState, locals map[string]fsutil.FS) {
	t.Helper()
	dir := os.Getenv(stepVariable)
	if dir == "" {
		dir = t.TempDir()
		if err := buildStep(dir); err != nil {
			t.Fatal(err)
		}
	}
	fs, err := fsutil.NewFS(dir)
	if err != nil {
		t.Fatal(err)
	}
	run = func(name string, args []string, opts ...llb.RunOption) llb.ExecState {
		program := llb.AddMount("/t", llb.Local("t", llb.WithCustomName("send the test program")), llb.Readonly)
		return llb.Scratch().Run(append(opts, program, llb.Args(append([]string{"/t/step"}, args...)), llb.WithCustomName(name))...)
	}
	return run, map[string]fsutil.FS{"t": fs}
}

func marshal(t *testing.T, s llb.State) *llb.Definition {
	t.Helper()
	def, err := s.Marshal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return def
}

// layer is a state with one file that a step wrote.
func layer(run func(string, []string, ...llb.RunOption) llb.ExecState, name, text string) llb.State {
	return run("["+name+"] write", []string{"write", "/out/" + name, text}, llb.Network(llb.NetModeNone)).AddMount("/out", llb.Scratch())
}

func TestStepsAndNetwork(t *testing.T) {
	d, opts, log := fresh(t, nil)
	run, locals := steps(t)
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer srv.Close()
	b := connected(t, opts)
	// The daemon uses the host's network for steps that don't refuse one: no
	// CNI plugin and no entitlement is needed to download modules.
	online := run("get online", []string{"get", srv.URL}).Root()
	offline := run("look offline", []string{"offline"}, llb.Network(llb.NetModeNone)).Root()
	_, err := b.Solve(t.Context(),
		Job{Name: "online", Definition: marshal(t, online), Opt: client.SolveOpt{LocalMounts: locals}},
		Job{Name: "offline", Definition: marshal(t, offline), Opt: client.SolveOpt{LocalMounts: locals}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"get online", "look offline", "send the test program"} {
		// Without the name of a job: one of the three steps is of both.
		if !strings.Contains(log.String(), name) || strings.Contains(log.String(), "] "+name) {
			t.Errorf("the display lacks %q, or has it as a job's:\n%s", name, log)
		}
	}
	if err := d.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := leftovers(t, d); len(l) > 0 {
		t.Errorf("down after steps left %q", l)
	}
}

func TestCancelEndsTheStep(t *testing.T) {
	d, opts, log := fresh(t, nil)
	run, locals := steps(t)
	b := connected(t, opts)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	def := marshal(t, run("[sleep] sleep", []string{"sleep", opts.CacheDir}).Root())
	done := make(chan error, 1)
	go func() {
		_, err := b.Solve(ctx, Job{Name: "sleep", Definition: def, Opt: client.SolveOpt{LocalMounts: locals}})
		done <- err
	}()
	eventually(t, 5*time.Minute, "the step runs", func() bool { return strings.Contains(log.String(), "step is asleep") })
	if n := activeBuilds(t.Context(), b.def.Client); n != 1 {
		t.Errorf("%d builds are active", n)
	}
	start := time.Now()
	cancel()
	err := <-done
	took := time.Since(start)
	if !errors.Is(err, context.Canceled) || took > time.Minute { // what it waits at most, without load: TestCancelledBeforeTheDaemonAnswers
		t.Errorf("cancelled in %s with %v", took, err)
	}
	eventually(t, time.Minute, "no step's process is left", func() bool { return len(stepProcesses(t, opts.CacheDir)) == 0 })
	t.Logf("cancelled in %s, without a process after %s", took, time.Since(start))
	n := up(t, d)
	eventually(t, time.Minute, "the daemon has closed the build", func() bool { return activeBuilds(t.Context(), n.Client) == 0 })
}

// A daemon that is killed takes its steps along.
func TestKillEndsTheSteps(t *testing.T) {
	d, opts, log := fresh(t, nil)
	run, locals := steps(t)
	b := connected(t, opts)
	def := marshal(t, run("[sleep] sleep", []string{"sleep", opts.CacheDir}).Root())
	done := make(chan error, 1)
	go func() {
		_, err := b.Solve(t.Context(), Job{Name: "sleep", Definition: def, Opt: client.SolveOpt{LocalMounts: locals}})
		done <- err
	}()
	eventually(t, 5*time.Minute, "the step runs", func() bool { return strings.Contains(log.String(), "step is asleep") })
	syscall.Kill(process(t, d.PID()), syscall.SIGKILL)
	if err := <-done; err == nil {
		t.Error("the build succeeded without a daemon")
	}
	eventually(t, time.Minute, "no step's process is left", func() bool { return len(stepProcesses(t, opts.CacheDir)) == 0 })
	up(t, d)
	if err := d.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := leftovers(t, d); len(l) > 0 {
		t.Errorf("down left %q", l)
	}
}

// stepProcesses are those of the step that sleeps, told by its argument from those
// of another checkout's test.
func stepProcesses(t *testing.T, argument string) (found []string) {
	t.Helper()
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		if data, _ := os.ReadFile(p); bytes.HasPrefix(data, []byte("/t/step\x00sleep\x00"+argument)) {
			found = append(found, p)
		}
	}
	return found
}

func TestErrorNamesTheStep(t *testing.T) {
	_, opts, _ := fresh(t, nil)
	run, locals := steps(t)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/missing.deb" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, "another content")
	}))
	defer srv.Close()
	b := connected(t, opts)
	sum := digest.FromString("the locked content")
	for _, c := range []struct {
		name, source, message, log string
		state                      llb.State
	}{
		// With a checksum BuildKit looks at the body alone, whatever the status.
		{"[deb] missing", srv.URL + "/missing.deb", sum.String(), "", llb.HTTP(srv.URL+"/missing.deb", llb.Checksum(sum), llb.WithCustomName("[deb] missing"))},
		{"[deb] changed", srv.URL + "/changed.deb", sum.String(), "", llb.HTTP(srv.URL+"/changed.deb", llb.Checksum(sum), llb.WithCustomName("[deb] changed"))},
		{"[step] fail", "", "exit code: 3", "last words", run("[step] fail", []string{"fail"}).Root()},
	} {
		_, err := b.Solve(t.Context(),
			Job{Name: "fails", Definition: marshal(t, c.state), Opt: client.SolveOpt{LocalMounts: locals}},
			Job{Name: "waits", Definition: marshal(t, run("[sleep] sleep", []string{"sleep"}).Root()), Opt: client.SolveOpt{LocalMounts: locals}})
		var failed *Error
		if !errors.As(err, &failed) || len(failed.Failed) != 1 || failed.Job != "fails" {
			t.Errorf("%s: %v is not one failed step", c.name, err)
			continue
		}
		f := failed.Failed[0]
		if f.Name != c.name || f.Source != c.source || !strings.Contains(f.Message, c.message) || !strings.Contains(f.Log, c.log) {
			t.Errorf("%s: %+v", c.name, f)
		}
		t.Log(err)
	}
}

// variant exports a state and returns its manifest.
func variant(t *testing.T, b *Builder, dir, platform string, layers int, state llb.State, locals map[string]fsutil.FS) (ocispecs.Descriptor, ocispecs.Manifest) {
	t.Helper()
	job := exportJob(t, opened(t, dir), platform, layers, state, locals)
	res, err := b.Solve(t.Context(), job)
	if err != nil {
		t.Fatal(err)
	}
	return manifest(t, dir, res[0])
}

func opened(t *testing.T, dir string) content.Store {
	t.Helper()
	store, err := OpenStore(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func exportJob(t *testing.T, store content.Store, platform string, layers int, state llb.State, locals map[string]fsutil.FS) Job {
	t.Helper()
	p := strings.Split(platform, "/")
	created := time.Unix(1700000000, 0).UTC()
	exp, err := Export{
		Config: ocispecs.Image{
			Created:  &created,
			Platform: ocispecs.Platform{OS: p[0], Architecture: p[1]},
			Config:   ocispecs.ImageConfig{User: "1000:1000", Env: []string{"A=b"}, Entrypoint: []string{"/x"}},
		},
		Layers: []string{"one", "two", "three"}[:layers],
	}.To(store)
	if err != nil {
		t.Fatal(err)
	}
	return Job{Name: "v-" + p[1], Platform: platform, Definition: marshal(t, state), Opt: client.SolveOpt{LocalMounts: locals, Exports: []client.ExportEntry{exp}}}
}

func manifest(t *testing.T, dir string, res *client.SolveResponse) (ocispecs.Descriptor, ocispecs.Manifest) {
	t.Helper()
	desc, err := Descriptor(res)
	if err != nil {
		t.Fatal(err)
	}
	var m ocispecs.Manifest
	blob(t, dir, desc.Digest, &m)
	return desc, m
}

func blob(t *testing.T, dir string, d digest.Digest, v any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "blobs", "sha256", d.Encoded()))
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func digests(ls []ocispecs.Descriptor) (ds []digest.Digest) {
	for _, l := range ls {
		ds = append(ds, l.Digest)
	}
	return ds
}

func TestMergedStatesBecomeSharedLayers(t *testing.T) {
	_, opts, _ := fresh(t, nil)
	run, locals := steps(t)
	b := connected(t, opts)
	one, two, three, four := layer(run, "one", "1"), layer(run, "two", "2"), layer(run, "three", "3"), layer(run, "four", "4")
	dir := t.TempDir()
	// Both at once, into one store, as a build of the family does it.
	store := opened(t, dir)
	res, err := b.Solve(t.Context(),
		exportJob(t, store, "linux/amd64", 3, llb.Merge([]llb.State{one, two, three}), locals),
		exportJob(t, store, "linux/arm64", 3, llb.Merge([]llb.State{one, two, four}), locals))
	if err != nil {
		t.Fatal(err)
	}
	_, toolbox := manifest(t, dir, res[0])
	_, session := manifest(t, dir, res[1])
	a, s := digests(toolbox.Layers), digests(session.Layers)
	if len(a) != 3 || len(s) != 3 || !slices.Equal(a[:2], s[:2]) || a[2] == s[2] {
		t.Errorf("layers %q and %q: want three each, the first two shared", a, s)
	}
	// Another store takes the same from the daemon's own, without a copy.
	linked := t.TempDir()
	direct, err := OpenStore(linked, nil, b.Blobs()...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Solve(t.Context(), exportJob(t, direct, "linux/amd64", 3, llb.Merge([]llb.State{one, two, three}), locals)); err != nil {
		t.Fatal(err)
	}
	for _, d := range append(a, toolbox.Config.Digest) {
		own, err1 := os.Stat(filepath.Join(b.Blobs()[0], "sha256", d.Encoded()))
		here, err2 := os.Stat(filepath.Join(linked, "blobs", "sha256", d.Encoded()))
		if err := errors.Join(err1, err2); err != nil || !os.SameFile(own, here) {
			t.Errorf("%s was copied from the daemon on the same file system, or is missing: %v", d, err)
		}
	}
	if toolbox.Layers[0].MediaType != ocispecs.MediaTypeImageLayer || toolbox.MediaType != ocispecs.MediaTypeImageManifest {
		t.Errorf("media types: %q in a %q", toolbox.Layers[0].MediaType, toolbox.MediaType)
	}
	var cfg ocispecs.Image
	blob(t, dir, session.Config.Digest, &cfg)
	if cfg.Config.User != "1000:1000" || cfg.Architecture != "arm64" || len(cfg.RootFS.DiffIDs) != 3 || cfg.Created.Unix() != 1700000000 {
		t.Errorf("config %+v", cfg)
	}
	for _, h := range cfg.History {
		if h.Created != nil && h.Created.Unix() != 1700000000 {
			t.Errorf("the history has a clock: %+v", h)
		}
	}
	blobs, _ := filepath.Glob(filepath.Join(dir, "blobs", "sha256", "*"))
	if len(blobs) != 4+2+2 { // distinct layers, configs, manifests
		t.Errorf("%d blobs in the store: %q", len(blobs), blobs)
	}
}

// Exports that share their layers race for every blob of the store.
func TestConcurrentExportsIntoOneStore(t *testing.T) {
	_, opts, log := fresh(t, nil)
	run, locals := steps(t)
	b := connected(t, opts)
	state := llb.Merge([]llb.State{layer(run, "one", "1"), layer(run, "two", "2"), layer(run, "three", "3")})
	for i := range 10 {
		dir := t.TempDir()
		store := opened(t, dir)
		var jobs []Job
		for range 6 {
			jobs = append(jobs, exportJob(t, store, "linux/amd64", 3, state, locals))
		}
		start := time.Now()
		if _, err := b.Solve(t.Context(), jobs...); err != nil {
			t.Fatalf("round %d: %v\n%s", i, err, log)
		}
		t.Log(time.Since(start))
		if blobs, _ := filepath.Glob(filepath.Join(dir, "blobs", "sha256", "*")); len(blobs) != 5 {
			t.Errorf("blobs %q", blobs)
		}
	}
}

func TestTwoDaemonsGiveTheSameDigests(t *testing.T) {
	one, opts, _ := fresh(t, nil)
	two, _, _ := fresh(t, nil)
	up(t, one)
	up(t, two)
	run, locals := steps(t)
	state := llb.Merge([]llb.State{layer(run, "one", "1"), layer(run, "two", "2")})

	opts.Getenv = env(map[string]string{"BUILDKIT_HOST_AMD64": one.Address(), "BUILDKIT_HOST_ARM64": two.Address(), "BUILDKIT_HOST": "unix:///not/needed"})
	b := connected(t, opts)
	if a := b.ForPlatform("linux/amd64").Address; a != one.Address() {
		t.Errorf("amd64 is built by %s", a)
	}
	if a := b.ForPlatform("linux/arm64").Address; a != two.Address() || len(b.Nodes()) != 2 {
		t.Errorf("arm64 is built by %s of %d", a, len(b.Nodes()))
	}
	// Both nodes at once, one display.
	dir := t.TempDir()
	store := opened(t, dir)
	res, err := b.Solve(t.Context(), exportJob(t, store, "linux/amd64", 2, state, locals), exportJob(t, store, "linux/arm64", 2, state, locals))
	if err != nil {
		t.Fatal(err)
	}
	amd64, m1 := manifest(t, dir, res[0])
	arm64, m2 := manifest(t, dir, res[1])
	if !slices.Equal(digests(m1.Layers), digests(m2.Layers)) {
		t.Errorf("two daemons made different layers: %q, %q", digests(m1.Layers), digests(m2.Layers))
	}
	// And the whole family on the first one alone.
	opts.Getenv = env(map[string]string{"BUILDKIT_HOST": one.Address()})
	single := connected(t, opts)
	if d, _ := variant(t, single, t.TempDir(), "linux/arm64", 2, state, locals); d.Digest != arm64.Digest {
		t.Errorf("one node made arm64 %s, two nodes %s", d.Digest, arm64.Digest)
	}
	if d, _ := variant(t, single, t.TempDir(), "linux/amd64", 2, state, locals); d.Digest != amd64.Digest {
		t.Errorf("one node made amd64 %s, two nodes %s", d.Digest, amd64.Digest)
	}
}

func TestUnusableHostIsAnError(t *testing.T) {
	_, opts, _ := fresh(t, nil)
	for _, c := range []struct{ variable, addr string }{
		{"BUILDKIT_HOST", "unix:///nonexistent/buildkitd.sock"},
		{"BUILDKIT_HOST_ARM64", "unix:///nonexistent/buildkitd.sock"},
		{"BUILDKIT_HOST", "docker-container://"},
	} {
		opts.Getenv = env(map[string]string{c.variable: c.addr})
		_, err := Connect(t.Context(), opts)
		if err == nil || !strings.Contains(err.Error(), c.variable+"="+c.addr) {
			t.Errorf("%s=%s: %v", c.variable, c.addr, err)
		}
	}
}

func TestStatus(t *testing.T) {
	d, opts, _ := fresh(t, nil)
	s, err := GetStatus(t.Context(), opts)
	if err != nil || len(s.Nodes) != 0 || len(s.Missing) != 2 || s.PID != 0 {
		t.Fatalf("with no daemon: %+v, %v", s, err)
	}
	up(t, d)
	_, other, _ := fresh(t, map[string]string{"BUILDKIT_HOST_ARM64": d.Address()})
	s, err = GetStatus(t.Context(), other)
	if err != nil || len(s.Nodes) != 1 || !slices.Equal(s.Nodes[0].Platforms, []string{"linux/arm64"}) || !slices.Equal(s.Missing, []string{"linux/amd64"}) {
		t.Errorf("with a node for one platform: %+v, %v", s, err)
	}
	run, locals := steps(t)
	variant(t, connected(t, opts), t.TempDir(), "linux/amd64", 1, layer(run, "one", "1"), locals)
	s, err = GetStatus(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Nodes) != 1 || s.PID != d.PID() || s.CacheBytes == 0 || s.Nodes[0].Records == 0 || s.Nodes[0].Bytes == 0 || len(s.Nodes[0].Platforms) != 2 {
		t.Errorf("status %+v", s)
	}
}

// What a daemon has left goes also when the command was interrupted; without
// root its files belong to other ids.
func TestDiscardInterrupted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		canRun(t)
		if out, err := exec.Command("rootlesskit", "sh", "-c", `mkdir "$0/theirs"; touch "$0/theirs/file"; chown -R 100:100 "$0/theirs"`, dir).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if os.RemoveAll(dir) == nil {
			t.Fatal("another id's files went without its namespace")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Discard(ctx, dir); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the folder is gone", func() bool { _, err := os.Stat(dir); return errors.Is(err, fs.ErrNotExist) })
}
