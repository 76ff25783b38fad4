// Package service puts the sidecar together from its configuration, and takes
// it apart again in the right order.
package service

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/images"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/server"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tracing"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

const (
	engineTimeout = time.Minute // for the engine to answer at boot
	trialTimeout  = 5 * time.Minute
	// An engine gives a container ten seconds to end. The calls under way have
	// drainTimeout of them, and the removal of what no session needs poolTimeout.
	drainTimeout = 4 * time.Second
	poolTimeout  = 5 * time.Second
	// answerTimeout is for the end of a call to be told.
	answerTimeout = 2 * time.Second
	flushTimeout  = time.Second // for what is then left to be sent
	openAtOnce    = 4
)

// sidecar is what there is of a running one.
type sidecar struct {
	cfg      *config.Config
	version  string
	log      *slog.Logger
	sessions *session.Manager
	engine   *engine.Engine
	store    *session.Store
	server   *server.Server
	tools    *tools.Tools
	traces   *tracing.Tracing
}

// Run is a sidecar, until ctx ends. It listens from the start, unready while it
// boots, which takes as long as the first pull of the session image. An error says
// what was missing: the state directory or the address is another's, the engine
// does not answer, the image is not there or not allowed, or no trial session starts.
func Run(ctx context.Context, c *config.Config, version string, log *slog.Logger) (err error) {
	s := &sidecar{cfg: c, version: version, log: log, traces: tracing.Off()}
	defer s.close()
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	left := fate(c.Host != "", os.Getppid(), namespace) // now: the parent may end first
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	// First: a second sidecar has to end here, before it touches what the running one owns.
	if s.store, err = session.OpenStore(c.StateDir, c.Instance); err != nil {
		return err
	}
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listening on SANDBOX_LISTEN_ADDR: %w", err)
	}
	defer l.Close()
	if c.Traces != "" {
		if s.traces, err = tracing.Start(ctx, version, log); err != nil {
			return err
		}
	}
	m := metrics.New(version, func() (int, int) { return s.sessions.Count() })
	stopCalls := make(chan struct{})
	s.tools = &tools.Tools{Config: c, Log: log, Tracing: s.traces, Metrics: m, Stop: stopCalls}
	s.server = &server.Server{Tools: s.tools, Metrics: m, Ping: func(ctx context.Context) error { return s.engine.Ping(ctx) },
		MaxBody: c.MaxBody(), Version: version, Log: log}
	h := s.server.HTTP()
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(s.server.Limit(l)) }()
	defer h.Close()
	if err := s.boot(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // told to end while it booted
		}
		return err
	}
	if c.RunStatusURL != "" {
		l := &session.Liveness{URL: c.RunStatusURL, Token: c.RunStatusToken, Client: &http.Client{Timeout: 10 * time.Second}}
		go l.Run(life, s.sessions, c.RunStatusInterval)
	}
	s.server.Booted()
	log.Info("serving", "address", l.Addr().String())
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.server.Drain()
	log.Info("shutting down; " + left)
	pctx, cancel := context.WithTimeout(life, poolTimeout)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { s.sessions.Drain(pctx) })
	answered := make(chan struct{})
	go func() { _ = h.Shutdown(life); close(answered) }()
	select {
	case <-answered:
	case <-time.After(drainTimeout):
		close(stopCalls)
		select {
		case <-answered:
		case <-time.After(answerTimeout):
			s.sessions.Close() // whose agents do not answer: that ends the calls too
			select {
			case <-answered:
			case <-time.After(flushTimeout):
			}
		}
	}
	wg.Wait()
	return nil
}

// hostNamespace is that of a machine's own processes (PROC_PID_INIT_INO of the kernel's
// proc_ns.h).
const hostNamespace = "pid:[4026531836]"

// fate tells what becomes of the sessions, by where their engine is, this process's
// parent and its PID namespace: those of a nested podman end with the container, whose
// first process ends with this one.
func fate(outside bool, parent int, namespace string) string {
	if !outside && parent == 1 && namespace != hostNamespace {
		return "its sessions end with this container, workspaces stay"
	}
	return "sessions stay for the next sidecar"
}

// boot reads who may call, finds the engine and the session image, tries a session,
// and adopts those of an earlier sidecar.
func (s *sidecar) boot(ctx context.Context) (err error) {
	c := s.cfg
	// A key set may be at a URL that does not answer.
	auth, err := identity.New(ctx, identity.Options{Tokens: c.Tokens, File: c.TokenFile, Anon: c.Anon, JWKS: c.JWKS, Issuer: c.Issuer, Audience: c.Audience, Leeway: c.Leeway, Once: c.Once, Log: s.log})
	if err != nil {
		return err
	}
	for _, t := range auth.Tokens() {
		if len(t.Secret) < 16 {
			s.log.Warn("a bearer token is shorter than 16 characters: make one with `openssl rand -hex 32`", "name", t.Name)
		}
	}
	s.server.Auth = auth // nobody asks for it before Booted
	var ws *workspace.Root
	if c.WorkspaceRoot != "" {
		if ws, err = workspace.New(c.WorkspaceRoot, c.WorkspaceHost, engine.SessionUser, c.WorkspaceMB<<20); err != nil {
			return err
		}
		ws.Most = c.Workspaces
	}
	opts := engine.Options{Instance: s.store.Instance, Host: c.Host, Runtime: c.Runtime, Agent: c.Agent, HostPath: c.AgentPath, Podman: c.PodmanOptions,
		Socket: socket(c.StateDir), NoFile: c.NoFile, NProc: c.NProc, Log: s.log, Trace: s.traces.Engine()}
	if opts.NProc == 0 {
		if opts.NProc, err = engine.Processes(c.AllProcesses()); err != nil {
			return err
		}
		// A principal who is alone takes them from nobody.
		if least := c.LeastProcesses(); opts.NProc < least && auth.Several() {
			s.log.Warn("the machine's limit of processes (ulimit -u of the sidecar, kernel.pid_max) is below what the sessions of one principal, or of one tenant with signed identities, may have: who fills them has commands of others fail; raise it, or lower SANDBOX_MAX_PIDS, SANDBOX_MAX_SESSIONS_PER_PRINCIPAL or SANDBOX_MAX_SESSIONS_PER_TENANT",
				"limit", opts.NProc, "needed", least)
		}
	}
	if c.AllowEgress {
		opts.Egress = c.EgressNetwork
	}
	ectx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	if s.engine, err = engine.Open(ectx, opts); err != nil {
		return err
	}
	if most := float64(s.engine.CPUs()); most > 0 && c.MaxCPU > most {
		s.log.Info("SANDBOX_MAX_CPU is lowered to the CPUs that the engine's host has", "asked", c.MaxCPU, "cpus", most)
		c.MaxCPU, c.CPU = most, min(c.CPU, most)
	}
	im := &images.Images{Engine: s.engine, Pull: c.Pull == "missing"}
	if c.ImagePolicy != "" {
		if im.Verify, err = images.LoadPolicy(c.ImagePolicy); err != nil {
			return err
		}
	}
	s.tools.Image = im.Resolve
	s.log.Info("looking for the session image, which may have to be pulled", "image", c.Image)
	spec, err := s.tools.DefaultSpec(ctx)
	if err != nil {
		return err
	}
	tctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	if err := session.Try(tctx, s.engine, s.store.Instance, spec); err != nil {
		return fmt.Errorf("a trial session does not start with SANDBOX_RUNTIME=%q on this engine: %w", c.Runtime, err)
	}
	if spec.Egress = c.AllowEgress; spec.Egress {
		if err := session.Try(tctx, s.engine, s.store.Instance, spec); err != nil {
			return fmt.Errorf("a trial session with egress does not start with SANDBOX_RUNTIME=%q and SANDBOX_EGRESS_NETWORK=%s on this engine: %w", c.Runtime, c.EgressNetwork, err)
		}
	}
	s.sessions, err = session.New(ctx, session.Config{Engine: s.engine, Store: s.store, Workspaces: ws, Log: s.log, Default: s.tools.DefaultSpec,
		Limits:  session.Limits{Sessions: c.Sessions, PerPrincipal: c.PerPrincipal, PerTenant: c.PerTenant, IdleTTL: c.IdleTTL, WarmPool: c.WarmPool, Opening: openAtOnce},
		Observe: session.Observer{Opened: s.tools.Metrics.Opened, Closed: s.tools.Metrics.Closed}})
	s.tools.Sessions = s.sessions
	return err
}

// socket names a socket for this process alone: the podman of a sidecar that
// was just killed takes its own socket away when it ends, maybe after the next
// sidecar has started.
func socket(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs // podman runs elsewhere
	}
	stale, _ := filepath.Glob(filepath.Join(dir, "podman-*.sock"))
	for _, path := range stale {
		_ = os.Remove(path)
	}
	return filepath.Join(dir, fmt.Sprintf("podman-%d.sock", os.Getpid()))
}

// close ends the sidecar, not its sessions.
func (s *sidecar) close() {
	if s.sessions != nil {
		s.sessions.Close()
	}
	if s.engine != nil {
		s.engine.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if err := s.traces.Close(ctx); err != nil {
		s.log.Warn("the last traces were not sent", "error", err)
	}
	if s.store != nil {
		s.store.Close() // last: the next sidecar may have the directory
	}
}
