package build

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/proctest"
)

// Ctrl-C while a step runs: the program that people run ends, says why, and leaves
// neither files nor the step. The step is a compiler that waits for a module. The
// same where a script ends the `go run` that it started, which passes nothing on.
// That the daemon does not hold it for two seconds is measured without the load of
// the machine in internal/buildkit; here it has the five that mage gives.
func TestInterrupt(t *testing.T) {
	machine, err := mirror.FromMachine(t.Context(), os.Getenv).Candidates(lock.Source{Kind: lock.KindGo, Path: "x"})
	if err != nil {
		t.Fatal(err)
	}
	asked, gone := make(chan struct{}, 100), make(chan struct{}, 100)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/example.test/never/") {
			http.Redirect(w, r, strings.TrimSuffix(machine[0], "/x")+r.URL.Path, http.StatusFound)
			return
		}
		asked <- struct{}{}
		<-r.Context().Done()
		gone <- struct{}{}
	}))
	defer proxy.Close()
	source, checkout := t.TempDir(), filepath.Join(t.TempDir(), "checkout")
	sum := "h1:" + strings.Repeat("A", 43) + "="
	for name, text := range map[string]string{
		"go.mod":                "module example.org/loomcycle\n\ngo 1.24\n\nrequire example.test/never v1.0.0\n",
		"go.sum":                "example.test/never v1.0.0 " + sum + "\nexample.test/never v1.0.0/go.mod " + sum + "\n",
		"cmd/loomcycle/main.go": "package main\n\nimport _ \"example.test/never\"\n\nfunc main() {}\n",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(source, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(source, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// A checkout of its own: this one's dist may be in use.
	if out, err := exec.Command("git", "clone", "-q", repo, checkout).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cached := t.TempDir()
	const limit = 5 * time.Second
	interrupt := func(t *testing.T, tell func(pid int) error) time.Duration {
		t.Helper()
		for len(asked)+len(gone) > 0 { // what the try before left
			select {
			case <-asked:
			case <-gone:
			}
		}
		cmd := exec.Command("go", "run", "mage.go", "images:build", "loomcycle")
		cmd.Dir = checkout
		cmd.Env = append(os.Environ(), "GOPROXY="+proxy.URL, "LOOMCYCLE_SOURCE=dir:"+source, "MAGEFILE_CACHE="+cached,
			"DOCKER_HOST=unix:///dev/null", "BUILDKIT_HOST=", "BUILDKIT_HOST_AMD64=", "BUILDKIT_HOST_ARM64=") // the proxy is on this machine's loopback
		g := proctest.Start(t, cmd)
		g.Until(t, "the step runs", func() bool { return len(asked) > 0 })
		took := g.Interrupt(t, tell)
		select {
		case <-gone:
		case <-time.After(time.Minute):
			t.Error("the step still runs")
		}
		left, err := filepath.Glob(filepath.Join(checkout, "*dist*"))
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case took >= limit: // mage has ended it before it was done
			for _, dir := range left {
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			}
		case len(left) > 0:
			t.Errorf("left behind: %q", left)
		case !strings.Contains(g.Out.String(), "the build was cancelled"):
			t.Errorf("it does not say that it was cancelled:\n%s", &g.Out)
		}
		return took
	}
	for _, how := range []struct {
		name string
		tell func(pid int) error
	}{
		{"Ctrl-C", func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) }},
		{"SIGTERM of go run", func(pid int) error { return syscall.Kill(pid, syscall.SIGTERM) }},
		{"kill -9 of go run", func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) }},
	} {
		t.Run(how.name, func(t *testing.T) {
			// The machine may have much else to do: one of three tries counts.
			for range 3 {
				if interrupt(t, how.tell) < limit || t.Failed() {
					return
				}
			}
			t.Error("that is too long")
		})
	}
}
