package engine_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// A podman that is killed while it removes a container may leave its entry
// without its layer, and then fails every list. The engine removes the rest.
func TestListHealsALostLayer(t *testing.T) {
	p := enginetest.New(t).Apart(t) // the index is written without podman's lock
	root := p.Root()
	out, err := p.Command("create", "--label", engine.LabelManaged+"=1", "--label", engine.LabelInstance+"=lost", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", p.Image, "true").Output()
	if err != nil {
		t.Fatal(err)
	}
	id := string(out[:64])
	t.Cleanup(func() { _ = p.Command("rm", "-f", id).Run() })

	var containers []struct{ ID, Layer string }
	index := filepath.Join(root, "overlay-containers", "containers.json")
	text, err := os.ReadFile(index)
	if err == nil {
		err = json.Unmarshal(text, &containers)
	}
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(containers, func(c struct{ ID, Layer string }) bool { return c.ID == id })
	if i < 0 {
		t.Fatalf("%s does not list %s", index, id)
	}
	var layers []map[string]any
	file := filepath.Join(root, "overlay-layers", "layers.json")
	if text, err = os.ReadFile(file); err == nil {
		err = json.Unmarshal(text, &layers)
	}
	if err != nil {
		t.Fatal(err)
	}
	before := len(layers)
	layers = slices.DeleteFunc(layers, func(l map[string]any) bool { return l["id"] == containers[i].Layer })
	if len(layers) != before-1 {
		t.Fatalf("%d of %d layers are left", len(layers), before)
	}
	if text, err = json.Marshal(layers); err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}

	e := enginetest.Open(t, p.Options(t, "runc"))
	if _, err := e.List(t.Context(), "lost"); err != nil {
		t.Fatal(err)
	}
	if out, err := p.Command("ps", "-aq", "--no-trunc", "--filter", "id="+id).Output(); err != nil || len(out) > 0 {
		t.Errorf("the container is still there: %s %v", out, err)
	}
}

// A container's monitor reaps it before it writes down how it ended, and may be preempted
// between the two: who looks just then is told what it ended with all the same. One whose
// monitor was killed is over too.
func TestEndIsWrittenDown(t *testing.T) {
	p := enginetest.New(t)
	opts := p.Options(t, "runc")
	var looks atomic.Int64
	var again atomic.Pointer[func()] // what comes before the second look
	opts.Trace = []otelhttp.Option{otelhttp.WithFilter(func(r *http.Request) bool {
		if f := again.Load(); f != nil && strings.HasSuffix(r.URL.Path, "/json") && looks.Add(1) == 2 {
			(*f)()
		}
		return false
	})}
	e := enginetest.Open(t, opts)
	for what, late := range map[string]bool{"a monitor that is late": true, "one that was killed": false} {
		t.Run(what, func(t *testing.T) {
			again.Store(nil)
			c := open(t, e, p.Image, nil)
			out, err := p.Command("inspect", "--format", "{{.State.ConmonPid}} {{.State.Pid}}", c.id).Output()
			if err != nil {
				t.Fatal(err)
			}
			var monitor, pid int
			if _, err := fmt.Sscan(string(out), &monitor, &pid); err != nil || monitor <= 0 || pid <= 0 {
				t.Fatalf("%q: %v", out, err)
			}
			for _, p := range []int{monitor, pid} { // what the monitor does is done below
				if err := syscall.Kill(p, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			for syscall.Kill(pid, 0) != syscall.ESRCH {
				time.Sleep(time.Millisecond)
			}
			// As conmon writes it, in podman's tmpdir.
			write := func() {
				exit := filepath.Join(p.Flags[slices.Index(p.Flags, "--tmpdir")+1], "exits", c.id)
				if err := os.WriteFile(exit, []byte("137"), 0o600); err != nil {
					t.Error(err)
				}
			}
			if late {
				looks.Store(0)
				again.Store(&write)
			}
			state, ok, err := e.Inspect(t.Context(), c.id)
			if err != nil || !ok || state.Running || late && state.ExitCode != 137 {
				t.Errorf("%+v, %v, %v", state, ok, err)
			}
		})
	}
}

// Of a container that does not run a list tells whether its processes may go on: a sidecar
// that adopts it keeps others from its workspace then.
func TestListOfEndings(t *testing.T) {
	p := enginetest.New(t)
	e := enginetest.Open(t, p.Options(t, "runc"))
	c := open(t, e, p.Image, nil)
	for _, step := range []struct {
		command []string
		want    engine.State
	}{
		{[]string{"inspect"}, engine.State{Running: true}}, {[]string{"pause"}, engine.State{Ending: true}}, {[]string{"unpause"}, engine.State{Running: true}},
		{[]string{"stop", "--time", "1"}, engine.State{}},
	} {
		if out, err := p.Command(append(step.command, c.id)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", step.command, err, out)
		}
		all, err := e.List(t.Context(), t.Name())
		if err != nil || len(all) != 1 || all[0].Running != step.want.Running || all[0].Ending != step.want.Ending {
			t.Errorf("after %v there are %+v, %v", step.command, all, err)
		}
	}
}
