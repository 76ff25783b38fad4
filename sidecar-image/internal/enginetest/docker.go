package enginetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// Docker is a private docker: a daemon with a socket and storage of its own.
type Docker struct {
	Host  string // its address
	Image string // the session image's id

	socket string
	root   string
	conf   string
	cmd    *exec.Cmd
	ended  chan struct{}
	log    string
}

// NewDocker starts a docker daemon that has the session image, or skips where
// none can run. It has no bridge and sets no firewall, so that it leaves the
// machine's network alone; sessions without a network need neither.
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
	dir := t.TempDir()
	// The storage is kept, because the image is large.
	d := &Docker{Host: "unix://" + filepath.Join(dir, "docker.sock"), socket: filepath.Join(dir, "docker.sock"), root: filepath.Join(cache, "docker"), conf: filepath.Join(dir, "daemon.json"), log: filepath.Join(dir, "log")}
	unlock, err := lock(d.root + ".lock") // one daemon at a time
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	conf := map[string]any{"iptables": false, "ip6tables": false, "bridge": "none", "userland-proxy": false, "exec-opts": []string{"native.cgroupdriver=cgroupfs"}, "log-level": "warn"}
	if runsc, err := exec.LookPath("runsc"); err == nil {
		conf["runtimes"] = map[string]any{"runsc": map[string]any{"path": runsc, "runtimeArgs": []string{"--network=none"}}}
	}
	text, err := json.Marshal(conf)
	if err == nil {
		err = os.WriteFile(d.conf, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	if err := d.Start(); err != nil {
		citest.Skip(t, "docker does not run on this host: %v", err)
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

// Start starts the daemon and waits until it answers.
func (d *Docker) Start() error {
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	dir := filepath.Dir(d.socket)
	cmd := exec.Command("dockerd", "--host", d.Host, "--data-root", d.root, "--exec-root", filepath.Join(dir, "exec"), "--pidfile", filepath.Join(dir, "pid"), "--config-file", d.conf)
	cmd.Stdout, cmd.Stderr = log, log
	// Ends with the test program, when that runs into its timeout and nothing
	// cleans up. (The thread that forked lives as long: Go ends only locked ones.)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	d.cmd, d.ended = cmd, ended
	go func() { _ = cmd.Wait(); close(ended) }()
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if d.Command("version").Run() == nil {
			return nil
		}
		select {
		case <-ended:
			text, _ := os.ReadFile(d.log)
			return fmt.Errorf("dockerd ended: %.2000s", text)
		default:
		}
		if time.Now().After(end) {
			text, _ := os.ReadFile(d.log)
			return fmt.Errorf("dockerd does not answer: %.2000s", text)
		}
	}
}

// Stop ends the daemon, and with it its containers.
func (d *Docker) Stop() {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	<-d.ended
	d.cmd = nil
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
