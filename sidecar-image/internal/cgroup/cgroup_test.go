package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// mount finds a cgroup v2 that may be written: the only one, or that of a hybrid
// layout, which has no controllers.
func mount(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if _, rest, _ := strings.Cut(line, " - "); strings.HasPrefix(rest, "cgroup2 ") && strings.HasPrefix(f[5], "rw") {
			return f[4]
		}
	}
	citest.Skip(t, "no cgroup v2 is mounted here")
	return ""
}

// With the real kernel: a cgroup that holds processes hands its controllers
// down once they are in a child of it.
func TestMakeRoom(t *testing.T) {
	root := filepath.Join(mount(t), fmt.Sprintf("loomcycle-test-%d", os.Getpid()))
	if err := os.Mkdir(root, 0o755); err != nil {
		citest.Skip(t, "cgroups cannot be made here: %v", err)
	}
	var started []*exec.Cmd
	t.Cleanup(func() {
		for _, c := range started {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
		for _, d := range []string{filepath.Join(root, leaf), root} {
			if err := os.Remove(d); err != nil {
				t.Error(err)
			}
		}
	})
	for range 3 {
		c := exec.Command("sleep", "100")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		started = append(started, c)
		if err := os.WriteFile(filepath.Join(root, "cgroup.procs"), []byte(fmt.Sprint(c.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	read := func(path string) []string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(b))
	}
	if err := MakeRoom(root, "0::/user.slice\n"); err != nil || len(read("cgroup.procs")) != 3 {
		t.Errorf("another's cgroup was changed: %v, %v", read("cgroup.procs"), err)
	}
	for range 2 { // a second time changes nothing
		if err := MakeRoom(root, "1:name=x:/\n0::/\n"); err != nil {
			t.Fatal(err)
		}
	}
	if left, moved := read("cgroup.procs"), read(leaf+"/cgroup.procs"); len(left) != 0 || len(moved) != 3 {
		t.Errorf("left %v, moved %v", left, moved)
	}
	if have, given := read("cgroup.controllers"), read("cgroup.subtree_control"); len(have) != len(given) {
		t.Errorf("of %v it hands down %v", have, given)
	}
	if err := MakeRoom(filepath.Dir(mount(t)), "0::/\n"); err != nil {
		t.Errorf("where there is no cgroup v2: %v", err)
	}
}
