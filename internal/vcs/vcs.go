// Package vcs says which commit a checkout is at, and brings a commit of
// another repository onto this machine.
package vcs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

// State is a checkout's commit.
type State struct {
	Commit  string    // 40 hex digits, with -dirty when the work tree differs (but for ignored files); "unknown" outside git
	Version string    // of `git describe`, without the v of a tag: 1.2.3, 1.2.3-4-gabcdef0, 0.0.0-gabcdef0
	Time    time.Time // the commit's, UTC; zero outside git
}

// Describe reads the state of the checkout at dir. A git that is missing or
// refuses to work there is an error: only a folder outside git has no commit.
func Describe(ctx context.Context, dir string) (State, error) {
	if _, err := git(ctx, dir, "rev-parse", "--git-dir"); err != nil && strings.Contains(err.Error(), "not a git repository") {
		return State{Commit: "unknown", Version: "0.0.0"}, nil
	} else if err != nil {
		return State{}, fmt.Errorf("cannot tell the commit of %s: %w", dir, err)
	}
	line, err := git(ctx, dir, "log", "-1", "--format=%H %ct")
	if err != nil {
		return State{}, fmt.Errorf("%s has no commit yet: %w", dir, err)
	}
	hash, seconds, _ := strings.Cut(line, " ")
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return State{}, fmt.Errorf("git log printed %q for the commit's time: %w", line, err)
	}
	s := State{Commit: hash, Time: time.Unix(unix, 0).UTC(), Version: "0.0.0-g" + hash[:12]}
	if tag, err := git(ctx, dir, "describe", "--tags", "--match", "v[0-9]*"); err == nil {
		s.Version = strings.TrimPrefix(tag, "v")
	} else if !strings.Contains(err.Error(), "annot describe") && !strings.Contains(err.Error(), "can describe") {
		return State{}, fmt.Errorf("cannot tell the version of %s: %w", dir, err)
	}
	// Also of files that were not added: the go command compiles them.
	changed, err := git(ctx, dir, "status", "--porcelain", "--untracked-files=normal")
	if err != nil {
		return State{}, err
	}
	if changed != "" {
		s.Commit += "-dirty"
		s.Version += "-dirty"
	}
	return s, nil
}

// Checkout brings a branch, tag or commit of a repository into a folder of
// its own below cache and returns the folder and the commit.
func Checkout(ctx context.Context, cache, url, ref string) (dir, commit string, err error) {
	if ref == "" || strings.HasPrefix(ref, "-") || strings.HasPrefix(url, "-") {
		return "", "", fmt.Errorf("git:%s#%s does not name a tag or commit; write git:URL#REF", url, ref)
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", "", err
	}
	tmp, err := os.MkdirTemp(cache, ".clone-*")
	if err != nil {
		return "", "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	if _, err := git(ctx, tmp, "init", "-q"); err != nil {
		return "", "", err
	}
	if _, err := git(ctx, tmp, "fetch", "-q", "--depth=1", "--", url, ref); err != nil {
		return "", "", fmt.Errorf("cannot fetch %s of the repository: %w", ref, hidden{err})
	}
	if commit, err = git(ctx, tmp, "rev-parse", "FETCH_HEAD^{commit}"); err != nil {
		return "", "", err
	}
	dir = filepath.Join(cache, commit)
	// One at a time: what another build has just put there is in use.
	done, err := host.TurnIn(ctx, cache)
	if err != nil {
		return "", "", err
	}
	defer done()
	if !at(ctx, dir, commit) {
		if _, err := git(ctx, tmp, "checkout", "-q", "--detach", commit); err != nil {
			return "", "", err
		}
		if err := errors.Join(os.RemoveAll(dir), os.Rename(tmp, dir)); err != nil {
			return "", "", err
		}
	}
	host.Used(dir)
	host.Sweep(cache)
	return dir, commit, nil
}

// at tells whether a folder is the whole commit: a power cut may have emptied files.
func at(ctx context.Context, dir, commit string) bool {
	s, err := Describe(ctx, dir)
	return err == nil && s.Commit == commit
}

// Clone copies a local checkout's commit and history into a new folder.
func Clone(ctx context.Context, from, to string) error {
	if out, err := host.Command(ctx, "git", "clone", "-q", "--no-hardlinks", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cloning the checkout: %w\n%s", err, out)
	}
	return nil
}

// hidden is an error without the user and password of the URLs in its text.
type hidden struct{ error }

func (h hidden) Error() string { return Redact(h.error.Error()) }
func (h hidden) Unwrap() error { return h.error }

// Redact takes the users and passwords out of URLs. Git itself leaves out a
// password, but not a user, who may be a token.
func Redact(s string) string { return userinfo.ReplaceAllString(s, "://") }

var userinfo = regexp.MustCompile(`://[^/\s]*@`)

func git(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	cmd.Env = append(slices.DeleteFunc(os.Environ(), elsewhere), "GIT_TERMINAL_PROMPT=0", "LC_ALL=C")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// elsewhere tells whether a variable leads git to another repository than that
// of the folder it works in; a hook of git runs with them.
func elsewhere(kv string) bool {
	name, _, _ := strings.Cut(kv, "=")
	return slices.Contains([]string{"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE", "GIT_PREFIX"}, name)
}
