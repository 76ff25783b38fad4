package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/smoke/plan"
)

func work(ctx context.Context, file string) plan.Report {
	var p plan.Plan
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return plan.Report{Error: err.Error()}
	}
	dir := os.ExpandEnv(p.Fixture)
	if dir != "" {
		if err := copyTree(plan.Fixture, dir); err != nil {
			return plan.Report{Error: "copying the fixture: " + err.Error()}
		}
	}
	var r plan.Report
	for _, s := range p.Steps {
		if s.Dir == "" {
			s.Dir = dir
		}
		r.Steps = append(r.Steps, step(ctx, s))
		if ctx.Err() != nil {
			break
		}
	}
	return r
}

// copyTree copies files and links; the copies belong to the container's user.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		info, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case e.IsDir():
			return os.MkdirAll(target, 0o755)
		case info.Mode()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(target, text, info.Mode().Perm()|0o200)
	})
}

// keepOutput is how much of each stream a result carries, in bytes; the end
// is what tells why a command failed.
const keepOutput = 256 << 10

func step(ctx context.Context, s plan.Step) plan.Result {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(s.TimeoutMS)*time.Millisecond)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, s.Argv[0], s.Argv[1:]...)
	cmd.Env = environ(s)
	cmd.Dir = os.ExpandEnv(s.Dir)
	cmd.Stdin = strings.NewReader(s.Stdin)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// A process group of its own, so that a timeout ends all of it; and a
	// short wait for what went into the background and holds the pipes.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	start := time.Now()
	err := cmd.Run()
	r := plan.Result{DurationMS: time.Since(start).Milliseconds(), TimedOut: errors.Is(ctx.Err(), context.DeadlineExceeded)}
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		r.Exit = exit.ExitCode()
	default:
		r.Exit = 127
		fmt.Fprintln(&stderr, "probe:", err)
	}
	r.Stdout, r.Stderr = end(stdout.Bytes()), end(stderr.Bytes())
	for _, f := range s.Files {
		r.Files = append(r.Files, look(f))
	}
	return r
}

func environ(s plan.Step) []string {
	if !s.Clear {
		return append(os.Environ(), s.Env...)
	}
	out := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return !slices.Contains(s.Keep, name)
	})
	return append(out, s.Env...)
}

func end(b []byte) string {
	if len(b) > keepOutput {
		return "[...]\n" + string(b[len(b)-keepOutput:])
	}
	return string(b)
}

func look(name string) plan.FileInfo {
	f := plan.FileInfo{Path: name}
	path := os.ExpandEnv(name)
	info, err := os.Lstat(path)
	if err != nil {
		f.Missing = true
		return f
	}
	st := info.Sys().(*syscall.Stat_t)
	f.Mode, f.UID, f.GID = fmt.Sprintf("0%03o", st.Mode&0o7777), int(st.Uid), int(st.Gid)
	if info.Mode().IsRegular() && info.Size() < keepOutput {
		if text, err := os.ReadFile(path); err == nil {
			f.Content = string(text)
		}
	}
	return f
}
