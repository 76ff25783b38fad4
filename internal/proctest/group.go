package proctest

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// Group is a command with all that it starts, as a terminal runs it: in a
// process group of its own.
type Group struct {
	Out syncbuf.Buffer // stdout and stderr

	cmd   *exec.Cmd
	ended chan struct{}
	err   error
}

// patience is until when a group may take to come to a point, or to end: ten minutes,
// and less where go test would end the test, which shows no output of the group.
func patience(t *testing.T) time.Time {
	late := time.Now().Add(10 * time.Minute)
	if end, ok := t.Deadline(); ok && end.Add(-10*time.Second).Before(late) {
		late = end.Add(-10 * time.Second)
	}
	return late
}

// Start starts a command as a group, of which nothing outlives the test.
func Start(t *testing.T, cmd *exec.Cmd) *Group {
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
func (g *Group) Until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for late := patience(t); !ok(); {
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

// Interrupt tells the command to end, with a signal to its process or, as -pid, to all
// of the group, and returns how long it took until the last that has its output ended.
// The command must end as one that has failed.
func (g *Group) Interrupt(t *testing.T, tell func(pid int) error) time.Duration {
	t.Helper()
	start := time.Now()
	if err := tell(g.cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	select {
	case <-g.ended:
	case <-time.After(time.Until(patience(t))):
		t.Fatalf("it does not end:\n%s", &g.Out)
	}
	took := time.Since(start)
	t.Logf("it took %s to end", took)
	if g.err == nil {
		t.Error("an interrupted command ends with exit code 0")
	}
	return took
}
