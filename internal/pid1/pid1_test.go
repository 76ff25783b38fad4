package pid1

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// The test program is its own container: as PID 1 of a new namespace it does
// what a main would.
func TestMain(m *testing.M) {
	if os.Getenv("PID1_TEST") == "" {
		os.Exit(m.Run())
	}
	if os.Getpid() == 1 { // a container has a /proc of its own namespace
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, "")
		syscall.Mount("proc", "/proc", "proc", 0, "")
	}
	if exit, first := Run(); first {
		os.Exit(exit)
	}
	switch os.Getenv("PID1_TEST") {
	case "exit":
		os.Exit(7)
	case "orphan": // a child that leaves a grandchild, which ends at once
		if out, err := exec.Command("/bin/sh", "-c", "(:) & echo $!").Output(); err != nil {
			os.Stdout.WriteString(err.Error())
		} else {
			pid := strings.TrimSpace(string(out))
			for range 500 {
				if _, err := os.Stat("/proc/" + pid); err != nil {
					os.Exit(0)
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
		os.Exit(1)
	case "signal":
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		os.Stdout.WriteString("ready\n")
		<-c
		os.Exit(9)
	}
}

func container(t *testing.T, what string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PID1_TEST="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}}
	if os.Getuid() == 0 {
		cmd.SysProcAttr.Cloneflags &^= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = nil, nil
	}
	return cmd
}

func TestRun(t *testing.T) {
	var exit *exec.ExitError
	err := container(t, "exit").Run()
	if errors.Is(err, syscall.EPERM) {
		citest.Skip(t, "this machine allows no PID namespace: %v", err)
	}
	if !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("the exit code is lost: %v", err)
	}
	if out, err := container(t, "orphan").CombinedOutput(); err != nil {
		t.Errorf("an orphan stays: %v\n%s", err, out)
	}
	cmd := container(t, "signal")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 6)
	if _, err := out.Read(line); err != nil || !bytes.HasPrefix(line, []byte("ready")) {
		t.Fatalf("%q %v", line, err)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 9 {
		t.Errorf("the signal did not arrive: %v", err)
	}
}
