package buildkit

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/moby/buildkit/client/llb"
	digest "github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// An engine that answers is used when it passes the probe, and is passed over
// with the reason when it doesn't: which one depends on its version and image store.
func TestDockerEngine(t *testing.T) {
	_, opts, log := fresh(t, nil)
	host := dockertest.Start(t)
	opts.Getenv = env(map[string]string{"DOCKER_HOST": host})
	b := connected(t, opts)
	if b.def.Version == "" {
		t.Error("the version of the engine is not told")
	}
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

// A builder of buildx needs no docker engine; one with a node for each platform
// builds each on its own, and one that is down is passed over.
func TestBuildx(t *testing.T) {
	if !dockertest.Programs(t) {
		citest.Skip(t, "docker is not installed (apt-get install docker.io docker-cli)")
	}
	amd64, direct, _ := fresh(t, nil)
	arm64, _, _ := fresh(t, nil)
	_, opts, log := fresh(t, map[string]string{"DOCKER_HOST": ""})
	up(t, amd64)
	up(t, arm64)

	dockertest.Buildx(t)
	create := func(args ...string) {
		t.Helper()
		args = append([]string{"buildx", "create", "--name", "far", "--driver", "remote"}, args...)
		if out, err := exec.CommandContext(t.Context(), "docker", args...).CombinedOutput(); err != nil {
			t.Fatalf("docker %q: %v\n%s", args, err, out)
		}
	}
	run, locals := steps(t)
	state := llb.Merge([]llb.State{layer(run, "one", "1"), layer(run, "two", "2")})
	build := func(opts Options, platform string) (*Builder, digest.Digest) {
		t.Helper()
		b := connected(t, opts)
		desc, _ := variant(t, b, t.TempDir(), platform, 2, state, locals)
		return b, desc.Digest
	}
	direct.Getenv = env(map[string]string{"BUILDKIT_HOST": amd64.Address()})
	_, want := build(direct, "linux/arm64")

	create("--use", "--platform", "linux/amd64", amd64.Address())
	b, got := build(opts, "linux/arm64")
	if b.def.Source != "buildx" || !strings.Contains(b.def.Address, "far (remote)") || len(b.Nodes()) != 1 {
		t.Errorf("found %+v, of %d nodes", b.def, len(b.Nodes()))
	}
	if got != want {
		t.Errorf("through buildx %s, without it %s", got, want)
	}

	create("--append", "--platform", "linux/arm64", arm64.Address())
	if b, got = build(opts, "linux/arm64"); len(b.Nodes()) != 2 || got != want {
		t.Errorf("with two nodes %d are found, which make %s, one %s", len(b.Nodes()), got, want)
	}
	for platform, d := range map[string]*Daemon{"linux/amd64": amd64, "linux/arm64": arm64} {
		n := up(t, d)
		if on := b.ForPlatform(platform); on.worker != n.worker || n.worker == "" {
			t.Errorf("%s is built by %+v, not by %+v", platform, on, n)
		}
	}

	for _, d := range []*Daemon{amd64, arm64} {
		if err := d.Down(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if b := connected(t, opts); b.def.Source != "private daemon" || !strings.Contains(log.String(), "passing over the buildx builder far (remote): ") {
		t.Errorf("with the nodes down %+v is used:\n%s", b.def, log)
	}
	opts.Getenv = env(map[string]string{"DOCKER_HOST": "", "BUILDX_BUILDER": "near"})
	t.Setenv("BUILDX_BUILDER", "near")
	if connected(t, opts); !strings.Contains(log.String(), `no builder "near" found`) {
		t.Errorf("a builder that was asked for is passed over in silence:\n%s", log)
	}
}
