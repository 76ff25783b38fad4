package registry_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/freeport"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

func content(size int) []byte {
	b := make([]byte, size)
	_, _ = io.ReadFull(rand.NewChaCha8([32]byte{1}), b)
	return b
}

// open connects with a backoff that notes its pauses instead of waiting.
func open(t *testing.T, address string, repositories ...string) (*registry.Client, func() []time.Duration) {
	t.Helper()
	return openIdle(t, 0, address, repositories...)
}

func openIdle(t *testing.T, idle time.Duration, address string, repositories ...string) (*registry.Client, func() []time.Duration) {
	t.Helper()
	var mu sync.Mutex
	var pauses []time.Duration
	c, err := registry.Open(t.Context(), address, repositories, registry.Options{
		Idle: idle,
		Backoff: registry.Backoff{Sleep: func(ctx context.Context, d time.Duration) error {
			mu.Lock()
			defer mu.Unlock()
			pauses = append(pauses, d)
			return ctx.Err()
		}},
		Log: t.Logf,
	})
	if err != nil {
		t.Fatal(err)
	}
	return c, func() []time.Duration { mu.Lock(); defer mu.Unlock(); return pauses }
}

var kinds = []registrytest.Kind{registrytest.Distribution, registrytest.Referrers}

func TestPushBlobThroughFaults(t *testing.T) {
	const size = 3 << 20
	data := content(size)
	first := func(method, path string, f func(*http.Request) *http.Response) func() registrytest.Fault {
		return func() registrytest.Fault {
			var done atomic.Bool
			return func(r *http.Request) *http.Response {
				if r.Method == method && strings.Contains(r.URL.Path, path) && done.CompareAndSwap(false, true) {
					return f(r)
				}
				return nil
			}
		}
	}
	cut := func(r *http.Request) *http.Response {
		r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, size/2), broken{}))
		return nil
	}
	for _, c := range []struct {
		name  string
		fault func() registrytest.Fault
		pause time.Duration // the least that must have been waited
	}{
		{"nothing", func() registrytest.Fault { return func(*http.Request) *http.Response { return nil } }, 0},
		{"429 asks for 7 s", first("POST", "/blobs/uploads/", func(*http.Request) *http.Response {
			return registrytest.Answer(429, `{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}`, "Retry-After", "7")
		}), 7 * time.Second},
		{"429 asks for a moment", first("POST", "/blobs/uploads/", func(*http.Request) *http.Response {
			return registrytest.Answer(429, "", "Retry-After", time.Now().Add(9*time.Second).UTC().Format(http.TimeFormat))
		}), 6 * time.Second},
		{"503 on the existence check", first("HEAD", "/blobs/", func(*http.Request) *http.Response { return registrytest.Answer(503, "") }), time.Millisecond},
		{"500 in the middle of the data", first("PATCH", "/blobs/uploads/", func(r *http.Request) *http.Response {
			_, _ = io.CopyN(io.Discard, r.Body, size/3)
			return registrytest.Answer(500, "oops")
		}), time.Millisecond},
		{"cut in the middle of the data", first("PATCH", "/blobs/uploads/", cut), time.Millisecond},
		{"507 on the existence check", first("HEAD", "/blobs/", func(*http.Request) *http.Response { return registrytest.Answer(507, "") }), time.Millisecond},
		{"522 of a proxy when opening", first("POST", "/blobs/uploads/", func(*http.Request) *http.Response { return registrytest.Answer(522, "") }), time.Millisecond},
		{"500 when closing", first("PUT", "/blobs/uploads/", func(*http.Request) *http.Response { return registrytest.Answer(500, "oops") }), time.Millisecond},
	} {
		for _, k := range kinds {
			t.Run(c.name+"/"+string(k), func(t *testing.T) {
				address := registrytest.Proxy(t, registrytest.Start(t, k), c.fault())
				client, pauses := open(t, address, "a")
				b, opened, closed := registry.Bytes(data), 0, make(chan struct{}, 99)
				plain := b.Open
				b.Open = func(ctx context.Context) (io.ReadCloser, error) {
					opened++
					r, err := plain(ctx)
					return &closing{Reader: r, closed: closed}, err
				}
				if err := client.PushBlob(t.Context(), "a", b); err != nil {
					t.Fatal(err)
				}
				if c.name == "nothing" && opened != 1 {
					t.Errorf("the blob was opened %d times", opened)
				}
				for range opened {
					select {
					case <-closed:
					case <-time.After(10 * time.Second):
						t.Fatal("a reader was not closed")
					}
				}
				got, err := client.ReadBlob(t.Context(), "a", b.Digest)
				if err != nil || !bytes.Equal(got, data) {
					t.Fatalf("the registry has %d bytes, %v", len(got), err)
				}
				longest := time.Duration(0)
				for _, p := range pauses() {
					longest = max(longest, p)
				}
				if longest < c.pause {
					t.Errorf("waited %v at most, want at least %v", longest, c.pause)
				}
				sent := client.Sent.Load()
				if err := client.PushBlob(t.Context(), "a", b); err != nil || client.Sent.Load() != sent {
					t.Errorf("a blob that is there was sent again (%d bytes, %v)", client.Sent.Load()-sent, err)
				}
			})
		}
	}
}

// closing tells that it was closed, the first time.
type closing struct {
	io.Reader
	closed chan<- struct{}
	once   sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { c.closed <- struct{}{} })
	return nil
}

// TestNothingToSend has blobs that can't be opened, were cut or have rotted: that is
// not the registry's fault.
func TestNothingToSend(t *testing.T) {
	client, pauses := open(t, registrytest.Start(t, registrytest.Referrers), "a")
	gone := errors.New("it is gone")
	for _, size := range []int{1000, 3 << 20} {
		b := registry.Bytes(content(size))
		b.Open = func(context.Context) (io.ReadCloser, error) { return nil, gone }
		if err := client.PushBlob(t.Context(), "a", b); !errors.Is(err, gone) {
			t.Errorf("%d bytes: %v", size, err)
		}
		rotten := content(size)
		rotten[size/2]++
		for _, text := range [][]byte{rotten, content(size)[:size-1], nil} {
			b.Open = func(context.Context) (io.ReadCloser, error) {
				return registry.Checked(io.NopCloser(bytes.NewReader(text)), b.Digest, "dist/oci"), nil
			}
			if err := client.PushBlob(t.Context(), "a", b); err == nil || !strings.Contains(err.Error(), "in dist/oci has the digest") {
				t.Errorf("%d of %d bytes: %v", len(text), size, err)
			}
		}
	}
	if n := len(pauses()); n > 0 {
		t.Errorf("it was tried %d times again", n)
	}
}

// TestReferrersOfAllPages has strangers' referrers before ours.
func TestReferrersOfAllPages(t *testing.T) {
	h := registry.Bytes(nil).Digest
	for _, c := range []struct{ name, link, want string }{
		{"relative", "</v2/a/referrers/%s?page=2>; rel=\"next\"", ""},
		{"absolute", "<http://%[2]s/v2/a/referrers/%[1]s?page=2>; rel=next", ""},
		{"elsewhere", "<http://registry.example/v2/a/referrers/%s?page=2>; rel=\"next\"", "lies elsewhere"},
		{"a circle", "</v2/a/referrers/%s>; rel=\"next\"", "no end"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var address string
			address = newServer(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				size := 1
				if strings.Contains(r.URL.Path, "/referrers/") && r.URL.Query().Get("page") == "" {
					size = 2
					w.Header().Set("Link", fmt.Sprintf(strings.ReplaceAll(c.link, "%s", "%[1]s"), h, address))
				}
				w.Header().Set("Content-Type", string(types.OCIImageIndex))
				_ = json.NewEncoder(w).Encode(v1.IndexManifest{SchemaVersion: 2, Manifests: slices.Repeat([]v1.Descriptor{{Digest: h}}, size)})
			}))
			client, _ := open(t, address, "a")
			found, err := client.Referrers(t.Context(), "a", h)
			if c.want == "" && (err != nil || len(found) != 3) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%d referrers, %v; want %q", len(found), err, c.want)
			}
		})
	}
}

// TestUncertainReferrers is a gateway that knows neither the API nor the tag in its
// place: nothing is attached then is what only the registry can say.
func TestUncertainReferrers(t *testing.T) {
	h := registry.Bytes(nil).Digest
	for answer, none := range map[string]bool{`{"errors":[{"code":"MANIFEST_UNKNOWN","message":"unknown"}]}`: true, "<html>not found</html>": false, "": false} {
		address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
			if r.URL.Path == "/v2/" {
				return nil
			}
			return registrytest.Answer(404, answer)
		})
		client, _ := open(t, address, "a")
		if found, err := client.Referrers(t.Context(), "a", h); (err == nil) != none || len(found) > 0 {
			t.Errorf("%q gave %v, %v", answer, found, err)
		}
	}
}

// TestHugeBlob is what anyone who may push can attach to an image.
func TestHugeBlob(t *testing.T) {
	client, _ := open(t, registrytest.Start(t, registrytest.Referrers), "a")
	b := registry.Bytes(make([]byte, registry.MaxBlob+1))
	if err := client.PushBlob(t.Context(), "a", b); err != nil {
		t.Fatal(err)
	}
	if _, err := client.ReadBlob(t.Context(), "a", b.Digest); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("it was read: %v", err)
	}
}

// TestSilentRegistry stops to read or to answer once, for longer than is waited. A
// link that is only slow is no such registry, though all takes longer than that.
func TestSilentRegistry(t *testing.T) {
	for _, c := range []struct {
		name, method, path string
		size               int
		slow               bool
	}{
		{"it does not answer", "PUT", "/blobs/uploads/", 1000, false},
		{"it does not read", "PATCH", "/blobs/uploads/", 24 << 20, false},
		{"it does not write", "GET", "/blobs/sha256", 1000, false},
		{"a slow link", "PATCH", "/blobs/uploads/", 24 << 20, true}, // more than the kernel's buffers hold
	} {
		t.Run(c.name, func(t *testing.T) {
			over := make(chan struct{})
			var began atomic.Int64
			address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
				switch {
				case r.Method != c.method || !strings.Contains(r.URL.Path, c.path):
				case c.slow:
					r.Body = slow{r.Body}
				case began.Add(1) == 1:
					<-over
					return registrytest.Answer(500, "")
				}
				return nil
			})
			t.Cleanup(func() { close(over) }) // before the proxy's, which waits for what hangs
			const idle = time.Second
			client, _ := openIdle(t, idle, address, "a")
			b, start := registry.Bytes(content(c.size)), time.Now()
			if err := client.PushBlob(t.Context(), "a", b); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); c.slow && took < idle {
				t.Errorf("the slow link took %v, which proves nothing", took)
			}
			if got, err := client.ReadBlob(t.Context(), "a", b.Digest); err != nil || len(got) != c.size {
				t.Fatalf("the registry has %d bytes, %v", len(got), err)
			}
			if n := began.Load(); !c.slow && n < 2 {
				t.Errorf("it was asked %d times, want twice", n)
			}
		})
	}
}

// slow lets 64 kB through every 5 ms, about 12 MB/s.
type slow struct{ io.ReadCloser }

func (s slow) Read(p []byte) (int, error) {
	time.Sleep(5 * time.Millisecond)
	return s.ReadCloser.Read(p[:min(len(p), 64<<10)])
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("the link broke") }

func TestUploadResumes(t *testing.T) {
	// A registry that keeps what arrived, as the specification has it; the
	// session's state is a few lines here because neither server on hand
	// keeps the first half of a cut request.
	const size = 4 << 20
	data := content(size)
	b := registry.Bytes(data)
	var mu sync.Mutex
	var got bytes.Buffer
	var cuts int
	mux := http.NewServeMux()
	mux.HandleFunc("/v2/", func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case r.URL.Path == "/v2/":
		case r.Method == http.MethodHead:
			w.WriteHeader(http.StatusNotFound)
		case r.Method == http.MethodPost:
			w.Header().Set("Location", "/v2/a/blobs/uploads/1")
			w.WriteHeader(http.StatusAccepted)
		case r.Method == http.MethodGet:
			w.Header().Set("Location", "/v2/a/blobs/uploads/1")
			w.Header().Set("Range", "0-"+itoa(got.Len()-1))
			w.WriteHeader(http.StatusNoContent)
		case r.Method == http.MethodPatch:
			if from := r.Header.Get("Content-Range"); from != "" && !strings.HasPrefix(from, itoa(got.Len())+"-") {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			if cuts++; cuts <= 3 {
				_, _ = io.CopyN(&got, r.Body, size/5)
				panic(http.ErrAbortHandler)
			}
			_, _ = io.Copy(&got, r.Body)
			w.Header().Set("Location", "/v2/a/blobs/uploads/1")
			w.WriteHeader(http.StatusAccepted)
		case r.Method == http.MethodPut:
			w.WriteHeader(http.StatusCreated)
		}
	})
	server := newServer(t, mux)
	client, _ := open(t, server, "a")
	if err := client.PushBlob(t.Context(), "a", b); err != nil {
		t.Fatal(err)
	}
	if h, _, _ := v1.SHA256(bytes.NewReader(got.Bytes())); h != b.Digest {
		t.Fatalf("%d bytes arrived, %s", got.Len(), h)
	}
	if n := client.Resumed.Load(); n != 3 {
		t.Errorf("resumed %d times, want 3", n)
	}
}

func TestMountsAcrossRepositories(t *testing.T) {
	for _, k := range kinds {
		t.Run(string(k), func(t *testing.T) {
			client, _ := open(t, registrytest.Start(t, k), "a", "b")
			data := content(2 << 20)
			b := registry.Bytes(data)
			for _, r := range []string{"a", "b"} {
				if err := client.PushBlob(t.Context(), r, b); err != nil {
					t.Fatal(err)
				}
			}
			if sent := client.Sent.Load(); sent > int64(len(data))+1000 {
				t.Errorf("%d bytes were sent for a blob of %d in two repositories", sent, len(data))
			}
		})
	}
}

// TestUploadsAtOnceAreLimited holds every upload until as many as may run at
// once are there, and counts them.
func TestUploadsAtOnceAreLimited(t *testing.T) {
	const limit, all = 3, 12
	var now, most atomic.Int64
	full := make(chan struct{})
	var once sync.Once
	address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Distribution), func(r *http.Request) *http.Response {
		if r.Method != http.MethodPut {
			return nil
		}
		n := now.Add(1)
		defer now.Add(-1)
		if n >= limit {
			once.Do(func() { close(full) })
		}
		<-full
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		return nil
	})
	client, err := registry.Open(t.Context(), address, []string{"a"}, registry.Options{Concurrency: limit})
	if err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	for i := range all {
		g.Go(func() error { return client.PushBlob(t.Context(), "a", registry.Bytes(content(1000+i))) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if most.Load() != limit {
		t.Errorf("%d uploads ran at once, want %d", most.Load(), limit)
	}
}

func TestOnlyTheRegistryCallsATagFree(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer *http.Response
		absent bool
	}{
		{"the registry knows no such manifest", registrytest.Answer(404, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"unknown"}]}`), true},
		{"the registry knows no such repository", registrytest.Answer(404, `{"errors":[{"code":"NAME_UNKNOWN","message":"unknown"}]}`), true},
		{"a proxy's own 404", registrytest.Answer(404, "<html>not found</html>"), false},
		{"an empty 404", registrytest.Answer(404, ""), false},
		{"not logged in", registrytest.Answer(401, `{"errors":[{"code":"UNAUTHORIZED","message":"log in"}]}`), false},
		{"denied", registrytest.Answer(403, `{"errors":[{"code":"DENIED","message":"no"}]}`), false},
		{"a mixed answer", registrytest.Answer(404, `{"errors":[{"code":"MANIFEST_UNKNOWN"},{"code":"DENIED"}]}`), false},
		{"a server error", registrytest.Answer(500, "oops"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
				if !strings.Contains(r.URL.Path, "/manifests/") {
					return nil
				}
				again := *c.answer
				body, _ := io.ReadAll(c.answer.Body)
				c.answer.Body = io.NopCloser(bytes.NewReader(body))
				again.Body = io.NopCloser(bytes.NewReader(body))
				return &again
			})
			client, _ := open(t, address, "a")
			_, absent, err := client.Digest(t.Context(), "a", "1.0.0")
			if absent != c.absent || (err == nil) != c.absent {
				t.Errorf("absent %v, error %v", absent, err)
			}
		})
	}
}

func TestTokenExpiresInTheMiddle(t *testing.T) {
	var issued atomic.Int64
	var uses atomic.Int64
	var address string
	fault := func(r *http.Request) *http.Response {
		if r.URL.Path == "/token" {
			return registrytest.Answer(200, `{"token":"t`+itoa(int(issued.Add(1)))+`"}`)
		}
		// Every token is good for three requests, so one ends within each upload.
		if r.Header.Get("Authorization") == "Bearer t"+itoa(int(issued.Load())) && uses.Add(1)%4 != 0 {
			return nil
		}
		return registrytest.Answer(401, "", "WWW-Authenticate", `Bearer realm="http://`+address+`/token",service="r"`)
	}
	address = registrytest.Proxy(t, registrytest.Start(t, registrytest.Distribution), fault)
	client, _ := open(t, address, "a")
	for i := range 4 {
		data := content(2<<20 + i)
		b := registry.Bytes(data)
		if err := client.PushBlob(t.Context(), "a", b); err != nil {
			t.Fatal(err)
		}
		if got, err := client.ReadBlob(t.Context(), "a", b.Digest); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("the registry has %d bytes, %v", len(got), err)
		}
	}
	if issued.Load() < 4 {
		t.Errorf("only %d tokens were issued: none expired", issued.Load())
	}
}

func TestFullDiskIsAnErrorThatSaysWhat(t *testing.T) {
	folder := t.TempDir()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=1m"); err != nil {
		if errors.Is(err, unix.EPERM) {
			citest.Skip(t, "mounting a small tmpfs needs root")
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	client, pauses := open(t, registrytest.StartDistribution(t, filepath.Join(folder, "r"), ""), "a")
	b := registry.Bytes(content(3 << 20))
	err := client.PushBlob(t.Context(), "a", b)
	if err == nil || !strings.Contains(err.Error(), b.Digest.String()) {
		t.Fatalf("pushing to a full disk gave %v", err)
	}
	if len(pauses()) == 0 {
		t.Error("a full disk may be emptied: it was not tried again")
	}
	if n := len(pauses()); n > 16 {
		t.Errorf("%d pauses: two layers of retries multiply", n)
	}
	if err := unix.Mount("tmpfs", folder, "tmpfs", unix.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	if err := client.PushBlob(t.Context(), "a", b); err != nil {
		t.Errorf("with room on the disk again: %v", err)
	}
}

func TestEmptyLinksAreWrittenAgain(t *testing.T) {
	folder := t.TempDir()
	client, _ := open(t, registrytest.StartDistribution(t, folder, ""), "a")
	b := registry.Bytes([]byte("{}"))
	m := registry.Manifest{Raw: []byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/x","size":2,"digest":"` +
		b.Digest.String() + `"},"layers":[]}`), Type: types.OCIManifestSchema1}
	h := registry.Bytes(m.Raw).Digest
	for _, before := range []string{"nothing", "empty links"} {
		if there, err := client.HasManifest(t.Context(), "a", h); err != nil || there {
			t.Fatalf("with %s the manifest is there: %v, %v", before, there, err)
		}
		if err := client.PushBlob(t.Context(), "a", b); err != nil {
			t.Fatal(err)
		}
		if err := client.PutManifest(t.Context(), "a", h.String(), m); err != nil {
			t.Fatal(err)
		}
		if there, err := client.HasManifest(t.Context(), "a", h); err != nil || !there {
			t.Fatalf("pushed over %s the manifest is there: %v, %v", before, there, err)
		}
		registrytest.EmptyLinks(t, folder)
	}
}

// TestUploadSecretsStayOutOfLogs cuts every upload, whose address is signed.
func TestUploadSecretsStayOutOfLogs(t *testing.T) {
	address := newServer(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodPost:
			w.Header().Set("Location", "/v2/a/blobs/uploads/1?_state=hunter2-secret")
			w.WriteHeader(http.StatusAccepted)
		case http.MethodPatch, http.MethodPut:
			panic(http.ErrAbortHandler)
		case http.MethodHead:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	var log strings.Builder
	client, err := registry.Open(t.Context(), address, []string{"a"}, registry.Options{
		Backoff: registry.Backoff{Attempts: 3, Sleep: func(context.Context, time.Duration) error { return nil }},
		Log:     func(format string, args ...any) { fmt.Fprintf(&log, format+"\n", args...) },
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1000, 3 << 20} {
		err := client.PushBlob(t.Context(), "a", registry.Bytes(content(size)))
		if err == nil {
			t.Fatal("it was pushed")
		}
		if text := log.String() + err.Error(); !strings.Contains(text, "/blobs/uploads/1") || strings.Contains(text, "hunter2") {
			t.Errorf("%d bytes: %s", size, text)
		}
	}
}

// TestManifestAttempts counts them: no second layer of retries multiplies them.
func TestManifestAttempts(t *testing.T) {
	var n atomic.Int64
	address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
		if r.Method != http.MethodPut {
			return nil
		}
		n.Add(1)
		return registrytest.Answer(500, `{"errors":[{"code":"UNKNOWN","message":"no space left on device"}]}`)
	})
	client, _ := open(t, address, "a")
	if err := client.PutManifest(t.Context(), "a", "x", registry.Manifest{Raw: []byte("{}"), Type: types.OCIManifestSchema1}); err == nil || n.Load() != 8 {
		t.Errorf("%d attempts, %v; docs/RELEASING.md promises 8", n.Load(), err)
	}
}

// TestCredentials has them in the docker configuration or with a helper of it. They
// open the registry, and are in no log and in no error where it then denies them.
func TestCredentials(t *testing.T) {
	const user, password = "robot", "hunter2-secret"
	secret := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	for name, login := range map[string]func(t *testing.T, address string){
		"docker login": func(t *testing.T, address string) { writeLogin(t, address, user, password) },
		"a helper":     func(t *testing.T, address string) { writeHelper(t, address, user, password) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DOCKER_CONFIG", t.TempDir())
			var denied atomic.Bool
			address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
				switch {
				case r.Header.Get("Authorization") != "Basic "+secret:
					return registrytest.Answer(401, "", "WWW-Authenticate", `Basic realm="r"`)
				case denied.Load() && r.Method == http.MethodHead: // tried again, with a line in the log
					return registrytest.Answer(503, "")
				case denied.Load():
					return registrytest.Answer(403, `{"errors":[{"code":"DENIED","message":"no"}]}`)
				}
				return nil
			})
			login(t, address)
			var log syncbuf.Buffer
			client, err := registry.Open(t.Context(), address, []string{"a"}, registry.Options{
				Backoff: registry.Backoff{Sleep: func(context.Context, time.Duration) error { return nil }},
				Log:     func(format string, args ...any) { fmt.Fprintf(&log, format+"\n", args...) },
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := client.PushBlob(t.Context(), "a", registry.Bytes([]byte("x"))); err != nil {
				t.Fatal(err)
			}
			denied.Store(true)
			_, _, digest := client.Digest(t.Context(), "a", "1.0.0")
			blob := client.PushBlob(t.Context(), "a", registry.Bytes([]byte("y")))
			if digest == nil || !strings.Contains(digest.Error(), "DENIED") || blob == nil || !strings.Contains(log.String(), "503") {
				t.Fatalf("it gave %v and %v; the log is %q", digest, blob, log.String())
			}
			for _, s := range []string{password, secret} {
				if text := fmt.Sprint(digest, blob, log.String()); strings.Contains(text, s) {
					t.Errorf("the password is printed: %s", text)
				}
			}
		})
	}
}

// TestNobodyThere asks where no registry is, and where one goes away: that may come back.
func TestNobodyThere(t *testing.T) {
	noName := strings.Repeat("a", 64) + ".example" // a label has 63 at most: no server needs to be asked
	for address, want := range map[string]string{freeport.Address(t): "connection refused", noName: "no such host"} {
		var log syncbuf.Buffer
		_, err := registry.Open(t.Context(), address, []string{"a"}, registry.Options{
			Backoff: registry.Backoff{Sleep: func(context.Context, time.Duration) error { return nil }},
			Log:     func(format string, args ...any) { fmt.Fprintf(&log, format+"\n", args...) },
		})
		if n := strings.Count(log.String(), "(3 of 3)"); err == nil || !strings.Contains(err.Error(), want) || n == 0 || n != strings.Count(log.String(), "(2 of 3)") {
			t.Errorf("%s: %v\n%s", address, err, log.String())
		}
	}
	gone := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	client, pauses := open(t, strings.TrimPrefix(gone.URL, "http://"), "a")
	gone.Close()
	if _, err := client.Tags(t.Context(), "a"); err == nil || len(pauses()) != 7 {
		t.Errorf("%d tries more, %v", len(pauses()), err)
	}
}

// TestDenied is docker-registry's answer, whose detail is a list of scopes.
func TestDenied(t *testing.T) {
	for _, status := range []int{401, 403} {
		address := registrytest.Proxy(t, registrytest.Start(t, registrytest.Referrers), func(r *http.Request) *http.Response {
			if r.URL.Path == "/v2/" {
				return nil
			}
			return registrytest.Answer(status, `{"errors":[{"code":"DENIED","message":"no","detail":[{"Type":"repository","Name":"a","Action":"push"}]}]}`)
		})
		client, _ := open(t, address, "a")
		_, _, digest := client.Digest(t.Context(), "a", "1.0.0")
		_, tags := client.Tags(t.Context(), "a")
		_, referrers := client.Referrers(t.Context(), "a", registry.Bytes(nil).Digest)
		for what, err := range map[string]error{"a tag": digest, "tags": tags, "referrers": referrers, "a blob": client.PushBlob(t.Context(), "a", registry.Bytes(nil)),
			"a manifest": client.PutManifest(t.Context(), "a", "1.0.0", registry.Manifest{Raw: []byte("{}"), Type: types.OCIManifestSchema1})} {
			if err == nil || strings.Contains(err.Error(), "map[") || strings.Count(err.Error(), "docker login "+address) != 1 {
				t.Errorf("%s, %d: %v", what, status, err)
			}
		}
	}
}
