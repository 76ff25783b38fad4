package engine_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// A container that the runtime has in podman's storage and podman does not know,
// as one leaves that is killed while it starts it, goes when it was seen twice.
// One that podman knows stays, and so does another manager's.
func TestSweep(t *testing.T) {
	p := enginetest.New(t)
	e := enginetest.Open(t, p.Options(t, "runc"))
	storage := p.Root()
	known := func(id string) bool { return exec.Command("runc", "state", id).Run() == nil }
	create := func(id, manager string) string {
		t.Helper()
		bundle := filepath.Join(storage, "overlay-containers", id, "userdata")
		rootfs := t.TempDir()
		if err := os.MkdirAll(bundle, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = exec.Command("runc", "delete", "--force", id).Run()
			os.RemoveAll(filepath.Dir(bundle))
		})
		agent, err := os.ReadFile(p.Agent)
		if err == nil {
			err = os.WriteFile(filepath.Join(rootfs, "agent"), agent, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		spec := exec.Command("runc", "spec")
		spec.Dir = bundle
		if out, err := spec.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		config := filepath.Join(bundle, "config.json")
		text, err := os.ReadFile(config)
		var doc map[string]any
		if err == nil {
			err = json.Unmarshal(text, &doc)
		}
		if err != nil {
			t.Fatal(err)
		}
		process := doc["process"].(map[string]any)
		process["terminal"], process["args"] = false, []string{"/agent"}
		delete(process, "rlimits")
		doc["root"] = map[string]any{"path": rootfs}
		doc["annotations"] = map[string]string{"io.container.manager": manager}
		if text, err = json.Marshal(doc); err == nil {
			err = os.WriteFile(config, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		// Into a file: the container's first process would hold a pipe open.
		log, err := os.Create(filepath.Join(t.TempDir(), "log"))
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		cmd := exec.Command("runc", "create", "--bundle", bundle, id)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Run(); err != nil {
			out, _ := os.ReadFile(log.Name())
			t.Fatalf("%v\n%s", err, out)
		}
		return id
	}
	suffix := filepath.Base(filepath.Dir(t.TempDir()))
	lost, foreign := create("lost-"+suffix, "libpod"), create("foreign-"+suffix, "cri-o")
	out, err := p.Command("--runtime", "runc", "run", "-d", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", p.Image, "sleep", "1000").Output()
	if err != nil {
		t.Fatal(err)
	}
	running := string(out[:64])
	t.Cleanup(func() { _ = p.Command("rm", "-f", "-t", "0", running).Run() })

	// The runtime fails the whole list when a container of another test goes while it looks.
	var seen map[string]bool
	for range 20 {
		if seen = engine.SweepOnce(e, t.Context(), nil); len(seen) > 0 {
			break
		}
	}
	if !seen[lost] || seen[foreign] || seen[running] {
		t.Fatalf("it takes for forgotten: %v", seen)
	}
	for id := range seen {
		if id != lost {
			delete(seen, id) // of other tests
		}
	}
	for range 20 {
		if engine.SweepOnce(e, t.Context(), seen); !known(lost) {
			break
		}
	}
	if known(lost) || !known(foreign) || !known(running) {
		t.Errorf("the forgotten one is there: %v; another manager's: %v; podman's: %v", known(lost), known(foreign), known(running))
	}
}
