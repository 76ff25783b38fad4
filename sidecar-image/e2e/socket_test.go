package e2e

import (
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// An engine behind a socket, as the sidecar of a host's docker or podman has
// it: the engine does not see the sidecar's files, so the agent has to travel.
func TestEngineSocket(t *testing.T) {
	p := enginetest.New(t)
	p.Options(t, "runc")
	socket := filepath.Join(t.TempDir(), "engine.sock")
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	service := p.Command("--runtime", runc, "system", "service", "--time", "0", "unix://"+socket)
	service.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := service.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = service.Process.Signal(syscall.SIGTERM); _ = service.Wait() })
	s := start(t, "runc", map[string]string{"SANDBOX_ENGINE": "docker", "DOCKER_HOST": "unix://" + socket, "SANDBOX_RUNTIME": ""})
	c := s.client()
	id := c.open(m{})
	if a := c.exec(id, "echo hello; cat /proc/1/cmdline | tr '\\0' ' '"); a.Text != "hello\n/run/loomcycle-agent/session-agent " {
		t.Errorf("%+v", a)
	}
	if mounts := s.podmanOut("inspect", "loomcycle-"+id, "--format", "{{range .Mounts}}{{.Type}} {{.RW}} {{.Destination}};{{end}}"); mounts != "volume false /run/loomcycle-agent;" {
		t.Errorf("the session's mounts are %s", mounts)
	}
	if a := c.exec(id, "rm -f /run/loomcycle-agent/session-agent"); !a.IsError {
		t.Error("a session may change the agent of others")
	}
	s.kill()
	s.run()
	if a := c.exec(id, "echo again"); a.Text != "again\n" {
		t.Errorf("after a restart: %+v", a)
	}
	c.call("sandbox_close", m{"session_id": id})
	eventually(t, 10*time.Second, "the container is removed", func() bool { return len(s.containers()) == 0 })
}

// What does not work stops the boot with a sentence that says what it needs.
func TestRefusedAtBoot(t *testing.T) {
	p := enginetest.New(t)
	bin, err := builder()
	if err != nil {
		t.Fatal(err)
	}
	base := map[string]string{"SANDBOX_IMAGE": p.Image, "SANDBOX_IMAGE_PULL": "never", "SANDBOX_AUTH_TOKEN": token, "SANDBOX_PODMAN_OPTIONS": strings.Join(p.Flags, " "), "SANDBOX_AGENT": p.Agent, "SANDBOX_RUNTIME": "runc"}
	for name, tc := range map[string]struct {
		env  map[string]string
		want string
	}{
		"no token":         {map[string]string{"SANDBOX_AUTH_TOKEN": ""}, "SANDBOX_AUTH_TOKEN is not set"},
		"anon on all":      {map[string]string{"SANDBOX_AUTH_TOKEN": "", "SANDBOX_ALLOW_ANON": "1", "SANDBOX_LISTEN_ADDR": "0.0.0.0:0"}, "loopback"},
		"missing runtime":  {map[string]string{"PATH": onlyPodman(t)}, "SANDBOX_RUNTIME=runc needs the program runc"},
		"missing image":    {map[string]string{"SANDBOX_IMAGE": "localhost/none:1"}, "localhost/none:1"},
		"no engine":        {map[string]string{"PATH": t.TempDir()}, "needs podman on the sidecar's PATH"},
		"missing key set":  {map[string]string{"SANDBOX_IDENTITY_JWKS": "/nonexistent"}, "SANDBOX_IDENTITY_JWKS"},
		"missing agent":    {map[string]string{"SANDBOX_AGENT": "/nonexistent"}, "SANDBOX_AGENT"},
		"a wrong variable": {map[string]string{"SANDBOX_MEM_MB": "much"}, "SANDBOX_MEM_MB"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(bin)
			env := map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SANDBOX_STATE_DIR": t.TempDir(), "SANDBOX_LISTEN_ADDR": "127.0.0.1:0"}
			for _, layer := range []map[string]string{base, tc.env} {
				for k, v := range layer {
					env[k] = v
				}
			}
			for k, v := range env {
				cmd.Env = append(cmd.Env, k+"="+v)
			}
			done := time.AfterFunc(90*time.Second, func() { _ = cmd.Process.Kill() })
			defer done.Stop()
			out, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(out), tc.want) {
				t.Errorf("%v, %s does not say %q", err, out, tc.want)
			}
		})
	}
}

// onlyPodman is a PATH with podman and nothing else.
func onlyPodman(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("podman")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := exec.Command("ln", "-s", path, filepath.Join(dir, "podman")).Run(); err != nil {
		t.Fatal(err)
	}
	return dir
}
