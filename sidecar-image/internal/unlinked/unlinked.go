// Package unlinked measures what no walk through a directory finds: files that
// have lost their last name, and lie on the disk for as long as a process has
// them. The sidecar looks from the host, and the session agent from inside.
package unlinked

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Bytes is the size on disk of the files without a name on device dev (as stat(2)
// numbers it) that the given processes of /proc have open, mapped, as their program
// or as their directory, in bytes. What the caller may not look at counts nothing. When
// ctx ends, what was found so far is the answer: processes may have millions of
// descriptors, so that it looks first where most files are found.
func Bytes(ctx context.Context, dev uint64, pids []string) (sum int64) {
	seen := map[[2]uint64]bool{}
	look := func(paths ...string) {
		for _, p := range paths {
			if ctx.Err() != nil {
				return
			}
			var st unix.Stat_t
			// Follows the link to the file itself, and opens nothing.
			if unix.Stat(p, &st) != nil || st.Nlink > 0 || seen[[2]uint64{st.Dev, st.Ino}] || st.Dev != dev && !overlaid(p) {
				continue
			}
			seen[[2]uint64{st.Dev, st.Ino}] = true
			sum += st.Blocks * 512
		}
	}
	each := func(what func(dir string)) {
		for _, pid := range pids {
			if ctx.Err() == nil {
				what(filepath.Join("/proc", pid))
			}
		}
	}
	held := func(dir string) {
		look(filepath.Join(dir, "exe"), filepath.Join(dir, "cwd"), filepath.Join(dir, "root"))
		look(names(dir, "fd")...)
	}
	each(held)
	each(func(dir string) { look(names(dir, "map_files")...) })
	each(func(dir string) {
		for _, thread := range names(dir, "task") { // each may have descriptors of its own (unshare(2), CLONE_FILES)
			if ctx.Err() == nil && filepath.Base(thread) != filepath.Base(dir) {
				held(thread)
			}
		}
	})
	return sum
}

// overlaid tells whether a file is of an overlay, which hides the device on which it
// lies: a session may mount one over its workspace in a user namespace.
func overlaid(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(path, &fs) == nil && fs.Type == unix.OVERLAYFS_SUPER_MAGIC
}

// Processes are the ids of all processes in /proc.
func Processes() []string {
	var pids []string
	for _, p := range names("/proc", "") {
		if pid := filepath.Base(p); strings.Trim(pid, "0123456789") == "" {
			pids = append(pids, pid)
		}
	}
	return pids
}

func names(dir, sub string) []string {
	dir = filepath.Join(dir, sub)
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	all, _ := f.Readdirnames(-1)
	for i, n := range all {
		all[i] = dir + "/" + n
	}
	return all
}
