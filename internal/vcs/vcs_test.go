package vcs

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

func run(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.test", "GIT_AUTHOR_DATE=2001-02-03T04:05:06Z",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.test", "GIT_COMMITTER_DATE=2001-02-03T04:05:06Z")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
}

func repository(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	run(t, dir, "init", "-q")
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, dir, "add", "f")
	run(t, dir, "commit", "-qm", "one")
	return dir
}

func TestDescribe(t *testing.T) {
	dir := repository(t)
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct {
		name, version string
		do            func()
		dirty         bool
	}{
		{"no tag", "0.0.0-g", func() {}, false},
		{"a tag", "1.2.3", func() { run(t, dir, "tag", "v1.2.3") }, false},
		{"an ignored file", "1.2.3", func() { write(".git/info/exclude", "g\n"); write("g", "") }, false},
		{"an untracked file", "1.2.3-dirty", func() { write("h.go", "") }, true},
		{"none any more", "1.2.3", func() { os.Remove(filepath.Join(dir, "h.go")) }, false},
		{"a change", "1.2.3-dirty", func() { write("f", "2") }, true},
	} {
		step.do()
		s, err := Describe(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(s.Version, step.version) || strings.HasSuffix(s.Commit, "-dirty") != step.dirty || s.Time.Unix() != 981173106 {
			t.Errorf("%s: %+v", step.name, s)
		}
	}
	s, err := Describe(t.Context(), t.TempDir())
	if err != nil || s.Commit != "unknown" {
		t.Errorf("outside git: %+v, %v", s, err)
	}
}

// A hook of git, and "git rebase --exec", run with these.
func TestDescribeOfAnotherRepository(t *testing.T) {
	dir, other := repository(t), repository(t)
	run(t, dir, "tag", "v1.2.3")
	t.Setenv("GIT_DIR", filepath.Join(other, ".git"))
	t.Setenv("GIT_WORK_TREE", other)
	t.Setenv("GIT_INDEX_FILE", filepath.Join(other, ".git", "index"))
	if s, err := Describe(t.Context(), dir); err != nil || s.Version != "1.2.3" {
		t.Errorf("%+v, %v", s, err)
	}
}

// A repository that git can't read is not a folder outside git.
func TestDescribeFails(t *testing.T) {
	dir := repository(t)
	if err := os.WriteFile(filepath.Join(dir, ".git", "config"), []byte("[core"), 0o644); err != nil {
		t.Fatal(err)
	}
	if s, err := Describe(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "config") {
		t.Errorf("%+v, %v", s, err)
	}
	t.Setenv("PATH", t.TempDir())
	if s, err := Describe(t.Context(), dir); err == nil {
		t.Errorf("without git: %+v", s)
	}
}

// A token is often the user of a URL, whom git shows.
func TestCheckoutHidesTheToken(t *testing.T) {
	closed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("WWW-Authenticate", `Basic realm="git"`)
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer closed.Close()
	_, _, err := Checkout(t.Context(), t.TempDir(), strings.Replace(closed.URL, "://", "://open-sesame@", 1)+"/repository.git", "v1")
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1") || strings.Contains(err.Error(), "sesame") {
		t.Error(err)
	}
}

func TestCheckout(t *testing.T) {
	repo, cache := repository(t), t.TempDir()
	run(t, repo, "tag", "v1")
	dir, commit, err := Checkout(t.Context(), cache, repo, "v1")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != "1" {
		t.Errorf("the checkout holds %q, %v", b, err)
	}
	again, same, err := Checkout(t.Context(), cache, repo, commit)
	if err != nil || again != dir || same != commit {
		t.Errorf("the commit itself: %s %s %v", again, same, err)
	}
	if err := os.Truncate(filepath.Join(dir, "f"), 0); err != nil { // a power cut
		t.Fatal(err)
	}
	killed := filepath.Join(cache, ".clone-1")
	if err := os.Mkdir(killed, 0o755); err != nil {
		t.Fatal(err)
	}
	old := time.Now().AddDate(0, -1, 0)
	for _, name := range []string{killed, dir} {
		if err := os.Chtimes(name, old, old); err != nil {
			t.Fatal(err)
		}
	}
	for _, state := range []string{"a damaged checkout", "a checkout of last month"} {
		if _, _, err := Checkout(t.Context(), cache, repo, "v1"); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(b) != "1" {
			t.Errorf("%s: it holds %q, %v", state, b, err)
		}
		if err := os.Chtimes(dir, old, old); err != nil {
			t.Fatal(err)
		}
	}
	for _, ref := range []string{"v2", "", "--upload-pack=x"} {
		if _, _, err := Checkout(t.Context(), cache, repo, ref); err == nil {
			t.Errorf("ref %q was accepted", ref)
		}
	}
	left, _ := filepath.Glob(filepath.Join(cache, ".clone-*"))
	if len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// What one process is about to take, in its turn, no other one sweeps, not even
// one that fails.
func TestCheckoutSweepsInItsTurn(t *testing.T) {
	repo, cache := repository(t), t.TempDir()
	run(t, repo, "tag", "v1")
	dir, _, err := Checkout(t.Context(), cache, repo, "v1")
	if err != nil {
		t.Fatal(err)
	}
	lock := filepath.Join(cache, ".lock")
	old := time.Now().AddDate(0, -1, 0)
	for _, name := range []string{dir, lock} {
		if err := os.Chtimes(name, old, old); err != nil {
			t.Fatal(err)
		}
	}
	held, err := os.Stat(lock)
	if err != nil {
		t.Fatal(err)
	}
	done, err := host.TurnIn(t.Context(), cache)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Checkout(t.Context(), cache, repo, "no-such-tag"); err == nil {
		t.Error("a ref that does not exist was accepted")
	}
	if _, err := os.Stat(dir); err != nil {
		t.Errorf("the checkout that is being taken: %v", err)
	}
	done()
	if _, _, err := Checkout(t.Context(), cache, repo, "v1"); err != nil {
		t.Fatal(err)
	}
	if now, err := os.Stat(lock); err != nil || !os.SameFile(held, now) {
		t.Errorf("who waits has another lock than who comes: %v", err)
	}
}
