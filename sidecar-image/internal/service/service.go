// Package service puts the sidecar together from its configuration, and takes
// it apart again in the right order.
package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
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
	engineTimeout = time.Minute     // for the engine to answer at boot
	bootTimeout   = 5 * time.Minute // for a pull and the trial session
	drainTimeout  = 20 * time.Second
	flushTimeout  = 5 * time.Second
	openAtOnce    = 4
)

// Service is a running sidecar.
type Service struct {
	Sessions *session.Manager

	cfg    *config.Config
	log    *slog.Logger
	engine *engine.Engine
	store  *session.Store
	server *server.Server
	stop   context.CancelFunc
	traces *tracing.Tracing
}

// Start boots a sidecar: the engine answers, the image is there and allowed,
// and a trial container has started under the runtime, or the error says what
// is missing. Sessions of an earlier sidecar have been adopted when it returns.
func Start(ctx context.Context, c *config.Config, version string, log *slog.Logger) (_ *Service, err error) {
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &Service{cfg: c, log: log, stop: stop, traces: tracing.Off()}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	auth, err := identity.New(run, identity.Options{Tokens: c.Tokens, Anon: c.Anon, JWKS: c.JWKS, Issuer: c.Issuer, Audience: c.Audience, Leeway: c.Leeway})
	if err != nil {
		return nil, err
	}
	for _, t := range c.Tokens {
		if len(t.Secret) < 16 {
			log.Warn("a bearer token is shorter than 16 characters: make one with `openssl rand -hex 32`", "name", t.Name)
		}
	}
	if c.Traces != "" {
		if s.traces, err = tracing.Start(ctx, version, log); err != nil {
			return nil, err
		}
	}
	var ws *workspace.Root
	if c.WorkspaceRoot != "" {
		if ws, err = workspace.New(c.WorkspaceRoot, c.WorkspaceHost, engine.SessionUser, c.WorkspaceMB<<20); err != nil {
			return nil, err
		}
	}
	if s.store, err = session.OpenStore(c.StateDir, c.Instance); err != nil {
		return nil, err
	}
	opts := engine.Options{Instance: s.store.Instance, Host: c.Host, Runtime: c.Runtime, Agent: c.Agent, HostPath: c.AgentPath, Podman: c.PodmanOptions,
		Socket: socket(c.StateDir), NoFile: c.NoFile, NProc: c.NProc, Log: log, Trace: s.traces.Engine()}
	if opts.NProc == 0 {
		if opts.NProc, err = engine.Processes(c.AllProcesses()); err != nil {
			return nil, err
		}
		if least := c.LeastProcesses(); opts.NProc < least {
			log.Warn("the machine's limit of processes (ulimit -u of the sidecar, kernel.pid_max) is below what one principal's sessions may have: one that fills them has commands of others fail; raise it, or lower SANDBOX_MAX_PIDS or SANDBOX_MAX_SESSIONS_PER_PRINCIPAL",
				"limit", opts.NProc, "needed", least)
		}
	}
	if c.AllowEgress {
		opts.Egress = c.EgressNetwork
	}
	if opts.Host == "" && c.Engine == "docker" {
		opts.Host = "unix:///var/run/docker.sock"
	}
	ectx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	if s.engine, err = engine.Open(ectx, opts); err != nil {
		return nil, err
	}
	im := &images.Images{Engine: s.engine, Pull: c.Pull == "missing"}
	if c.ImagePolicy != "" {
		if im.Verify, err = images.LoadPolicy(c.ImagePolicy); err != nil {
			return nil, err
		}
	}
	t := &tools.Tools{Config: c, Image: im.Resolve, Log: log, Tracing: s.traces}
	bctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	spec, err := t.DefaultSpec(bctx)
	if err != nil {
		return nil, err
	}
	if err := session.Try(bctx, s.engine, s.store.Instance, spec); err != nil {
		return nil, fmt.Errorf("a trial session does not start with SANDBOX_RUNTIME=%q on this engine: %w", c.Runtime, err)
	}
	t.Metrics = metrics.New(version, func() (int, int) {
		if t.Sessions == nil {
			return 0, 0
		}
		return t.Sessions.Count()
	})
	s.Sessions, err = session.New(ctx, session.Config{Engine: s.engine, Store: s.store, Workspaces: ws, Log: log, Default: t.DefaultSpec,
		Limits:  session.Limits{Sessions: c.Sessions, PerPrincipal: c.PerPrincipal, IdleTTL: c.IdleTTL, WarmPool: c.WarmPool, Opening: openAtOnce},
		Observe: session.Observer{Opened: t.Metrics.Opened, Closed: t.Metrics.Closed}})
	if err != nil {
		return nil, err
	}
	t.Sessions = s.Sessions
	if c.RunStatusURL != "" {
		l := &session.Liveness{URL: c.RunStatusURL, Token: c.RunStatusToken, Client: &http.Client{Timeout: 10 * time.Second}}
		go l.Run(run, s.Sessions, c.RunStatusInterval)
	}
	s.server = &server.Server{Auth: auth, Tools: t, Metrics: t.Metrics, Ping: s.engine.Ping, MaxBody: c.MaxBody(), Version: version, Log: log}
	return s, nil
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

// Serve serves on l until ctx ends, then lets calls finish for a while.
func (s *Service) Serve(ctx context.Context, l net.Listener) error {
	h := s.server.HTTP()
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(l) }()
	s.log.Info("serving", "address", l.Addr().String())
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.server.Drain()
	s.log.Info("shutting down; sessions stay for the next sidecar")
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	if err := h.Shutdown(dctx); err != nil {
		_ = h.Close()
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Close ends the sidecar, not its sessions.
func (s *Service) Close() {
	s.stop()
	if s.Sessions != nil {
		s.Sessions.Close()
	}
	if s.engine != nil {
		s.engine.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if err := s.traces.Close(ctx); err != nil {
		s.log.Warn("the last traces were not sent", "error", err)
	}
}
