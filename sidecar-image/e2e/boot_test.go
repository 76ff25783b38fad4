package e2e

import (
	"io"
	"maps"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// A sidecar that is started beside one that runs, on its state directory or on its
// address, ends with a sentence and takes nothing from it.
func TestSecondSidecar(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_WARM_POOL": "1"})
	c := s.client()
	id := c.open(m{})
	eventually(t, time.Minute, "the pool fills", func() bool { return len(s.containers()) == 2 })
	before := s.podmanOut("ps", "-aq", "--filter", "label=loomcycle.instance="+s.env["SANDBOX_INSTANCE"])
	for want, env := range map[string]map[string]string{
		s.env["SANDBOX_STATE_DIR"] + ": another sidecar that runs has it": {"SANDBOX_LISTEN_ADDR": "127.0.0.1:0"},
		"SANDBOX_LISTEN_ADDR": {"SANDBOX_STATE_DIR": t.TempDir()},
	} {
		second := exec.Command(s.cmd.Path)
		all := maps.Clone(s.env)
		maps.Copy(all, env)
		for k, v := range all {
			second.Env = append(second.Env, k+"="+v)
		}
		defer time.AfterFunc(time.Minute, func() { _ = second.Process.Kill() }).Stop()
		if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("the second ended with %v, %s", err, out)
		}
	}
	if a := c.exec(id, "echo alive"); a.Text != "alive\n" {
		t.Errorf("the session of the first: %+v", a)
	}
	if after := s.podmanOut("ps", "-aq", "--filter", "label=loomcycle.instance="+s.env["SANDBOX_INSTANCE"]); after != before {
		t.Errorf("containers %q became %q", before, after)
	}
	c.open(m{"mem_mb": 64}) // so its podman's socket is there
}

// A machine that has fewer processes than one principal may fill is a matter where
// there is another.
func TestProcessLimitWarning(t *testing.T) {
	for name, tc := range map[string]struct {
		env  map[string]string
		want bool
	}{
		"one principal":       {map[string]string{"SANDBOX_MAX_PIDS": "1048576"}, false}, // more than pid_max can be, times the sessions
		"two":                 {map[string]string{"SANDBOX_MAX_PIDS": "1048576", "SANDBOX_AUTH_TOKENS": "other=" + otherToken}, true},
		"two who are bounded": {map[string]string{"SANDBOX_MAX_PIDS": "1024", "SANDBOX_AUTH_TOKENS": "other=" + otherToken}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, "runc", tc.env)
			if got := strings.Contains(s.log.String(), "limit of processes"); got != tc.want {
				t.Errorf("the log warns: %v\n%s", got, s.log)
			}
		})
	}
}

// While the session image is pulled, or the key set fetched, the sidecar lives, is
// not ready, and ends when it is told to.
func TestSlowBoot(t *testing.T) {
	for name, env := range map[string]map[string]string{
		"pull":    {"SANDBOX_IMAGE": "%s/session:1", "SANDBOX_IMAGE_PULL": "missing"},
		"key set": {"SANDBOX_IDENTITY_JWKS": "http://%s/keys", "SANDBOX_MAX_SESSION": "s3cret"},
	} {
		t.Run(name, func(t *testing.T) { slowBoot(t, env) })
	}
}

func slowBoot(t *testing.T, env map[string]string) {
	mute, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	for k, v := range env {
		env[k] = strings.ReplaceAll(v, "%s", mute.Addr().String())
	}
	p := enginetest.New(t)
	p.Options(t, "runc")
	s := prepare(t, "runc", env, p)
	s.begin()
	if err := mute.(*net.TCPListener).SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	conn, err := mute.Accept() // it has begun
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for path, want := range map[string]int{"/healthz": http.StatusOK, "/readyz": http.StatusServiceUnavailable, "/mcp": http.StatusServiceUnavailable} {
		resp, err := http.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != want || want != http.StatusOK && !strings.Contains(string(text), "the sidecar is starting") {
			t.Errorf("%s answers %s, %s", path, resp.Status, text)
		}
	}
	for name := range env { // a typo is told, and nothing of its value
		typo := !slices.ContainsFunc(config.Vars, func(v config.Var) bool { return v.Name == name })
		if text := s.log.String(); strings.Contains(text, "the sidecar reads no variable "+name) != typo || strings.Contains(text, "s3cret") {
			t.Errorf("%s: the log is\n%s", name, text)
		}
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.ended:
	case <-time.After(20 * time.Second):
		t.Error("it does not end")
	}
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("it ended with %d", code)
	}
}

// Whoever starts a sidecar without its engine sees at once what it waits for.
func TestAbsentEngine(t *testing.T) {
	dir := t.TempDir()
	mute, err := net.Listen("unix", filepath.Join(dir, "mute.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	p := enginetest.New(t)
	p.Options(t, "runc")
	for address, want := range map[string]string{
		"unix://" + filepath.Join(dir, "nope.sock"): "waiting for the container engine, which does not answer yet",
		"unix://" + mute.Addr().String():            "asking the container engine",
	} {
		s := prepare(t, "runc", map[string]string{"DOCKER_HOST": address, "SANDBOX_ENGINE": "docker"}, p)
		s.begin()
		eventually(t, 30*time.Second, "the log says "+want, func() bool {
			text := s.log.String()
			return strings.Contains(text, want) && strings.Contains(text, address)
		})
		began := time.Now()
		_ = s.cmd.Process.Signal(syscall.SIGTERM)
		s.ends(began)
		if n := strings.Count(s.log.String(), "\n"); n > 2 {
			t.Errorf("it is said more than once:\n%s", s.log)
		}
	}
}

// An image that is in no registry, and not in the engine, has to be loaded: the boot
// ends with that.
func TestAbsentImage(t *testing.T) {
	p := enginetest.New(t)
	p.Options(t, "runc")
	for _, pull := range []string{"missing", "never"} {
		s := prepare(t, "runc", map[string]string{"SANDBOX_IMAGE": "localhost/absent:1", "SANDBOX_IMAGE_PULL": pull}, p)
		s.begin()
		select {
		case <-s.ended:
		case <-time.After(2 * time.Minute):
			t.Fatalf("it goes on:\n%s", s.log)
		}
		if s.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(s.log.String(), "the session image localhost/absent:1 is not in the engine, and localhost/ is no registry") {
			t.Errorf("SANDBOX_IMAGE_PULL=%s: it ended with %d:\n%s", pull, s.cmd.ProcessState.ExitCode(), s.log)
		}
	}
}
