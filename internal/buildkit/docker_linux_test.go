package buildkit

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/buildkit/client/llb"
)

// An engine that answers is used when it passes the probe, and is passed over
// with the reason when it doesn't: which one depends on its version and image store.
func TestDockerEngine(t *testing.T) {
	_, opts, log := fresh(t, nil)
	host := engine(t)
	opts.Getenv = env(map[string]string{"DOCKER_HOST": host})
	b := connected(t, opts)
	t.Logf("%s %s %s\n%s", b.def.Source, b.def.Version, b.def.Snapshotter, log)
	if b.def.Source == "private daemon" && !strings.Contains(log.String(), "passing over the docker engine at "+host) {
		t.Errorf("the engine was passed over in silence:\n%s", log)
	}
	run, locals := steps(t)
	state := llb.Merge([]llb.State{layer(run, "one", "1"), layer(run, "two", "2")})
	found, _ := variant(t, b, t.TempDir(), "linux/amd64", 2, state, locals)
	opts.Private = "compare"
	other, err := NewDaemon(opts)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Remove(context.Background())
	private, _ := variant(t, connected(t, opts), t.TempDir(), "linux/amd64", 2, state, locals)
	if found.Digest != private.Digest {
		t.Errorf("the engine made %s, the pinned BuildKit %s", found.Digest, private.Digest)
	}
}

// engine is the address of the machine's docker engine, else of one that CI
// unpacks from Debian's packages and starts with a state of its own.
func engine(t *testing.T) string {
	t.Helper()
	host := os.Getenv("DOCKER_HOST")
	if host == "" {
		host = "unix:///var/run/docker.sock"
	}
	if c := engineAt(t.Context(), host); c != nil {
		c.Close()
		return host
	}
	if os.Getenv("CI") != "true" {
		t.Skipf("no docker engine answers at %s (CI=true starts one)", host)
	}
	if os.Geteuid() != 0 {
		t.Fatalf("no docker engine answers at %s, and starting one takes root", host)
	}
	dir := t.TempDir()
	script := `set -e
cd "$1"
apt-get -q -o APT::Sandbox::User=root download docker.io containerd
for deb in *.deb; do dpkg-deb -x "$deb" root; done
echo '{"features": {"containerd-snapshotter": true}}' >daemon.json`
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("unpacking docker: %v: %s", err, out)
	}
	host = "unix://" + filepath.Join(dir, "sock")
	cmd := exec.Command(filepath.Join(dir, "root/usr/sbin/dockerd"), "--config-file", filepath.Join(dir, "daemon.json"),
		"--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"), "--pidfile", filepath.Join(dir, "pid"),
		"--host", host, "--iptables=false", "--ip-forward=false", "--bridge=none")
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "root/usr/bin")+":"+filepath.Join(dir, "root/usr/sbin")+":"+os.Getenv("PATH"))
	var out buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		if t.Failed() {
			t.Logf("dockerd:\n%s", &out)
		}
	})
	eventually(t, time.Minute, "dockerd answers", func() bool {
		c := engineAt(t.Context(), host)
		if c != nil {
			c.Close()
		}
		return c != nil
	})
	return host
}
