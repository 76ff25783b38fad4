package images

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// store is an engine's, as far as names go.
type store struct {
	images map[string]engine.Image
	used   []string
	asked  int
}

func (s *store) ResolveImage(_ context.Context, ref string, _ bool) (engine.Image, error) {
	s.asked++
	img, ok := s.images[ref]
	if !ok {
		return img, fmt.Errorf("no such image: %s: %w", ref, cerrdefs.ErrNotFound)
	}
	return img, nil
}

func (s *store) PlaceAgent(_ context.Context, id string) error {
	s.used = append(s.used, id)
	return nil
}

// A moved tag and a removed image are noticed, and a digest is verified before
// its first use and then no more.
func TestResolve(t *testing.T) {
	clock := time.Unix(1e9, 0)
	s := &store{images: map[string]engine.Image{"ref:1": {ID: "one", Digests: []string{"sha256:1"}}}}
	verified := map[string]int{}
	i := &Images{Engine: s, Now: func() time.Time { return clock }, Verify: func(_ context.Context, _, digest string) error {
		verified[digest]++
		if strings.HasPrefix(digest, "sha256:bad") {
			return errors.New("unsigned")
		}
		return nil
	}}
	resolve := func(ref, want string) {
		t.Helper()
		got, err := i.Resolve(t.Context(), ref)
		if strings.HasPrefix(want, "error:") {
			if err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(want, "error:")) {
				t.Errorf("%q, %v; want %s", got, err, want)
			}
		} else if got != want || err != nil {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	for range 3 {
		resolve("ref:1", "one")
	}
	if s.asked != 1 {
		t.Errorf("the engine was asked %d times at one moment", s.asked)
	}
	clock = clock.Add(fresh)
	resolve("ref:1", "one")
	if s.asked != 2 || verified["sha256:1"] != 1 || len(s.used) != 2 { // the agent may have been lost meanwhile
		t.Errorf("asked %d times, verified %v, used %v", s.asked, verified, s.used)
	}

	s.images["ref:1"] = engine.Image{ID: "two", Digests: []string{"sha256:2"}}
	resolve("ref:1", "one") // not yet noticed
	clock = clock.Add(fresh)
	resolve("ref:1", "two")
	if verified["sha256:2"] != 1 || len(s.used) != 3 || s.used[2] != "two" {
		t.Errorf("a moved tag: verified %v, used %v", verified, s.used)
	}
	s.images["ref:1"] = engine.Image{ID: "three", Digests: []string{"sha256:bad3"}}
	clock = clock.Add(fresh)
	resolve("ref:1", "error:refused by SANDBOX_IMAGE_POLICY")
	resolve("ref:1", "error:unsigned") // again, at the same moment
	delete(s.images, "ref:1")
	resolve("ref:1", "error:no such image")
	s.images["ref:1"] = engine.Image{ID: "two", Digests: []string{"sha256:2"}}
	resolve("ref:1", "two")

	clock = clock.Add(-time.Hour) // a clock that jumps back is no reason to believe forever
	s.images["ref:1"] = engine.Image{ID: "one", Digests: []string{"sha256:1"}}
	resolve("ref:1", "one")

	s.images["any"] = engine.Image{ID: "index", Digests: []string{"sha256:bad-manifest", "sha256:5"}}
	resolve("any", "index")
	s.images["loaded"] = engine.Image{ID: "loaded"}
	resolve("loaded", "error:no manifest digest")
	i.Verify = nil
	resolve("loaded", "loaded")
}

// refusing is an engine whose pulls end as one of localhost/ does, or that is ill.
type refusing struct{ missing error }

func (r refusing) ResolveImage(_ context.Context, ref string, pull bool) (engine.Image, error) {
	if pull && cerrdefs.IsNotFound(r.missing) {
		return engine.Image{}, fmt.Errorf("pulling %s: connection refused", ref)
	}
	return engine.Image{}, r.missing
}

func (refusing) PlaceAgent(context.Context, string) error { return nil }

// What cannot be pulled has to be loaded: that is said, with the engine's own words.
func TestAbsent(t *testing.T) {
	missing, ill := fmt.Errorf("no such image: %w", cerrdefs.ErrNotFound), errors.New("the engine is ill")
	for _, tc := range []struct {
		ref     string
		pull    bool
		missing error
		want    string // before the engine's own words
		words   string
	}{
		{"localhost/session:dev", true, missing, "the session image localhost/session:dev is not in the engine, and localhost/ is no registry", "connection refused"},
		{"localhost/session:dev", false, missing, "localhost/ is no registry that it could come from: load it", "no such image"},
		{"registry.example/session:1", false, missing, "SANDBOX_IMAGE_PULL=never forbids to pull it: load it", "no such image"},
		{"registry.example/session:1", true, missing, "", "connection refused"},
		{"localhost:5000/session:1", true, missing, "", "connection refused"}, // that is one
		{"localhost/session:dev", true, ill, "", "the engine is ill"},
		{"registry.example/session:1", false, ill, "", "the engine is ill"},
	} {
		_, err := (&Images{Engine: refusing{tc.missing}, Pull: tc.pull}).Resolve(t.Context(), tc.ref)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasSuffix(err.Error(), tc.words) && !strings.Contains(err.Error(), tc.words+": ") || tc.want == "" && strings.Contains(err.Error(), "load it") {
			t.Errorf("%s, pull %v, %v: %v", tc.ref, tc.pull, tc.missing, err)
		}
	}
}

// slow is an engine that pulls one reference for as long as the test likes.
type slow struct {
	*store
	pulling chan struct{} // sent to as a pull of "slow" begins
	resume  chan struct{} // closed to end it
	pulls   atomic.Int32
}

func (s *slow) ResolveImage(ctx context.Context, ref string, _ bool) (engine.Image, error) {
	if ref == "slow" {
		s.pulls.Add(1)
		s.pulling <- struct{}{}
		select {
		case <-s.resume:
		case <-ctx.Done():
			return engine.Image{}, ctx.Err()
		}
	}
	return engine.Image{ID: "id of " + ref}, nil
}

// A pull that takes long keeps nobody from another image, is shared by those who
// want it, and does not end with the one who asked first.
func TestSlowPull(t *testing.T) {
	s := &slow{store: &store{}, pulling: make(chan struct{}, 9), resume: make(chan struct{})}
	i := &Images{Engine: s, Pull: true}
	first, hangUp := context.WithCancel(t.Context())
	type result struct {
		id  string
		err error
	}
	ask := func(ctx context.Context) chan result {
		c := make(chan result, 1)
		go func() {
			id, err := i.Resolve(ctx, "slow")
			c <- result{id, err}
		}()
		return c
	}
	gone := ask(first)
	<-s.pulling
	waiting := ask(t.Context())

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	other := make(chan result, 1)
	go func() {
		id, err := i.Resolve(ctx, "other")
		other <- result{id, err}
	}()
	select {
	case r := <-other:
		if r.id != "id of other" || r.err != nil {
			t.Errorf("another image: %+v", r)
		}
	case <-ctx.Done():
		t.Error("another image waits for the pull")
	}
	hangUp()
	select {
	case r := <-gone:
		if !errors.Is(r.err, context.Canceled) {
			t.Errorf("the one who hung up got %+v", r)
		}
	case <-ctx.Done():
		t.Error("the one who hung up is held")
	}
	close(s.resume)
	if r := <-waiting; r.id != "id of slow" || r.err != nil {
		t.Errorf("the one who waited got %+v", r)
	}
	if n := s.pulls.Load(); n != 1 {
		t.Errorf("%d pulls", n)
	}
}
