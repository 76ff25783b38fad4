// Package server answers for the stand-in runtime what health checks and the
// smoke cases ask of a real one.
package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/jsonlog"
)

// Info says which build this is.
type Info struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
}

// grace is how long a shutdown waits for requests in flight: shorter than the
// 10 s that engines wait between SIGTERM and SIGKILL.
const grace = 5 * time.Second

// Handler answers /healthz and /v1/version.
func Handler(info Info) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.HandleFunc("GET /v1/version", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(struct {
			Info
			Go       string `json:"go"`
			Platform string `json:"platform"`
		}{info, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
	})
	return mux
}

// Serve listens on addr until ctx ends, then lets the requests in flight
// finish.
func Serve(ctx context.Context, addr string, info Info, logs io.Writer) error {
	log := jsonlog.New(logs, slog.LevelInfo)
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("cannot listen on LOOMCYCLE_LISTEN_ADDR=%s: %w", addr, err)
	}
	srv := &http.Server{Handler: Handler(info), ReadHeaderTimeout: 10 * time.Second}
	log.Info("listening", "addr", l.Addr().String(), "version", info.Version, "commit", info.Commit)
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	select {
	case err := <-failed:
		return fmt.Errorf("the HTTP server stopped: %w", err)
	case <-ctx.Done():
	}
	log.Info("shutting down", "grace", grace)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	if err := srv.Shutdown(end); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}
