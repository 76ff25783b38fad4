package buildkit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/moby/buildkit/client"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
	"github.com/loomcycle/loomcycle-images/internal/host"
)

// Daemon is a private buildkitd: its program, its state below the cache folder,
// and the process, if one runs. Any number of processes may use one at the same
// time; a file lock makes starting and stopping one at a time.
type Daemon struct {
	opts Options
	name string
	dir  string
	sock string
}

// Times that a daemon is given.
const (
	startTimeout = 90 * time.Second // to answer after its start: a large state is opened slowly
	wedgeTimeout = 10 * time.Second // to answer when its process lives
	usedTimeout  = 2 * time.Minute  // the same when a build may keep it busy
	stopTimeout  = 15 * time.Second // to stop when asked to
)

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,40}$`)

// NewDaemon names the private daemon of the options; it starts nothing.
func NewDaemon(opts Options) (*Daemon, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	d := &Daemon{opts: opts, name: opts.Private}
	if d.name == "" {
		d.name = "default"
	}
	if !namePattern.MatchString(d.name) {
		return nil, fmt.Errorf("a private daemon can't be named %q: use lower case letters, digits and hyphens", d.name)
	}
	d.dir = filepath.Join(opts.CacheDir, "buildkit", d.name)
	d.sock, err = socketPath(d.dir, opts.Getenv)
	return d, err
}

// Address is what a BuildKit client (BUILDKIT_HOST, buildctl --addr) dials.
func (d *Daemon) Address() string { return "unix://" + d.sock }

// Log is the file that the daemon logs to.
func (d *Daemon) Log() string { return filepath.Join(d.dir, "buildkitd.log") }

// Dir holds the daemon's state, log and configuration.
func (d *Daemon) Dir() string { return d.dir }

// record is what is known of the process, in buildkitd.json. A pid alone could be
// somebody else's by now: the start time and the boot tell.
type record struct {
	PID     int    `json:"pid"`
	Started string `json:"started"` // see processStart
	Version string `json:"version"`
	Key     string `json:"key"` // see plan
}

func (d *Daemon) recordPath() string { return filepath.Join(d.dir, "buildkitd.json") }

// running is the record of the living process; ok is false when there is none.
func (d *Daemon) running() (r record, ok bool) {
	data, err := os.ReadFile(d.recordPath())
	if err != nil || json.Unmarshal(data, &r) != nil || r.PID <= 1 {
		return record{}, false
	}
	return r, alive(r)
}

func alive(r record) bool {
	started, err := processStart(r.PID)
	return err == nil && started == r.Started
}

// PID is that of the daemon's process, 0 when none runs.
func (d *Daemon) PID() int {
	r, ok := d.running()
	if !ok {
		return 0
	}
	return r.PID
}

var errDown = errors.New("no private daemon is up")

// connect returns the daemon that is up, or an error: errDown when nothing listens.
func (d *Daemon) connect(ctx context.Context) (*Node, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	// Dialled by hand first: gRPC would try a dead socket again and again.
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", d.sock)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDown, err)
	}
	conn.Close()
	c, err := client.New(ctx, d.Address())
	if err != nil {
		return nil, err
	}
	n := &Node{Client: c, Source: "private daemon", Address: d.Address(), state: d.state()}
	if err := describe(ctx, n); err != nil {
		c.Close()
		return nil, fmt.Errorf("the private daemon at %s does not answer: %w", d.Address(), err)
	}
	return n, nil
}

// plan is how the daemon is to be run.
type plan struct {
	bin    binary
	config string
	// key changes with the program, its configuration, its proxies and whom it
	// trusts: a daemon of another key is replaced when it is idle.
	key string
}

func (d *Daemon) plan(ctx context.Context) (plan, error) {
	tools, err := toolsDir(d.opts.Root)
	if err != nil {
		return plan{}, err
	}
	bin, err := pinned(ctx, tools, d.opts.CacheDir)
	if err != nil {
		return plan{}, err
	}
	p := plan{bin: bin, config: d.config()}
	key := sha256.New()
	fmt.Fprintln(key, bin.path, p.config)
	for _, v := range []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} {
		fmt.Fprintln(key, d.opts.Getenv(v), d.opts.Getenv(strings.ToLower(v)))
	}
	// Read once, at the first https request. A folder's contents are not looked at.
	file := d.opts.Getenv("SSL_CERT_FILE")
	authorities, _ := os.ReadFile(file)
	fmt.Fprintf(key, "%s\n%x\n%s\n", file, sha256.Sum256(authorities), d.opts.Getenv("SSL_CERT_DIR"))
	p.key = hex.EncodeToString(key.Sum(nil))[:16]
	return p, nil
}

// config is the daemon's buildkitd.toml.
func (d *Daemon) config() string {
	maxUsed := d.opts.Getenv("BUILDKIT_MAX_USED_SPACE")
	if maxUsed == "" {
		maxUsed = "40GB"
	}
	return fmt.Sprintf(`# Written at every start of the daemon; see docs/BUILDKIT.md.
root = %q
[grpc]
  address = [%q]
[otel]
  socketPath = %q
[cdi]
  disabled = true
[history]
  maxAge = 172800
  maxEntries = 100
[worker.containerd]
  enabled = false
[worker.oci]
  enabled = true
  snapshotter = "auto"
  networkMode = "host"
  binary = %q
  defaultCgroupParent = %q
  max-parallelism = %[7]d
  gc = true
  # Cache mounts and local sources go first, then what has not been used for
  # two weeks, then whatever is over the limit.
  [[worker.oci.gcpolicy]]
    filters = ["type==source.local", "type==exec.cachemount", "type==source.git.checkout"]
    keepDuration = "168h"
    maxUsedSpace = "5GB"
  [[worker.oci.gcpolicy]]
    keepDuration = "336h"
    reservedSpace = "10GB"
    maxUsedSpace = %[6]q
    minFreeSpace = "5%%"
  [[worker.oci.gcpolicy]]
    all = true
    maxUsedSpace = %[6]q
    minFreeSpace = "5%%"
`, d.state(), d.Address(), filepath.Join(filepath.Dir(d.sock), "otel.sock"), findRunc(), "/"+d.cgroup(), maxUsed, d.opts.Parallelism)
}

func (d *Daemon) state() string { return filepath.Join(d.dir, "state") }

// cgroup is the parent of the steps' cgroups, so that what a killed daemon
// leaves can be told from another's.
func (d *Daemon) cgroup() string {
	sum := sha256.Sum256([]byte(d.dir))
	return "loomcycle-buildkit-" + hex.EncodeToString(sum[:6])
}

// kitState is rootlesskit's folder, for a daemon without root.
func (d *Daemon) kitState() string { return filepath.Join(filepath.Dir(d.sock), "rootlesskit") }

// lock is held while a daemon is started or stopped.
func (d *Daemon) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of the private buildkitd: %w", err)
	}
	l := flock.New(filepath.Join(d.dir, "lock"))
	ok, err := l.TryLock()
	if err == nil && !ok {
		d.opts.notice("waiting for another process that starts or stops the private buildkitd %q", d.name)
		_, err = l.TryLockContext(ctx, 50*time.Millisecond)
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", l.Path(), err)
	}
	return func() { l.Unlock() }, nil
}

// join marks the daemon as used by this process until leave is called or the
// process ends. Who wants to replace the daemon needs the same lock alone.
func (d *Daemon) join() (leave func(), err error) {
	l := d.users()
	ok, err := l.TryRLock()
	if err == nil && !ok {
		err = errors.New("another process is about to stop this buildkitd: try again")
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", l.Path(), err)
	}
	return func() { l.Unlock() }, nil
}

func (d *Daemon) users() *flock.Flock { return flock.New(filepath.Join(d.dir, "users")) }

// reserve keeps others from joining until release is called, unless a process
// has joined already.
func (d *Daemon) reserve() (release func(), used bool) {
	l := d.users()
	ok, err := l.TryLock()
	return func() { l.Unlock() }, err == nil && !ok
}

// Up returns the daemon, starting it when it is not up. What an earlier one
// left behind (a stale socket, a killed process) is cleared away; a daemon of an
// older pin or configuration is replaced, unless somebody uses it.
func (d *Daemon) Up(ctx context.Context) (*Node, error) {
	p, err := d.plan(ctx)
	if err != nil {
		return nil, err
	}
	if r, ok := d.running(); ok && r.Key == p.key {
		leave, err := d.join()
		if err == nil {
			if n, err := d.connect(ctx); err == nil {
				n.leave = leave
				return n, nil
			}
			leave()
		}
	}
	unlock, err := d.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	n, err := d.upLocked(ctx, p)
	if err != nil {
		return nil, err
	}
	if n.leave, err = d.join(); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (d *Daemon) upLocked(ctx context.Context, p plan) (*Node, error) {
	if r, ok := d.running(); ok {
		gone := func() bool { return !alive(r) }
		n, err := d.await(ctx, wedgeTimeout, gone)
		if err != nil && ctx.Err() == nil {
			release, used := d.reserve() // nobody joins what is killed
			defer func() { release() }()
			if used && !gone() {
				d.opts.notice("the private buildkitd (pid %d) does not answer, but is in use: waiting up to %s for it", r.PID, usedTimeout)
			}
			for end := time.Now().Add(usedTimeout); err != nil && used && !gone() && ctx.Err() == nil && time.Now().Before(end); {
				if n, err = d.await(ctx, wedgeTimeout, gone); err != nil {
					release, used = d.reserve() // who used it may have left
				}
			}
		}
		switch {
		case err == nil && r.Key == p.key:
			return n, nil
		case err == nil:
			release, used := d.reserve()
			defer release()
			if used {
				d.opts.notice("the private buildkitd %s is of another version or configuration, but in use: taking it as it is", n.Version)
				return n, nil
			}
			n.Close()
			d.opts.notice("restarting the private buildkitd: its version or configuration has changed")
			err = d.stop(r)
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		default:
			d.opts.notice("the private buildkitd (pid %d) lives but does not answer: replacing it", r.PID)
			err = d.kill(r)
		}
		if err != nil {
			return nil, err
		}
	} else if n, err := d.connect(ctx); err == nil {
		// Somebody started one by hand on our socket: theirs to keep.
		return n, nil
	}
	d.sweep()
	if err := d.need(ctx); err != nil {
		return nil, err
	}
	var err error
	if p, err = d.plan(ctx); err != nil { // runc has a path only now, perhaps
		return nil, err
	}
	if err := p.bin.ensure(ctx, d.opts.notice, d.opts.Log); err != nil {
		return nil, err
	}
	return d.start(ctx, p)
}

// await connects as soon as the daemon answers.
func (d *Daemon) await(ctx context.Context, limit time.Duration, gone func() bool) (*Node, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		n, err := d.connect(ctx)
		if err == nil {
			return n, nil
		}
		if gone() {
			return nil, errors.New("its process ended")
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("it does not answer: %w", err)
		case <-tick.C:
		}
	}
}

func (d *Daemon) start(ctx context.Context, p plan) (*Node, error) {
	begin := time.Now()
	if err := privateDir(filepath.Dir(d.sock)); err != nil {
		return nil, err
	}
	configPath := filepath.Join(d.dir, "buildkitd.toml")
	if err := os.WriteFile(configPath, []byte(p.config), 0o600); err != nil {
		return nil, fmt.Errorf("writing the configuration of buildkitd: %w", err)
	}
	log, offset, err := d.openLog()
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd, err := d.command(ctx, p.bin.path, configPath)
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting buildkitd: %w; it needs root with CAP_SYS_ADMIN, or an ordinary user with rootlesskit; else set BUILDKIT_HOST", err)
	}
	exited := make(chan struct{})
	go func() { cmd.Wait(); close(exited) }()
	r := record{PID: cmd.Process.Pid, Version: p.bin.version, Key: p.key}
	fail := func(err error) (*Node, error) {
		// Nobody else can be using it yet: the lock is ours.
		cmd.Process.Kill()
		<-exited
		d.sweep()
		return nil, err
	}
	if r.Started, err = processStart(r.PID); err == nil {
		err = writeJSON(d.recordPath(), r)
	}
	if err != nil {
		return fail(fmt.Errorf("recording the process of buildkitd: %w", err))
	}
	n, err := d.await(ctx, startTimeout, func() bool {
		select {
		case <-exited:
			return true
		default:
			return false
		}
	})
	if err != nil {
		if ctx.Err() != nil {
			return fail(fmt.Errorf("starting buildkitd was cancelled: %w", context.Cause(ctx)))
		}
		return fail(fmt.Errorf("buildkitd did not start: %w; its log %s ends with: %s", err, d.Log(), tail(d.Log(), offset)))
	}
	d.opts.notice("started buildkitd %s (pid %d, %s) in %s", n.Version, r.PID, n.Snapshotter, time.Since(begin).Round(time.Millisecond))
	return n, nil
}

// Down stops the daemon and waits until it and its steps are gone. It is no
// error when none is up.
func (d *Daemon) Down(ctx context.Context) error {
	if _, err := os.Stat(d.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	unlock, err := d.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if r, ok := d.running(); ok {
		release, used := d.reserve()
		defer release()
		if used {
			d.opts.notice("stopping the private buildkitd while it is in use")
		}
		if err := d.stop(r); err != nil {
			return err
		}
	}
	d.sweep()
	return nil
}

// Remove stops the daemon and deletes its state: the next one starts empty. When
// ctx is over it only stops it: the state takes seconds to delete, and goes with
// the folder that holds it (Discard).
func (d *Daemon) Remove(ctx context.Context) error {
	if err := d.Down(context.WithoutCancel(ctx)); err != nil || ctx.Err() != nil {
		return err
	}
	if err := d.removeState(); err != nil {
		return fmt.Errorf("deleting the state of the private buildkitd: %w", err)
	}
	return nil
}

// Discard removes a temporary folder that the states of private daemons, which
// are down, may be left in. When the work was interrupted another process does
// it, as with host.Discard.
func Discard(ctx context.Context, dir string) error {
	if ctx.Err() == nil || os.Geteuid() == 0 {
		return host.Discard(ctx, dir)
	}
	rm, err := remover(dir)
	if err != nil {
		return err
	}
	rm.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return rm.Start()
}

// stop ends the process: asked first, then killed. Everything it runs is in its
// PID namespace and dies with it.
func (d *Daemon) stop(r record) error {
	if d.signal(r, syscall.SIGTERM) == nil {
		return nil
	}
	return d.kill(r)
}

func (d *Daemon) kill(r record) error {
	if err := d.signal(r, syscall.SIGKILL); err != nil {
		return fmt.Errorf("buildkitd (pid %d) does not end, not even killed: %w; see %s", r.PID, err, d.Log())
	}
	return nil
}

func (d *Daemon) signal(r record, sig syscall.Signal) error {
	if !alive(r) {
		return nil
	}
	if err := syscall.Kill(r.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	for deadline := time.Now().Add(stopTimeout); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if !alive(r) {
			return nil
		}
	}
	return fmt.Errorf("it lives %s after the %s", stopTimeout, sig)
}

// sweep removes what a daemon that is gone left: sockets, its record, and the
// empty cgroups of steps that were killed with it.
func (d *Daemon) sweep() {
	for _, f := range []string{d.sock, d.sock + ".lock", filepath.Join(filepath.Dir(d.sock), "otel.sock"), d.recordPath()} {
		os.Remove(f)
	}
	os.RemoveAll(d.kitState())
	if filepath.Dir(d.sock) != d.dir {
		os.Remove(filepath.Dir(d.sock))
	}
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		for _, below := range []string{"buildkit/*", "buildkit", ""} {
			dirs, _ := filepath.Glob(filepath.Join(hierarchy, d.cgroup(), below))
			for _, dir := range dirs {
				syscall.Rmdir(dir) // fails for the files, and for what is in use
			}
		}
	}
}

func writeJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, data, 0o600)
}

// need gets the programs that are missing, or says all that is, before minutes
// go into compiling.
func (d *Daemon) need(ctx context.Context) error {
	programs, ids := lacking()
	err := host.Need(ctx, d.opts.Log, append(programs, d.opts.Programs...)...)
	switch {
	case ids == nil && (err == nil || len(programs) == 0):
		return err
	case err == nil:
		err = ids
	case ids != nil:
		err = fmt.Errorf("%w, and %w", err, ids)
	}
	return fmt.Errorf("no private buildkitd can start, and BUILDKIT_HOST names none elsewhere: %w", err)
}

// findRunc is the path of runc, "" when there is none. An ordinary user's PATH
// lacks the sbin folders, where Debian puts it.
func findRunc() string {
	if p, err := exec.LookPath("runc"); err == nil {
		return p
	}
	for _, p := range []string{"/usr/sbin/runc", "/usr/local/sbin/runc"} {
		if p, err := exec.LookPath(p); err == nil {
			return p
		}
	}
	return ""
}
