package session

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// A running session is adopted whoever has its workspace's lock for the moment, keeps it
// from others all the same, and takes the lock when it is free. One whose workspace is
// gone is closed, and its owner is told.
func TestAdoptedWorkspaces(t *testing.T) {
	ws, err := workspace.New(t.TempDir(), "", os.Getuid(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	looker, err := ws.Take(t.Context(), "p", "ws")
	if err != nil {
		t.Fatal(err)
	}
	kept, gone := opened(time.Hour), opened(time.Hour)
	kept.Workspace, gone.Workspace = "ws", "gone"
	e := &hung{removed: make(chan string, 10)}
	for _, id := range []string{kept.ID, gone.ID} {
		e.has = append(e.has, engine.State{ID: id, Running: true, Labels: map[string]string{engine.LabelSession: id}})
	}
	kept.Container, gone.Container = kept.ID, gone.ID
	m := manage(t, filepath.Join(t.TempDir(), "state"), Config{Engine: e, Workspaces: ws, Limits: Limits{IdleTTL: time.Hour}}, kept, gone)
	who := Caller{Principal: "p"}
	if _, err := m.Get(who, kept.ID); err != nil {
		t.Fatalf("with a lock that another has: %v", err)
	}
	if _, err := m.Get(who, gone.ID); !errors.Is(err, errNoWorkspace) || !strings.Contains(err.Error(), "workspace could not be opened") {
		t.Errorf("without its workspace: %v", err)
	}
	if id := <-e.removed; id != gone.ID {
		t.Errorf("%s is removed", id)
	}
	// Between the other's lock and its own.
	looker.Close()
	if _, err := m.takeWorkspace(t.Context(), "p", "ws"); !errors.Is(err, workspace.ErrBusy) {
		t.Errorf("a second session may have it: %v", err)
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		h, err := ws.Take(t.Context(), "p", "ws")
		if errors.Is(err, workspace.ErrBusy) {
			break
		}
		if err != nil || time.Now().After(end) {
			t.Fatalf("its lock is not taken: %v", err)
		}
		h.Close()
	}
}

// A session that was being closed when its sidecar was killed may write until its
// container is gone: nobody has its workspace before.
func TestAdoptedClose(t *testing.T) {
	ws := free(t, 0)
	for _, state := range []State{Closing, Opening} {
		rec := opened(time.Hour)
		rec.State, rec.Workspace = state, "ws"
		e := &hung{removed: make(chan string)}
		e.has = []engine.State{{ID: "c", Running: true, Labels: map[string]string{engine.LabelSession: rec.ID}}}
		m := manage(t, filepath.Join(t.TempDir(), "state"), Config{Engine: e, Workspaces: ws}, rec)
		if _, err := ws.Take(t.Context(), "p", "ws"); !errors.Is(err, workspace.ErrBusy) {
			t.Errorf("%s: another sidecar may have it: %v", state, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if _, err := m.takeWorkspace(ctx, "p", "ws"); err == nil {
			t.Errorf("%s: the next session may have it", state)
		}
		cancel()
		if id := <-e.removed; id != "c" {
			t.Errorf("%s is removed", id)
		}
		h, err := m.takeWorkspace(t.Context(), "p", "ws")
		if err != nil {
			t.Fatalf("%s: when the container is gone: %v", state, err)
		}
		h.Close()
		m.Close()
	}
}

// What is left of a session that ended while no sidecar ran cannot write any more: its
// workspace is free at once, however long the engine takes to remove the container. One
// that is paused may go on.
func TestAdoptedDead(t *testing.T) {
	ws := free(t, 0)
	for what, tc := range map[string]struct {
		has  []engine.State
		free bool
	}{
		"gone":     {nil, true},
		"over":     {[]engine.State{{}}, true},
		"stopping": {[]engine.State{{Ending: true}}, false},
	} {
		for _, state := range []State{Open, Closing, Opening} {
			rec := opened(time.Hour)
			rec.State, rec.Workspace = state, "ws"
			e := &hung{removed: make(chan string)}
			for _, c := range tc.has {
				c.ID, c.Labels = "c", map[string]string{engine.LabelSession: rec.ID}
				e.has = append(e.has, c)
			}
			m := manage(t, filepath.Join(t.TempDir(), "state"), Config{Engine: e, Workspaces: ws}, rec)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if !tc.free {
				ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
			}
			h, err := m.takeWorkspace(ctx, "p", "ws")
			if (err == nil) != tc.free {
				t.Errorf("%s, %s: %v", what, state, err)
			}
			if err == nil {
				h.Close()
			}
			cancel()
			if id := <-e.removed; id != "c" {
				t.Errorf("%s, %s: %s is removed", what, state, id)
			}
			m.Close()
		}
	}
}

// What prune has to leave alone is read without the sidecar, and beside it.
func TestRecorded(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if _, err := Recorded(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("where no sidecar was: %v", err)
	}
	store, err := OpenStore(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	a, b := opened(time.Hour), opened(time.Hour)
	a.Principal, a.Workspace, a.State = "acme/p", "ws", Closing
	for _, r := range []Record{a, b} {
		if err := store.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := Recorded(dir); err != nil || len(got) != 1 || !got[workspace.Key("acme/p", "ws")] {
		t.Errorf("%v, %v", got, err)
	}
}

// A record that cannot be written is told without the path.
func TestPutTellsNoPath(t *testing.T) {
	dir := t.TempDir()
	store, err := OpenStore(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	r := opened(time.Hour)
	if err := os.Mkdir(store.file(r.ID), 0o755); err != nil { // so that it cannot be renamed to
		t.Fatal(err)
	}
	for range 2 {
		if err := store.Put(r); err == nil || strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "SANDBOX_STATE_DIR: ") {
			t.Errorf("it says %v", err)
		}
		if err := os.RemoveAll(store.dir); err != nil { // nor a file be made
			t.Fatal(err)
		}
	}
}

// The containers of closed sessions are as many as sessions may be: then an open waits,
// its own principal's and tenant's alone, and no longer than its caller.
func TestDepartures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{Sessions: 6, PerPrincipal: 1, PerTenant: 3}
		var d departures
		waits := func(principal string) bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			err := d.wait(ctx, principal, l)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			return err != nil
		}
		for _, step := range []struct {
			id, principal string
			gone          bool
			waits, not    string
		}{
			{"1", "acme/a", false, "", "acme/a"},
			{"1", "acme/a", false, "", "acme/a"}, // tried again
			{"2", "acme/a", false, "acme/a", "acme/b"},
			{"3", "acme/b", false, "acme/a", "acme/b"},
			{"4", "acme/c", false, "acme/d", "other/a"},
			{"5", "token", false, "acme/d", "token"},
			{"6", "", false, "acme/d", "other/a"}, // of the pool
			{"7", "", false, "other/a", ""},
			{"7", "", true, "acme/d", "other/a"},
			{"1", "acme/a", true, "", "acme/a"},
		} {
			rec := Record{ID: step.id, Principal: step.principal}
			if step.gone {
				d.gone(rec)
			} else {
				d.add(rec)
			}
			if step.waits != "" && !waits(step.waits) {
				t.Errorf("%+v: %s does not wait", step, step.waits)
			}
			if step.not != "" && waits(step.not) {
				t.Errorf("%+v: %s waits", step, step.not)
			}
		}
		// All who wait are woken.
		for i := range 5 {
			d.add(Record{ID: string(rune('a' + i)), Principal: "x"})
		}
		woken := make(chan error, 3)
		for range cap(woken) {
			go func() { woken <- d.wait(t.Context(), "x", Limits{Sessions: 100, PerPrincipal: 1}) }()
		}
		for i := range 4 {
			synctest.Wait()
			if len(woken) > 0 {
				t.Fatalf("they go on with %d left", 5-i)
			}
			d.gone(Record{ID: string(rune('a' + i)), Principal: "x"})
		}
		for range cap(woken) {
			if err := <-woken; err != nil {
				t.Error(err)
			}
		}
	})
}
