package engine

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// processGrace is how long a process may take to end after its container: an
// engine's monitor tidies up behind the command that waited for it.
const processGrace = 5 * time.Second

// Processes lists the processes that still name the mark in their command
// line or have it among their mounts, as every process of a container has the
// folders that were bound into it. It waits for those that are about to end.
func Processes(ctx context.Context, mark string) []string {
	ctx, cancel := context.WithTimeout(ctx, processGrace)
	defer cancel()
	for {
		left := processes(mark)
		if len(left) == 0 || ctx.Err() != nil {
			return left
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func processes(mark string) (out []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid := filepath.Base(dir)
		if pid == strconv.Itoa(os.Getpid()) {
			continue
		}
		// What cannot be read has ended, or is another user's.
		command, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		mounts, _ := os.ReadFile(filepath.Join(dir, "mountinfo"))
		if bytes.Contains(command, []byte(mark)) || bytes.Contains(mounts, []byte(mark)) {
			command = bytes.TrimRight(bytes.ReplaceAll(command, []byte{0}, []byte{' '}), " ")
			out = append(out, "process "+pid+" ("+string(command[:min(len(command), 80)])+")")
		}
	}
	return out
}
