package engine

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// child is a podman service that the sidecar keeps running: it is started
// again when it ends, with its last words kept for errors.
type child struct {
	mu   sync.Mutex
	cmd  *exec.Cmd
	out  *tailBuffer // of cmd
	stop func()
}

// said returns what podman, and the OCI runtimes that it runs, will have written since: the
// runtime's own words are there alone where the API says no more than "exit status 128".
// They come through a pipe, so a little later than the answer, and among those of other
// requests: it waits a moment for what is of container id, or of what gvisorNeeds explains.
func (c *child) said(id string) func() string {
	if c == nil {
		return func() string { return "" }
	}
	c.mu.Lock()
	out := c.out
	c.mu.Unlock()
	if out == nil {
		return func() string { return "" }
	}
	from := out.written()
	return func() string {
		for range 25 {
			if text := out.since(from); strings.Contains(text, id) || strings.Contains(text, gvisorSays) {
				return text
			}
			time.Sleep(10 * time.Millisecond)
		}
		return out.since(from)
	}
}

// What sessions have in place of copies of the host's /etc/hosts and /etc/resolv.conf, which
// podman makes also for those without a network: names of the operator's machines.
const (
	hostsFile   = "session-hosts"
	resolvFile  = "session-resolv.conf" // empty, for those without a network
	sessionName = "sandbox"             // the host name, which hosts has to know
	hosts       = "127.0.0.1\tlocalhost " + sessionName + "\n::1\tlocalhost\n"
)

// killAfter is what podman has to end by itself.
const killAfter = time.Second

func startPodman(opts Options) (*child, error) {
	podman, err := exec.LookPath("podman")
	if err != nil {
		return nil, fmt.Errorf("SANDBOX_ENGINE=podman needs podman on the sidecar's PATH: %w; or set DOCKER_HOST to a running engine", err)
	}
	args := append([]string{}, opts.Podman...)
	if opts.Runtime != "" {
		path, err := exec.LookPath(opts.Runtime)
		if err != nil {
			return nil, fmt.Errorf("SANDBOX_RUNTIME=%s needs the program %[1]s on the sidecar's PATH: %w", opts.Runtime, err)
		}
		args = append(args, "--runtime", path)
	}
	if opts.Runtime == "runsc" && opts.Egress == "" {
		// No session has a network, so gVisor needs none either: stricter, and spares its
		// older versions what gvisorNeeds tells of.
		args = append(args, "--runtime-flag", "network=none")
	}
	args = append(args, "system", "service", "--time", "0", "unix://"+opts.Socket)
	if err := os.MkdirAll(filepath.Dir(opts.Socket), 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of podman's socket: %w", err)
	}
	for name, content := range map[string]string{hostsFile: hosts, resolvFile: ""} {
		path := filepath.Join(filepath.Dir(opts.Socket), name)
		if has, err := os.ReadFile(path); err == nil && string(has) == content {
			continue // also on a disk that is full by now
		}
		if err := atomicfile.Write(path, []byte(content), 0o644); err != nil {
			return nil, fmt.Errorf("writing a file that sessions get: %w", err)
		}
	}
	c := &child{}
	quit, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c.stop = func() {
		once.Do(func() { close(quit) })
		c.mu.Lock()
		if c.cmd != nil && c.cmd.Process != nil {
			p := c.cmd.Process
			_ = p.Signal(syscall.SIGTERM)
			defer time.AfterFunc(killAfter, func() { _ = p.Kill() }).Stop()
		}
		c.mu.Unlock()
		<-ended
	}
	go func() {
		defer close(ended)
		// The parent-death signal is sent when the thread that forked dies, so it
		// must be one that lasts.
		runtime.LockOSThread()
		for delay := 100 * time.Millisecond; ; delay = min(2*delay, 10*time.Second) {
			_ = os.Remove(opts.Socket)
			cmd := exec.Command(podman, args...)
			out := &tailBuffer{max: 2048}
			cmd.Stdout, cmd.Stderr = out, out
			cmd.WaitDelay = time.Second         // for what holds its output and outlives it
			cmd.Dir = filepath.Dir(opts.Socket) // conmon leaves a file "oom" where it was started
			// Dies with the sidecar, so that a restarted one finds the socket free.
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
			began := time.Now()
			c.mu.Lock()
			select {
			case <-quit:
				c.mu.Unlock()
				return
			default:
			}
			err := cmd.Start()
			c.cmd, c.out = cmd, out
			c.mu.Unlock()
			if err == nil {
				err = cmd.Wait()
			}
			select {
			case <-quit:
				return
			default:
			}
			opts.Log.Error("podman ended and is started again", "error", err, "output", out.String())
			if time.Since(began) > time.Minute {
				delay = 100 * time.Millisecond
			}
			select {
			case <-quit:
				return
			case <-time.After(delay):
			}
		}
	}()
	return c, nil
}

// Processes is the highest limit of processes, up to want, that this process
// may give to another. It stands for the engine, which has started us or is
// started by us. There are never more than kernel.pid_max, to which podman lowers
// its own limit.
func Processes(want int64) (int64, error) {
	if text, err := os.ReadFile("/proc/sys/kernel/pid_max"); err == nil {
		if most, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64); err == nil {
			want = min(want, most)
		}
	}
	var have syscall.Rlimit
	if err := syscall.Getrlimit(unix.RLIMIT_NPROC, &have); err != nil {
		return 0, fmt.Errorf("reading the limit of processes: %w", err)
	}
	if uint64(want) <= have.Max {
		return want, nil
	}
	// Only trying tells: CAP_SYS_RESOURCE is of no use in a user namespace.
	if syscall.Setrlimit(unix.RLIMIT_NPROC, &syscall.Rlimit{Cur: have.Cur, Max: uint64(want)}) == nil {
		return want, syscall.Setrlimit(unix.RLIMIT_NPROC, &have)
	}
	return int64(have.Max), nil
}

// tailBuffer keeps the last max bytes written to it.
type tailBuffer struct {
	mu  sync.Mutex
	max int
	b   []byte
	all int // bytes ever written
}

func (t *tailBuffer) written() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all
}

// since is what is kept of what was written after the first from bytes.
func (t *tailBuffer) since(from int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b[len(t.b)-min(t.all-from, len(t.b)):]))
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	t.all += len(p)
	if over := len(t.b) - t.max; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}
