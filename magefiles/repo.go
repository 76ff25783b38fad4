//go:build mage

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/fuzz"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/lint"
)

// Test passes the project's tests, with real engines, daemons and registries.
func Test(ctx context.Context) error {
	if err := host.Need(ctx, os.Stderr, host.Tests...); err != nil {
		return err
	}
	return goCommand(ctx, "test", "-timeout=90m", "./...")
}

// concurrent are the packages that serve many clients at once.
var concurrent = []string{"./runtime/...", "./sidecar-image/internal/agent/...", "./sidecar-image/internal/identity", "./sidecar-image/internal/images", "./sidecar-image/internal/server",
	"./sidecar-image/internal/session", "./sidecar-image/internal/tools", "./sidecar-image/internal/workspace"}

// Race runs the tests of what serves many clients at once under Go's race detector, which needs a C compiler.
func Race(ctx context.Context) error {
	if err := host.Need(ctx, os.Stderr, host.Tests...); err != nil {
		return err
	}
	return goCommand(ctx, append([]string{"test", "-race", "-timeout=45m"}, concurrent...)...)
}

// Fuzz runs every fuzz test for FUZZ_TIME each, 30s unless it is set.
func Fuzz(ctx context.Context) error {
	return fuzz.Run(ctx, ".", cmp.Or(os.Getenv("FUZZ_TIME"), "30s"), os.Stdout)
}

// Lint runs gofmt, go vet and staticcheck on every module, and actionlint.
func Lint(ctx context.Context) error {
	if err := lint.Go(ctx, ".", os.Stderr); err != nil {
		return err
	}
	workflows, err := filepath.Glob(".github/workflows/*.yml")
	if err != nil || len(workflows) == 0 {
		return errors.Join(err, errors.New("there are no workflows in .github/workflows to lint"))
	}
	return goCommand(ctx, append([]string{"tool", "-modfile=tools/lint/go.mod", "actionlint"}, workflows...)...)
}

func goCommand(ctx context.Context, args ...string) error {
	cmd := host.Command(ctx, "go", args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return nil
}
