package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

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
	text, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(all, arch+"-"+digest.FromBytes(text).Encoded()[:32])
	place := filepath.Join(dir, "unpack")
	if have, err := os.ReadFile(place); err != nil || !bytes.Equal(have, text) { // a power cut may have emptied it
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o755), os.Rename(program, place)); err != nil {
			return "", err
		}
	}
	host.Used(dir)
	host.Sweep(all)
	return dir, nil
}

func goEnv(ctx context.Context, name string) string {
	out, err := exec.CommandContext(ctx, "go", "env", name).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
