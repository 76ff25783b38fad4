// Package engine runs session containers through the Docker-compatible API,
// which docker and podman both serve. It holds every flag that makes a session
// container a cage; nothing else in the sidecar talks to an engine.
package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"golang.org/x/sys/unix"
)

// Labels of a session container. Each has the prefix so that an operator can
// filter on it.
const (
	LabelManaged   = "loomcycle.managed"
	LabelInstance  = "loomcycle.instance"
	LabelSession   = "loomcycle.session"
	LabelPrincipal = "loomcycle.principal"
	LabelRun       = "loomcycle.run"
	LabelPool      = "loomcycle.pool"
)

const (
	agentDir  = "/run/loomcycle-agent"
	agentName = "session-agent"
	// SessionUser is the uid and gid of every session process.
	SessionUser = 1000
)

// ErrUnavailable is wrapped by errors that come of an engine that does not
// answer, as opposed to one that refuses.
var ErrUnavailable = errors.New("the container engine does not answer")

// unavailable keeps the client's words, which name the engine's address, for the log.
type unavailable struct {
	doing string
	err   error
}

func (e *unavailable) Error() string {
	return fmt.Sprintf("%v (%s): %v", ErrUnavailable, e.doing, e.err)
}
func (e *unavailable) Unwrap() []error { return []error{ErrUnavailable, e.err} }

// Public is what a session's owner is told.
func (e *unavailable) Public() string {
	return fmt.Sprintf("%v (%s); try again in a while, the operator's log says more", ErrUnavailable, e.doing)
}

// wordy has also, for the log, what the podman service wrote meanwhile: of whatever request, so it
// may name other sessions and paths of the host.
type wordy struct {
	err  error
	said string
}

func (e *wordy) Error() string { return e.err.Error() + ": " + e.said }
func (e *wordy) Unwrap() error { return e.err }

// Public is what a session's owner is told.
func (e *wordy) Public() string { return e.err.Error() + "; the operator's log says more" }

const kataNeeds = "SANDBOX_RUNTIME=kata needs a docker whose host has /dev/kvm and whose daemon.json has a runtime kata of the type io.containerd.kata.v2"

var errKata = errors.New(kataNeeds + "; set DOCKER_HOST to it: Kata is a containerd shim since version 2, which podman cannot start")

// gvisorNeeds is for runscs that know the host's network namespace by a file of /proc/sys/net which
// Linux 6.11 shows in all of them (https://github.com/google/gvisor/issues/10704).
const gvisorNeeds = "a runsc from before August 2024 takes each network namespace of Linux 6.11 and newer for the host's: it needs SANDBOX_ALLOW_EGRESS=0, or a newer runsc, or its flag network=host (SANDBOX_PODMAN_OPTIONS=--runtime-flag=network=host, or docker's runtimeArgs), with which sessions with egress meet Linux's network stack in place of gVisor's"

// gvisorSays is what tells a runsc that has that need.
const gvisorSays = "root network namespace"

const listTries = 20

// podmanStart is how long a podman that was just started may be silent before that is told.
const podmanStart = 3 * time.Second

var containerID = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

// Options configure an Engine.
type Options struct {
	Instance string // of the sidecar, for LabelInstance
	Host     string // unix:// or tcp:// address of a running engine; empty starts podman
	Runtime  string // runc, crun, runsc, kata, or empty for the engine's default
	Agent    string // the session agent in the sidecar's own file system
	HostPath string // the session agent in the engine host's file system, if it is there already
	Socket   string // where a started podman listens
	Podman   []string
	Egress   string // network of sessions with egress; empty when the operator allows none
	NoFile   int64  // hard and soft limit of open files
	NProc    int64  // hard and soft limit of processes of the session uid, over all its containers
	Log      *slog.Logger
	Trace    []otelhttp.Option
}

// Engine is a connection to a container engine.
type Engine struct {
	opts   Options
	api    *client.Client
	child  *child
	podman bool
	cpus   int         // of the engine's host
	mount  mount.Mount // what brings the agent into a session
	placed placed      // where that is a volume
	sweep  *sweeper    // of a podman that Open started
	last   recent      // List's answer

	patience time.Duration // carrierPatience, but in tests
}

// Spec is what differs from one session container to the next.
type Spec struct {
	Name      string
	Image     string // an image id, so that no tag is resolved twice
	Labels    map[string]string
	Egress    bool
	Workspace string // host path of a durable /work; empty for a tmpfs
	WorkBytes int64
	TmpBytes  int64
	MemBytes  int64
	CPUs      float64
	Pids      int64
}

// State is what the engine knows of a container.
type State struct {
	ID        string
	Running   bool
	Ending    bool // of List: it does not run, but its processes may be there still, or again
	OOMKilled bool
	ExitCode  int
	GVisor    bool // whose kernel ends with what it runs when a limit is used up, and tells nobody
	Labels    map[string]string
}

// Open connects to the engine, starting podman when opts.Host is empty, and
// waits until it answers or ctx ends.
func Open(ctx context.Context, opts Options) (*Engine, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	e := &Engine{opts: opts, patience: carrierPatience}
	host := opts.Host
	if opts.Runtime == "kata" && host == "" {
		return nil, errKata
	}
	if host == "" {
		c, err := startPodman(opts)
		if err != nil {
			return nil, err
		}
		e.child, host = c, "unix://"+opts.Socket
	}
	api, err := client.New(client.WithHost(host), client.WithTraceOptions(opts.Trace...))
	if err != nil {
		e.Close()
		return nil, fmt.Errorf("engine address %q: %w", host, err)
	}
	e.api = api
	// Told when it begins: an engine that takes a connection may yet say nothing.
	opts.Log.Info("asking the container engine", "address", host)
	warnAfter := time.Now()
	if e.child != nil {
		warnAfter = warnAfter.Add(podmanStart)
	}
	for {
		err := e.greet(ctx)
		if err == nil {
			e.startSweeper()
			return e, nil
		}
		if errors.Is(err, ErrUnavailable) && !warnAfter.IsZero() && time.Now().After(warnAfter) {
			warnAfter = time.Time{}
			opts.Log.Warn("waiting for the container engine, which does not answer yet", "address", host, "error", err)
		}
		if !errors.Is(err, ErrUnavailable) && ctx.Err() == nil {
			e.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			e.Close()
			return nil, fmt.Errorf("the engine at %s has not answered within the time given: %w", host, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (e *Engine) greet(ctx context.Context) error {
	v, err := e.api.ServerVersion(ctx, client.ServerVersionOptions{})
	if err != nil {
		err = e.wrap("asking the engine for its version", err)
		if e.child != nil && e.opts.Runtime != "" && !errors.Is(err, ErrUnavailable) { // podman 5 asks the runtime for its own, and panics
			err = fmt.Errorf("podman does not work with SANDBOX_RUNTIME=%q; does `%[1]s --version`? %w", e.opts.Runtime, err)
		}
		return err
	}
	for _, c := range v.Components {
		e.podman = e.podman || strings.HasPrefix(c.Name, "Podman")
	}
	if v.Arch != runtime.GOARCH {
		return fmt.Errorf("the engine runs on %s and this sidecar, with its session agent, is built for %s: use the image of the engine's platform", v.Arch, runtime.GOARCH)
	}
	if err := e.checkRuntime(ctx); err != nil {
		return err
	}
	if err := e.checkNetwork(ctx); err != nil {
		return err
	}
	return e.provideAgent()
}

// checkNetwork refuses a network for egress that is none of the engine's, or is the host's own
// under whatever name: docker has that one, and none, as networks with an id. What podman takes for
// a mode is refused too: these can lead to the host's loopback, and default is one of them where
// podman is rootless. With docker default is the bridge, and the others are names.
func (e *Engine) checkNetwork(ctx context.Context) error {
	name := e.opts.Egress
	if name == "" {
		return nil
	}
	if e.podman && slices.Contains([]string{"private", "default", "slirp4netns", "pasta", "no-pod"}, name) {
		return fmt.Errorf("SANDBOX_EGRESS_NETWORK=%s is a mode of podman, not a network: name one, such as bridge", name)
	}
	looked := name
	if name == "default" {
		looked = "bridge"
	}
	found, err := e.api.NetworkInspect(ctx, looked, client.NetworkInspectOptions{})
	switch {
	case cerrdefs.IsNotFound(err):
		return fmt.Errorf("SANDBOX_EGRESS_NETWORK=%s: the engine has no network of that name: create it (podman network create, docker network create), or name another", name)
	case err != nil:
		return e.wrap("looking for the network SANDBOX_EGRESS_NETWORK="+name, err)
	case found.Network.Driver == "host" || found.Network.Driver == "null":
		return fmt.Errorf("SANDBOX_EGRESS_NETWORK=%s is the engine's network of the driver %s: sessions need a network of their own, such as bridge", name, found.Network.Driver)
	}
	return nil
}

// checkRuntime refuses a runtime that the engine will not use. Podman's
// Docker-compatible API ignores the runtime of a create call (4.3), so it has
// to be the service's own default.
func (e *Engine) checkRuntime(ctx context.Context) error {
	system, err := e.api.Info(ctx, client.InfoOptions{})
	if err != nil {
		return e.wrap("asking the engine for its runtimes", err)
	}
	info := system.Info
	e.cpus = info.NCPU
	want := e.opts.Runtime
	if want == "" || e.child != nil {
		return nil
	}
	if e.podman {
		if want == "kata" {
			return errKata
		}
		if filepath.Base(info.DefaultRuntime) != want { // as it was started, by name or path
			return fmt.Errorf("SANDBOX_RUNTIME=%s, but the podman service at %s uses %s: start it as `podman --runtime %s system service`", want, e.opts.Host, info.DefaultRuntime, want)
		}
		return nil
	}
	rt, ok := info.Runtimes[want]
	switch {
	case !ok:
		err := fmt.Errorf("SANDBOX_RUNTIME=%s is not configured in the engine, which has %s: add it to the engine's daemon.json and restart it", want, strings.Join(slices.Sorted(maps.Keys(info.Runtimes)), ", "))
		return e.kata(err)
	case rt.Path == "" && rt.Type == "":
		// Docker before 23 knows no runtimeType.
		return e.kata(fmt.Errorf("SANDBOX_RUNTIME=%s is configured in the engine by nothing that this version of it reads, so it would run runc under that name: docker reads a runtimeType since version 23, and a path in all", want))
	}
	return nil
}

// kata adds what Kata needs to an error that may come of its lack: an engine does not tell
// beforehand whether its host has /dev/kvm.
func (e *Engine) kata(err error) error {
	if err == nil || e.opts.Runtime != "kata" || errors.Is(err, ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w; "+kataNeeds, err)
}

// CPUs is how many there are on the engine's host. Docker refuses a container
// that asks for more.
func (e *Engine) CPUs() int { return e.cpus }

// Close stops a podman that Open started. Session containers go on.
func (e *Engine) Close() {
	e.sweep.stop()
	if e.api != nil {
		_ = e.api.Close()
	}
	if e.child != nil {
		e.child.stop()
	}
}

// Ping tells whether the engine answers.
func (e *Engine) Ping(ctx context.Context) error {
	_, err := e.api.Ping(ctx, client.PingOptions{})
	return e.wrap("asking the engine for a sign of life", err)
}

func (e *Engine) wrap(doing string, err error) error {
	var op *net.OpError
	var u *url.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded): // the caller's end, not the engine's
		if err = bare(err); errors.As(err, &u) {
			err = u.Err // it has the address as well
		}
	case client.IsErrConnectionFailed(err), errors.As(err, &op):
		return &unavailable{doing, err}
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// bare is an error of a connection to the engine without the engine's address.
func bare(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return fmt.Errorf("%s: %w", op.Op, op.Err)
	}
	return err
}

// Image is a session image in the engine's store.
type Image struct {
	ID      string   // what containers are created from
	Digests []string // of the manifest and of its index, as far as the engine knows them
}

// ResolveImage finds ref in the engine's store, pulling it first when it is
// missing and pull allows it.
func (e *Engine) ResolveImage(ctx context.Context, ref string, pull bool) (Image, error) {
	got, err := e.api.ImageInspect(ctx, ref)
	if cerrdefs.IsNotFound(err) && pull {
		r, perr := e.api.ImagePull(ctx, ref, client.ImagePullOptions{})
		if perr != nil {
			return Image{}, e.wrap("pulling "+ref, perr)
		}
		perr = pulled(r)
		r.Close()
		if perr != nil {
			return Image{}, e.wrap("pulling "+ref, perr)
		}
		got, err = e.api.ImageInspect(ctx, ref)
	}
	if err != nil {
		return Image{}, e.wrap("looking for the session image "+ref, err)
	}
	img := Image{ID: got.ID}
	if _, d, ok := strings.Cut(ref, "@"); ok {
		img.Digests = []string{d}
		return img, nil
	}
	for _, known := range got.RepoDigests {
		if _, d, ok := strings.Cut(known, "@"); ok && !slices.Contains(img.Digests, d) {
			img.Digests = append(img.Digests, d)
		}
	}
	return img, nil
}

// pulled reads a pull's progress to its end. That is where an engine says what
// went wrong: its status was sent when the pull began.
func pulled(r io.Reader) error {
	for d := json.NewDecoder(r); ; {
		var line struct {
			Error  string `json:"error"`
			Detail struct {
				Message string `json:"message"`
			} `json:"errorDetail"`
		}
		switch err := d.Decode(&line); {
		case err == io.EOF:
			return nil
		case err != nil:
			return fmt.Errorf("reading the engine's progress: %w", err)
		case cmp.Or(line.Detail.Message, line.Error) != "":
			return errors.New(cmp.Or(line.Detail.Message, line.Error))
		}
	}
}

// Create makes a session container.
func (e *Engine) Create(ctx context.Context, s Spec) (string, error) {
	cfg, host := e.configs(s)
	resp, err := e.api.ContainerCreate(ctx, client.ContainerCreateOptions{Config: cfg, HostConfig: host, Name: s.Name})
	if err != nil {
		return "", e.kata(e.wrap("creating the session's container", err))
	}
	if lost := unlimited(resp.Warnings, !e.local() || swapping(procSwaps)); len(lost) > 0 {
		return "", fmt.Errorf("the engine made the session's container without a limit that it asked for: %s: the engine's host has to have the cgroup controllers memory, cpu and pids, and swap accounting (the kernel parameter swapaccount=1, or no swap on this host)", strings.Join(lost, "; "))
	}
	return resp.ID, nil
}

// lostLimit is how docker and podman word a limit that they leave out, to make the
// container all the same.
var lostLimit = regexp.MustCompile(`(?i)(limitation|limit|quota) discarded|limits are not supported|limited without swap`)

// unlimited picks those about limits from a create call's warnings. Where there is no
// swap, none has to be kept from.
func unlimited(warnings []string, swap bool) (lost []string) {
	for _, w := range warnings {
		if lostLimit.MatchString(w) && (swap || !strings.Contains(w, "without swap")) {
			lost = append(lost, strings.TrimSuffix(w, "."))
		}
	}
	return lost
}

const procSwaps = "/proc/swaps"

// local tells whether the engine runs under this kernel.
func (e *Engine) local() bool { return e.child != nil || strings.HasPrefix(e.opts.Host, "unix://") }

// swapping tells whether the kernel has swap, by the lines below the head of
// /proc/swaps (proc(5)).
func swapping(file string) bool {
	text, err := os.ReadFile(file)
	return err != nil || bytes.Count(bytes.TrimSpace(text), []byte("\n")) > 0
}

// configs is the whole cage.
func (e *Engine) configs(s Spec) (*container.Config, *container.HostConfig) {
	tmpfs := func(size int64, mode string) string {
		o := fmt.Sprintf("rw,exec,nosuid,nodev,mode=%s,size=%d", mode, size)
		if e.podman {
			// Otherwise podman copies what the image has there into each session.
			o += ",notmpcopyup"
		}
		return o
	}
	cfg := &container.Config{
		Image:      s.Image,
		Entrypoint: []string{agentDir + "/" + agentName},
		Cmd:        []string{},
		User:       fmt.Sprintf("%d:%d", SessionUser, SessionUser),
		WorkingDir: "/work",
		Labels:     s.Labels,
		// The agent's frames; it stays when the sidecar goes.
		OpenStdin: true, AttachStdin: true, AttachStdout: true, AttachStderr: true,
		// Whatever the image says: the agent passes it on. Who closes a session kills.
		StopSignal: "SIGTERM",
	}
	host := &container.HostConfig{
		Runtime:        e.opts.Runtime,
		NetworkMode:    "none",
		ReadonlyRootfs: true,
		CapDrop:        []string{"ALL"},
		// Naming no seccomp profile keeps the engine's default one.
		SecurityOpt:  []string{"no-new-privileges"},
		IpcMode:      "private",
		CgroupnsMode: "private",
		Tmpfs:        map[string]string{"/tmp": tmpfs(s.TmpBytes, "1777")},
		Mounts:       []mount.Mount{e.mount},
		// No log: frames are nobody's log, and a log would fill the host's disk.
		LogConfig: container.LogConfig{Type: "none"},
		Resources: container.Resources{
			Memory:     s.MemBytes,
			MemorySwap: s.MemBytes, // the same as Memory: no swap
			NanoCPUs:   int64(s.CPUs * 1e9),
			PidsLimit:  &s.Pids,
			// All explicit: an engine's defaults may be above what its own process
			// may hand on (no CAP_SYS_RESOURCE).
			Ulimits: []*units.Ulimit{
				{Name: "nofile", Soft: e.opts.NoFile, Hard: e.opts.NoFile},
				{Name: "nproc", Soft: e.opts.NProc, Hard: e.opts.NProc},
				{Name: "core", Soft: 0, Hard: 0},
			},
		},
	}
	if e.podman {
		// It knows its default runtime by path, and a name only in newer versions.
		host.Runtime = ""
		// With a read-only root it mounts these too, without a size.
		host.Tmpfs["/run"] = "rw,noexec,nosuid,nodev,mode=0755,size=65536,notmpcopyup"
		host.Tmpfs["/var/tmp"] = tmpfs(s.TmpBytes, "1777")
	}
	if e.opts.Runtime == "runsc" {
		// Counted on the host, where gVisor has several threads for each of the
		// session's; its kernel panics when it cannot have another.
		pids := 8*s.Pids + 1024
		host.PidsLimit = &pids
	}
	if s.Egress {
		host.NetworkMode = container.NetworkMode(e.opts.Egress)
	}
	if e.child != nil {
		own := func(name, target string) {
			host.Mounts = append(host.Mounts, mount.Mount{Type: mount.TypeBind, Source: filepath.Join(filepath.Dir(e.opts.Socket), name), Target: target, ReadOnly: true})
		}
		cfg.Hostname = sessionName
		own(hostsFile, "/etc/hosts")
		if !s.Egress {
			own(resolvFile, "/etc/resolv.conf")
		}
	}
	if s.Workspace != "" {
		host.Mounts = append(host.Mounts, mount.Mount{Type: mount.TypeBind, Source: s.Workspace, Target: "/work"})
	} else {
		host.Tmpfs["/work"] = tmpfs(s.WorkBytes, "0777")
	}
	return cfg, host
}

// Start starts a created container.
func (e *Engine) Start(ctx context.Context, id string) error {
	said := e.child.said(id)
	_, err := e.api.ContainerStart(ctx, id, client.ContainerStartOptions{})
	if err == nil {
		return nil
	}
	e.placed.forget() // it may be that the agent is not there
	err = e.wrap("starting the session's container", err)
	if strings.Contains(err.Error(), "exit status") {
		if text := said(); text != "" {
			err = &wordy{err, text}
		}
	}
	switch text := err.Error(); {
	case e.opts.Runtime != "runsc":
	case strings.Contains(text, gvisorSays):
		err = fmt.Errorf("%w; %s", err, gvisorNeeds)
	case e.podman && e.child == nil && strings.Contains(text, "exit status 128"): // which hides the words
		err = fmt.Errorf("%w; the podman service's own output has runsc's words. If they are of the root network namespace, %s; for sessions without a network `podman --runtime runsc --runtime-flag network=none system service` will do", err, gvisorNeeds)
	}
	return e.kata(err)
}

// Attach returns the stdio of a container that was just started.
func (e *Engine) Attach(ctx context.Context, id string) (io.ReadWriteCloser, error) {
	h, err := hijack(ctx, func() (client.HijackedResponse, error) {
		r, err := e.api.ContainerAttach(ctx, id, client.ContainerAttachOptions{Stream: true, Stdin: true, Stdout: true, Stderr: true})
		return r.HijackedResponse, err
	})
	if err != nil {
		return nil, e.wrap("attaching to the session's container", err)
	}
	return newStdio(h, e.opts.Log, id), nil
}

// hijack ends with ctx, which the client forgets when it takes over a connection:
// an engine that accepts one and does not answer would be waited for without end.
func hijack(ctx context.Context, call func() (client.HijackedResponse, error)) (client.HijackedResponse, error) {
	type answer struct {
		h   client.HijackedResponse
		err error
	}
	c := make(chan answer)
	go func() {
		h, err := call()
		select {
		case c <- answer{h, err}:
		case <-ctx.Done():
			if err == nil {
				h.Close()
			}
		}
	}()
	select {
	case a := <-c:
		return a.h, a.err
	case <-ctx.Done():
		return client.HijackedResponse{}, ctx.Err() // the caller adds the cause
	}
}

// Connect reaches the agent of a running container whose first stdio is lost,
// by running the agent's connect bridge in it.
func (e *Engine) Connect(ctx context.Context, id string) (io.ReadWriteCloser, error) {
	x, err := e.api.ExecCreate(ctx, id, client.ExecCreateOptions{
		Cmd:         []string{agentDir + "/" + agentName, "connect"},
		User:        fmt.Sprintf("%d:%d", SessionUser, SessionUser),
		AttachStdin: true, AttachStdout: true, AttachStderr: true,
	})
	if err != nil {
		return nil, e.wrap("reaching into the session's container", err)
	}
	h, err := hijack(ctx, func() (client.HijackedResponse, error) {
		r, err := e.api.ExecAttach(ctx, x.ID, client.ExecAttachOptions{})
		return r.HijackedResponse, err
	})
	if err != nil {
		return nil, e.wrap("reaching into the session's container", err)
	}
	return newStdio(h, e.opts.Log, id), nil
}

// writtenDown is how long podman's monitor may take from the end of a container, and of its
// output, to write down how it ended.
const writtenDown = 2 * time.Second

// Inspect returns a container's state; ok is false when there is none. For one that has just
// ended it waits up to writtenDown for what it ended with.
func (e *Engine) Inspect(ctx context.Context, id string) (s State, ok bool, err error) {
	var seen time.Time // to be gone
	for {
		s, gone, ok, err := e.inspect(ctx, id)
		if !gone || err != nil {
			return s, ok, err
		}
		if seen.IsZero() {
			seen = time.Now()
		} else if time.Since(seen) > writtenDown {
			// Podman takes a container whose monitor was killed with it for running, for good.
			s.Running = false
			return s, ok, nil
		}
		select {
		case <-ctx.Done():
			return State{}, false, e.wrap("waiting for the end of the session's container to be written down", ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// inspect is Inspect without the wait: gone is true for a container that runs for podman and
// has no process.
func (e *Engine) inspect(ctx context.Context, id string) (s State, gone, ok bool, err error) {
	found, err := e.api.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	if cerrdefs.IsNotFound(err) {
		return State{}, false, false, nil
	}
	if err != nil {
		return State{}, false, false, e.wrap("looking at the session's container", err)
	}
	c := found.Container
	s = State{ID: c.ID, GVisor: e.opts.Runtime == "runsc" || c.HostConfig != nil && c.HostConfig.Runtime == "runsc", Labels: c.Config.Labels}
	if c.State != nil {
		s.Running, s.OOMKilled, s.ExitCode = c.State.Running, c.State.OOMKilled, c.State.ExitCode
		// Its processes are in this namespace, as a podman that was started here is.
		gone = e.child != nil && s.Running && c.State.Pid > 0 && unix.Kill(c.State.Pid, 0) == unix.ESRCH
	}
	return s, gone, true, nil
}

// ending are the states of a container, in docker's words and podman's, that is neither
// running nor all gone.
var ending = []string{"paused", "stopping", "removing", "restarting"}

// List returns the containers of one sidecar instance, running or not.
func (e *Engine) List(ctx context.Context, instance string) ([]State, error) {
	var cs []container.Summary
	for try := 1; ; try++ {
		r, err := e.api.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", LabelManaged+"=1", LabelInstance+"="+instance)})
		cs = r.Items
		if err == nil {
			break
		}
		// Podman fails the whole list when any container, of whoever, is removed
		// while it looks ("container not known").
		if err = e.wrap("listing the session containers", err); try == listTries || errors.Is(err, ErrUnavailable) {
			return nil, err
		}
		// It fails for good when a podman was killed between removing a container's
		// storage and its entry. What our own podman has lost that way is removed.
		if id := containerID.FindString(err.Error()); try%5 == 0 && e.child != nil && id != "" && strings.Contains(err.Error(), "not known") {
			if strings.Contains(err.Error(), "layer not known") {
				id = e.containerOfLayer(ctx, id)
			}
			e.opts.Log.Warn("removing a container that a killed podman left half removed", "container", id, "error", e.Remove(ctx, id))
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
	}
	var out []State
	for _, c := range cs {
		// Checked again: a filter that an engine misread must not cost a stranger's container.
		if c.Labels[LabelManaged] == "1" && c.Labels[LabelInstance] == instance {
			out = append(out, State{ID: c.ID, Running: c.State == "running", Ending: slices.Contains(ending, string(c.State)), Labels: c.Labels})
		}
	}
	if instance == e.opts.Instance {
		e.last.keep(out)
	}
	return out, nil
}

// containerOfLayer finds the container whose writable layer podman lost, in the
// index of podman's storage (containers/storage, containers.json): by then
// no call of the API tells. It returns the layer itself when there is none.
func (e *Engine) containerOfLayer(ctx context.Context, layer string) string {
	system, err := e.api.Info(ctx, client.InfoOptions{})
	if err != nil {
		return layer
	}
	info := system.Info
	text, err := os.ReadFile(filepath.Join(info.DockerRootDir, info.Driver+"-containers", "containers.json"))
	if err != nil {
		return layer
	}
	var index []struct{ ID, Layer string }
	if json.Unmarshal(text, &index) != nil {
		return layer
	}
	for _, c := range index {
		if c.Layer == layer {
			return c.ID
		}
	}
	return layer
}

// Remove kills and removes a container; one that is gone is no error.
func (e *Engine) Remove(ctx context.Context, id string) error {
	// Killed first: podman would give it the ten seconds of a stop.
	_, _ = e.api.ContainerKill(ctx, id, client.ContainerKillOptions{Signal: "SIGKILL"})
	_, err := e.api.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	if cerrdefs.IsNotFound(err) {
		return nil
	}
	return e.wrap("removing the session's container", err)
}

// Kill ends a container's processes; one that does not run is no error.
func (e *Engine) Kill(ctx context.Context, id string) error {
	_, err := e.api.ContainerKill(ctx, id, client.ContainerKillOptions{Signal: "SIGKILL"})
	if err == nil {
		return nil
	}
	// Engines word a container that has just ended in many ways.
	if s, ok, ierr := e.Inspect(ctx, id); ierr == nil && (!ok || !s.Running) {
		return nil
	}
	return e.wrap("killing the session's container", err)
}

// agentFile reads the sidecar's copy of the agent.
func (e *Engine) agentFile() (string, []byte, error) {
	p, err := filepath.Abs(e.opts.Agent)
	if err != nil {
		return "", nil, err
	}
	b, err := os.ReadFile(p)
	if err != nil {
		return "", nil, fmt.Errorf("reading the session agent (SANDBOX_AGENT): %w", err)
	}
	return p, b, nil
}
