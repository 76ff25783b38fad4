package engine_test

import (
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// Of two sidecars that boot at once with an agent that is new to their engine one copies it,
// and the other waits: a second copy would take the file from the first one's session.
// What a killed sidecar has left stops neither itself nor, for long, another.
func TestOneCarrier(t *testing.T) {
	p := enginetest.New(t)
	opts, _ := socketWithNewAgent(t, p)
	// sidecar is an engine that calls before ahead of each request for an agent's carrier.
	sidecar := func(instance string, before func(r *http.Request)) *engine.Engine {
		opts := opts
		opts.Instance = instance
		opts.Trace = []otelhttp.Option{otelhttp.WithFilter(func(r *http.Request) bool { before(r); return false })}
		return enginetest.Open(t, opts)
	}
	copies := func(r *http.Request) bool {
		return r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/archive")
	}

	waits, copied := make(chan struct{}), make(chan struct{})
	looks, again := sync.OnceFunc(func() { close(waits) }), sync.OnceFunc(func() { close(copied) })
	second := sidecar("second", func(r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "-carrier/json") {
			looks()
		} else if copies(r) {
			again()
		}
	})
	img, err := second.ResolveImage(t.Context(), p.Image, false)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	meets := sync.OnceFunc(func() {
		go func() { ended <- second.PlaceAgent(t.Context(), img.ID) }()
		select { // the first has looked, and has not copied yet
		case <-waits:
		case <-copied:
			t.Error("the second does not wait for the first")
		case <-time.After(time.Minute):
			t.Error("the second does nothing")
		}
	})
	first := sidecar("first", func(r *http.Request) {
		if copies(r) {
			meets()
		}
	})
	if err := first.PlaceAgent(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	select {
	case <-copied:
		t.Error("the second copies what is there")
	default:
	}

	volume := ""
	for _, name := range strings.Fields(p.Say(t, "volume", "ls", "--quiet")) {
		if exec.Command("cmp", "--quiet", opts.Agent, filepath.Join(p.Root(), "volumes", name, "_data", "session-agent")).Run() == nil {
			volume = name
		}
	}
	if volume == "" {
		t.Fatal("no volume holds the agent")
	}
	t.Cleanup(func() { _ = p.Command("volume", "rm", "--force", volume).Run() })
	leave := func() {
		p.Say(t, "create", "--name", volume+"-carrier", "--label", engine.LabelInstance+"=first", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", p.Image, "true")
	}
	for instance, patience := range map[string]time.Duration{"first": time.Hour, "third": 0} { // its own, and one that nobody comes back for
		leave()
		restarted := sidecar(instance, func(*http.Request) {})
		engine.SetPatience(restarted, patience)
		if err := restarted.PlaceAgent(t.Context(), img.ID); err != nil {
			t.Errorf("%s, with the carrier of the first before it was killed: %v", instance, err)
		}
	}
	if left := p.Say(t, "ps", "--all", "--quiet", "--filter", "volume="+volume); left != "" {
		t.Errorf("carriers are left: %s", left)
	}
}
