package buildkit

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/mod/modfile"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

const buildkitModule = "github.com/moby/buildkit"

// toolsDir is the module that pins buildkitd, tools/buildkitd in the checkout.
func toolsDir(root string) (string, error) {
	if root != "" {
		return filepath.Join(root, "tools", "buildkitd"), nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		tools := filepath.Join(d, "tools", "buildkitd")
		if _, err := os.Stat(filepath.Join(tools, "go.mod")); err == nil {
			return tools, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("neither %s nor a folder above it holds tools/buildkitd, which pins BuildKit: run this in a checkout", dir)
		}
	}
}

// binary says which buildkitd a checkout pins and where it is kept.
type binary struct{ tools, version, path string }

// pinned reads the pin; the file name holds the version, and a hash of every
// pinned module and of the compiler, so that a change of either builds a new one.
func pinned(ctx context.Context, tools, cache string) (binary, error) {
	mod, err := os.ReadFile(filepath.Join(tools, "go.mod"))
	if err != nil {
		return binary{}, fmt.Errorf("reading the pin of BuildKit: %w", err)
	}
	sum, err := os.ReadFile(filepath.Join(tools, "go.sum"))
	if err != nil {
		return binary{}, fmt.Errorf("reading the pin of BuildKit: %w", err)
	}
	f, err := modfile.ParseLax("go.mod", mod, nil)
	if err != nil {
		return binary{}, fmt.Errorf("reading the pin of BuildKit in %s: %w", tools, err)
	}
	b := binary{tools: tools}
	for _, r := range f.Require {
		if r.Mod.Path == buildkitModule {
			b.version = r.Mod.Version
		}
	}
	if b.version == "" {
		return b, fmt.Errorf("%s/go.mod does not require %s", tools, buildkitModule)
	}
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOARCH", "CGO_ENABLED")
	cmd.Dir = tools
	env, err := cmd.Output()
	if err != nil {
		return b, fmt.Errorf("asking go for its version (is it installed?): %w", err)
	}
	key := sha256.New()
	for _, part := range [][]byte{mod, sum, env} {
		fmt.Fprintf(key, "%d\n", len(part))
		key.Write(part)
	}
	b.path = filepath.Join(cache, "bin", "buildkitd-"+b.version+"-"+hex.EncodeToString(key.Sum(nil))[:12])
	return b, nil
}

// ensure builds the program unless it is there. The caller holds the lock.
func (b binary) ensure(ctx context.Context, notice func(string, ...any), log io.Writer) error {
	// A cache folder may have come from another machine, with another libc.
	if err := exec.CommandContext(ctx, b.path, "--version").Run(); err == nil {
		return os.Chtimes(b.path, time.Time{}, time.Now())
	}
	if err := os.MkdirAll(filepath.Dir(b.path), 0o755); err != nil {
		return fmt.Errorf("making the folder of buildkitd: %w", err)
	}
	notice("compiling buildkitd %s, once (a few minutes with a cold Go cache)", b.version)
	start := time.Now()
	tmp := fmt.Sprintf("%s.%d.tmp", b.path, os.Getpid())
	defer os.Remove(tmp)
	// With go's own defaults and the main module's versions, a third of the
	// packages and the standard library come out of the Go cache, where compiling
	// the targets has put them. Seccomp profiles are runc's, no build tag is needed.
	cmd := host.Command(ctx, "go", "build", "-ldflags", "-s -w -X "+buildkitModule+"/version.Version="+b.version,
		"-o", tmp, buildkitModule+"/cmd/buildkitd")
	cmd.Dir = b.tools
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=readonly", "GOWORK=off")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(log, &out), io.MultiWriter(log, &out)
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("compiling buildkitd was cancelled: %w", context.Cause(ctx))
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		return fmt.Errorf("compiling buildkitd %s failed: %w (%s); does go reach its module proxy (go env GOPROXY)?", b.version, err, lines[len(lines)-1])
	}
	if err := os.Rename(tmp, b.path); err != nil {
		return fmt.Errorf("putting buildkitd into place: %w", err)
	}
	notice("compiled buildkitd in %s", time.Since(start).Round(time.Second))
	return b.prune(start)
}

// unused is how long a program of another pin is kept after its last build.
const unused = 30 * 24 * time.Hour

// prune removes old programs of other pins. A running daemon loses nothing:
// Linux keeps the file that it executes.
func (b binary) prune(now time.Time) error {
	old, err := filepath.Glob(filepath.Join(filepath.Dir(b.path), "buildkitd-*"))
	if err != nil {
		return err
	}
	for _, f := range old {
		if info, err := os.Stat(f); err != nil || f == b.path || now.Sub(info.ModTime()) < unused {
			continue
		}
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) { // another one prunes, too
			return fmt.Errorf("removing an old buildkitd: %w", err)
		}
	}
	return nil
}
