package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
)

// Program compiles a package of the project with the machine's go command for
// Linux, static, and returns the program's path below dir. Its folder has the
// name of its content, so that nothing takes the place of a program that runs
// or that a container has mounted: other checkouts and later sources have
// another one. Those that nobody has asked for in a week go (Sweep).
func Program(ctx context.Context, root, dir, pkg, arch string) (_ string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(dir, "new-*")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	name := path.Base(pkg)
	cmd := Command(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", filepath.Join(tmp, name), pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compiling %s for %s: %w\n%s", pkg, arch, err, bytes.TrimSpace(out))
	}
	text, err := os.ReadFile(filepath.Join(tmp, name))
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	folder := filepath.Join(dir, arch+"-"+hex.EncodeToString(sum[:16]))
	if err := place(ctx, dir, tmp, folder, name, text); err != nil {
		return "", err
	}
	return filepath.Join(folder, name), nil
}

// place moves the folder tmp with a program to its name below dir, unless the same
// program is there.
func place(ctx context.Context, dir, tmp, folder, name string, text []byte) error {
	done, err := TurnIn(ctx, dir)
	if err != nil {
		return err
	}
	defer done()
	have, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil || !bytes.Equal(have, text) { // a power cut may have emptied it
		if err := errors.Join(os.RemoveAll(folder), os.Chmod(tmp, 0o755), os.Rename(tmp, folder)); err != nil {
			return err
		}
	}
	Used(folder)
	Sweep(dir)
	return nil
}
