package build

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

// unused is how long an unpacker that no build asked for is kept.
const unused = 7 * 24 * time.Hour

// compileUnpacker compiles the unpacker for a worker's architecture with the
// machine's go command and returns its folder, which has the name of its
// content: builds of other checkouts have other ones. What it makes of its
// inputs does not depend on the compiler; a layer's digest does not either.
func compileUnpacker(ctx context.Context, root, cache, arch string) (dir string, err error) {
	all := filepath.Join(cache, "unpack")
	if err := os.MkdirAll(all, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(all, "new-*")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	program := filepath.Join(tmp, "unpack")
	cmd := host.Command(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=",
		"-o", program, "./internal/unpack/cmd/unpack")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compiling the unpacker for %s: %w\n%s", arch, err, out)
	}
	f, err := os.Open(program)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum, err := digest.FromReader(f)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(all, arch+"-"+sum.Encoded()[:32])
	now := time.Now()
	err = errors.Join(os.Chmod(tmp, 0o755), os.Rename(tmp, dir))
	if _, serr := os.Stat(filepath.Join(dir, "unpack")); serr == nil { // from now or before
		err = os.Chtimes(dir, now, now)
	}
	return dir, errors.Join(err, sweep(all, now.Add(-unused)))
}

// sweep removes the folders in a folder that are older than a time.
func sweep(dir string, before time.Time) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if info, ierr := e.Info(); ierr == nil && info.ModTime().Before(before) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

func goEnv(ctx context.Context, name string) string {
	out, err := exec.CommandContext(ctx, "go", "env", name).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
