// Package supplychain runs the program of the same name, and compiles it when
// it is not there or not of this checkout: its libraries take minutes, which
// the targets that do not need it should not wait for.
package supplychain

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/host"
)

// Command is where and with what output the program runs.
type Command struct {
	Root     string // of the repository
	Cache    string // the project's cache folder
	Out, Log io.Writer
}

// Program compiles the program and returns its path. An unchanged checkout
// costs a second: the go command finds its own work.
func (c Command) Program(ctx context.Context) (string, error) {
	root, err := filepath.Abs(c.Root)
	if err != nil {
		return "", err
	}
	// Each checkout has its own, where the go command sees that it need not link
	// again: two at once would run each other's.
	all := filepath.Join(c.Cache, "supplychain")
	dir := filepath.Join(all, digest.FromString(root).Encoded()[:16])
	program := filepath.Join(dir, "supplychain")
	if err := os.MkdirAll(all, 0o755); err != nil {
		return "", fmt.Errorf("make the cache folder: %w", err)
	}
	done, err := host.TurnIn(ctx, all)
	if err != nil {
		return "", err
	}
	err = os.MkdirAll(dir, 0o755)
	host.Used(dir) // before it is compiled, which takes minutes
	host.Sweep(all)
	if done(); err != nil {
		return "", fmt.Errorf("make the cache folder: %w", err)
	}
	temp, err := cache.Temp(func(name string) string { return map[string]string{"LOOMCYCLE_CACHE": c.Cache}[name] })
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(program); err != nil {
		fmt.Fprintln(c.Log, "compiling the supply-chain program, once (a few minutes with a cold Go cache)")
	}
	cmd := host.Command(ctx, "go", "build", "-o", program, "./internal/cmd/supplychain")
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Root, c.Log, c.Log
	cmd.Env = append(os.Environ(), "GOTMPDIR="+temp) // from there it is renamed: another run may use it
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("compile ./internal/cmd/supplychain: %w", err)
	}
	return program, nil
}

// Run runs one subcommand in the repository's root.
func (c Command) Run(ctx context.Context, args ...string) error {
	program, err := c.Program(ctx)
	if err != nil {
		return err
	}
	cmd := host.Command(ctx, program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Root, c.Out, c.Log
	cmd.WaitDelay = 0 // it has registries to leave, which may take longer
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return nil
}
