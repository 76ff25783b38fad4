package host

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Command is a program that ends with the context and in good order: it and
// what it has started get SIGINT, on which the go command and mmdebstrap clean
// up. One that does not listen is killed after four seconds: mage ends this
// process after five. It has a process group of its own, so it can't read from
// a terminal.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error {
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); !errors.Is(err, syscall.ESRCH) {
			return err
		}
		return os.ErrProcessDone
	}
	cmd.WaitDelay = 4 * time.Second
	return cmd
}

// Apt is apt-get, which is never killed, or dpkg's database would be left half
// written: it alone gets SIGINT, upon which it ends a download at once and lets
// a dpkg that works come to its end. It waits five minutes for another one that
// works, which it would not do by itself, and says so once a second.
func Apt(ctx context.Context, args ...string) *exec.Cmd {
	cmd := Command(ctx, "apt-get", append([]string{"-o", "DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 0
	return cmd
}
