package enginetest

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// Docker is a private docker: a daemon with a socket and storage of its own.
type Docker struct {
	*dockertest.Daemon
	Image string // the session image's name
}

// NewDocker starts a docker daemon that has the session image, or skips where
// none can run. Sessions without a network need none of it.
func NewDocker(t testing.TB) *Docker {
	t.Helper()
	p := New(t)
	if !dockertest.Programs(t) {
		citest.Skip(t, "docker is not installed (apt-get install docker.io docker-cli)")
	}
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(cache, "docker") // kept, because the image is large
	unlock, err := lock(root + ".lock")    // one daemon at a time
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	runtimes := map[string]any{"kata": map[string]any{"runtimeType": "io.containerd.kata.v2"}}
	if runsc, err := exec.LookPath("runsc"); err == nil {
		runtimes["runsc"] = map[string]any{"path": runsc, "runtimeArgs": []string{"--network=none"}}
	}
	conf := map[string]any{"userland-proxy": false, "exec-opts": []string{"native.cgroupdriver=cgroupfs"}, "runtimes": runtimes}
	daemon, err := dockertest.New(t.TempDir(), root, conf)
	if err != nil {
		t.Fatal(err)
	}
	d := &Docker{Daemon: daemon}
	t.Cleanup(d.Stop)
	if err := d.Start(); err != nil {
		citest.Skip(t, "docker does not run on this host: %v", err)
	}
	// What tests have left that were killed.
	for _, args := range [][2]string{{"ps --all --quiet", "rm --force --volumes"}, {"volume ls --quiet", "volume rm --force"}} {
		out, _ := d.Command(strings.Fields(args[0])...).Output()
		if left := strings.Fields(string(out)); len(left) > 0 {
			_ = d.Command(append(strings.Fields(args[1]), left...)...).Run()
		}
	}
	if d.Image, err = d.Load(p, p.Image); err != nil {
		t.Fatal(err)
	}
	// Those of earlier builds.
	tags, _ := d.Command("images", "--format", "{{.Repository}}:{{.Tag}}", "loomcycle-test").Output()
	for _, tag := range strings.Fields(string(tags)) {
		if tag != d.Image {
			_ = d.Command("rmi", tag).Run()
		}
	}
	return d
}

// Load copies an image of podman's, unless it is there, and returns its name.
func (d *Docker) Load(p *Podman, image string) (string, error) {
	id, err := p.cmd("image", "inspect", "--format", "{{.Id}}", image).Output()
	if err != nil {
		return "", fmt.Errorf("looking for %s: %w", image, err)
	}
	name := "loomcycle-test:" + strings.TrimSpace(string(id))[:12]
	if d.Command("image", "inspect", name).Run() == nil {
		return name, nil
	}
	save, load := p.cmd("save", image), d.Command("load", "--quiet")
	pipe, err := save.StdoutPipe()
	if err != nil {
		return "", err
	}
	load.Stdin = pipe
	if err := save.Start(); err != nil {
		return "", err
	}
	out, err := load.CombinedOutput()
	if err = errors.Join(err, save.Wait()); err != nil {
		return "", fmt.Errorf("loading %s into docker: %w\n%s", image, err, out)
	}
	words := strings.Fields(string(out)) // "Loaded image ID: sha256:..." or "Loaded image: NAME"
	if out, err := d.Command("tag", words[len(words)-1], name).CombinedOutput(); err != nil {
		return "", fmt.Errorf("tagging %s: %w\n%s", image, err, out)
	}
	return name, nil
}

// Command is a docker command to this daemon.
func (d *Docker) Command(args ...string) *exec.Cmd {
	return exec.Command("docker", append([]string{"--host", d.Host}, args...)...)
}

// Try skips where docker cannot start a container under a runtime.
func (d *Docker) Try(t testing.TB, runtime string) {
	t.Helper()
	out, err := d.Command("run", "--rm", "--runtime", runtime, "--network", "none", "--ulimit", "nofile=1024:1024", d.Image, "true").CombinedOutput()
	if err != nil {
		unusable(t, runtime, out)
	}
}
