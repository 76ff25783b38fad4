package release

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/freeport"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// maker makes releases: one key, one set of registries.
type maker struct {
	t         testing.TB
	cache     string
	signer    *signing.Signer
	trust     *signing.Trust
	addresses []string
}

func newMaker(t testing.TB, addresses ...string) *maker {
	t.Helper()
	m := &maker{t: t, cache: t.TempDir(), addresses: addresses}
	none := func(string) string { return "" }
	var err error
	if m.signer, err = signing.Open(t.Context(), signing.FromEnv(none, m.cache)); err != nil {
		t.Fatal(err)
	}
	config, err := signing.TrustFromEnv(none, m.cache)
	if err == nil {
		m.trust, err = signing.NewTrust(t.Context(), config)
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// dist makes and signs a family in a fresh folder.
func (m *maker) dist(f disttest.Family) string {
	m.t.Helper()
	folder := filepath.Join(m.t.TempDir(), "dist")
	r, err := f.Write(folder)
	if err == nil {
		_, err = signing.SignFamily(m.t.Context(), folder, r, m.signer)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return folder
}

func (m *maker) options(folder string) Options {
	m.t.Helper()
	c, err := Load(filepath.Join("..", "..", "release.yaml"))
	if err != nil {
		m.t.Fatal(err)
	}
	c.Hooks, c.Registries = Hooks{}, nil
	for i, a := range m.addresses {
		c.Registries = append(c.Registries, Registry{Variable: fmt.Sprintf("R%d", i), Address: a})
	}
	return Options{Config: c, Dist: folder, State: filepath.Join(m.cache, "release"), Trust: m.trust,
		Registry: registry.Options{Backoff: registry.Backoff{Base: time.Millisecond, Max: 20 * time.Millisecond}},
		Lease:    time.Minute, Notice: m.t.Logf}
}

// tags reads every tag of every repository of the family in a registry.
func (m *maker) tags(address string, repos ...string) map[string]v1.Hash {
	m.t.Helper()
	c, err := registry.Open(m.t.Context(), address, repos, registry.Options{})
	if err != nil {
		m.t.Fatal(err)
	}
	found := map[string]v1.Hash{}
	for _, r := range repos {
		tags, err := c.Tags(m.t.Context(), r)
		if err != nil {
			m.t.Fatal(err)
		}
		for _, tag := range tags {
			if strings.HasPrefix(tag, "sha256-") {
				continue
			}
			h, absent, err := c.Digest(m.t.Context(), r, tag)
			if err != nil {
				m.t.Fatalf("%s:%s: %v", r, tag, err)
			}
			if absent {
				continue // listed after its link could not be written
			}
			found[r+":"+tag] = h
		}
	}
	return found
}

var repositories = []string{"loomcycle", "toolbox", "loomcycle-release"}

// complete fails unless every tag that the version should have is there, points
// to it and verifies.
func (m *maker) complete(address, folder string, channels ...string) {
	m.t.Helper()
	r, err := dist.Read(folder)
	if err != nil {
		m.t.Fatal(err)
	}
	artifact, err := signing.Layout(filepath.Join(folder, "oci")).Release()
	if err != nil {
		m.t.Fatal(err)
	}
	repos := []string{"loomcycle-release"}
	for _, i := range r.Images {
		repos = append(repos, i.Name)
	}
	tags := m.tags(address, repos...)
	c, err := registry.Open(m.t.Context(), address, repos, registry.Options{})
	if err != nil {
		m.t.Fatal(err)
	}
	want := map[string]string{"loomcycle-release": artifact.String()}
	for _, i := range r.Images {
		want[i.Name] = i.IndexDigest.String()
		h, _ := v1.NewHash(i.IndexDigest.String())
		if _, _, err := signing.VerifyImage(m.t.Context(), signing.Repository{Client: c, Path: i.Name}, h, m.trust); err != nil {
			m.t.Errorf("%s: %v", address, err)
		}
	}
	for repo, digest := range want {
		for _, tag := range append([]string{r.Version, "v" + r.Version}, channels...) {
			if got := tags[repo+":"+tag]; got.String() != digest {
				m.t.Errorf("%s/%s:%s is %s, want %s", address, repo, tag, got, digest)
			}
		}
	}
}

func TestReleaseToTwoRegistries(t *testing.T) {
	a, b := registrytest.Start(t, registrytest.Distribution), registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, a+"/team", b)
	folder := m.dist(disttest.Small("1.0.0"))
	o := m.options(folder)
	var hooked []Ref
	o.Config.Hooks = Hooks{Smoke: []string{"smoke"}}
	o.Hook = func(ctx context.Context, name string, command []string, refs []Ref) error {
		hooked = refs
		for _, address := range []string{a + "/team", b} {
			if got := m.tags(address, repositories...); len(got) != 0 {
				t.Errorf("tags exist before the smoke test ran: %v", got)
			}
		}
		return nil
	}
	if err := Publish(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if len(hooked) != 4 {
		t.Errorf("the smoke test was given %v", hooked)
	}
	for _, address := range m.addresses {
		m.complete(address, folder, "1.0", "1", "latest")
	}
	if left, _ := filepath.Glob(filepath.Join(o.State, "*.json")); len(left) != 0 {
		t.Errorf("a finished release left its journal: %v", left)
	}
	list, err := List(t.Context(), o)
	if err != nil || len(list) != 2 || list[0].Version != "1.0.0" || strings.Join(list[0].Channels, " ") != "1 1.0 latest" {
		t.Errorf("List gave %+v, %v", list, err)
	}
	shown, err := Show(t.Context(), o, "latest")
	if err != nil || shown.Release.Version != "1.0.0" || len(shown.SBOMs) != 8 {
		t.Errorf("Show gave %+v, %v", shown, err)
	}
}

func TestFailedHookMovesNoTag(t *testing.T) {
	address := registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, address)
	o := m.options(m.dist(disttest.Small("1.0.0")))
	o.Config.Hooks = Hooks{Policy: []string{"policy"}}
	o.Hook = func(context.Context, string, []string, []Ref) error { return errors.New("exit status 1") }
	if err := Publish(t.Context(), o); err == nil || !strings.Contains(err.Error(), "policy") {
		t.Fatalf("got %v", err)
	}
	if got := m.tags(address, repositories...); len(got) != 0 {
		t.Errorf("tags: %v", got)
	}
	o.Hook = func(context.Context, string, []string, []Ref) error { return nil }
	if err := Promote(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	m.complete(address, o.Dist, "1.0", "1", "latest")
}

// TestAgainFromAFreshCheckout signs the same family anew, with other signatures
// and no journal, as a rebuilt CI job would.
func TestAgainFromAFreshCheckout(t *testing.T) {
	for _, k := range []registrytest.Kind{registrytest.Distribution, registrytest.Referrers} {
		t.Run(string(k), func(t *testing.T) {
			address := registrytest.Start(t, k)
			m := newMaker(t, address)
			first := m.dist(disttest.Small("1.0.0"))
			if err := Publish(t.Context(), m.options(first)); err != nil {
				t.Fatal(err)
			}
			before, referrers := m.tags(address, repositories...), m.referrers(address, first)
			second := m.dist(disttest.Small("1.0.0"))
			o := m.options(second)
			o.State = t.TempDir()
			if err := Publish(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			if after := m.tags(address, repositories...); fmt.Sprint(after) != fmt.Sprint(before) {
				t.Errorf("tags changed from %v to %v", before, after)
			}
			if after := m.referrers(address, first); after != referrers {
				t.Errorf("%d referrers became %d: the same statements were attached twice", referrers, after)
			}
		})
	}
}

// TestCleanedUpVariant is a registry whose clean-up deleted what no tag names.
func TestCleanedUpVariant(t *testing.T) {
	address := registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, address)
	folder := m.dist(disttest.Small("1.0.0"))
	if err := Publish(t.Context(), m.options(folder)); err != nil {
		t.Fatal(err)
	}
	r, err := dist.Read(folder)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, "http://"+address+"/v2/toolbox/manifests/"+r.Images[1].Platforms[0].Digest.String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil || resp.StatusCode != http.StatusAccepted {
		t.Fatalf("%+v, %v", resp, err)
	}
	resp.Body.Close()
	if err := Publish(t.Context(), m.options(folder)); err != nil {
		t.Fatal(err)
	}
	m.complete(address, folder, "1.0", "1", "latest")
}

// TestRottenLayer damages a layer after all was signed.
func TestRottenLayer(t *testing.T) {
	address := registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, address)
	for name, damage := range map[string]func([]byte) []byte{
		"cut":     func(b []byte) []byte { return b[:len(b)-1] },
		"changed": func(b []byte) []byte { b[0]++; return b },
	} {
		o := m.options(m.dist(disttest.Small("1.0.0")))
		r, err := dist.Read(o.Dist)
		if err != nil {
			t.Fatal(err)
		}
		layer := r.Images[0].Platforms[0].Layers[0].Digest
		file := filepath.Join(o.Dist, "oci", "blobs", "sha256", layer.Encoded())
		text, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(file, damage(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := Publish(t.Context(), o); err == nil || !strings.Contains(err.Error(), "blob "+layer.String()+" in "+filepath.Join(o.Dist, "oci")) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(o.State); err == nil {
			t.Errorf("%s: the registry was asked", name)
		}
	}
}

func (m *maker) referrers(address, folder string) int {
	m.t.Helper()
	r, err := dist.Read(folder)
	if err != nil {
		m.t.Fatal(err)
	}
	c, err := registry.Open(m.t.Context(), address, repositories, registry.Options{})
	if err != nil {
		m.t.Fatal(err)
	}
	n := 0
	for _, i := range r.Images {
		h, _ := v1.NewHash(i.IndexDigest.String())
		all, err := subjects(m.t.Context(), signing.Repository{Client: c, Path: i.Name}, h)
		if err != nil {
			m.t.Fatal(err)
		}
		for _, s := range all {
			found, err := c.Referrers(m.t.Context(), i.Name, s)
			if err != nil {
				m.t.Fatal(err)
			}
			n += len(found)
		}
	}
	return n
}

func TestVersionTagIsNeverMoved(t *testing.T) {
	address := registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, address)
	if err := Publish(t.Context(), m.options(m.dist(disttest.Small("1.0.0")))); err != nil {
		t.Fatal(err)
	}
	before := m.tags(address, repositories...)
	other := disttest.Small("1.0.0")
	other.Images["toolbox"] = append(other.Images["toolbox"], disttest.Layer{Name: "more", Size: 1000})
	err := Publish(t.Context(), m.options(m.dist(other)))
	if err == nil || !strings.Contains(err.Error(), "toolbox:1.0.0 already points to") {
		t.Fatalf("got %v", err)
	}
	if after := m.tags(address, repositories...); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("tags changed from %v to %v", before, after)
	}
}

// TestUncertainAnswersStop asks with a registry that answers the tag lookups wrongly.
func TestUncertainAnswersStop(t *testing.T) {
	for _, status := range []int{0, 401, 403, 404, 500, 503} { // 0: no answer, the connection drops
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			inner := registrytest.Start(t, registrytest.Referrers)
			address := registrytest.Proxy(t, inner, func(r *http.Request) *http.Response {
				if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/manifests/v1.0.0") {
					if status == 0 {
						panic(http.ErrAbortHandler)
					}
					return registrytest.Answer(status, "<html>gateway</html>")
				}
				return nil
			})
			m := newMaker(t, address)
			o := m.options(m.dist(disttest.Small("1.0.0")))
			if err := Publish(t.Context(), o); err == nil || strings.Contains(err.Error(), "have the tag removed") != (status == 500) {
				t.Fatalf("it gave %v", err)
			}
			if got := m.tags(inner, repositories...); len(got) != 0 {
				t.Errorf("tags: %v", got)
			}
			if left, _ := filepath.Glob(filepath.Join(o.State, "*.json")); len(left) > 0 {
				t.Errorf("a run that wrote nothing leaves the journal %v", left)
			}
		})
	}
}

// TestNoRegistry releases to where none is.
func TestNoRegistry(t *testing.T) {
	m := newMaker(t, freeport.Address(t))
	o := m.options(m.dist(disttest.Small("1.0.0")))
	for name, f := range map[string]func() error{"release": func() error { return Publish(t.Context(), o) }, "list": func() error { _, err := List(t.Context(), o); return err }} {
		if err := f(); err == nil || !strings.Contains(err.Error(), "R0="+m.addresses[0]+", which release.yaml asks for") || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestImmutableRegistry moves no tag at all. Such a registry has the referrers API.
func TestImmutableRegistry(t *testing.T) {
	inner := registrytest.Start(t, registrytest.Referrers)
	var seen sync.Map
	address := registrytest.Proxy(t, inner, func(r *http.Request) *http.Response {
		if r.Method != http.MethodPut || !strings.Contains(r.URL.Path, "/manifests/") || strings.Contains(r.URL.Path, "/manifests/sha256:") {
			return nil
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return registrytest.Answer(500, "")
		}
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		if old, there := seen.LoadOrStore(r.URL.Path, string(body)); there && old != string(body) {
			return registrytest.Answer(400, `{"errors":[{"code":"TAG_INVALID","message":"the tag is immutable"}]}`)
		}
		return nil
	})
	m := newMaker(t, address)
	for _, v := range []string{"1.0.0", "1.0.1"} {
		folder := m.dist(disttest.Small(v))
		for range 2 { // a second time, as after a lost job
			o := m.options(folder)
			o.Config.Registries[0].ImmutableTags = true
			var said bool
			o.Notice = func(f string, a ...any) {
				said = said || strings.Contains(fmt.Sprintf(f, a...), "the channels [1.0 1 latest] are skipped")
			}
			if err := Publish(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			// As after a kill between giving the lock back and forgetting it.
			if j, err := openJournal(o.State, Version(v)); err != nil {
				t.Fatal(err)
			} else {
				j.Claims[address] = lastClaim(t, m, address)
				err = j.save()
				if j.close(); err != nil {
					t.Fatal(err)
				}
			}
			if !said {
				t.Error("no line says that the channels were skipped")
			}
		}
		m.complete(address, folder)
	}
}

// lastClaim is the id of a claim that was withdrawn.
func lastClaim(t *testing.T, m *maker, address string) string {
	t.Helper()
	for tag := range m.tags(address, "loomcycle-release-lock") {
		if _, id, ok := strings.Cut(tag, ":"+removeTag); ok {
			return id
		}
	}
	t.Fatal("no claim was withdrawn")
	return ""
}

func TestTwoReleasesAtOnce(t *testing.T) {
	address := registrytest.Start(t, registrytest.Distribution)
	m := newMaker(t, address)
	a, b := m.options(m.dist(disttest.Small("1.0.0"))), m.options(m.dist(disttest.Small("1.1.0")))
	inside, goOn := make(chan struct{}), make(chan struct{})
	a.Config.Hooks = Hooks{Smoke: []string{"smoke"}}
	a.Hook = func(context.Context, string, []string, []Ref) error { close(inside); <-goOn; return nil }
	done := make(chan error, 1)
	go func() { done <- Publish(t.Context(), a) }()
	select {
	case <-inside:
	case err := <-done:
		t.Fatalf("the first release ended before its smoke test: %v", err)
	}
	err := Publish(t.Context(), b)
	var busy *busyError
	if !errors.As(err, &busy) || !strings.Contains(err.Error(), "1.0.0 of c0ffee") {
		t.Errorf("the second release was not refused: %v", err)
	}
	b.Wait = time.Minute
	waiting := make(chan error, 1)
	var once sync.Once
	b.Notice = func(f string, _ ...any) {
		if strings.HasSuffix(f, "waiting") {
			once.Do(func() { close(goOn) })
		}
	}
	b.Lease = 10 * time.Second // it polls in step with the lease
	go func() { waiting <- Publish(t.Context(), b) }()
	if err := errors.Join(<-done, <-waiting); err != nil {
		t.Fatal(err)
	}
	m.complete(address, a.Dist, "1.0")
	m.complete(address, b.Dist, "1.1", "1", "latest")
}

// TestLockExcludes lets many contend for one lock.
func TestLockExcludes(t *testing.T) {
	c, err := registry.Open(t.Context(), registrytest.Start(t, registrytest.Referrers), []string{"locks"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := lease{time.Minute, 20 * time.Millisecond, time.Now, registry.Sleep, func(string, ...any) {}}
	var holders, got atomic.Int64
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			k, err := acquire(t.Context(), l, c, "locks", fmt.Sprint(i), time.Minute, nil, func(string) error { return nil })
			if err != nil {
				t.Error(err)
				return
			}
			if n := holders.Add(1); n != 1 {
				t.Errorf("%d hold the lock", n)
			}
			// Long enough for all that wait to look.
			for range 10 {
				if _, err := c.Tags(t.Context(), "locks"); err != nil {
					t.Error(err)
				}
			}
			got.Add(1)
			holders.Add(-1)
			if err := k.withdraw(t.Context(), k.id); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if got.Load() != 6 {
		t.Errorf("%d of 6 got the lock", got.Load())
	}
}

func TestLockOfADeadRunEnds(t *testing.T) {
	c, err := registry.Open(t.Context(), registrytest.Start(t, registrytest.Referrers), []string{"locks"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	l := lease{10 * time.Minute, time.Minute, func() time.Time { return now }, registry.Sleep, func(string, ...any) {}}
	note := func(string) error { return nil }
	if _, err := acquire(t.Context(), l, c, "locks", "the dead one", 0, nil, note); err != nil {
		t.Fatal(err)
	}
	now = now.Add(9 * time.Minute)
	if _, err := acquire(t.Context(), l, c, "locks", "too early", 0, nil, note); err == nil || !strings.Contains(err.Error(), "the dead one") {
		t.Fatalf("got %v", err)
	}
	now = now.Add(2 * time.Minute)
	if _, err := acquire(t.Context(), l, c, "locks", "the next", 0, nil, note); err != nil {
		t.Fatal(err)
	}
}

// clock is a time that only tests move.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time { return c.add(0) }

func (c *clock) add(d time.Duration) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
	return c.t
}

// kept runs a lock's keeper until it says that the lock is lost.
func kept(t *testing.T, k *lock) error {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go k.keep(ctx, func(err error) { cancel(err) })
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(20 * time.Second):
		t.Error("nobody noticed that the lock was lost")
		return nil
	}
}

// TestLockIsLostWhileARenewalHangs has a registry that never answers to it.
func TestLockIsLostWhileARenewalHangs(t *testing.T) {
	arrived := make(chan struct{})
	arrive := sync.OnceFunc(func() { close(arrived) })
	hang := make(chan struct{})
	renewal := regexp.MustCompile(`/lock-[0-9a-f]+-1-\d+$`)
	address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
		if r.Method == http.MethodPut && renewal.MatchString(r.URL.Path) {
			arrive()
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		}
		return nil
	})
	t.Cleanup(func() { close(hang) }) // before the proxy's, which waits for what hangs
	c, err := registry.Open(t.Context(), address, []string{"locks"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	now := &clock{t: start}
	l := lease{10 * time.Minute, 2 * time.Minute, now.now, func(ctx context.Context, d time.Duration) error {
		if d < 2*time.Minute { // the watch: its clock goes on when the renewal hangs
			select {
			case <-arrived:
			case <-ctx.Done():
			}
		}
		now.add(d)
		return ctx.Err()
	}, t.Logf}
	k, err := acquire(t.Context(), l, c, "locks", "the slow one", 0, nil, func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := kept(t, k); !errors.Is(err, errLost) {
		t.Errorf("it ended with %v", err)
	}
	if at := now.now(); !at.Before(start.Add(l.length)) {
		t.Errorf("the loss was noticed at %v, when the lock was free already", at)
	}
	if err := k.held(); !errors.Is(err, errLost) {
		t.Errorf("held says %v", err)
	}
}

func TestWithdrawnLockIsLost(t *testing.T) {
	c, err := registry.Open(t.Context(), registrytest.Start(t, registrytest.Referrers), []string{"locks"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := lease{10 * time.Minute, 2 * time.Minute, time.Now, func(ctx context.Context, d time.Duration) error {
		if d < 2*time.Minute {
			<-ctx.Done() // the clock does not go on
		}
		return ctx.Err()
	}, t.Logf}
	k, err := acquire(t.Context(), l, c, "locks", "the withdrawn one", 0, nil, func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(k.now().String(), "m=") {
		t.Error("the lease is measured by a clock that stands still while the machine is suspended")
	}
	other := &lock{lease: l, client: c, repo: "locks", who: "another"}
	if err := other.withdraw(t.Context(), k.id); err != nil {
		t.Fatal(err)
	}
	if err := kept(t, k); !errors.Is(err, errWithdrawn) {
		t.Errorf("it ended with %v", err)
	}
}

// TestLostLockWritesNothing is a machine that is suspended for an hour between
// two channels, in which others may have released.
func TestLostLockWritesNothing(t *testing.T) {
	var now clock
	now.t = time.Now()
	var suspend atomic.Bool
	address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/loomcycle/manifests/latest") && suspend.CompareAndSwap(true, false) {
			now.add(time.Hour)
		}
		return nil
	})
	m := newMaker(t, address)
	old, recent := m.dist(disttest.Small("1.0.0")), m.dist(disttest.Small("1.0.1"))
	publish := func(folder string) error {
		o := m.options(folder)
		o.Now = now.now
		return Publish(t.Context(), o)
	}
	if err := publish(old); err != nil {
		t.Fatal(err)
	}
	before := m.tags(address, repositories...)
	suspend.Store(true)
	if err := publish(recent); !errors.Is(err, errLost) || !strings.Contains(err.Error(), "release:abort 1.0.1") {
		t.Fatalf("it gave %v", err)
	}
	after := m.tags(address, repositories...)
	if after["toolbox:latest"] != before["toolbox:latest"] || after["loomcycle:latest"] != after["loomcycle:1.0.1"] {
		t.Errorf("channels were written without the lock: %v became %v", before, after)
	}
	if err := publish(recent); err != nil {
		t.Fatal(err)
	}
	m.complete(address, recent, "1.0", "1", "latest")
}

// TestTakingBack denies the last channel. What was moved is taken back though the
// caller gives up at that moment, but not when the machine is suspended then, in
// the middle of a write: others may have released before it would arrive.
func TestTakingBack(t *testing.T) {
	for _, suspended := range []bool{false, true} {
		t.Run(fmt.Sprintf("suspended %v", suspended), func(t *testing.T) {
			var now clock
			now.t = time.Now()
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			var armed, denied atomic.Bool
			address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
				latest := func(repo string) bool {
					return armed.Load() && r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/"+repo+"/manifests/latest")
				}
				switch {
				case latest("loomcycle-release"):
					denied.Store(true)
					giveUp()
					return registrytest.Answer(403, `{"errors":[{"code":"DENIED","message":"no"}]}`)
				case suspended && denied.Load() && latest("toolbox"):
					_, _ = io.Copy(io.Discard, r.Body) // or the server does not see the client leave
					now.add(time.Hour)
					select {
					case <-r.Context().Done():
					case <-time.After(20 * time.Second):
						t.Error("a write was waited for without the lock")
					}
					return registrytest.Answer(403, "")
				}
				return nil
			})
			m := newMaker(t, address)
			old, recent := m.dist(disttest.Small("1.0.0")), m.dist(disttest.Small("1.0.1"))
			if err := Publish(t.Context(), m.options(old)); err != nil {
				t.Fatal(err)
			}
			armed.Store(true)
			o := m.options(recent)
			o.Now = now.now
			err := Publish(ctx, o)
			if err == nil || errors.Is(err, errLost) != suspended || strings.Contains(err.Error(), "release:abort 1.0.1") != suspended {
				t.Errorf("it gave %v", err)
			}
			if !suspended {
				m.complete(address, old, "1.0", "1", "latest")
			} else if tags := m.tags(address, "loomcycle"); tags["loomcycle:latest"] != tags["loomcycle:1.0.1"] {
				t.Errorf("a channel was written without the lock: %v", tags)
			}
			armed.Store(false)
			if err := Publish(t.Context(), m.options(recent)); err != nil {
				t.Fatal(err)
			}
			m.complete(address, recent, "1.0", "1", "latest")
		})
	}
}

func TestRollback(t *testing.T) {
	address := registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, address)
	more := disttest.Small("1.0.1")
	more.Images["extra"] = []disttest.Layer{{Name: "extra", Size: 1000}}
	old, recent := m.dist(disttest.Small("1.0.0")), m.dist(more)
	for _, folder := range []string{old, recent} {
		if err := Publish(t.Context(), m.options(folder)); err != nil {
			t.Fatal(err)
		}
	}
	o := m.options("")
	if err := Rollback(t.Context(), o, "1.0.1", "1.0.0"); err == nil || !strings.Contains(err.Error(), "not a channel") {
		t.Errorf("a version tag was rolled back: %v", err)
	}
	if err := Rollback(t.Context(), o, "latest", "0.9.0"); err == nil || !strings.Contains(err.Error(), "0.9.0") {
		t.Errorf("rolled back to an unknown version: %v", err)
	}
	var notices strings.Builder
	o.Notice = func(f string, a ...any) { fmt.Fprintf(&notices, f+"\n", a...) }
	if err := Rollback(t.Context(), o, "latest", "1.0.0"); err != nil {
		t.Fatal(err)
	}
	if want := address + "/extra:latest stays where it is: 1.0.0 has no such image\n"; !strings.Contains(notices.String(), want) {
		t.Errorf("it said\n%swithout %s", &notices, want)
	}
	m.complete(address, old, "latest")
	m.complete(address, recent, "1.0", "1")
	// The newer version's job runs again, elsewhere.
	again := m.options(recent)
	again.State = t.TempDir()
	var said bool
	again.Notice = func(f string, a ...any) {
		said = said || strings.Contains(fmt.Sprintf(f, a...), "latest was rolled back from 1.0.1")
	}
	if err := Publish(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	if !said {
		t.Error("no line says that the channel was rolled back")
	}
	m.complete(address, old, "latest")
	m.complete(address, recent, "1.0", "1")
	if err := Rollback(t.Context(), o, "latest", "1.0.1"); err != nil {
		t.Fatal(err)
	}
	m.complete(address, recent, "1.0", "1", "latest")
	if err := Rollback(t.Context(), o, "latest", "1.0.0"); err != nil {
		t.Fatal(err)
	}
	next := m.dist(disttest.Small("1.0.2"))
	if err := Publish(t.Context(), m.options(next)); err != nil {
		t.Fatal(err)
	}
	m.complete(address, next, "1.0", "1", "latest")
}

func TestOnlyACommitIsReleased(t *testing.T) {
	m := newMaker(t, registrytest.Start(t, registrytest.Referrers))
	dirty := strings.Repeat("a", 40) + "-dirty"
	for _, x := range []struct{ own, runtime, want string }{
		{"unknown", "", "unknown"}, {dirty, "", dirty},
		{"", "dir:loomcycle#" + dirty, dirty}, {"", "dir:loomcycle#unknown", "unknown"},
		{"", "dir:loomcycle#" + strings.Repeat("a", 40), ""}, {"", "bin:loomcycle", ""},
	} {
		folder := m.dist(disttest.Small("1.0.0"))
		r, err := dist.Read(folder)
		if err != nil {
			t.Fatal(err)
		}
		r.Source.Loomcycle = x.runtime
		if x.own != "" {
			r.Source.Commit = x.own
		}
		text, err := json.Marshal(r)
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, "release.json"), text, 0o644)
		}
		if err == nil {
			_, err = signing.SignFamily(t.Context(), folder, r, m.signer)
		}
		if err != nil {
			t.Fatal(err)
		}
		err = Publish(t.Context(), m.options(folder))
		if refused := err != nil && strings.Contains(err.Error(), "nobody can check out"); refused != (x.want != "") || refused && !strings.Contains(err.Error(), x.want) {
			t.Errorf("a build of %+v: %v", x, err)
		}
	}
}

// retag points a tag to something that the registry has, as anyone may who
// writes to it but has no key.
func (m *maker) retag(address, repo, tag string, h v1.Hash) {
	m.t.Helper()
	c, err := registry.Open(m.t.Context(), address, []string{repo}, registry.Options{})
	if err != nil {
		m.t.Fatal(err)
	}
	old, _, err := c.Fetch(m.t.Context(), repo, h.String())
	if err == nil {
		err = c.PutManifest(m.t.Context(), repo, tag, old)
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

// TestRetaggedRelease gives out the signed release 1.0.0 as 1.3.0.
func TestRetaggedRelease(t *testing.T) {
	address, dst := registrytest.Start(t, registrytest.Referrers), registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, address)
	for _, v := range []string{"1.0.0", "1.3.0"} {
		if err := Publish(t.Context(), m.options(m.dist(disttest.Small(v)))); err != nil {
			t.Fatal(err)
		}
	}
	before := m.tags(address, repositories...)
	for _, repo := range repositories {
		m.retag(address, repo, "1.3.0", before[repo+":1.0.0"])
	}
	m.retag(address, "loomcycle-release", "1.3", before["loomcycle-release:1.0.0"])
	o := m.options("")
	for name, f := range map[string]func() error{
		"show":           func() error { _, err := Show(t.Context(), o, "1.3.0"); return err },
		"show a channel": func() error { _, err := Show(t.Context(), o, "1.3"); return err },
		"mirror":         func() error { return Mirror(t.Context(), o, "1.3.0", Registry{Address: dst}) },
		"rollback":       func() error { return Rollback(t.Context(), o, "latest", "1.3.0") },
		"rollback, one registry": func() error { // the second of two is the one that was tampered with
			return o.with(t.Context(), "1.0.0", func(ctx context.Context, r *run) error { r.version = "1.3.0"; return r.load(ctx, r.targets[0]) })
		},
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), "signed as 1.0.0") {
			t.Errorf("%s gave %v", name, err)
		}
	}
	if got := m.tags(dst, repositories...); len(got) != 0 {
		t.Errorf("mirrored: %v", got)
	}
	if got := m.tags(address, repositories...); got["toolbox:latest"] != before["toolbox:latest"] {
		t.Errorf("latest was moved to %s", got["toolbox:latest"])
	}
}

// TestForeignBundles attaches what would fill a reader's memory.
func TestForeignBundles(t *testing.T) {
	m := newMaker(t, registrytest.Start(t, registrytest.Referrers))
	folder := m.dist(disttest.Small("1.0.0"))
	if err := Publish(t.Context(), m.options(folder)); err != nil {
		t.Fatal(err)
	}
	c, err := registry.Open(t.Context(), m.addresses[0], []string{"toolbox"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	toolbox, h, err := c.Fetch(t.Context(), "toolbox", "1.0.0")
	if err != nil {
		t.Fatal(err)
	}
	for i, size := range []int{registry.MaxBlob + 1, registry.MaxBlob, registry.MaxBlob, registry.MaxBlob, registry.MaxBlob} {
		if _, _, err := signing.VerifyImage(t.Context(), signing.Repository{Client: c, Path: "toolbox"}, h, m.trust); err != nil {
			t.Fatalf("beside %d foreign bundles: %v", i, err)
		}
		a, err := signing.NewAttachment(v1.Descriptor{MediaType: toolbox.Type, Digest: h, Size: int64(len(toolbox.Raw))}, signing.SPDX, bytes.Repeat([]byte{byte(i)}, size))
		if err == nil {
			err = c.PushBlob(t.Context(), "toolbox", registry.Bytes(a.Bundle))
		}
		if err == nil {
			err = c.PutManifest(t.Context(), "toolbox", registry.Bytes(a.Manifest).Digest.String(), registry.Manifest{Raw: a.Manifest, Type: types.OCIManifestSchema1})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := signing.VerifyImage(t.Context(), signing.Repository{Client: c, Path: "toolbox"}, h, m.trust); err == nil || !strings.Contains(err.Error(), "delete what is foreign") {
		t.Errorf("verify gave %v", err)
	}
}

// TestSwappedImages says in a release.json that one image, validly signed, is another.
func TestSwappedImages(t *testing.T) {
	m := newMaker(t)
	o := m.options(m.dist(disttest.Small("1.0.0")))
	for name, change := range map[string]func(*dist.Release){
		"names":   func(r *dist.Release) { r.Images[0].Name, r.Images[1].Name = r.Images[1].Name, r.Images[0].Name },
		"version": func(r *dist.Release) { r.Version = "1.3.0" },
		"nothing": func(*dist.Release) {},
	} {
		layout := signing.Layout(filepath.Join(o.Dist, "oci"))
		release, err := dist.Read(o.Dist)
		if err != nil {
			t.Fatal(err)
		}
		change(release)
		r := &run{Options: o, release: release, layout: layout}
		if r.artifact, err = layout.Release(); err != nil {
			t.Fatal(err)
		}
		err = r.check(t.Context(), func(string) signing.Store { return layout })
		if name == "nothing" && err != nil || name != "nothing" && (err == nil || !strings.Contains(err.Error(), "was signed as")) {
			t.Errorf("%s changed: %v", name, err)
		}
	}
}

// TestChannelFailureMovesNone denies the last channel move of the second registry.
func TestChannelFailureMovesNone(t *testing.T) {
	a, inner := registrytest.Start(t, registrytest.Referrers), registrytest.Start(t, registrytest.Referrers)
	var deny atomic.Bool
	b := registrytest.Proxy(t, inner, func(r *http.Request) *http.Response {
		if deny.Load() && r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/loomcycle-release/manifests/latest") {
			return registrytest.Answer(403, `{"errors":[{"code":"DENIED","message":"no"}]}`)
		}
		return nil
	})
	m := newMaker(t, a, b)
	old := m.dist(disttest.Small("1.0.0"))
	if err := Publish(t.Context(), m.options(old)); err != nil {
		t.Fatal(err)
	}
	deny.Store(true)
	recent := m.dist(disttest.Small("1.0.1"))
	if err := Publish(t.Context(), m.options(recent)); err == nil {
		t.Fatal("it was released")
	}
	for _, address := range m.addresses {
		m.complete(address, old, "1.0", "1", "latest")
	}
	deny.Store(false)
	if err := Publish(t.Context(), m.options(recent)); err != nil {
		t.Fatal(err)
	}
	for _, address := range m.addresses {
		m.complete(address, recent, "1.0", "1", "latest")
	}
}

// faulty is a registry that refuses some writes.
func faulty(t *testing.T) (address string, refuse func(when func(path string) bool)) {
	var mu sync.Mutex
	when := func(string) bool { return false }
	address = registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
		mu.Lock()
		defer mu.Unlock()
		if r.Method == http.MethodPut && when(r.URL.Path) {
			return registrytest.Answer(403, `{"errors":[{"code":"DENIED","message":"no"}]}`)
		}
		return nil
	})
	return address, func(f func(string) bool) { mu.Lock(); defer mu.Unlock(); when = f }
}

// after lets the write of one path pass and refuses all that follow, as if the
// process had been killed then: nothing is taken back.
func after(path string) func(string) bool {
	seen := false
	return func(p string) bool {
		if seen {
			return true
		}
		seen = strings.HasSuffix(p, path)
		return false
	}
}

func one(path string) func(string) bool {
	return func(p string) bool { return strings.HasSuffix(p, path) }
}

func none(string) bool { return false }

// elsewhere makes a run one of another machine: it has no journal, and finds the
// lock of a killed run ended.
func elsewhere(t *testing.T, o Options, n int) Options {
	o.State, o.Now = t.TempDir(), func() time.Time { return time.Now().Add(time.Duration(n) * time.Hour) }
	return o
}

// TestFailureAfterAKill is a run that dies between the channels of two images,
// and the next, which fails at the second: both go back, in both registries, also
// when the next runs on another machine, or is that of a newer version there.
func TestFailureAfterAKill(t *testing.T) {
	for _, x := range []struct {
		name, next string
		elsewhere  int
	}{{"here", "1.0.1", 0}, {"elsewhere", "1.0.1", 1}, {"another version elsewhere", "1.0.2", 1}} {
		t.Run(x.name, func(t *testing.T) {
			address, refuse := faulty(t)
			m := newMaker(t, address, registrytest.Start(t, registrytest.Referrers))
			old, recent := m.dist(disttest.Small("1.0.0")), m.dist(disttest.Small("1.0.1"))
			if err := Publish(t.Context(), m.options(old)); err != nil {
				t.Fatal(err)
			}
			refuse(after("/loomcycle/manifests/latest"))
			if err := Publish(t.Context(), m.options(recent)); err == nil {
				t.Fatal("it was released")
			}
			if tags := m.tags(address, "loomcycle"); tags["loomcycle:latest"] != tags["loomcycle:1.0.1"] {
				t.Fatalf("the killed release moved nothing: %v", tags)
			}
			if x.next != "1.0.1" {
				recent = m.dist(disttest.Small(x.next))
			}
			publish := func(n int) error {
				o := m.options(recent)
				if n > 0 {
					o = elsewhere(t, o, n)
				}
				return Publish(t.Context(), o)
			}
			refuse(one("/toolbox/manifests/latest"))
			if err := publish(x.elsewhere); err == nil {
				t.Fatal("it was released")
			}
			for _, a := range m.addresses {
				m.complete(a, old, "1.0", "1", "latest")
			}
			refuse(none)
			if err := publish(2 * x.elsewhere); err != nil {
				t.Fatal(err)
			}
			for _, a := range m.addresses {
				m.complete(a, recent, "1.0", "1", "latest")
			}
		})
	}
}

// TestAbort takes a killed release back to where the channels were before it,
// which is not where they were before an earlier try; also on another machine.
func TestAbort(t *testing.T) {
	for _, there := range []bool{false, true} {
		t.Run(fmt.Sprintf("elsewhere %v", there), func(t *testing.T) { abort(t, there) })
	}
}

func abort(t *testing.T, there bool) {
	address, refuse := faulty(t)
	m := newMaker(t, address)
	publish := func(folder string, f func(string) bool) error {
		refuse(f)
		defer refuse(none)
		return Publish(t.Context(), m.options(folder))
	}
	first, fix, next := m.dist(disttest.Small("1.1.0")), m.dist(disttest.Small("1.1.1")), m.dist(disttest.Small("1.2.0"))
	if err := publish(first, none); err != nil {
		t.Fatal(err)
	}
	// Not released, or 1.1.1 would leave latest alone; its channels are planned.
	if err := publish(next, one("/loomcycle-release/manifests/1.2.0")); err == nil {
		t.Fatal("it was released")
	}
	m.complete(address, first, "1.1", "1", "latest")
	if err := publish(fix, none); err != nil {
		t.Fatal(err)
	}
	if err := publish(next, after("/toolbox/manifests/latest")); err == nil {
		t.Fatal("it was released")
	}
	if tags := m.tags(address, "toolbox"); tags["toolbox:latest"] != tags["toolbox:1.2.0"] {
		t.Fatalf("the killed release moved nothing: %v", tags)
	}
	if err := Rollback(t.Context(), m.options(""), "latest", "1.2.0"); err == nil || !strings.Contains(err.Error(), "release:abort 1.2.0") {
		t.Errorf("rolled back to a half-released version: %v", err)
	}
	o := m.options("")
	if there {
		o = elsewhere(t, o, 1)
	}
	if err := Abort(t.Context(), o, "1.2.0"); err != nil {
		t.Fatal(err)
	}
	m.complete(address, fix, "1.1", "1", "latest")
	if left, _ := filepath.Glob(filepath.Join(o.State, "*.json")); len(left) != 0 {
		t.Errorf("what was taken back left its journal: %v", left)
	}
	o.Notice = func(f string, a ...any) {
		if said := fmt.Sprintf(f, a...); strings.Contains(said, " -> ") || !strings.HasSuffix(said, ":1.2 is new and stays") {
			t.Errorf("with nothing to take back: %s", said)
		}
	}
	if err := Abort(t.Context(), o, "1.2.0"); err != nil {
		t.Error(err)
	}
	said := false
	o.Notice = func(f string, a ...any) {
		said = said || strings.Contains(fmt.Sprintf(f, a...), "no channel had been moved to 1.1.0")
	}
	if err := Abort(t.Context(), o, "1.1.0"); err != nil || !said {
		t.Errorf("of a version that 1.1.1 has followed: said %v, %v", said, err)
	}
	m.complete(address, fix, "1.1", "1", "latest")
}

// TestAbortElsewhere is a release whose journal is lost: what can't be put back is named.
func TestAbortElsewhere(t *testing.T) {
	for _, c := range []struct{ name, before, last, says string }{
		{"between the artifact's channels", "1.0.0", "/loomcycle-release/manifests/1", ": 1)"},
		{"first release, before the artifact's channels", "", "/toolbox/manifests/latest", "is new and stays"},
	} {
		t.Run(c.name, func(t *testing.T) {
			address, refuse := faulty(t)
			m := newMaker(t, address)
			if c.before != "" {
				if err := Publish(t.Context(), m.options(m.dist(disttest.Small(c.before)))); err != nil {
					t.Fatal(err)
				}
			}
			refuse(after(c.last))
			if err := Publish(t.Context(), m.options(m.dist(disttest.Small("1.1.0")))); err == nil {
				t.Fatal("it was released")
			}
			refuse(none)
			o := elsewhere(t, m.options(""), 1)
			var said strings.Builder
			o.Notice = func(f string, a ...any) { fmt.Fprintf(&said, f+"\n", a...) }
			err := Abort(t.Context(), o, "1.1.0")
			if c.before == "" {
				if err != nil || !strings.Contains(said.String(), c.says) || strings.Contains(said.String(), "no channel had been moved") {
					t.Errorf("%v\n%s", err, said.String())
				}
			} else if err == nil || !strings.Contains(err.Error(), "release:rollback") || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v\n%s", err, said.String())
			}
		})
	}
}

// TestForgottenRegistry is a second run that is not told of the first one's other registry.
func TestForgottenRegistry(t *testing.T) {
	a := registrytest.Start(t, registrytest.Referrers)
	b, refuse := faulty(t)
	m := newMaker(t, a, b)
	refuse(one("/loomcycle/manifests/1.0.0"))
	folder := m.dist(disttest.Small("1.0.0"))
	if err := Publish(t.Context(), m.options(folder)); err == nil {
		t.Fatal("it was released")
	}
	refuse(none)
	o := m.options(folder)
	o.Config.Registries = o.Config.Registries[:1]
	if err := Publish(t.Context(), o); err == nil || !strings.Contains(err.Error(), "also released to "+b) {
		t.Errorf("it gave %v", err)
	}
	if err := Publish(t.Context(), m.options(folder)); err != nil {
		t.Fatal(err)
	}
	m.complete(b, folder, "latest")
}

func TestJournalRemembers(t *testing.T) {
	for _, x := range []struct {
		name            string
		old, move, want move
	}{
		{"a killed run, the tag not moved", move{From: "a", To: "b"}, move{From: "a", To: "b"}, move{From: "a", To: "b"}},
		{"undone, moved by another release since", move{From: "a", To: "c"}, move{From: "b", To: "c"}, move{From: "b", To: "c"}},
		{"built anew after it moved", move{From: "a", To: "b"}, move{From: "b", To: "c"}, move{From: "a", To: "c"}},
	} {
		j := journal{Moves: []move{{Tag: "other", To: "z"}, x.old}}
		if j.remember(x.move); len(j.Moves) != 2 || j.Moves[1] != x.want {
			t.Errorf("%s: the journal has %+v, want %+v", x.name, j.Moves, x.want)
		}
	}
}

func TestMirror(t *testing.T) {
	src, dst := registrytest.Start(t, registrytest.Distribution), registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, src)
	folder := m.dist(disttest.Small("1.0.0"))
	o := m.options(folder)
	o.Config.Registries[0].LegacySignatures = true
	o.Legacy = m.signer.Legacy
	if err := Publish(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	mirror := func() {
		if err := Mirror(t.Context(), o, "1.0.0", Registry{Address: dst + "/airgap"}); err != nil {
			t.Fatal(err)
		}
	}
	mirror()
	// The mirror's owner signs too; what holds their signature stands here for any other manifest.
	released := m.tags(dst+"/airgap", "toolbox")["toolbox:1.0.0"]
	signature := released.Algorithm + "-" + released.Hex + ".sig"
	m.retag(dst+"/airgap", "toolbox", signature, released)
	mirror()
	m.complete(dst+"/airgap", folder)
	c, err := registry.Open(t.Context(), dst+"/airgap", repositories, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	tags, err := c.Tags(t.Context(), "toolbox")
	if err != nil {
		t.Fatal(err)
	}
	if now, _, err := c.Digest(t.Context(), "toolbox", signature); err != nil || now != released {
		t.Errorf("the owner's signature was overwritten with %s, %v", now, err)
	}
	var legacy int
	for _, tag := range tags {
		if strings.HasSuffix(tag, ".sig") || strings.HasSuffix(tag, ".att") {
			legacy++
		}
	}
	if legacy != 6 {
		t.Errorf("%d signatures and attestations of the tag scheme were mirrored, want 6: %v", legacy, tags)
	}
}

// TestFullDisk is a registry whose disk fills while a release is pushed: no tag
// appears, the error names what was not written, and with room again the release finishes,
// though every link that the registry wrote was left empty, as the last ones are:
// also by a machine that has no journal of the lost claims, once they ended.
func TestFullDisk(t *testing.T) {
	for _, later := range []time.Duration{0, time.Hour} {
		t.Run(later.String(), func(t *testing.T) {
			folder := smallDisk(t, "2m")
			address := registrytest.StartDistribution(t, filepath.Join(folder, "r"), "")
			m := newMaker(t, address)
			f := disttest.Small("1.0.0")
			f.Images["toolbox"] = append(f.Images["toolbox"], disttest.Layer{Name: "big", Size: 3 << 20})
			o := m.options(m.dist(f))
			o.Registry.Backoff.Attempts = 3
			// Several are written at once: any of them may be the one without room.
			if err := Publish(t.Context(), o); err == nil || !strings.Contains(err.Error(), "push blob sha256:") && !strings.Contains(err.Error(), "write manifest ") {
				t.Fatalf("a release to a full disk gave %v", err)
			}
			if err := unix.Mount("tmpfs", folder, "tmpfs", unix.MS_REMOUNT, "size=64m"); err != nil {
				t.Fatal(err)
			}
			if got := m.tags(address, repositories...); len(got) != 0 {
				t.Errorf("tags after a full disk: %v", got)
			}
			if n := registrytest.EmptyLinks(t, folder); n < 3 { // of the lock: its blob, its claim, the claim's tag
				t.Fatalf("only %d links", n)
			}
			if later > 0 {
				// The claim was not taken back, and a newer release never got its tag's link.
				tags := filepath.Join(folder, "r", "docker", "registry", "v2", "repositories")
				if gone, _ := filepath.Glob(filepath.Join(tags, "loomcycle-release-lock/_manifests/tags/unlock-*")); len(gone) == 1 {
					if err := os.RemoveAll(gone[0]); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.MkdirAll(filepath.Join(tags, "loomcycle-release/_manifests/tags/1.0.1"), 0o755); err != nil {
					t.Fatal(err)
				}
				o.State, o.Now = t.TempDir(), func() time.Time { return time.Now().Add(later) }
			}
			if err := Publish(t.Context(), o); err != nil {
				t.Fatalf("with room on the disk again: %v", err)
			}
			if err := os.RemoveAll(filepath.Join(folder, "r/docker/registry/v2/repositories/loomcycle-release/_manifests/tags/1.0.1")); err != nil {
				t.Fatal(err)
			}
			m.complete(address, o.Dist, "1.0", "1", "latest")
		})
	}
}

// TestFullDiskWhilePromoting has a registry with room for the tags of no image, of
// some, of all, and for some channels too. The channels stay whole, or go back, and
// with room again the release finishes.
func TestFullDiskWhilePromoting(t *testing.T) {
	folder := smallDisk(t, "64m")
	address := registrytest.StartDistribution(t, filepath.Join(folder, "r"), "")
	m := newMaker(t, address)
	last := m.dist(disttest.Small("1.0.0"))
	if err := Publish(t.Context(), m.options(last)); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(folder, "filler")
	for i, files := range []int64{0, 6, 12, 14} { // that fit beside the filler: two make a tag, one moves it
		folder := m.dist(disttest.Small(fmt.Sprintf("1.0.%d", i+1)))
		o := m.options(folder)
		o.Lease = time.Hour // a renewal would take room
		o.Registry.Backoff.Attempts = 2
		o.Config.Hooks = Hooks{Policy: []string{"policy"}}
		o.Hook = func(context.Context, string, []string, []Ref) error {
			f, err := os.Create(filler)
			if err != nil {
				return err
			}
			defer f.Close()
			n, err := io.Copy(f, zeros{})
			if !errors.Is(err, unix.ENOSPC) {
				return fmt.Errorf("the disk is not full: %w", err)
			}
			return f.Truncate(n - files*int64(os.Getpagesize()))
		}
		if err := Publish(t.Context(), o); err == nil {
			t.Errorf("with room for %d files it was released", files)
		}
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		m.complete(address, last, "1.0", "1", "latest")
		if err := Publish(t.Context(), m.options(folder)); err != nil {
			t.Fatalf("after room for %d files, with more: %v", files, err)
		}
		m.complete(address, folder, "1.0", "1", "latest")
		last = folder
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// smallDisk mounts a file system of a size.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	folder := t.TempDir()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size="+size); err != nil {
		if errors.Is(err, unix.EPERM) {
			citest.Skip(t, "mounting a small tmpfs needs root")
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	return folder
}

// TestTokensExpire gives out tokens that are good for thirty requests, so that
// several end within one release.
func TestTokensExpire(t *testing.T) {
	inner := registrytest.Start(t, registrytest.Distribution)
	var issued atomic.Int64
	var uses sync.Map
	var address string
	address = registrytest.Proxy(t, inner, func(r *http.Request) *http.Response {
		if r.URL.Path == "/token" {
			token := fmt.Sprintf("t%d", issued.Add(1))
			uses.Store("Bearer "+token, new(atomic.Int64))
			return registrytest.Answer(200, fmt.Sprintf(`{"token":%q}`, token))
		}
		if n, ok := uses.Load(r.Header.Get("Authorization")); ok && n.(*atomic.Int64).Add(1) <= 30 {
			return nil
		}
		return registrytest.Answer(401, "", "WWW-Authenticate", `Bearer realm="http://`+address+`/token",service="r"`)
	})
	m := newMaker(t, address)
	folder := m.dist(disttest.Small("1.0.0"))
	if err := Publish(t.Context(), m.options(folder)); err != nil {
		t.Fatal(err)
	}
	if issued.Load() < 4 {
		t.Errorf("only %d tokens were issued: none expired", issued.Load())
	}
	m.complete(inner, folder, "1.0", "1", "latest")
}

// TestFlakyRegistry fails one request in five, in every way, and cuts one upload in three.
func TestFlakyRegistry(t *testing.T) {
	for _, k := range []registrytest.Kind{registrytest.Distribution, registrytest.Referrers} {
		t.Run(string(k), func(t *testing.T) {
			inner := registrytest.Start(t, k)
			var mu sync.Mutex
			random := rand.New(rand.NewPCG(4, 2))
			row := map[string]int{} // faults in a row of one method and path: fewer than the client's tries
			var faults atomic.Int64
			address := registrytest.Proxy(t, inner, func(r *http.Request) *http.Response {
				mu.Lock()
				n, kind, key := random.IntN(5), random.IntN(3), r.Method+r.URL.Path
				if n != 0 || row[key] == 3 {
					row[key] = 0
					mu.Unlock()
					return nil
				}
				row[key]++
				mu.Unlock()
				faults.Add(1)
				switch {
				case r.Method == http.MethodPatch:
					r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, 200_000), failing{}))
					return nil
				case kind == 0:
					return registrytest.Answer(429, `{"errors":[{"code":"TOOMANYREQUESTS"}]}`, "Retry-After", "0")
				case kind == 1:
					return registrytest.Answer(500, "oops")
				}
				panic(http.ErrAbortHandler) // the connection drops before the registry saw anything
			})
			m := newMaker(t, address)
			f := disttest.Small("1.0.0")
			f.Images["toolbox"] = append(f.Images["toolbox"], disttest.Layer{Name: "big", Size: 3 << 20})
			folder := m.dist(f)
			o := m.options(folder)
			o.Notice = func(string, ...any) {}
			if err := Publish(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			if faults.Load() < 20 {
				t.Errorf("only %d faults", faults.Load())
			}
			m.complete(inner, folder, "1.0", "1", "latest")
		})
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("the link broke") }

// A release in a process of its own, to be killed.
const childVariable = "LOOMCYCLE_RELEASE_TEST_CHILD"

type child struct {
	Cache, Dist, State string
	Addresses          []string
}

func TestMain(m *testing.M) {
	if text := os.Getenv(childVariable); text != "" {
		var c child
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			panic(err)
		}
		if err := publishChild(c); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func publishChild(c child) error {
	config, err := Load(filepath.Join("..", "..", "release.yaml"))
	if err != nil {
		return err
	}
	config.Hooks, config.Registries = Hooks{}, nil
	for _, a := range c.Addresses {
		config.Registries = append(config.Registries, Registry{Address: a})
	}
	tc, err := signing.TrustFromEnv(func(string) string { return "" }, c.Cache)
	if err != nil {
		return err
	}
	trust, err := signing.NewTrust(context.Background(), tc)
	if err != nil {
		return err
	}
	return Publish(context.Background(), Options{Config: config, Dist: c.Dist, State: c.State, Trust: trust, Lease: time.Hour})
}

// TestKilledAtRandomMoments kills a release with SIGKILL 40 times, each a new
// version, at seeded moments from its start to its end. After each, every tag
// points to a complete, verified release, no channel is mixed with anything but
// the old one, and running it again finishes it.
func TestKilledAtRandomMoments(t *testing.T) {
	kills := 40
	if testing.Short() {
		kills = 5
	}
	a, b := registrytest.Start(t, registrytest.Distribution), registrytest.Start(t, registrytest.Referrers)
	m := newMaker(t, a, b)
	state := filepath.Join(m.cache, "release")
	start := func(folder string) *exec.Cmd {
		text, err := json.Marshal(child{m.cache, folder, state, m.addresses})
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childVariable+"="+string(text))
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	valid := map[v1.Hash]bool{} // every digest of a complete release
	learn := func(folder string) {
		r, err := dist.Read(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range r.Images {
			h, _ := v1.NewHash(i.IndexDigest.String())
			valid[h] = true
		}
		h, err := signing.Layout(filepath.Join(folder, "oci")).Release()
		if err != nil {
			t.Fatal(err)
		}
		valid[h] = true
	}
	first := m.dist(disttest.Small("1.0.0"))
	learn(first)
	began := time.Now()
	if err := start(first).Wait(); err != nil {
		t.Fatal(err)
	}
	whole := time.Since(began)
	t.Logf("a release takes %v", whole)
	random := rand.New(rand.NewPCG(20260101, 40))
	finished := 0
	for n := 1; n <= kills; n++ {
		folder := m.dist(disttest.Small(fmt.Sprintf("1.0.%d", n)))
		learn(folder)
		began := time.Now()
		cmd := start(folder)
		at := time.Duration(random.Int64N(int64(whole)))
		timer := time.AfterFunc(at, func() { _ = cmd.Process.Kill() })
		if err := cmd.Wait(); err == nil {
			finished++
			whole = min(whole, time.Since(began)) // the first run was cold
		}
		timer.Stop()
		m.invariants(fmt.Sprintf("killed after %v of 1.0.%d", at, n), valid, fmt.Sprintf("1.0.%d", n))
		o := m.options(folder)
		o.Notice = nil
		if err := Publish(t.Context(), o); err != nil {
			t.Fatalf("the rerun of 1.0.%d, killed after %v: %v", n, at, err)
		}
		for _, address := range m.addresses {
			m.complete(address, folder, "1.0", "1", "latest")
		}
		if t.Failed() {
			return
		}
	}
	if finished > kills*3/4 {
		t.Errorf("%d of %d runs ended before they were killed: the test proves little", finished, kills)
	}
	t.Logf("%d kills, %d runs had ended before", kills, finished)
}

// invariants checks all tags of all registries after a kill.
func (m *maker) invariants(when string, valid map[v1.Hash]bool, version string) {
	m.t.Helper()
	for _, address := range m.addresses {
		c, err := registry.Open(m.t.Context(), address, repositories, registry.Options{})
		if err != nil {
			m.t.Fatal(err)
		}
		seen := map[v1.Hash]bool{}
		for name, h := range m.tags(address, repositories...) {
			repo, tag, _ := strings.Cut(name, ":")
			if !valid[h] {
				m.t.Errorf("%s: %s/%s is %s, which no release is", when, address, name, h)
			}
			// The newest version and the channels; older versions were checked before.
			if seen[h] || strings.HasPrefix(strings.TrimPrefix(tag, "v"), "1.0.") && strings.TrimPrefix(tag, "v") != version {
				continue
			}
			seen[h] = true
			s := signing.Repository{Client: c, Path: repo}
			if repo == "loomcycle-release" {
				err = signing.VerifyDigest(m.t.Context(), s, h, []string{signing.Signature}, m.trust)
			} else {
				_, _, err = signing.VerifyImage(m.t.Context(), s, h, m.trust)
			}
			if err != nil {
				m.t.Errorf("%s: %s/%s: %v", when, address, name, err)
			}
		}
	}
}
