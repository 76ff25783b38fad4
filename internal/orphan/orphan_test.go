package orphan

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// The test program plays all roles: one that waits for the program named in its
// argument, as `go run` does, mage's two processes, and a target.
func TestMain(m *testing.M) {
	role, rest, _ := strings.Cut(os.Getenv("ORPHAN_TEST"), " ")
	start := func() {
		cmd := exec.Command(os.Args[1], os.Args[2:]...)
		cmd.Env = append(os.Environ(), "ORPHAN_TEST="+rest)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		_ = cmd.Run()
	}
	switch role {
	case "":
		os.Exit(m.Run())
	case "waits":
		start()
	case "passes":
		PassOn("go")
		start()
		fmt.Println("passed on")
	case "target":
		interrupted := make(chan os.Signal, 2)
		Interrupt("mage")
		signal.Notify(interrupted, syscall.SIGINT)
		fmt.Println("pids", os.Getppid(), os.Getpid())
		<-interrupted
		fmt.Println("interrupted")
		select { // while it cleans up
		case <-interrupted:
			fmt.Println("interrupted again")
		case <-time.After(5 * every):
		}
	}
	os.Exit(0)
}

// Whoever of `go run`, mage and the target is told to end, and however, the target is
// interrupted once, and nothing is left.
func TestChain(t *testing.T) {
	if runtime.GOOS != "linux" {
		citest.Skip(t, "it takes Linux's /proc")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	name := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.Link(self, path); err != nil && !errors.Is(err, os.ErrExist) {
			if text, rerr := os.ReadFile(self); rerr != nil || os.WriteFile(path, text, 0o755) != nil {
				t.Fatal(err)
			}
		}
		return path
	}
	for _, tc := range []struct {
		what, first string
		nohup       bool
		signal      func(first, second, third int) error
		says        string // after "interrupted"
	}{
		{"SIGTERM of go run", "go", false, func(first, _, _ int) error { return syscall.Kill(first, syscall.SIGTERM) }, "passed on\n"},
		{"kill -9 of go run", "go", false, func(first, _, _ int) error { return syscall.Kill(first, syscall.SIGKILL) }, "passed on\n"},
		{"SIGTERM of mage", "go", false, func(_, second, _ int) error { return syscall.Kill(second, syscall.SIGTERM) }, "passed on\n"},
		{"kill -9 of mage", "go", false, func(_, second, _ int) error { return syscall.Kill(second, syscall.SIGKILL) }, ""},
		{"SIGTERM of the target", "go", false, func(_, _, third int) error { return syscall.Kill(third, syscall.SIGTERM) }, "passed on\n"},
		{"SIGTERM of all", "go", false, func(first, _, _ int) error { return syscall.Kill(-first, syscall.SIGTERM) }, "passed on\n"},
		{"a closed terminal", "go", false, func(first, _, _ int) error { return syscall.Kill(-first, syscall.SIGHUP) }, ""},
		{"a closed terminal below nohup", "go", true, func(first, _, third int) error {
			return errors.Join(syscall.Kill(-first, syscall.SIGHUP), syscall.Kill(third, syscall.SIGTERM))
		}, "passed on\n"},
		// A shell's end is no reason: the target is told to.
		{"the end of another parent", "sh", false, func(first, _, third int) error {
			if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
				return err
			}
			time.Sleep(5 * every)
			return syscall.Kill(third, syscall.SIGTERM)
		}, "passed on\n"},
	} {
		t.Run(tc.what, func(t *testing.T) {
			if tc.what == "a closed terminal" && signal.Ignored(syscall.SIGHUP) {
				t.Skip("the tests run below nohup, and so would it")
			}
			t.Parallel()
			args := []string{name(tc.first), name("mage"), name("target")}
			if tc.nohup {
				args = append([]string{"sh", "-c", `trap "" HUP; exec "$0" "$@"`}, args...)
			}
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Env = append(os.Environ(), "ORPHAN_TEST=waits passes target")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stderr = cmd.Stdout
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer time.AfterFunc(time.Minute, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }).Stop()
			lines := bufio.NewReader(out)
			var second, third int
			if line, err := lines.ReadString('\n'); err != nil {
				t.Fatal(err)
			} else if _, err := fmt.Sscanf(line, "pids %d %d", &second, &third); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			if err := tc.signal(cmd.Process.Pid, second, third); err != nil {
				t.Error(err)
			}
			// To the end of the last of them that could write.
			if rest, err := io.ReadAll(lines); err != nil || string(rest) != "interrupted\n"+tc.says {
				t.Errorf("it said %q, %v", rest, err)
			}
			_ = cmd.Wait()
		})
	}
}
