// Command loomcycle is a stand-in for the runtime, used when no other loomcycle
// source is named: it answers /healthz and /v1/version and runs no agents.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/loomcycle/loomcycle-images/internal/pid1"
	"github.com/loomcycle/loomcycle-images/runtime/internal/server"
)

// Set at link time with -ldflags "-X main.version=... -X main.commit=...".
var (
	version = "devel"
	commit  = "unknown"
)

const usage = `loomcycle is a stand-in for the runtime, which runs no agents.

Usage:
  loomcycle serve      serve the HTTP API on LOOMCYCLE_LISTEN_ADDR (127.0.0.1:8787)
  loomcycle version    print the version and the commit
`

func main() {
	if exit, first := pid1.Run(); first {
		os.Exit(exit)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Getenv, os.Stdout)
	var u usageError
	switch {
	case errors.As(err, &u):
		fmt.Fprintf(os.Stderr, "loomcycle: %v\n\n%s", err, usage)
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "loomcycle: %v\n", err)
		os.Exit(1)
	}
}

type usageError string

func (e usageError) Error() string { return string(e) }

func run(ctx context.Context, args []string, getenv func(string) string, stdout io.Writer) error {
	if len(args) == 0 {
		return usageError("no command is given")
	}
	if len(args) > 1 {
		return usageError(fmt.Sprintf("%s takes no arguments, found %q", args[0], args[1:]))
	}
	info := server.Info{Version: version, Commit: commit}
	switch args[0] {
	case "serve":
		addr := getenv("LOOMCYCLE_LISTEN_ADDR")
		if addr == "" {
			addr = "127.0.0.1:8787"
		}
		return server.Serve(ctx, addr, info, os.Stderr)
	case "version":
		_, err := fmt.Fprintf(stdout, "loomcycle %s (%s)\n", info.Version, info.Commit)
		return err
	case "help", "-h", "--help":
		_, err := io.WriteString(stdout, usage)
		return err
	}
	return usageError(fmt.Sprintf("no command is called %q", args[0]))
}
