// Package dockertest gives tests a docker engine: the machine's, or a private
// one of Debian's docker.io, which leaves nothing behind.
package dockertest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	docker "github.com/docker/docker/client"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// Start is the address of an engine, in DOCKER_HOST for the rest of the test:
// the machine's where one answers; else one that is started with a state of its
// own, without a network, from the dockerd on PATH or, in CI, from Debian's
// packages. Where neither can be had the test is skipped, and fails in CI.
func Start(t *testing.T) string {
	t.Helper()
	host := os.Getenv("DOCKER_HOST")
	if host == "" {
		host = docker.DefaultDockerHost
	}
	if answers(t.Context(), host) {
		return host
	}
	if os.Geteuid() != 0 {
		citest.Skip(t, "no docker engine answers at %s, and starting one takes root", host)
	}
	dir := t.TempDir()
	if !Programs(t) {
		citest.Skip(t, "no docker engine answers at %s, and docker is not installed (apt-get install docker.io docker-cli)", host)
	}
	host = "unix://" + filepath.Join(dir, "sock")
	config := filepath.Join(dir, "daemon.json")
	if err := os.WriteFile(config, []byte(`{"features": {"containerd-snapshotter": true}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("dockerd", "--config-file", config, "--host", host,
		"--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"), "--pidfile", filepath.Join(dir, "pid"),
		"--iptables=false", "--ip-forward=false", "--bridge=none")
	var out syncbuf.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// Ends with the test program, when that runs into its timeout and nothing
	// cleans up. (The thread that forked lives as long: Go ends only locked ones.)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		// Where mounts are private dockerd binds its data root to itself, and
		// leaves that; where they are not there is nothing to unmount.
		_ = syscall.Unmount(filepath.Join(dir, "data"), syscall.MNT_DETACH)
		if t.Failed() {
			t.Logf("dockerd:\n%s", &out)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for !answers(ctx, host) {
		if ctx.Err() != nil {
			t.Fatalf("dockerd does not answer:\n%s", &out)
		}
		time.Sleep(50 * time.Millisecond) // polling a process of another program
	}
	t.Setenv("DOCKER_HOST", host)
	return host
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
cd "$1"
apt-get -q -o APT::Sandbox::User=root download docker.io containerd $(apt-cache pkgnames docker-cli | grep -x docker-cli || true)
for deb in *.deb; do dpkg-deb -x "$deb" root; done`
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("unpacking docker: %v: %s", err, out)
	}
	root := filepath.Join(dir, "root")
	t.Setenv("PATH", filepath.Join(root, "usr/bin")+":"+filepath.Join(root, "usr/sbin")+":"+os.Getenv("PATH"))
	return true
}

func answers(ctx context.Context, host string) bool {
	c, err := docker.NewClientWithOpts(docker.WithHost(host))
	if err != nil {
		return false
	}
	defer c.Close()
	_, err = c.Ping(ctx)
	return err == nil
}
