package smoke

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
	"github.com/loomcycle/loomcycle-images/internal/proctest"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
	"github.com/loomcycle/loomcycle-images/smoke/engine"
)

// waiter is a program that says it is up and ends when it is told to.
const waiter = `package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	println("up")
	<-stop
}
`

// tiny is an image that passes for loomcycle and holds nothing but waiter, with
// an argument by which its processes are found.
func tiny(t *testing.T, arch, mark string) v1.Image {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "waiter.go"), []byte(waiter), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", "waiter", "waiter.go")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch, "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program, err := os.ReadFile(filepath.Join(dir, "waiter"))
	if err != nil {
		t.Fatal(err)
	}
	return imagetest.Image(t, v1.Config{
		User: "65532:65532", Entrypoint: []string{"/waiter"}, Cmd: []string{mark}, StopSignal: "SIGTERM",
		Env: []string{"PATH=/", "HOME=/"}, Labels: map[string]string{"org.opencontainers.image.title": "loomcycle"},
	}, arch, []imagetest.Entry{imagetest.Program("waiter", string(program))})
}

// needPodman skips, or fails in CI, where podman is not installed.
func needPodman(t *testing.T) { citest.Program(t, "podman", "apt-get install podman runc") }

// tinyCache is a cache folder of its own with the compiled BuildKit of the
// project's, and without what podman keeps in it when the test is over.
func tinyCache(t *testing.T) string {
	t.Helper()
	temp, err := buildkit.TempRoot(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	tiny := citest.CacheDir(t, temp)
	t.Cleanup(func() {
		root, run := engine.Storage(tiny)
		if _, err := os.Stat(root); err != nil {
			return // no podman was started on it
		}
		// Layers belong to the uids of the storage: podman removes its own. Not by
		// `system reset`, which takes the machine's networks and temporary files too.
		for _, args := range [][]string{{"rm", "-af"}, {"volume", "rm", "-af"}, {"rmi", "-af"}} {
			cmd := exec.Command("podman", append([]string{"--root", root, "--runroot", run, "--tmpdir", filepath.Join(run, "tmp"), "--cgroup-manager=cgroupfs", "--events-backend=none"}, args...)...)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("podman %v: %v\n%s", args, err, out)
			}
		}
		os.RemoveAll(root)
		os.RemoveAll(run)
	})
	return tiny
}

// An index in a registry is tested like a build: every platform, by digest,
// with an engine that pulls and with BuildKit.
func TestReference(t *testing.T) {
	var adds []mutate.IndexAddendum
	want := map[string]string{}
	for _, arch := range []string{"amd64", "arm64"} {
		img := tiny(t, arch, "reference")
		d, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		want["linux/"+arch] = d.String()
		adds = append(adds, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
	}
	index := mutate.IndexMediaType(mutate.AppendManifests(empty.Index, adds...), types.OCIImageIndex)
	top, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.NewDigest(registrytest.Start(t, registrytest.Distribution) + "/family/loomcycle@" + top.String())
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(ref.Context().Tag("pushed"), index, remote.WithContext(t.Context())); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"podman", "buildkit"} {
		t.Run(name, func(t *testing.T) {
			needPodman(t)
			cache := tinyCache(t)
			if name == "buildkit" {
				t.Cleanup(func() { stopBuildKit(t, cache) })
			}
			env := map[string]string{"SMOKE_REF": ref.String(), "SMOKE_ENGINE": name, "SMOKE_CASES": "no-shell", "SMOKE_SLOW": "5", "LOOMCYCLE_CACHE": cache}
			var out bytes.Buffer
			rep, err := Run(t.Context(), Options{Root: "..", Getenv: environment(env), Out: &out, Log: t.Output(), Reports: t.TempDir()})
			if err != nil {
				t.Fatalf("%v\n%s", err, &out)
			}
			if len(rep.Results) != 2 {
				t.Fatalf("%d results, not one for each platform:\n%s", len(rep.Results), &out)
			}
			for _, r := range rep.Results {
				if r.Status != Passed || r.Image != "loomcycle" || r.Digest != want[r.Platform] || r.Emulated != (r.Platform != "linux/"+runtime.GOARCH) {
					t.Errorf("%+v", r)
				}
			}
		})
	}
	t.Run("pulled", func(t *testing.T) {
		needPodman(t)
		img := tiny(t, runtime.GOARCH, "pulled")
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		config = config.DeepCopy()
		config.Config.Labels["org.opencontainers.image.title"] = "loomcycle sandbox sidecar for a host engine"
		if img, err = mutate.ConfigFile(img, config); err != nil {
			t.Fatal(err)
		}
		second := mutate.IndexMediaType(mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}}}), types.OCIImageIndex)
		other := ref.Context().Tag("second")
		if err := remote.WriteIndex(other, second, remote.WithContext(t.Context())); err != nil {
			t.Fatal(err)
		}
		dist := t.TempDir()
		env := map[string]string{"SMOKE_ENGINE": "podman", "SMOKE_CASES": "no-shell", "SMOKE_SLOW": "5", "LOOMCYCLE_CACHE": tinyCache(t)}
		o := Options{Root: "..", Dist: dist, Native: true, Getenv: environment(env), Out: t.Output(), Log: t.Output()}
		if err := Pulled(t.Context(), o, fmt.Sprintf("loomcycle %s\nloomcycle %[1]s\nloomcycle-builder-docker %[2]s\n", ref, other)); err != nil {
			t.Fatal(err)
		}
		// Two of a registry are one matrix; the second registry has one of its own.
		for name, want := range map[string][]string{"pulled-1": {"loomcycle", "loomcycle-builder-docker"}, "pulled-2": {"loomcycle"}} {
			var rep Report
			text, err := os.ReadFile(filepath.Join(dist, "smoke", name, "report.json"))
			if err == nil {
				err = json.Unmarshal(text, &rep)
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range rep.Results {
				got = append(got, r.Image)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s has %v, want %v", name, got, want)
			}
		}
		for text, want := range map[string]string{"loomcycle\n": "is not IMAGE REFERENCE", "loomcycle-toolbox " + ref.String(): "is an image loomcycle-toolbox"} {
			if err := Pulled(t.Context(), o, text); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %v", text, err)
			}
		}
		env["SMOKE_REF"] = ref.String() + " " + ref.String()
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "one at a time") {
			t.Errorf("an image twice: %v", err)
		}
	})
	t.Run("no family", func(t *testing.T) {
		stranger := imagetest.Image(t, v1.Config{Labels: map[string]string{"org.opencontainers.image.title": "stranger"}}, "amd64", nil)
		other := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: stranger, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
		if err := remote.WriteIndex(ref.Context().Tag("stranger"), other, remote.WithContext(t.Context())); err != nil {
			t.Fatal(err)
		}
		for ref, want := range map[string]string{
			ref.Context().Tag("stranger").String(): `its title label is "stranger"`,
			ref.Context().Tag("gone").String():     "MANIFEST_UNKNOWN",
			"Not A Reference":                      "could not parse reference",
		} {
			_, err := Run(t.Context(), Options{Root: "..", Getenv: environment(map[string]string{"SMOKE_REF": ref, "LOOMCYCLE_CACHE": t.TempDir()}), Out: t.Output(), Log: t.Output(), Reports: t.TempDir()})
			if err == nil || !strings.Contains(err.Error(), "SMOKE_REF") || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v", ref, err)
			}
		}
	})
}

func stopBuildKit(t *testing.T, cache string) {
	d, err := buildkit.NewDaemon(buildkit.Options{Getenv: environment(nil), Log: t.Output(), CacheDir: cache, Root: ".."})
	if err == nil {
		err = d.Remove(context.Background())
	}
	if err != nil {
		t.Error(err)
	}
}

// environment is the real one with changes, without what would change a test.
func environment(changes map[string]string) func(string) string {
	return func(name string) string {
		if v, ok := changes[name]; ok {
			return v
		}
		if strings.HasPrefix(name, "SMOKE_") || name == "GITHUB_STEP_SUMMARY" {
			return ""
		}
		return os.Getenv(name)
	}
}

// tinyDist is a dist folder with one image for this machine.
func tinyDist(t *testing.T, mark string) string {
	t.Helper()
	dir := t.TempDir()
	img := tiny(t, runtime.GOARCH, mark)
	platform := &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	index := mutate.IndexMediaType(mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: platform}}), types.OCIImageIndex)
	path, err := layout.Write(filepath.Join(dir, "oci"), empty.Index)
	if err == nil {
		err = path.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "loomcycle"}))
	}
	if err != nil {
		t.Fatal(err)
	}
	must := func(h v1.Hash, err error) digest.Digest {
		if err != nil {
			t.Fatal(err)
		}
		return digest.Digest(h.String())
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	size, err := layers[0].Size()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(dist.Release{
		SchemaVersion: 1, Version: "0.0.0", Source: dist.Source{Repository: "https://example.test/x", Commit: strings.Repeat("0", 40)},
		Epoch: imagetest.Epoch, LockDigest: testDigest, Compression: "gzip", Compressor: "test",
		Images: []dist.Image{{Name: "loomcycle", IndexDigest: must(index.Digest()), Platforms: []dist.Variant{{
			Platform: "linux/" + runtime.GOARCH, Digest: must(img.Digest()), Config: must(img.ConfigName()), Size: size,
			Layers: []dist.Layer{{Group: "static", Digest: must(layers[0].Digest()), DiffID: must(layers[0].DiffID()), Size: size}},
		}}}},
	})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "release.json"), text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Ctrl-C in the middle of a run, which a terminal sends to all processes of
// its group, and SIGTERM to the same: containers, volumes, processes and
// temporary files go, at once, and the run says what happened.
func TestInterrupt(t *testing.T) {
	needPodman(t)
	mage := filepath.Join(t.TempDir(), "targets")
	build := exec.Command("go", "run", "mage.go", "-compile", mage)
	build.Dir = ".."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, tc := range map[string]struct {
		argv   []string
		signal syscall.Signal
	}{
		"ctrl-c":  {[]string{"go", "run", "mage.go", "smoke"}, syscall.SIGINT},
		"sigterm": {[]string{mage, "smoke"}, syscall.SIGTERM},
	} {
		t.Run(name, func(t *testing.T) {
			mark := fmt.Sprintf("waiting-%d-%d", os.Getpid(), time.Now().UnixNano())
			cache, tmp := tinyCache(t), t.TempDir()
			cmd := exec.Command(tc.argv[0], tc.argv[1:]...)
			cmd.Dir = ".."
			// The case has a service, whose first step waits for an answer that
			// never comes, and two volumes.
			cmd.Env = append(os.Environ(), "SMOKE_DIST="+tinyDist(t, mark), "SMOKE_CASES=drop-in", "SMOKE_ENGINE=podman", "SMOKE_REF=",
				"LOOMCYCLE_CACHE="+cache, "TMPDIR="+tmp)
			g := proctest.Start(t, cmd)
			g.Until(t, "a service has started", func() bool {
				return slices.ContainsFunc(running(mark), func(p string) bool { return strings.Contains(p, "/waiter "+mark) })
			})
			took := g.Interrupt(t, func(pid int) error { return syscall.Kill(-pid, tc.signal) })
			if took > time.Minute {
				t.Error("that is too long")
			}
			said := []string{"INTERRUPTED after 0 of 1 cases", "the run was interrupted"}
			if strings.Contains(g.Out.String(), "cleanup timeout") {
				// mage gave up on a slow machine: the next run has to clean up.
				said = nil
				next, err := engine.Podman(t.Context(), cache, t.Output())
				if err == nil {
					err = next.Close(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for _, want := range said {
				if !strings.Contains(g.Out.String(), want) {
					t.Errorf("it does not say %q", want)
				}
			}
			for _, bad := range []string{"LEAKED", "FAILED"} {
				if strings.Contains(g.Out.String(), bad) {
					t.Errorf("it says %q", bad)
				}
			}
			if left := running(mark); len(left) > 0 {
				t.Errorf("processes are left: %q", left)
			}
			storage, _ := engine.Storage(cache)
			for _, file := range []string{"overlay-containers/containers.json", "vfs-containers/containers.json"} {
				text, err := os.ReadFile(filepath.Join(storage, file))
				if err == nil && strings.TrimSpace(string(text)) != "[]" {
					t.Errorf("containers are left: %s", text)
				}
			}
			if volumes, _ := filepath.Glob(filepath.Join(storage, "volumes", "smoke-*")); len(volumes) > 0 {
				t.Errorf("volumes are left: %v", volumes)
			}
			if files, _ := filepath.Glob(filepath.Join(tmp, "smoke-*")); len(files) > 0 {
				t.Errorf("temporary files are left: %v", files)
			}
			if t.Failed() {
				t.Logf("output:\n%s", &g.Out)
			}
		})
	}
}

// running are the command lines that hold the mark.
func running(mark string) []string { return engine.Processes(expired, mark) }

// expired is a context in which nothing is waited for.
var expired = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// forgetful is a real engine that starts one container more than it was asked
// for and forgets it.
type forgetful struct{ engine.Engine }

func (f forgetful) Run(ctx context.Context, c *engine.Container) (*engine.Output, error) {
	more := *c
	more.Args = nil
	if _, err := f.Start(ctx, &more); err != nil {
		return nil, err
	}
	return f.Engine.Run(ctx, c)
}

// A container that a case leaves behind fails the run, which names it and its
// process and removes it.
func TestLeakedContainer(t *testing.T) {
	needPodman(t)
	cache := tinyCache(t)
	podman, err := engine.Podman(t.Context(), cache, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	r := newTestRunner(t, forgetful{podman}, "cases:\n  - {name: x, title: A case that leaks, images: [loomcycle], steps: [{probe: [uid]}]}\n")
	folder := tinyDist(t, "leak")
	release, err := dist.Read(folder)
	if err != nil {
		t.Fatal(err)
	}
	v := release.Images[0].Platforms[0]
	r.targets[0].Image = engine.Image{Name: "loomcycle", Platform: v.Platform, Manifest: v.Digest, Config: v.Config, Layout: filepath.Join(folder, "oci")}
	r.targets = r.targets[:1]
	rep, text := report(t, r)
	err = rep.Err()
	for _, want := range []string{"left behind", "container smoke-", "process ", "/waiter leak"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in the error: %v", want, err)
		}
	}
	if rep.Results[0].Status != Passed || !strings.Contains(text, "LEAKED container smoke-") {
		t.Errorf("the report:\n%s", text)
	}
	if err := podman.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if left := engine.Processes(t.Context(), filepath.Base(r.scratch)); len(left) > 0 {
		t.Errorf("after Close there is still %q", left)
	}
}
