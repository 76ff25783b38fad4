package host

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// ready starts a program and waits for its first line.
func ready(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
}

// What a program has started ends with it, and both may clean up.
func TestCommandEndsTheGroup(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := Command(ctx, "sh", "-c", `
		trap 'touch parent' INT
		sh -c 'trap "touch child; exit" INT; echo ready; while :; do sleep 0.1; done'`)
	cmd.Dir = dir
	ready(t, cmd)
	cancel()
	_ = cmd.Wait()
	for _, name := range []string{"parent", "child"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("it was not told: %v", err)
		}
	}
}

// Who does not listen is killed before mage gives up on this process.
func TestCommandKills(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cmd := Command(ctx, "sh", "-c", `trap "" INT; echo ready; while :; do sleep 0.1; done`)
	ready(t, cmd)
	start := time.Now()
	cancel()
	if err := cmd.Wait(); err == nil || !errors.Is(ctx.Err(), context.Canceled) {
		t.Errorf("it ended by itself: %v", err)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("it took %s", took)
	}
	if cmd.WaitDelay >= 5*time.Second { // which mage gives this process
		t.Errorf("it is killed after %s", cmd.WaitDelay)
	}
}
