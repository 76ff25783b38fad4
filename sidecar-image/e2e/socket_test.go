package e2e

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
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
	p.Serve(t, socket)
	agent, err := os.ReadFile(p.Agent)
	if err != nil {
		t.Fatal(err)
	}
	agent = append(agent, rand.Text()...) // so that its volume is no other test's
	own := filepath.Join(t.TempDir(), "session-agent")
	if err := os.WriteFile(own, agent, 0o755); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(agent)
	volume := fmt.Sprintf("loomcycle-agent-%x", sum[:8])
	t.Cleanup(func() { _ = p.Command("volume", "rm", volume).Run() })
	s := start(t, "runc", map[string]string{"SANDBOX_ENGINE": "docker", "DOCKER_HOST": "unix://" + socket, "SANDBOX_RUNTIME": "", "SANDBOX_AGENT": own})
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
	eventually(t, 30*time.Second, "the container is removed", func() bool { return len(s.containers()) == 0 })
	// As a prune does, while no container has it.
	s.podmanOut("volume", "rm", volume)
	eventually(t, 30*time.Second, "sessions open again", func() bool { return !c.call("sandbox_open", m{}).IsError })
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
		"no token":          {map[string]string{"SANDBOX_AUTH_TOKEN": ""}, "SANDBOX_AUTH_TOKEN is not set"},
		"anon on all":       {map[string]string{"SANDBOX_AUTH_TOKEN": "", "SANDBOX_ALLOW_ANON": "1", "SANDBOX_LISTEN_ADDR": "0.0.0.0:0"}, "loopback"},
		"missing runtime":   {map[string]string{"PATH": onlyPodman(t)}, "SANDBOX_RUNTIME=runc needs the program runc"},
		"broken runtime":    {map[string]string{"PATH": brokenRunc(t) + ":/usr/sbin:/usr/bin:/sbin:/bin"}, "with SANDBOX_RUNTIME=\"runc\""},
		"missing image":     {map[string]string{"SANDBOX_IMAGE": "localhost/none:1"}, "localhost/none:1"},
		"no engine":         {map[string]string{"PATH": t.TempDir()}, "needs podman on the sidecar's PATH"},
		"missing key set":   {map[string]string{"SANDBOX_IDENTITY_JWKS": "/nonexistent"}, "SANDBOX_IDENTITY_JWKS"},
		"missing agent":     {map[string]string{"SANDBOX_AGENT": "/nonexistent"}, "SANDBOX_AGENT"},
		"kata":              {map[string]string{"SANDBOX_RUNTIME": "kata"}, "needs a docker whose host has /dev/kvm"},
		"policy":            {map[string]string{"SANDBOX_IMAGE_POLICY": "/nonexistent"}, "SANDBOX_IMAGE_POLICY"},
		"an unsigned image": {map[string]string{"SANDBOX_IMAGE_POLICY": policy(t)}, "SANDBOX_IMAGE_POLICY"},
		"no workspaces":     {map[string]string{"SANDBOX_WORKSPACE_ROOT": "/nonexistent/ws"}, "SANDBOX_WORKSPACE_ROOT=/nonexistent/ws: there is no directory /nonexistent to make it in"},
		"workspaces a file": {map[string]string{"SANDBOX_WORKSPACE_ROOT": p.Agent}, "is no directory"},
		"a wrong variable":  {map[string]string{"SANDBOX_MEM_MB": "much"}, "SANDBOX_MEM_MB"},
		"host's network":    {map[string]string{"SANDBOX_ALLOW_EGRESS": "1", "SANDBOX_EGRESS_NETWORK": "host"}, `SANDBOX_EGRESS_NETWORK: "host" is no network`},
		"missing network":   {map[string]string{"SANDBOX_ALLOW_EGRESS": "1", "SANDBOX_EGRESS_NETWORK": "nowhere"}, "SANDBOX_EGRESS_NETWORK=nowhere: the engine has no network of that name"},
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

// policy is one that no image here meets.
func policy(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.pub")
	key := "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE8nXRh950IZbRj8Ra/N9sbqOPZrfM\n5/KAQN0/KjHcorm/J5yctVd7iEcnessRQjU917hmKO6JWVGHpDguIyakZA==\n-----END PUBLIC KEY-----\n"
	if err := os.WriteFile(path, []byte(key), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// An engine that is stopped, and started after a while: clear errors meanwhile,
// and the sessions that it kept answer again.
func TestEngineStoppedAndStarted(t *testing.T) {
	p := enginetest.New(t)
	p.Options(t, "runc")
	socket := filepath.Join(t.TempDir(), "engine.sock")
	stop := p.Serve(t, socket)
	s := start(t, "runc", map[string]string{"DOCKER_HOST": "unix://" + socket, "SANDBOX_RUNTIME": ""})
	c := s.client()
	id := c.open(m{})
	c.exec(id, "echo kept > f")
	stop()
	eventually(t, 30*time.Second, "the error says that the engine is away, and not where it was", func() bool {
		a := c.exec(id, "cat f")
		if strings.Contains(a.Text, filepath.Base(socket)) {
			t.Errorf("a path of the host: %s", a.Text)
		}
		return strings.Contains(a.Text, "the container engine does not answer")
	})
	if a := c.call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "the container engine does not answer") || strings.Contains(a.Text, filepath.Base(socket)) || strings.Contains(a.Text, "unix:") {
		t.Errorf("an open: %+v", a)
	}
	eventually(t, 30*time.Second, "it is not ready", func() bool {
		resp, err := http.Get(s.URL + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusServiceUnavailable
	})
	if a := c.call("sandbox_list", m{}); strings.Count(a.Text, "session_id") != 1 {
		t.Errorf("an engine that is away cost a session: %s", a.Text)
	}
	p.Serve(t, socket)
	eventually(t, 30*time.Second, "the session answers again", func() bool { return c.exec(id, "cat f").Text == "kept\n" })
	c.call("sandbox_close", m{"session_id": c.open(m{})})
}

// A docker that is stopped takes its containers with it: their sessions are told
// to be over, and new ones open.
func TestDockerStoppedAndStarted(t *testing.T) {
	d := enginetest.NewDocker(t)
	d.Try(t, "runc")
	env := maps.Clone(caged)
	env["DOCKER_HOST"], env["SANDBOX_ENGINE"], env["SANDBOX_IMAGE"], env["SANDBOX_MAX_CPU"] = d.Host, "docker", d.Image, "1024"
	s := startOn(t, "runc", env, d)
	c := s.client()
	id := c.open(m{})
	inCage(t, s, c, id)
	d.Stop()
	if a := c.call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "the container engine does not answer") {
		t.Errorf("an open without docker: %+v", a)
	}
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the lost session is told to be over", func() bool { return strings.Contains(c.exec(id, "true").Text, "the session has ended") })
	if a := c.exec(c.open(m{"cpu": 1024}), "echo new"); a.Text != "new\n" { // docker refuses more than there are
		t.Errorf("a new session: %+v", a)
	}
	t.Run("kata without its shim", func(t *testing.T) {
		if shim, err := exec.LookPath("containerd-shim-kata-v2"); err == nil {
			t.Skipf("%s is installed", shim)
		}
		k := prepare(t, "kata", env, d)
		k.begin()
		select {
		case <-k.ended:
		case <-time.After(time.Minute):
			t.Fatal("it does not end")
		}
		if text := k.log.String(); !strings.Contains(text, "SANDBOX_RUNTIME=kata needs a docker whose host has /dev/kvm") {
			t.Errorf("it says\n%s", text)
		}
	})
	t.Run("the guide's removal of old volumes", func(t *testing.T) {
		volumes := func() string { return s.podmanOut("volume", "ls", "--quiet", "--filter", "label=loomcycle.managed=1") }
		removal := guide(t, "docker volume rm")
		script(t, time.Minute, strings.TrimSpace(removal)+" || true # it is refused", "DOCKER_HOST="+d.Host)
		if volumes() == "" {
			t.Fatal("the volume of a session that runs was removed")
		}
		s.stop()
		s.removeAll()
		script(t, time.Minute, removal, "DOCKER_HOST="+d.Host)
		if left := volumes(); left != "" {
			t.Errorf("%s is left", left)
		}
		s.run()
		c.open(m{})
	})
	t.Run("the guide's network", func(t *testing.T) {
		network := "egress-" + strings.ToLower(rand.Text())
		t.Cleanup(func() { _ = d.Command("network", "rm", network).Run() })
		script(t, time.Minute, strings.ReplaceAll(guide(t, "docker network create"), "sandbox-egress", network), "DOCKER_HOST="+d.Host)
		if got := s.podmanOut("network", "inspect", "--format", `{{index .Options "com.docker.network.bridge.enable_icc"}}`, network); got != "false" {
			t.Errorf("traffic between its containers: %s", got)
		}
	})
	t.Run("the guide's prune as root", func(t *testing.T) {
		p := enginetest.New(t)
		image, err := d.Load(p, image(t, p, "loomcycle-builder-docker"))
		if err != nil {
			t.Fatal(err)
		}
		const made = `mkdir -p p/old/closed p/new && chown -R 1000 p && chmod 700 p/old/closed && touch -d '40 days ago' p/old`
		root := t.TempDir()
		if out, err := exec.Command("sh", "-ec", "cd "+root+"; "+made).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		commands := strings.NewReplacer("/srv/loomcycle-workspaces", root, "loomcycle_sandbox-state", s.env["SANDBOX_STATE_DIR"], "$LOOMCYCLE_REGISTRY/loomcycle-builder-docker@$LOOMCYCLE_BUILDER_DOCKER_DIGEST", image).Replace(guide(t, "docker run --rm --user 0"))
		script(t, time.Minute, commands, "DOCKER_HOST="+d.Host)
		left, err := os.ReadDir(filepath.Join(root, "p"))
		if err != nil || len(left) != 1 || left[0].Name() != "new" {
			t.Errorf("left are %v, %v", left, err)
		}
	})
}

// Podman lists what meets any of several filters, docker what meets all: the guide's removal
// takes no volume but the agent's, on either.
func TestVolumeRemovalOnPodman(t *testing.T) {
	p := enginetest.New(t).Apart(t)
	bin := t.TempDir()
	shim := "#!/bin/sh\nexec podman '" + strings.Join(p.Flags, "' '") + "' \"$@\"\n"
	if err := os.WriteFile(filepath.Join(bin, "docker"), []byte(shim), 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(commands string) string {
		return script(t, time.Minute, commands, "PATH="+bin+":"+os.Getenv("PATH"))
	}
	run("for v in old new; do docker volume create --label loomcycle.managed=1 $v; done; docker volume create --label other=1 labelled; docker volume create sandbox-state; docker volume create mine\n" +
		"docker create --network none --volume new:/agent --volume mine:/mine " + p.Image + " true")
	run(strings.TrimSpace(guide(t, "docker volume rm")) + " || true # the one of a container is refused")
	if left := strings.Fields(p.Say(t, "volume", "ls", "--quiet")); !slices.Equal(slices.Sorted(slices.Values(left)), []string{"labelled", "mine", "new", "sandbox-state"}) {
		t.Errorf("left are %q", left)
	}
}

// brokenRunc is a PATH with a runc that starts nothing.
func brokenRunc(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "runc"), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
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
