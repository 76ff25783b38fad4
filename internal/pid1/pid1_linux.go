// Package pid1 lets a program be the first process of a container: orphans
// become children of PID 1, and stay zombies until it waits for them, which a
// program that waits for its own children through os/exec must not do.
package pid1

import (
	"os"
	"os/signal"
	"syscall"
)

// Run does nothing and returns false unless this process is PID 1. Then it
// starts the same program again as a child, passes signals on to it, reaps
// whatever ends, and returns the child's exit code, or 128 and its signal as
// shells do. Call it first thing in main.
func Run() (exit int, first bool) {
	if os.Getpid() != 1 {
		return 0, false
	}
	// Every signal that can be caught, but what is about this process itself.
	signals := make(chan os.Signal, 32)
	signal.Notify(signals)
	child, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		os.Stderr.WriteString("starting the program below PID 1: " + err.Error() + "\n")
		return 1, true
	}
	go func() {
		for s := range signals {
			switch s {
			case syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPIPE: // ours, or the Go scheduler's
			default:
				child.Signal(s)
			}
		}
	}()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			os.Stderr.WriteString("waiting as PID 1: " + err.Error() + "\n")
			return 1, true
		case pid != child.Pid:
		case status.Signaled():
			return 128 + int(status.Signal()), true
		default:
			return status.ExitStatus(), true
		}
	}
}
