// Command supplychain describes, attests, signs and checks a built family.
// It is apart from the mage targets because the libraries it needs take
// minutes to compile; the targets build it when they first need it.
package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

// command is one subcommand. It prints its result on out and what it is doing on log.
type command struct {
	usage string
	run   func(ctx context.Context, env environment, args []string) error
}

// environment is what a subcommand knows of the world outside.
type environment struct {
	out, log io.Writer
	getenv   func(string) string
	now      func() time.Time
}

// commands are added by each area's own file.
var commands = map[string]command{}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, environment{os.Stdout, os.Stderr, os.Getenv, time.Now}, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "supplychain:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, env environment, args []string) error {
	if len(args) > 0 {
		if c, ok := commands[args[0]]; ok {
			return c.run(ctx, env, args[1:])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(commands)) {
		fmt.Fprintf(env.log, "  %s %s\n", name, commands[name].usage)
	}
	if len(args) == 0 {
		return fmt.Errorf("name one of the commands above")
	}
	return fmt.Errorf("there is no command %q; the commands are above", args[0])
}
