package proctest

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// Group is a command with all that it starts, as a terminal runs it: what a test
// signals is the whole process group.
type Group struct {
	Out syncbuf.Buffer // stdout and stderr

	cmd   *exec.Cmd
	ended chan struct{}
	err   error
}

// patience is how long a group may take to come to a point, or to end.
const patience = 10 * time.Minute

// Start starts a command as a group, of which nothing outlives the test.
func Start(t testing.TB, cmd *exec.Cmd) *Group {
	t.Helper()
	g := &Group{cmd: cmd, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &g.Out, &g.Out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { g.err = cmd.Wait(); close(g.ended) }()
	t.Cleanup(func() {
		select {
		case <-g.ended: // its process id is nobody's then
		default:
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-g.ended
		}
	})
	return g
}

// Until waits for a fact that the group makes true before it ends.
func (g *Group) Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for late := time.Now().Add(patience); !ok(); {
		if time.Now().After(late) {
			t.Fatalf("still not so: %s\n%s", what, &g.Out)
		}
		select {
		case <-g.ended:
			t.Fatalf("it ended (%v) before this was so: %s\n%s", g.err, what, &g.Out)
		case <-time.After(50 * time.Millisecond): // polling a process of another program
		}
	}
}

// Interrupt ends the group as a terminal does: with a signal to each of its processes.
func (g *Group) Interrupt(t testing.TB, signal syscall.Signal) time.Duration {
	t.Helper()
	return g.End(t, func(pid int) error { return syscall.Kill(-pid, signal) })
}

// End ends the group, given its first process, and returns how long that took: until
// the last of its processes has ended, which have its output. The command must end
// as one that has failed.
func (g *Group) End(t testing.TB, end func(pid int) error) time.Duration {
	t.Helper()
	start := time.Now()
	if err := end(g.cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	select {
	case <-g.ended:
	case <-time.After(patience):
		t.Fatalf("it does not end:\n%s", &g.Out)
	}
	took := time.Since(start)
	t.Logf("it took %s to end", took)
	if g.err == nil {
		t.Error("an interrupted command ends with exit code 0")
	}
	return took
}
