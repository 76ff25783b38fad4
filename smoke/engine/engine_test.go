package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// image is an image of nothing but the probe, in an OCI layout.
func image(t *testing.T, layers ...tarball.LayerOption) *Image {
	t.Helper()
	probe := filepath.Join(t.TempDir(), "probe")
	cmd := exec.Command("go", "build", "-o", probe, "../probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(probe)
	if err != nil {
		t.Fatal(err)
	}
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	w.WriteHeader(&tar.Header{Name: "work/", Typeflag: tar.TypeDir, Mode: 0o777})
	w.WriteHeader(&tar.Header{Name: "probe", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(text))})
	w.Write(text)
	w.Close()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files.Bytes())), nil }, append([]tarball.LayerOption{tarball.WithMediaType(types.OCILayer)}, layers...)...)
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), layer)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Config.User = "linux", runtime.GOARCH, "1000:1000"
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "probe"}),
		layout.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH})); err != nil {
		t.Fatal(err)
	}
	manifest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	id, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	return &Image{Name: "probe", Platform: "linux/" + runtime.GOARCH, Manifest: digest.Digest(manifest.String()), Config: digest.Digest(id.String()), Layout: dir, Content: img}
}

// podman is the real engine with an image loaded; CI never skips it.
func podman(t *testing.T) (Engine, *Image) {
	t.Helper()
	citest.Program(t, "podman", "apt-get install podman runc")
	e, err := Podman(t.Context(), t.TempDir(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			t.Error(err)
		}
		c := e.(*cli)
		// Layers belong to the uids of the storage: podman removes its own. Not by
		// `system reset`, which takes the machine's networks too.
		for _, args := range [][]string{{"rm", "-af"}, {"volume", "rm", "-af"}, {"rmi", "-af"}} {
			if _, err := c.must(context.Background(), args...); err != nil {
				t.Error(err)
			}
		}
		os.RemoveAll(c.global[1])
		os.RemoveAll(c.global[3])
	})
	img := image(t)
	if err := e.Load(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	return e, img
}

// dockerEngine is the real engine with an image loaded.
func dockerEngine(t *testing.T) (Engine, *Image) {
	t.Helper()
	dockertest.Start(t)
	e, err := Docker(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	// What docker before version 23 can't read by itself.
	img := image(t, tarball.WithMediaType(types.OCILayerZStd), tarball.WithCompression(compression.ZStd))
	if err := e.Load(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	return e, img
}

// waits is a command of the probe that goes on until it is told to end.
var waits = []string{"/probe", "wait"}

func TestEngines(t *testing.T) {
	for name, start := range map[string]func(*testing.T) (Engine, *Image){"podman": podman, "docker": dockerEngine} {
		t.Run(name, func(t *testing.T) {
			e, img := start(t)
			testEngine(t, e, img)
		})
	}
}

func testEngine(t *testing.T, e Engine, img *Image) {
	none := func(t *testing.T, when string) {
		t.Helper()
		if leaks, err := e.Leaks(t.Context()); err != nil || len(leaks) > 0 {
			t.Errorf("%s: %q, %v", when, leaks, err)
		}
	}
	t.Run("hardened", func(t *testing.T) {
		out, err := e.Run(t.Context(), &Container{Image: img, Args: []string{"/probe", "uid"}, NoNetwork: true, ReadOnly: true, DropCaps: true,
			NoNewPrivileges: true, Pids: 50, Memory: "64m", Mounts: []Mount{{Path: "/work", Tmpfs: "0777"}}})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"uid 1000 gid 1000\n", "CapEff: 0000000000000000\n", "NoNewPrivs: 1\n"} {
			if !strings.Contains(string(out.Stdout), want) {
				t.Errorf("%q is missing: %s%s", want, out.Stdout, out.Stderr)
			}
		}
	})
	t.Run("exit code", func(t *testing.T) {
		out, err := e.Run(t.Context(), &Container{Image: img, Args: []string{"/probe", "hash", "/nowhere"}, NoNetwork: true})
		if err != nil || out.Exit != 1 || !strings.Contains(string(out.Stderr), "no such file") {
			t.Errorf("%+v, %v", out, err)
		}
	})
	t.Run("service", func(t *testing.T) {
		run, err := e.Start(t.Context(), &Container{Image: img, NoNetwork: true, Args: waits})
		if err != nil {
			t.Fatal(err)
		}
		out, err := run.Exec(t.Context(), []string{"/probe", "uid"})
		if err != nil || out.Exit != 0 || !strings.Contains(string(out.Stdout), "uid 1000") {
			t.Errorf("exec: %+v, %v", out, err)
		}
		took, exit, err := run.Stop(t.Context())
		if err != nil || exit == 0 || exit == 137 { // killed, for it did not end by itself
			t.Errorf("stop: exit code %d after %s, %v", exit, took, err)
		}
		if _, _, err := run.Stop(t.Context()); err == nil || !strings.Contains(err.Error(), "had ended before") {
			t.Errorf("a second stop: %v", err)
		}
		if log, err := run.Logs(t.Context()); err != nil || !strings.Contains(log, "probe: ") {
			t.Errorf("log: %q, %v", log, err)
		}
		if err := run.Remove(t.Context()); err != nil {
			t.Error(err)
		}
		none(t, "after a service")
	})
	t.Run("leak", func(t *testing.T) {
		if err := e.Volume(t.Context(), "left"); err != nil {
			t.Fatal(err)
		}
		mark := filepath.Join(t.TempDir(), "left-"+rand.Text())
		if err := os.Mkdir(mark, 0o755); err != nil {
			t.Fatal(err)
		}
		run, err := e.Start(t.Context(), &Container{Image: img, NoNetwork: true, Args: waits,
			Mounts: []Mount{{Path: "/v", Volume: "left"}, {Path: "/mark", Host: mark, ReadOnly: true}}})
		if err != nil {
			t.Fatal(err)
		}
		leaks, err := e.Leaks(t.Context())
		all := strings.Join(leaks, "\n")
		if err != nil || !strings.Contains(all, "container smoke-") || !strings.Contains(all, "volume smoke-") {
			t.Errorf("a container and a volume are there, and Leaks says %q, %v", leaks, err)
		}
		if left := Processes(t.Context(), filepath.Base(mark)); len(left) == 0 || !strings.Contains(strings.Join(left, "\n"), "/probe wait") {
			t.Errorf("the container's process is there, and Processes says %q", left)
		}
		if err := run.Remove(t.Context()); err != nil {
			t.Error(err)
		}
		if err := e.RemoveVolume(t.Context(), "left"); err != nil {
			t.Error(err)
		}
		none(t, "all is removed")
		if left := Processes(t.Context(), filepath.Base(mark)); len(left) > 0 {
			t.Errorf("all is removed, and Processes says %q", left)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if _, err := e.Run(ctx, &Container{Image: img, NoNetwork: true, Args: waits}); err == nil {
			t.Error("it ended before it was cancelled")
		}
		none(t, "after a cancelled run")
	})
	t.Run("killed", func(t *testing.T) {
		result := make(chan error, 1)
		go func() {
			_, err := e.Run(t.Context(), &Container{Image: img, NoNetwork: true, Args: waits})
			result <- err
		}()
		if pid := engineCommand(t, e.(*cli)); pid > 0 {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if err := <-result; err == nil || !strings.Contains(err.Error(), e.Name()+" run: signal: killed") {
			t.Errorf("the engine's command was killed, and the error is %v", err)
		}
		none(t, "after the engine's command was killed")
	})
}

// engineCommand is the engine command that runs a container which has started.
func engineCommand(t *testing.T, e *cli) int {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		if up, err := e.must(ctx, "ps", "-q", "--filter", "label="+label+"="+e.run); err == nil && up != "" {
			for _, p := range processes(e.run) {
				if fields := strings.Fields(p); strings.Contains(p, "("+e.program+" ") {
					pid, _ := strconv.Atoi(fields[1])
					return pid
				}
			}
		}
	}
	t.Error("the engine's command is not among the processes")
	return 0
}

// What BuildKit cannot do, a case must not silently do without.
func TestBuildKitCan(t *testing.T) {
	b := &bk{}
	args := []string{"/probe"}
	for name, c := range map[string]Container{
		"services":       {},
		"capabilities":   {Args: args, DropCaps: true},
		"privileges":     {Args: args, NoNewPrivileges: true},
		"limits":         {Args: args, Pids: 1},
		"volumes":        {Args: args, Mounts: []Mount{{Path: "/v", Volume: "v"}}},
		"writable binds": {Args: args, Mounts: []Mount{{Path: "/v", Host: "/tmp"}}},
		"tmpfs modes":    {Args: args, Mounts: []Mount{{Path: "/v", Tmpfs: "0700"}}},
		"runtimes":       {Args: args, Runtime: "runsc"},
	} {
		if err := b.Can(&c); err == nil || !strings.Contains(err.Error(), "install podman") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := b.Can(&Container{Args: args, ReadOnly: true, NoNetwork: true, User: "7", Mounts: []Mount{{Path: "/x", Host: "/tmp", ReadOnly: true}, {Path: "/tmp", Tmpfs: "01777"}}}); err != nil {
		t.Error(err)
	}
}

// The run root's name is known to all, so it may have been made by another.
func TestPrivate(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(dir string) error
		ok   bool
	}{
		{"none", func(string) error { return nil }, true},
		{"ours", func(dir string) error { return os.Mkdir(dir, 0o755) }, true},
		{"ours, open to all", func(dir string) error { return errors.Join(os.Mkdir(dir, 0o755), os.Chmod(dir, 0o777)) }, false},
		{"a link", func(dir string) error { return os.Symlink(t.TempDir(), dir) }, false},
		{"a file", func(dir string) error { return os.WriteFile(dir, nil, 0o600) }, false},
		{"another's", func(dir string) error { return errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, 65534, 65534)) }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			if err := c.make(dir); errors.Is(err, os.ErrPermission) {
				t.Skip("giving a folder away takes root")
			} else if err != nil {
				t.Fatal(err)
			}
			if err := private(dir); (err == nil) != c.ok {
				t.Fatalf("error is %v", err)
			}
			if info, err := os.Stat(dir); c.ok && (err != nil || info.Mode().Perm() != 0o700) {
				t.Errorf("%v, %v", info.Mode(), err)
			}
		})
	}
}
