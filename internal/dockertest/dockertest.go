// Package dockertest gives tests a docker engine: the machine's, or a private
// one of Debian's docker.io, which leaves nothing behind.
package dockertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	docker "github.com/moby/moby/client"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// Start is the address of an engine, in DOCKER_HOST for the rest of the test:
// the machine's where one answers; else one that is started with a state of its
// own, without a network, from the dockerd on PATH or, in CI, from Debian's
// packages. Where neither can be had the test is skipped, and fails in CI.
func Start(t *testing.T) string {
	t.Helper()
	address := os.Getenv("DOCKER_HOST")
	if address == "" {
		address = docker.DefaultDockerHost
	}
	if answers(t.Context(), address) {
		return address
	}
	if os.Geteuid() != 0 {
		citest.Skip(t, "no docker engine answers at %s, and starting one takes root", address)
	}
	dir := t.TempDir()
	if !Programs(t) {
		citest.Skip(t, "no docker engine answers at %s, and docker is not installed (apt-get install docker.io docker-cli)", address)
	}
	d, err := New(dir, filepath.Join(dir, "data"), map[string]any{"features": map[string]bool{"containerd-snapshotter": true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Stop()
		if t.Failed() {
			t.Logf("dockerd:\n%s", &d.out)
		}
	})
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DOCKER_HOST", d.Host)
	return d.Host
}

// Daemon is a dockerd of a test's own. It has no bridge and sets no firewall, so that
// it leaves the machine's network alone.
type Daemon struct {
	Host string // its address

	dir, root string
	cmd       *exec.Cmd
	ended     chan struct{}
	out       syncbuf.Buffer
}

// New configures a daemon whose socket is in dir and whose images and containers are
// in root. config is more for its daemon.json.
func New(dir, root string, config map[string]any) (*Daemon, error) {
	d := &Daemon{Host: "unix://" + filepath.Join(dir, "sock"), dir: dir, root: root}
	all := map[string]any{"bridge": "none", "iptables": false, "ip6tables": false, "ip-forward": false, "log-level": "warn"}
	maps.Copy(all, config)
	text, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	return d, os.WriteFile(filepath.Join(dir, "daemon.json"), text, 0o644)
}

// Start starts the daemon and waits until it answers.
func (d *Daemon) Start() error {
	in := func(name string) string { return filepath.Join(d.dir, name) }
	cmd := exec.Command("dockerd", "--config-file", in("daemon.json"), "--host", d.Host, "--data-root", d.root, "--exec-root", in("exec"), "--pidfile", in("pid"))
	cmd.Stdout, cmd.Stderr = &d.out, &d.out
	// Ends with the test program, when that runs into its timeout and nothing
	// cleans up. (The thread that forked lives as long: Go ends only locked ones.)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	d.cmd, d.ended = cmd, ended
	go func() { _ = cmd.Wait(); close(ended) }()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	for !answers(ctx, d.Host) {
		select {
		case <-ended:
			return fmt.Errorf("dockerd ended:\n%s", &d.out)
		case <-ctx.Done():
			return fmt.Errorf("dockerd does not answer:\n%s", &d.out)
		case <-time.After(50 * time.Millisecond): // polling a process of another program
		}
	}
	return nil
}

// Stop ends the daemon, and with it its containers.
func (d *Daemon) Stop() {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	<-d.ended
	d.cmd = nil
	// Where mounts are private dockerd binds its data root to itself, and
	// leaves that; where they are not there is nothing to unmount.
	_ = syscall.Unmount(d.root, syscall.MNT_DETACH)
}

// Programs tells whether docker's programs are on PATH. In CI, as root on Debian,
// it puts them there until the test ends, below a folder: an installation would
// start a daemon for everybody. The command is a package of its own since Debian 13.
func Programs(t testing.TB) bool {
	t.Helper()
	there := func(program string) bool { _, err := exec.LookPath(program); return err == nil }
	if there("dockerd") && there("docker") && there("containerd") {
		return true
	}
	if os.Getenv("CI") != "true" || os.Geteuid() != 0 {
		return false
	}
	dir := t.TempDir()
	const script = `set -e
cd "$1"; rm -rf ./*
apt-get -q -o APT::Sandbox::User=root download docker.io containerd $(apt-cache pkgnames docker-cli | grep -x docker-cli || true)
for deb in *.deb; do dpkg-deb -x "$deb" root; done`
	unpack := func() error {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", dir).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	if err := unpack(); err != nil { // the lists may be of before a security update
		if err := host.Update(t.Context(), t.Output()); err != nil {
			t.Log(err)
		}
		if again := unpack(); again != nil {
			t.Fatalf("unpacking docker: %v, and with new lists: %v", err, again)
		}
	}
	root := filepath.Join(dir, "root")
	t.Setenv("PATH", filepath.Join(root, "usr/bin")+":"+filepath.Join(root, "usr/sbin")+":"+os.Getenv("PATH"))
	return true
}

// Buildx gives the docker command for the rest of the test a configuration of its own,
// with the buildx that tools/buildx pins and no builder.
func Buildx(t testing.TB) {
	t.Helper()
	program := citest.Tool(t, "buildx", "buildx", "", "github.com/docker/buildx/cmd/buildx")
	dir := t.TempDir()
	plugins := filepath.Join(dir, "cli-plugins")
	if err := errors.Join(os.Mkdir(plugins, 0o755), os.Symlink(program, filepath.Join(plugins, "docker-buildx"))); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DOCKER_CONFIG", dir)
	t.Setenv("BUILDX_CONFIG", filepath.Join(dir, "buildx"))
	t.Setenv("BUILDX_BUILDER", "")
}

func answers(ctx context.Context, host string) bool {
	c, err := docker.New(docker.WithHost(host))
	if err != nil {
		return false
	}
	defer c.Close()
	_, err = c.Ping(ctx, docker.PingOptions{})
	return err == nil
}
