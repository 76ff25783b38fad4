package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// image pulls an image of dist into the test's podman and returns its id.
func image(t *testing.T, p *enginetest.Podman, name string) string {
	t.Helper()
	dist(t)
	if index, err := os.ReadFile("../../dist/oci/index.json"); err != nil || !strings.Contains(string(index), `"`+name+`"`) {
		citest.Skip(t, "dist has no %s: run `go run mage.go dist` first", name)
	}
	return p.FromDist(t, abs(t, "../../dist"), name)
}

// suffix is what makes a name the test's own: the port that is.
func suffix(address string) string { return address[strings.LastIndex(address, ":")+1:] }

// boxed is a sidecar in a container of the test's podman.
type boxed struct {
	*sidecar
	name string
	args []string // of podman run
}

func box(t *testing.T, p *enginetest.Podman, address string, args ...string) *boxed {
	name := "loomcycle-test-" + suffix(address)
	b := &boxed{&sidecar{t: t, podman: p, cli: p, log: &syncbuf.Buffer{}, URL: "http://" + address}, name,
		append([]string{"--runtime", "runc", "run", "--detach", "--name", name, "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384", "--env", "SANDBOX_AUTH_TOKEN=" + token}, args...)}
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := p.Command("logs", name).CombinedOutput()
			t.Logf("the sidecar's log:\n%s", out)
		}
		_ = p.Command("rm", "--force", "--time", "20", name).Run()
	})
	if out, err := p.Command(b.args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b.ready()
	return b
}

func (b *boxed) ready() {
	b.t.Helper()
	eventually(b.t, 2*time.Minute, "the sidecar in its container is ready", func() bool {
		resp, err := http.Get(b.URL + "/readyz")
		if err != nil {
			if out, err := b.podman.Command("inspect", "--format", "{{.State.Running}}", b.name).Output(); err != nil || strings.TrimSpace(string(out)) != "true" {
				b.t.Fatal("the sidecar's container has ended")
			}
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// again kills the sidecar, which is PID 1 of its container, and starts it.
func (b *boxed) again() {
	b.t.Helper()
	for _, args := range [][]string{{"kill", "--signal", "KILL", b.name}, {"wait", b.name}, {"--runtime", "runc", "start", b.name}} {
		if out, err := b.podman.Command(args...).CombinedOutput(); err != nil && args[0] != "wait" {
			b.t.Fatalf("podman %v: %v\n%s", args, err, out)
		}
	}
	b.ready()
}

// The image loomcycle-builder, privileged, with its own nested podman.
func TestNestedImage(t *testing.T) {
	p := enginetest.New(t)
	p.Options(t, "runc")
	builder := image(t, p, "loomcycle-builder")
	storage := "loomcycle-test-storage-" + suffix(freePort(t))
	t.Cleanup(func() { _ = p.Command("volume", "rm", "--force", storage).Run() })
	// Sixty seconds the first time; the README does the same.
	fill := p.Command("--runtime", "runc", "run", "--rm", "--privileged", "--network", "none", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384",
		"--volume", storage+":/var/lib/containers", "--volume", abs(t, "../../dist")+":/dist:ro", "--entrypoint", "/bin/sh", builder, "-c",
		"podman tag $(podman pull -q oci:/dist/oci:loomcycle-sandbox-session) localhost/session:test")
	if out, err := fill.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, rt := range []string{"runc", "crun", "runsc"} {
		t.Run(rt, func(t *testing.T) {
			if rt != "runc" {
				p.Options(t, rt) // what the host's kernel and cgroups refuse outside they refuse inside
			}
			address := freePort(t)
			workspaces := "loomcycle-test-workspaces-" + suffix(address)
			t.Cleanup(func() { _ = p.Command("volume", "rm", "--force", workspaces).Run() })
			b := box(t, p, address, "--privileged", "--cgroupns", "host", "--tmpfs", "/run", "--publish", address+":9000",
				"--env", "SANDBOX_IMAGE=localhost/session:test", "--env", "SANDBOX_IMAGE_PULL=never", "--env", "SANDBOX_RUNTIME="+rt,
				"--env", "SANDBOX_WORKSPACE_ROOT=/var/lib/loomcycle-workspaces", "--volume", workspaces+":/var/lib/loomcycle-workspaces",
				"--volume", storage+":/var/lib/containers", builder)
			compileTestFix(t, b.sidecar, b.again, false)
		})
	}
}

func abs(t *testing.T, path string) string {
	p, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The image loomcycle-builder-docker with an engine's socket, as socket.yaml
// runs it: no root, no capability, a read-only root.
func TestSocketImage(t *testing.T) {
	p := enginetest.New(t)
	p.Options(t, "runc")
	builder := image(t, p, "loomcycle-builder-docker")
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) { // the sidecar is another uid
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(dir, "engine.sock")
	p.Serve(t, socket)
	eventually(t, 30*time.Second, "the engine's socket", func() bool { _, err := os.Stat(socket); return err == nil })
	workspaces := filepath.Join(dir, "ws")
	for _, args := range [][]string{{"chgrp", "2375", socket}, {"chmod", "660", socket}, {"install", "-d", "-o", "65532", "-g", "65532", "-m", "0711", workspaces}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	address := freePort(t)
	instance := "test-" + filepath.Base(dir) + suffix(address)
	state := "loomcycle-test-state-" + suffix(address)
	t.Cleanup(func() { _ = p.Command("volume", "rm", "--force", state).Run() })
	b := box(t, p, address, "--publish", address+":9000", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--group-add", "2375", "--tmpfs", "/tmp",
		"--volume", socket+":/var/run/docker.sock", "--volume", state+":/home/nonroot/.local/share/loomcycle-builder", "--volume", workspaces+":"+workspaces,
		"--env", "SANDBOX_IMAGE="+p.Image, "--env", "SANDBOX_IMAGE_PULL=never", "--env", "SANDBOX_INSTANCE="+instance, "--env", "SANDBOX_WORKSPACE_ROOT="+workspaces, builder)
	b.env = map[string]string{"SANDBOX_INSTANCE": instance}
	t.Cleanup(b.removeAll)
	compileTestFix(t, b.sidecar, b.again, true)
	eventually(t, 30*time.Second, "no container is left", func() bool { return len(b.containers()) == 0 })
	_, err := b.podman.Command("inspect", "--format", "{{.Id}}", b.name).Output()
	if err != nil {
		t.Errorf("the sidecar's own container is gone too: %v", err)
	}
	// On cgroup v2 it has none of its own to make room in, and needs none: the engine's are elsewhere.
	if logs, err := b.podman.Command("logs", b.name).CombinedOutput(); err != nil || strings.Contains(string(logs), "sessions may have no limits") {
		t.Errorf("%v\n%s", err, logs)
	}
}

// The image's user podman, rootless. Limits need cgroup v2 there, with
// controllers that were given to the user; the sidecar refuses to go without.
func TestRootlessImage(t *testing.T) {
	p := enginetest.New(t)
	p.Options(t, "runc")
	image := image(t, p, "loomcycle-builder")
	bin, err := builder()
	if err != nil {
		t.Fatal(err)
	}
	address := freePort(t)
	name := "loomcycle-test-rootless-" + suffix(address)
	storage := name
	t.Cleanup(func() {
		_ = p.Command("rm", "--force", "--time", "5", name).Run()
		_ = p.Command("volume", "rm", "--force", storage).Run()
	})
	run := []string{"--runtime", "runc", "run", "--name", name, "--detach", "--user", "podman", "--privileged", "--cgroupns", "host", "--publish", address + ":9000",
		"--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384", "--tmpfs", "/run:mode=0777", "--volume", storage + ":/home/podman/.local/share/containers:U",
		"--volume", abs(t, "../../dist") + ":/dist:ro", "--volume", bin + ":/usr/local/bin/loomcycle-builder:ro", "--volume", p.Agent + ":/usr/local/bin/session-agent:ro",
		"--env", "HOME=/home/podman", "--env", "SANDBOX_AUTH_TOKEN=" + token, "--env", "SANDBOX_IMAGE=localhost/session:test", "--env", "SANDBOX_IMAGE_PULL=never", "--env", "SANDBOX_RUNTIME=runc",
		"--env", "SANDBOX_STATE_DIR=/home/podman/state", "--entrypoint", "/bin/sh", image, "-c",
		"podman tag $(podman pull -q oci:/dist/oci:loomcycle-sandbox-session) localhost/session:test && exec loomcycle-builder"}
	if out, err := p.Command(run...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s := &sidecar{t: t, podman: p, cli: p, URL: "http://" + address}
	logs := func() string { out, _ := p.Command("logs", name).CombinedOutput(); return string(out) }
	for end := time.Now().Add(20 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		if resp, err := http.Get(s.URL + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				break
			}
		}
		if running := s.podmanOut("inspect", "--format", "{{.State.Running}}", name); running != "true" {
			if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil || !strings.Contains(logs(), "a rootless podman needs cgroup v2") {
				t.Fatalf("it ended:\n%s", logs())
			}
			t.Log("this host has no cgroup v2 to limit rootless sessions with, and the sidecar says so")
			return
		}
		if time.Now().After(end) {
			t.Fatalf("it is not ready:\n%s", logs())
		}
	}
	c := s.client()
	if a := c.exec(c.open(m{}), "id -u; cd /tmp && printf 'package main\nfunc main() { println(42) }' > x.go && go run x.go 2>&1"); a.Text != "1000\n42\n" {
		t.Errorf("%+v", a)
	}
}
