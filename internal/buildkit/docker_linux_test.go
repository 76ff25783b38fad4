package buildkit

import (
	"context"
	"strings"
	"testing"

	"github.com/moby/buildkit/client/llb"

	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// An engine that answers is used when it passes the probe, and is passed over
// with the reason when it doesn't: which one depends on its version and image store.
func TestDockerEngine(t *testing.T) {
	_, opts, log := fresh(t, nil)
	host := dockertest.Start(t)
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
