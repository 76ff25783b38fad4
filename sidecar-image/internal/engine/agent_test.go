package engine_test

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// socketWithNewAgent serves podman behind a socket, for an agent that no other test has: its
// volume is new.
func socketWithNewAgent(t *testing.T, p *enginetest.Podman) (opts engine.Options, agent []byte) {
	t.Helper()
	opts = p.Options(t, "runc")
	p.Serve(t, opts.Socket)
	opts.Host, opts.Runtime = "unix://"+opts.Socket, ""
	opts.Agent = filepath.Join(t.TempDir(), "session-agent")
	agent, err := os.ReadFile(p.Agent)
	if err == nil {
		agent = append(agent, rand.Text()...)
		err = os.WriteFile(opts.Agent, agent, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return opts, agent
}

// The volume of the agent that an engine behind a socket has is filled again when it is
// lost, and when the engine has made an empty one in its place.
func TestLostVolume(t *testing.T) {
	p := enginetest.New(t)
	opts, agent := socketWithNewAgent(t, p)
	e := enginetest.Open(t, opts)
	podman := func(args ...string) string { t.Helper(); return p.Say(t, args...) }
	works := func(what string) {
		t.Helper()
		c := open(t, e, p.Image, nil)
		if out, exit := c.sh("echo hello", 10*time.Second); out != "hello\n" {
			t.Errorf("%s: %q, %+v", what, out, exit)
		}
		if err := e.Remove(t.Context(), c.id); err != nil {
			t.Fatal(err)
		}
	}
	sum := sha256.Sum256(agent)
	volume := fmt.Sprintf("loomcycle-agent-%x", sum[:8])
	t.Cleanup(func() { _ = p.Command("volume", "rm", volume).Run() })
	works("at first")
	podman("volume", "rm", volume)
	works("after a prune")
	podman("volume", "rm", volume)
	// The API tells in whole seconds when a volume was made.
	for next := time.Now().Truncate(time.Second).Add(time.Second); time.Now().Before(next); time.Sleep(10 * time.Millisecond) {
	}
	podman("volume", "create", volume)
	works("of an empty one")
	if got := podman("volume", "ls", "--quiet", "--filter", "label="+engine.LabelManaged+"=1"); !slices.Contains(strings.Fields(got), volume) {
		t.Errorf("the volumes that a removal of old ones finds are %q, without %s", got, volume)
	}

	// One whose loss nobody could tell from the engine's words.
	podman("volume", "rm", volume)
	podman("volume", "create", "--label", engine.LabelManaged+"=1", volume)
	spec := engine.Spec{Name: "loomcycle-test-" + strings.ToLower(rand.Text()), Image: podman("image", "inspect", "--format", "{{.Id}}", p.Image), WorkBytes: 1 << 20, TmpBytes: 1 << 20, MemBytes: 64 << 20, CPUs: 1, Pids: 64}
	id, err := e.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), id); err == nil {
		t.Error("a container starts without the agent")
	}
	if err := e.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	works("after a start that failed")

	podman("volume", "rm", volume)
	if err := os.WriteFile(opts.Agent, append(agent, 0), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := e.PlaceAgent(t.Context(), spec.Image); err == nil || !strings.Contains(err.Error(), "restart the sidecar") {
		t.Errorf("another agent takes the first one's name: %v", err)
	}
}
