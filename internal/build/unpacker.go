package build

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// compileUnpacker compiles the unpacker for a worker's architecture with the
// machine's go command and returns its folder. What it makes of its inputs
// does not depend on the compiler; a layer's digest does not either.
func compileUnpacker(ctx context.Context, root, cache, arch string) (string, error) {
	dir := filepath.Join(cache, "unpack", arch)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=",
		"-o", filepath.Join(dir, "unpack"), "./internal/unpack/cmd/unpack")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compiling the unpacker for %s: %w\n%s", arch, err, out)
	}
	return dir, nil
}

func goEnv(ctx context.Context, name string) string {
	out, err := exec.CommandContext(ctx, "go", "env", name).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
