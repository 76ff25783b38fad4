package engine_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

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
