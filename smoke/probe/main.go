// Command probe is the smoke runner's hand inside a container: a static
// program, so that it runs in images without a shell too. `probe run` works
// through a plan; the other commands look at what only a process inside can.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := dispatch(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

var commands = map[string]func(ctx context.Context, args []string) error{
	"authority": authority,
	"hash":      hash,
	"http":      fetch,
	"resolve":   resolve,
	"roots":     roots,
	"run":       runPlan,
	"tls":       handshake,
	"tree":      tree,
	"uid":       uid,
	"wait":      wait,
	"zombies":   zombies,
	"zone":      zone,
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) == 0 || commands[args[0]] == nil {
		return fmt.Errorf("no such command: %q", args)
	}
	return commands[args[0]](ctx, args[1:])
}

// wait is `probe wait`: a service that does nothing until it is told to end.
func wait(ctx context.Context, _ []string) error {
	<-ctx.Done()
	return ctx.Err()
}

// runPlan is `probe run PLAN [RESULT]`: the report goes to RESULT, or stdout.
func runPlan(ctx context.Context, args []string) error {
	report := work(ctx, args[0])
	text, err := json.Marshal(report)
	if err != nil {
		return err
	}
	if len(args) > 1 {
		return os.WriteFile(args[1], text, 0o666)
	}
	_, err = os.Stdout.Write(text)
	return err
}
