package buildkit

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// processStart identifies a process beyond its pid: the boot and the start time in
// clock ticks since then (field 22 of proc_pid_stat(5)). A zombie counts as gone.
func processStart(pid int) (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The second field, the program's name, may hold spaces and parentheses.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return "", fmt.Errorf("process %d has ended", pid)
	}
	return strings.TrimSpace(string(boot)) + "/" + fields[19], nil
}

// rootScript prepares the namespaces of a root daemon. It is PID 1 of its own
// PID namespace, so that the kernel ends every step with it however it dies; its
// mounts and runc's state are in its own mount namespace and vanish likewise.
const rootScript = `set -e
mount --make-rslave /
mount -t proc proc /proc
mkdir -p /run/runc
mount -t tmpfs -o mode=0700 tmpfs /run/runc
exec "$0" "$@"`

// command is the daemon's command line, detached from this process's terminal
// and process group.
func (d *Daemon) command(ctx context.Context, bin, config string) (*exec.Cmd, error) {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		// A supervisor's sockets aren't the daemon's, and no build may depend on
		// the epoch or the network setup of whoever started it.
		return slices.Contains([]string{"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "SOURCE_DATE_EPOCH", "BUILDKIT_NETWORK_BRIDGE_AUTO", "PATH"}, name)
	})
	env = append(env, "PATH="+os.Getenv("PATH")+":/usr/local/sbin:/usr/sbin:/sbin")
	if os.Geteuid() == 0 {
		cmd := exec.Command("/bin/sh", "-c", rootScript, bin, "--config", config)
		cmd.Env = env
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
		return cmd, nil
	}
	kit, err := exec.LookPath("rootlesskit")
	if err != nil {
		return nil, err
	}
	run := filepath.Join(d.dir, "run")
	if err := os.MkdirAll(run, 0o700); err != nil {
		return nil, err
	}
	// Its state folder holds sockets too, so it goes where ours is.
	args := []string{"--state-dir=" + d.kitState(), "--net=host", "--pidns", bin, "--config", config, "--rootless"}
	if !canMountProc(ctx) {
		d.opts.notice("this machine does not let a user mount /proc (it is itself a container?): steps see the daemon's processes")
		args = append(args, "--oci-worker-no-process-sandbox")
	}
	cmd := exec.Command(kit, args...)
	cmd.Env = append(env, "XDG_RUNTIME_DIR="+run) // where runc keeps its state
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd, nil
}

// lacking are the programs that a private daemon needs and this machine does
// not have, and the error of a user without subordinate ids, who needs them.
func lacking() (programs []string, ids error) {
	if findRunc() == "" {
		programs = append(programs, "runc")
	}
	if os.Geteuid() == 0 {
		return programs, nil
	}
	for _, name := range []string{"rootlesskit", "newuidmap", "newgidmap"} {
		if _, err := exec.LookPath(name); err != nil {
			programs = append(programs, name)
		}
	}
	return programs, subordinateIDs()
}

func subordinateIDs() error {
	u, err := user.Current()
	if err != nil {
		return err
	}
	for _, f := range []string{"/etc/subuid", "/etc/subgid"} {
		data, _ := os.ReadFile(f)
		if !slices.ContainsFunc(strings.Split(string(data), "\n"), func(l string) bool {
			return strings.HasPrefix(l, u.Username+":") || strings.HasPrefix(l, u.Uid+":")
		}) {
			return fmt.Errorf("%s gives user %s no subordinate ids: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 %[2]s (as root)", f, u.Username)
		}
	}
	return nil
}

// canMountProc tells whether a user namespace here may mount a /proc of its own:
// the kernel refuses it when parts of the visible one are masked.
func canMountProc(ctx context.Context) bool {
	return exec.CommandContext(ctx, "unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true").Run() == nil
}

// removeState deletes the state. Files of a rootless daemon belong to
// subordinate ids, which only a namespace that maps them may delete.
func (d *Daemon) removeState() error {
	if os.Geteuid() == 0 {
		return os.RemoveAll(d.dir)
	}
	rm, err := remover(d.dir)
	if err != nil {
		return err
	}
	if out, err := rm.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// remover deletes a folder with files of a rootless daemon.
func remover(dir string) (*exec.Cmd, error) {
	kit, err := exec.LookPath("rootlesskit")
	if err != nil {
		return nil, fmt.Errorf("files of a buildkitd without root go with rootlesskit: %w", err)
	}
	return exec.Command(kit, "rm", "-rf", "--", dir), nil
}
