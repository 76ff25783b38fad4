// Package sidecar starts the sandbox sidecar from this checkout, for trying it
// and for working on it.
package sidecar

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/host"
)

const module = "github.com/loomcycle/loomcycle-images/sidecar-image/cmd/"

// Run builds the sidecar and its session agent and runs it against podman, or the
// docker that dist.Load found, until ctx ends, with the session image
// of SANDBOX_IMAGE or else of dist. Every variable of the environment reaches it.
func Run(ctx context.Context, getenv func(string) string, w io.Writer) error {
	dir, err := cache.Dir(getenv)
	if err != nil {
		return err
	}
	dir = filepath.Join(dir, "sidecar")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if getenv("DOCKER_HOST") == "" && getenv("CONTAINER_HOST") == "" {
		if err := host.Need(ctx, w, "podman", "runc"); err != nil {
			return err
		}
	}
	programs := map[string]string{}
	for _, name := range []string{"loomcycle-builder", "session-agent"} {
		fmt.Fprintf(w, "compiling %s\n", name)
		if programs[name], err = host.Program(ctx, "", filepath.Join(dir, "programs"), module+name, runtime.GOARCH); err != nil {
			return err
		}
		host.Keep(ctx, filepath.Dir(programs[name])) // sessions of weeks mount it, and other checkouts sweep there
	}
	env := os.Environ()
	set := func(name, value string) {
		if getenv(name) == "" {
			env = append(env, name+"="+value)
		}
	}
	if getenv("SANDBOX_IMAGE") == "" {
		if _, err := os.Stat("dist/release.json"); err != nil {
			return errors.New("there is no session image: build the family with `go run mage.go dist`, or name one in SANDBOX_IMAGE")
		}
		ref, engine, err := dist.Load(ctx, getenv, "dist", "loomcycle-sandbox-session")
		if err != nil {
			return err
		}
		if engine != "podman" && getenv("DOCKER_HOST") == "" {
			set("SANDBOX_ENGINE", engine)
		}
		set("SANDBOX_IMAGE", ref)
	}
	if getenv("SANDBOX_AUTH_TOKEN") == "" && getenv("SANDBOX_ALLOW_ANON") == "" {
		token := strings.ToLower(rand.Text())
		fmt.Fprintf(w, "SANDBOX_AUTH_TOKEN=%s (made for this run)\n", token)
		set("SANDBOX_AUTH_TOKEN", token)
	}
	set("SANDBOX_AGENT", programs["session-agent"])
	set("SANDBOX_STATE_DIR", filepath.Join(dir, "state"))
	if _, err := os.Stat("/sys/fs/cgroup/unified"); err == nil {
		// A hybrid of cgroup v1 and v2, which podman's usual crun refuses.
		set("SANDBOX_RUNTIME", "runc")
	}
	cmd := host.Command(ctx, programs["loomcycle-builder"])
	cmd.Env, cmd.Stdout, cmd.Stderr = env, w, w
	cmd.WaitDelay = 0 // it has sessions to end
	if err := cmd.Run(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("the sidecar ended: %w", err)
	}
	return nil
}

// Bench measures the sidecar against a CLI-per-call peer under the runtimes
// named, separated by commas, and returns the table in Markdown.
func Bench(ctx context.Context, runtimes string, w io.Writer) (string, error) {
	if err := host.Need(ctx, w, "podman", "runc", "runsc", "mmdebstrap"); err != nil {
		return "", err
	}
	out, err := os.CreateTemp("", "sidecar-bench-")
	if err != nil {
		return "", err
	}
	defer os.Remove(out.Name())
	out.Close()
	cmd := host.Command(ctx, "go", "test", "./sidecar-image/e2e", "-run", "^TestSpeedTable$", "-count=1", "-timeout=30m")
	cmd.Env = append(os.Environ(), "SANDBOX_BENCH="+runtimes, "SANDBOX_BENCH_OUT="+out.Name())
	cmd.Stdout, cmd.Stderr = w, w
	failed := cmd.Run()
	table, err := os.ReadFile(out.Name())
	if err != nil {
		return "", err
	}
	return string(table), failed
}
