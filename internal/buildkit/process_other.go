//go:build !linux

package buildkit

import (
	"context"
	"errors"
	"os"
	"os/exec"
)

var errNotLinux = errors.New("a private buildkitd needs Linux: set BUILDKIT_HOST, or start a docker engine")

func lacking() ([]string, error) { return nil, errNotLinux }

func processStart(int) (string, error) { return "", errNotLinux }

func (d *Daemon) command(context.Context, string, string) (*exec.Cmd, error) {
	return nil, errNotLinux
}

func (d *Daemon) removeState() error { return os.RemoveAll(d.dir) }

func remover(dir string) (*exec.Cmd, error) { return exec.Command("rm", "-rf", "--", dir), nil }
