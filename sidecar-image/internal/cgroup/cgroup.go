// Package cgroup makes room for containers below the cgroup of a sidecar that is
// its own container's first process: cgroup v2 gives no limits to the children of
// a cgroup that holds processes (cgroups(7), "no internal processes").
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// leaf is where the processes of the container go.
const leaf = "loomcycle-builder"

// MakeRoom moves the processes of the cgroup v2 at root into a child of it and
// hands root's controllers down. self is /proc/self/cgroup. It does nothing where
// that is not needed: on cgroup v1, on the host's own root, and where the
// cgroups that are seen are the host's, which are not ours to change.
func MakeRoom(root, self string) error {
	controllers, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(root, "cgroup.type")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	ours := false
	for line := range strings.Lines(self) {
		ours = ours || strings.TrimSpace(line) == "0::/"
	}
	if !ours {
		return nil
	}
	fail := func(err error) error {
		return fmt.Errorf("making room for the sessions' cgroups below %s: %w; give the container a writable cgroup of its own, or the host's (cgroup: host)", root, err)
	}
	if err := os.Mkdir(filepath.Join(root, leaf), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fail(err)
	}
	for range 10 { // one that forks may be missed once
		procs, err := os.ReadFile(filepath.Join(root, "cgroup.procs"))
		if err != nil {
			return fail(err)
		}
		pids := strings.Fields(string(procs))
		if len(pids) == 0 {
			break
		}
		for _, pid := range pids {
			// One that has ended meanwhile is no matter; one that stays shows below.
			_ = os.WriteFile(filepath.Join(root, leaf, "cgroup.procs"), []byte(pid), 0)
		}
	}
	for _, c := range strings.Fields(string(controllers)) {
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
			return fail(fmt.Errorf("controller %s: %w", c, err))
		}
	}
	return nil
}
