// Package enginetest gives tests a real podman of their own: private storage
// in the project's cache, a session image, and the session agent built from
// this tree. It skips where that cannot be had, and fails instead under CI.
package enginetest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// standIn is the image used until the pipeline has built the real one: Debian
// packages alone, without toolchains.
const (
	standIn      = "localhost/loomcycle-session-standin:2"
	sessionImage = "loomcycle-sandbox-session"
)

// Podman is a private podman.
type Podman struct {
	Flags []string // global flags of the podman command
	Image string
	Agent string
}

var (
	setup  sync.Mutex
	using  *os.File // says that this program uses the storage
	agent  string
	pulled string
)

// New returns a podman with a session image in its storage: SANDBOX_TEST_IMAGE
// (anything that podman pulls), else the one in dist, else a stand-in.
func New(t testing.TB) *Podman {
	t.Helper()
	setup.Lock()
	defer setup.Unlock()
	if os.Getuid() != 0 {
		citest.Skip(t, "the test needs root for podman with private storage")
	}
	if _, err := exec.LookPath("podman"); err != nil {
		citest.Skip(t, "podman is not installed")
	}
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	// Podman knows a new boot by a file that is not there yet, by default one for all storages:
	// where another podman has made it, what this storage keeps has numbers of locks that are
	// given to others too, and a container with its own volume's hangs. /run ends as the locks do.
	root := filepath.Join(cache, "podman")
	run := fmt.Sprintf("/run/loomcycle-test-%.4x", sha256.Sum256([]byte(root))) // podman takes 50 characters
	p := &Podman{Flags: []string{"--root", root, "--runroot", run, "--tmpdir", filepath.Join(run, "tmp"), "--cgroup-manager", "cgroupfs", "--events-backend", "file"}}
	if using == nil {
		if using, err = share(filepath.Join(cache, "using"), p.empty); err != nil {
			t.Fatal(err)
		}
	}
	if p.Agent, err = Agent(); err != nil {
		t.Fatal(err)
	}
	source, dist := os.Getenv("SANDBOX_TEST_IMAGE"), built()
	switch {
	case pulled != "":
	case source != "" && p.cmd("image", "exists", source).Run() == nil:
		pulled = source
	case source != "":
		pulled = p.pull(t, p.cmd("pull", "--quiet", source))
	case dist != "":
		pulled = p.FromDist(t, dist, sessionImage)
	}
	if p.Image = pulled; pulled != "" {
		return p
	}
	p.Image = standIn
	// Several test programs may get here at once.
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if p.cmd("image", "exists", standIn).Run() == nil {
		return p
	}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		citest.Skip(t, "no session image: set SANDBOX_TEST_IMAGE, or install mmdebstrap for a stand-in")
	}
	rootfs := filepath.Join(cache, "standin-2.tar")
	if _, err := os.Stat(rootfs); err != nil {
		t.Log("making a stand-in session image from Debian packages, once")
		tmp := rootfs + ".partial.tar"
		out, err := exec.Command("mmdebstrap", "--variant=minbase", "--include=bash,coreutils,procps,python3,make",
			`--customize-hook=mkdir --mode=1777 "$1/work"`, "trixie", tmp).CombinedOutput()
		if err != nil {
			citest.Skip(t, "mmdebstrap could not make the stand-in: %v\n%s", err, out)
		}
		if err := os.Rename(tmp, rootfs); err != nil {
			t.Fatal(err)
		}
	}
	p.Say(t, "import", "--quiet", "-c", "ENV HOME=/work", "-c", "WORKDIR /work", "-c", "USER 1000:1000", rootfs, standIn)
	return p
}

// Apart is a podman with the same images and containers of its own, for a test that
// damages its storage.
func (p *Podman) Apart(t testing.TB) *Podman {
	own := *p
	own.Flags = append(slices.Clone(p.Flags), "--storage-opt", "additionalimagestore="+p.Root())
	for _, flag := range []string{"--root", "--runroot", "--tmpdir"} {
		own.Flags[slices.Index(own.Flags, flag)+1] = t.TempDir()
	}
	t.Cleanup(own.empty)
	return &own
}

// empty removes every container and volume: what tests have left that were killed, or what
// has a lock of podman's, of which there are 2048 for all storages of a boot.
func (p *Podman) empty() {
	_ = p.cmd("rm", "--force", "--all", "--time", "0").Run()
	_ = p.cmd("volume", "rm", "--force", "--all").Run()
	var left []struct{ ID, Bundle string } // of which podman knows nothing
	if out, err := exec.Command("runc", "list", "--format", "json").Output(); err != nil || json.Unmarshal(out, &left) != nil {
		return
	}
	for _, c := range left {
		if strings.HasPrefix(c.Bundle, p.Root()+"/") {
			_ = exec.Command("runc", "delete", "--force", c.ID).Run()
		}
	}
}

// Root is the directory of the podman's storage.
func (p *Podman) Root() string { return p.Flags[slices.Index(p.Flags, "--root")+1] }

// FromDist pulls an image of a family that was built, and returns its id.
func (p *Podman) FromDist(t testing.TB, dist, name string) string {
	t.Helper()
	cmd := p.cmd("pull", "--quiet", "oci:oci:"+name)
	cmd.Dir = dist // podman 4.3 takes a path with capitals for a wrong name
	return p.pull(t, cmd)
}

// pull runs a pull and returns the image's id. What an earlier build had in its
// place is removed, unless a container still uses it: the images are large.
func (p *Podman) pull(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	// Several test programs may get here at once.
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	// A name of its own: podman calls all images of all layouts alike.
	name := fmt.Sprintf("localhost/loomcycle-test:%.16x", sha256.Sum256([]byte(cmd.Dir+" "+cmd.Args[len(cmd.Args)-1])))
	before, _ := p.cmd("image", "inspect", "--format", "{{.Id}}", name).Output()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	words := strings.Fields(string(out))
	if err != nil || len(words) == 0 {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, stderr.String())
	}
	id := words[len(words)-1]
	p.Say(t, "tag", id, name)
	if old := strings.TrimSpace(string(before)); old != "" && old != id {
		_ = p.cmd("rmi", old).Run()
	}
	return id
}

// built is this checkout's dist when the session image is in it, or nothing.
func built() string {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return ""
	}
	dist := filepath.Join(filepath.Dir(strings.TrimSpace(string(out))), "dist")
	index, err := os.ReadFile(filepath.Join(dist, "oci", "index.json"))
	if err != nil || !strings.Contains(string(index), `"`+sessionImage+`"`) {
		return ""
	}
	return dist
}

func (p *Podman) cmd(args ...string) *exec.Cmd {
	cmd := exec.Command("podman", append(append([]string{}, p.Flags...), args...)...)
	cmd.Dir = os.TempDir() // where conmon leaves a file "oom"
	return cmd
}

// Command is a podman command on the private storage.
func (p *Podman) Command(args ...string) *exec.Cmd { return p.cmd(args...) }

// Say runs a podman command on the private storage and returns what it prints,
// without the warnings of some versions.
func (p *Podman) Say(t testing.TB, args ...string) string {
	t.Helper()
	cmd := p.cmd(args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("podman %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// Options are what the engine package needs to use this podman with an OCI
// runtime, which it skips when that runtime is not installed or cannot start a
// container on this host.
func (p *Podman) Options(t testing.TB, runtime string) engine.Options {
	t.Helper()
	path, err := exec.LookPath(runtime)
	if err != nil {
		citest.Skip(t, "%s is not installed", runtime)
	}
	args := []string{"--runtime", path}
	if runtime == "runsc" {
		args = append(args, "--runtime-flag", "network=none")
	}
	out, err := p.cmd(append(args, "run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", p.Image, "true")...).CombinedOutput()
	if err != nil {
		unusable(t, runtime, out)
	}
	return engine.Options{
		Runtime: runtime, Agent: p.Agent, Socket: filepath.Join(t.TempDir(), "podman.sock"),
		Podman: p.Flags, NoFile: 4096, NProc: 16384, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// Serve starts podman's service with runc, an engine behind a socket as a sidecar meets it
// that did not start it. It ends with the test, or at once, without a word, when kill is called.
func (p *Podman) Serve(t testing.TB, socket string) (kill func()) {
	t.Helper()
	runc, err := exec.LookPath("runc")
	if err != nil {
		citest.Skip(t, "runc is not installed")
	}
	service := p.cmd("--runtime", runc, "system", "service", "--time", "0", "unix://"+socket)
	service.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := service.Start(); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	end := func(how syscall.Signal) { once.Do(func() { _ = service.Process.Signal(how); _ = service.Wait() }) }
	t.Cleanup(func() { end(syscall.SIGTERM) })
	return func() {
		end(syscall.SIGKILL)
		_ = os.Remove(socket)
	}
}

// unusable skips, as citest.Skip does, for a runtime that starts no container. What CI may
// lack is crun where cgroups v1 and v2 are both mounted: it refuses that, and no package
// brings another kernel.
func unusable(t testing.TB, runtime string, out []byte) {
	t.Helper()
	if _, err := os.Stat("/sys/fs/cgroup/unified"); err == nil && runtime == "crun" {
		t.Skipf("crun refuses the hybrid of cgroups v1 and v2 of this host: %s", out)
	}
	citest.Skip(t, "%s starts no container on this host: %s", runtime, out)
}

// Open starts the engine and closes it with the test.
func Open(t testing.TB, opts engine.Options) *engine.Engine {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	e, err := engine.Open(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// Agent builds the session agent once for the test program.
func Agent() (string, error) {
	if agent != "" {
		return agent, nil
	}
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	agent, err = host.Program(context.Background(), "", filepath.Join(dir, "agent"), "github.com/loomcycle/loomcycle-images/sidecar-image/cmd/session-agent", runtime.GOARCH)
	return agent, err
}

func cacheDir() (string, error) {
	dir, err := cache.Dir(os.Getenv)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, "sandbox-test")
	return dir, os.MkdirAll(dir, 0o755)
}
