package engine

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/dist"
)

// label marks what a run made, with the run's id as its value.
const label = "loomcycle.smoke"

// cli is podman or docker behind its command.
type cli struct {
	program string
	global  []string // options before the subcommand
	runtime string   // default OCI runtime; the engine's when empty
	// runtimes are those that a docker daemon has by name.
	runtimes []string
	run      string // id of this run
	lock     *flock.Flock

	mu     sync.Mutex
	loaded map[string]func() error // by platform and digest
	refs   map[string]string
}

// Podman is podman with a storage of its own below the cache folder, so that
// a smoke run sees and leaves nothing of the machine's. Only one run uses it at
// a time: the others wait.
func Podman(ctx context.Context, cache string, log io.Writer) (Engine, error) {
	if _, err := exec.LookPath("podman"); err != nil {
		return nil, fmt.Errorf("podman is not installed (apt-get install podman runc): %w", err)
	}
	dir := filepath.Join(cache, "smoke", "podman")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	lock := flock.New(filepath.Join(dir, "lock"))
	if ok, err := lock.TryLock(); err != nil {
		return nil, err
	} else if !ok {
		fmt.Fprintf(log, "smoke: waiting for another run that uses %s\n", dir)
		if _, err := lock.TryLockContext(ctx, 200*time.Millisecond); err != nil {
			return nil, fmt.Errorf("waiting for another smoke run that uses %s (LOOMCYCLE_CACHE names another folder): %w", dir, err)
		}
	}
	storage, runroot := Storage(cache)
	if err := private(runroot); err != nil {
		return nil, errors.Join(err, lock.Unlock())
	}
	e := &cli{program: "podman", lock: lock,
		global: []string{"--root", storage, "--runroot", runroot, "--tmpdir", filepath.Join(runroot, "tmp"), "--log-level=error", "--cgroup-manager=cgroupfs", "--events-backend=none"}}
	// crun refuses the hybrid of cgroup v1 and v2; runc does not.
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		if path, err := exec.LookPath("runc"); err == nil {
			e.runtime = path
		}
	}
	return e.start(ctx)
}

// Storage is where the podman of smoke runs keeps its images and volumes, and
// what it needs while it runs: `podman --root ROOT --runroot RUN` sees them.
func Storage(cache string) (root, run string) {
	dir := filepath.Join(cache, "smoke", "podman")
	// podman keeps sockets in the run root, and refuses a path that is too long for them.
	run = fmt.Sprintf("%s/loomcycle-smoke-%d-%s", os.TempDir(), os.Getuid(), short(dir))
	if len(run) > 50 {
		run = filepath.Join("/tmp", filepath.Base(run))
	}
	return filepath.Join(dir, "storage"), run
}

// private makes a folder that is this user's alone. Its name in /tmp is known
// to all, so one that somebody else put there is refused.
func private(dir string) error {
	if err := os.Mkdir(dir, 0o700); !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("podman's run root %s is not a folder that you alone can write to (%s): remove it, or set TMPDIR to a folder of yours", dir, info.Mode())
	}
	return os.Chmod(dir, 0o700)
}

// Docker is the docker engine that the docker command reaches.
func Docker(ctx context.Context) (Engine, error) {
	if out, err := exec.CommandContext(ctx, "docker", "version", "--format", "{{.Server.Version}}").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("docker does not answer (start it, or use podman): %w: %s", err, bytes.TrimSpace(out))
	}
	e := &cli{program: "docker"}
	text, err := e.must(ctx, "info", "--format", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}")
	if err != nil {
		return nil, err
	}
	e.runtimes = strings.Fields(text)
	return e.start(ctx)
}

func (e *cli) start(ctx context.Context) (Engine, error) {
	id := make([]byte, 6)
	rand.Read(id)
	e.run = hex.EncodeToString(id)
	e.loaded, e.refs = map[string]func() error{}, map[string]string{}
	if e.program == "podman" {
		// The storage is ours alone: what is there is left of a killed run.
		return e, e.remove(ctx, "label="+label)
	}
	return e, nil
}

func short(s string) string {
	h := fnv.New32a()
	_, _ = io.WriteString(h, s)
	return strconv.FormatUint(uint64(h.Sum32()), 36)
}

func (e *cli) Name() string { return e.program }

func (e *cli) Can(c *Container) error {
	if c.Runtime == "" {
		return nil
	}
	if _, err := exec.LookPath(c.Runtime); err != nil {
		return fmt.Errorf("the runtime %s is not installed: apt-get install %[1]s", c.Runtime)
	}
	if e.program == "docker" && !slices.Contains(e.runtimes, c.Runtime) {
		return fmt.Errorf("docker does not know the runtime %s (it has %s): name it in the daemon's \"runtimes\", or use podman", c.Runtime, strings.Join(e.runtimes, ", "))
	}
	return nil
}

// command runs the engine's command and returns its standard output.
func (e *cli) command(ctx context.Context, stdin io.Reader, args ...string) (*Output, error) {
	cmd := exec.CommandContext(ctx, e.program, append(e.global[:len(e.global):len(e.global)], args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	// Out of the terminal's process group: Ctrl-C reaches this program, which
	// stops containers in order, and not the commands that do it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Not killed at once: the engine then leaves its locks and mounts in order.
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	out := &Output{Stdout: stdout.Bytes(), Stderr: stderr.Bytes()}
	if ctx.Err() != nil {
		return out, context.Cause(ctx)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if out.Exit = exit.ExitCode(); out.Exit < 0 { // it was killed, and its container may live on
			return out, fmt.Errorf("%s %s: %s", e.program, args[0], exit.ProcessState)
		}
		return out, nil
	}
	return out, err
}

// must is a command that has to succeed.
func (e *cli) must(ctx context.Context, args ...string) (string, error) {
	out, err := e.command(ctx, nil, args...)
	if err == nil && out.Exit != 0 {
		err = fmt.Errorf("exit code %d", out.Exit)
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", e.program, strings.Join(args, " "), err, bytes.TrimSpace(out.Stderr))
	}
	return strings.TrimSpace(string(out.Stdout)), nil
}

// Load makes an image known to the engine, once.
func (e *cli) Load(ctx context.Context, img *Image) error {
	key := img.Platform + " " + img.Manifest.String()
	e.mu.Lock()
	once, ok := e.loaded[key]
	if !ok {
		once = sync.OnceValue(func() error { return e.load(ctx, key, img) })
		e.loaded[key] = once
	}
	e.mu.Unlock()
	return once()
}

func (e *cli) load(ctx context.Context, key string, img *Image) (err error) {
	ref := img.Ref
	arch := strings.TrimPrefix(img.Platform, "linux/")
	switch {
	case img.Layout == "":
		args := []string{"pull", "-q", "--platform", img.Platform}
		if e.program == "podman" && onThisMachine(ref) {
			args = append(args, "--tls-verify=false")
		}
		_, err = e.must(ctx, append(args, ref)...)
	case e.program == "podman":
		ref = img.Config.String() // podman's image id
		if out, ierr := e.command(ctx, nil, "image", "exists", ref); ierr == nil && out.Exit == 0 {
			break
		}
		// podman makes a name of the path, which may hold nothing that a name may not.
		var dir string
		if dir, err = os.MkdirTemp("/tmp", "smoke-layout"); err != nil {
			break
		}
		defer os.RemoveAll(dir)
		link := filepath.Join(dir, "oci")
		if err = os.Symlink(img.Layout, link); err == nil {
			_, err = e.must(ctx, "pull", "-q", "--arch", arch, "oci:"+link+":"+img.Name)
		}
	default:
		ref = "localhost/" + img.Name + ":smoke-" + arch + "-" + e.run
		err = e.dockerLoad(ctx, img, ref)
	}
	if err != nil {
		return fmt.Errorf("loading %s for %s: %w", img.Name, img.Platform, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refs[key] = ref
	return nil
}

// onThisMachine tells a registry of this machine, which has no certificate; docker
// and go-containerregistry know that by themselves.
func onThisMachine(ref string) bool {
	r, err := name.ParseReference(ref)
	return err == nil && r.Context().Registry.Scheme() == "http"
}

func (e *cli) dockerLoad(ctx context.Context, img *Image, ref string) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return err
	}
	content, err := dist.ForDocker(img.Content)
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(tarball.Write(tag, content, w)) }()
	defer r.Close()
	out, err := e.command(ctx, r, "load", "-q")
	if err == nil && out.Exit != 0 {
		err = fmt.Errorf("docker load: %s", bytes.TrimSpace(out.Stderr))
	}
	return err
}

func (e *cli) ref(img *Image) (string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ref, ok := e.refs[img.Platform+" "+img.Manifest.String()]
	if !ok {
		return "", fmt.Errorf("%s for %s is not loaded", img.Name, img.Platform)
	}
	return ref, nil
}

// options are the arguments of run that start such a container.
func (e *cli) options(c *Container, container string) ([]string, error) {
	ref, err := e.ref(c.Image)
	if err != nil {
		return nil, err
	}
	args := []string{"--name", container, "--label", label + "=" + e.run, "--pull=never", "--platform", c.Image.Platform}
	add := func(ok bool, a ...string) {
		if ok {
			args = append(args, a...)
		}
	}
	runtime := c.Runtime
	if runtime != "" && e.program == "podman" { // docker knows runtimes by name
		if runtime, err = exec.LookPath(runtime); err != nil {
			return nil, err
		}
	}
	if runtime == "" {
		runtime = e.runtime
	}
	add(runtime != "", "--runtime", runtime)
	// gVisor takes over an interface where there is one, and fails where none is.
	add(c.Runtime == "runsc" && c.NoNetwork && e.program == "podman", "--runtime-flag", "network=none")
	add(c.User != "", "--user", c.User)
	add(c.Workdir != "", "--workdir", c.Workdir)
	add(c.NoNetwork, "--network", "none")
	add(c.ReadOnly, "--read-only")
	// No tmpfs that the case does not ask for. podman 5 then makes /dev read-only
	// too, below which gVisor lets nobody write to a device.
	add(c.ReadOnly && e.program == "podman" && c.Runtime != "runsc", "--read-only-tmpfs=false")
	add(c.DropCaps, "--cap-drop", "ALL")
	add(c.NoNewPrivileges, "--security-opt", "no-new-privileges")
	add(c.Pids > 0, "--pids-limit", strconv.Itoa(c.Pids))
	add(c.Memory != "", "--memory", c.Memory, "--memory-swap", c.Memory)
	// Said explicitly, within the limits of this process: an engine's own
	// default may be above them, which takes CAP_SYS_RESOURCE.
	for _, l := range []struct {
		name string
		what int
		most uint64
	}{{"nofile", unix.RLIMIT_NOFILE, 1 << 16}, {"nproc", unix.RLIMIT_NPROC, 1 << 15}} {
		var have unix.Rlimit
		if err := unix.Getrlimit(l.what, &have); err != nil {
			return nil, err
		}
		n := strconv.FormatUint(min(have.Max, l.most), 10)
		add(true, "--ulimit", l.name+"="+n+":"+n)
	}
	for _, h := range c.Hosts {
		add(true, "--add-host", h)
	}
	for _, p := range c.Ports {
		add(true, "--publish", "127.0.0.1::"+strconv.Itoa(p))
	}
	for _, kv := range c.Env {
		add(true, "--env", kv)
	}
	for _, m := range c.Mounts {
		switch {
		case m.Tmpfs != "":
			o := "rw,exec,nosuid,nodev,size=2g,mode=" + m.Tmpfs
			if e.program == "podman" {
				o += ",notmpcopyup"
			}
			add(true, "--tmpfs", m.Path+":"+o)
		default:
			source := m.Host
			if m.Volume != "" {
				source = e.volume(m.Volume)
			}
			spec := source + ":" + m.Path
			if m.ReadOnly {
				spec += ":ro"
			}
			add(true, "--volume", spec)
		}
	}
	if len(c.Args) > 0 {
		add(true, "--entrypoint", c.Args[0])
	}
	args = append(args, ref)
	if len(c.Args) > 1 {
		args = append(args, c.Args[1:]...)
	}
	return args, nil
}

func (e *cli) newName() string {
	id := make([]byte, 6)
	rand.Read(id)
	return "smoke-" + e.run + "-" + hex.EncodeToString(id)
}

func (e *cli) Run(ctx context.Context, c *Container) (*Output, error) {
	container := e.newName()
	args, err := e.options(c, container)
	if err != nil {
		return nil, err
	}
	out, err := e.command(ctx, nil, append([]string{"run", "--rm"}, args...)...)
	if err != nil {
		err = errors.Join(err, e.removeContainer(ctx, container))
	}
	return out, err
}

func (e *cli) removeContainer(ctx context.Context, container string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	args := []string{"rm", "-f", container}
	if e.program == "podman" {
		args = []string{"rm", "-f", "-i", "-t", "0", container}
	}
	out, err := e.command(ctx, nil, args...)
	if err == nil && out.Exit != 0 && !bytes.Contains(bytes.ToLower(out.Stderr), []byte("no such container")) {
		err = fmt.Errorf("removing container %s: %s", container, bytes.TrimSpace(out.Stderr))
	}
	return err
}

func (e *cli) Start(ctx context.Context, c *Container) (Running, error) {
	container := e.newName()
	args, err := e.options(c, container)
	if err != nil {
		return nil, err
	}
	if _, err := e.must(ctx, append([]string{"run", "-d"}, args...)...); err != nil {
		return nil, errors.Join(err, e.removeContainer(ctx, container))
	}
	return &running{e, container}, nil
}

type running struct {
	e    *cli
	name string
}

func (r *running) Exec(ctx context.Context, argv []string) (*Output, error) {
	return r.e.command(ctx, nil, append([]string{"exec", r.name}, argv...)...)
}

func (r *running) Published(ctx context.Context, port int) (string, error) {
	return r.e.must(ctx, "port", r.name, strconv.Itoa(port)+"/tcp")
}

func (r *running) Stop(ctx context.Context) (time.Duration, int, error) {
	state, err := r.e.must(ctx, "inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", r.name)
	if err != nil {
		return 0, 0, err
	}
	if running, code, _ := strings.Cut(state, " "); running != "true" {
		return 0, 0, fmt.Errorf("the main process had ended before it was stopped, with %s", code)
	}
	start := time.Now()
	if _, err := r.e.must(ctx, "stop", "-t", "10", r.name); err != nil {
		return 0, 0, err
	}
	took := time.Since(start)
	code, err := r.e.must(ctx, "inspect", "--format", "{{.State.ExitCode}}", r.name)
	if err != nil {
		return took, 0, err
	}
	exit, err := strconv.Atoi(code)
	return took, exit, err
}

func (r *running) Logs(ctx context.Context) (string, error) {
	out, err := r.e.command(ctx, nil, "logs", r.name)
	if err != nil {
		return "", err
	}
	return string(out.Stdout) + string(out.Stderr), nil
}

func (r *running) Remove(ctx context.Context) error { return r.e.removeContainer(ctx, r.name) }

func (e *cli) volume(name string) string { return "smoke-" + e.run + "-" + name }

func (e *cli) Volume(ctx context.Context, name string) error {
	_, err := e.must(ctx, "volume", "create", "--label", label+"="+e.run, e.volume(name))
	return err
}

func (e *cli) RemoveVolume(ctx context.Context, name string) error {
	_, err := e.must(context.WithoutCancel(ctx), "volume", "rm", "-f", e.volume(name))
	return err
}

func (e *cli) Chown(ctx context.Context, folder, owner string) error {
	var cmd *exec.Cmd
	switch {
	case os.Geteuid() == 0:
		cmd = exec.CommandContext(ctx, "chown", "-R", owner, folder)
	case e.program == "podman":
		cmd = exec.CommandContext(ctx, "podman", append(slices.Clone(e.global), "unshare", "chown", "-R", owner, folder)...)
	default:
		return fmt.Errorf("giving %s to %s takes root with docker; use podman", folder, owner)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("chown %s %s: %w: %s", owner, folder, err, bytes.TrimSpace(out))
	}
	return nil
}

// Leaks lists containers, volumes and processes of this run.
func (e *cli) Leaks(ctx context.Context) ([]string, error) {
	left, err := e.list(ctx, "label="+label+"="+e.run)
	return append(left, Processes(ctx, "smoke-"+e.run)...), err
}

func (e *cli) list(ctx context.Context, filter string) ([]string, error) {
	var out []string
	containers, err := e.must(ctx, "ps", "-a", "--filter", filter, "--format", "{{.Names}}")
	if err != nil {
		return nil, err
	}
	volumes, err := e.must(ctx, "volume", "ls", "--filter", filter, "--format", "{{.Name}}")
	if err != nil {
		return nil, err
	}
	for _, n := range strings.Fields(containers) {
		out = append(out, "container "+n)
	}
	for _, n := range strings.Fields(volumes) {
		out = append(out, "volume "+n)
	}
	return out, nil
}

// remove removes all that the filter finds.
func (e *cli) remove(ctx context.Context, filter string) error {
	left, err := e.list(ctx, filter)
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range left {
		kind, id, _ := strings.Cut(l, " ")
		if kind == "container" {
			errs = append(errs, e.removeContainer(ctx, id))
			continue
		}
		_, err := e.must(ctx, "volume", "rm", "-f", id)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Close removes what is left of this run, and images that it did not use:
// those of earlier builds, in a storage that no one else looks after.
func (e *cli) Close(ctx context.Context) error {
	interrupted := ctx.Err() != nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	errs := []error{e.remove(ctx, "label="+label+"="+e.run)}
	switch e.program {
	case "podman":
		if !interrupted { // who interrupts does not wait, and the next run can do it
			errs = append(errs, e.pruneImages(ctx))
		}
		errs = append(errs, e.lock.Unlock())
	default:
		for _, ref := range e.refs {
			_, err := e.must(ctx, "image", "rm", ref)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (e *cli) pruneImages(ctx context.Context) error {
	if len(e.refs) == 0 {
		return nil
	}
	text, err := e.must(ctx, "images", "--format", "json", "--no-trunc")
	if err != nil {
		return err
	}
	var images []struct {
		ID string `json:"Id"`
	}
	if err := json.Unmarshal([]byte(text), &images); err != nil {
		return err
	}
	var used []string
	for _, ref := range e.refs {
		used = append(used, strings.TrimPrefix(ref, "sha256:"))
	}
	var errs []error
	for _, img := range images {
		if !slices.Contains(used, img.ID) && !slices.ContainsFunc(used, func(u string) bool { return strings.Contains(u, "@") }) {
			_, err := e.must(ctx, "rmi", "-f", img.ID)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
