package buildkit

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	stdlog "log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/moby/buildkit/client/llb"
	ocispecs "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/rclone/gofakes3"
	"github.com/rclone/gofakes3/s3mem"
)

// What one daemon leaves in a remote cache an empty one takes from there.
func TestRemoteCaches(t *testing.T) {
	reg := httptest.NewServer(registry.New(registry.Logger(stdlog.New(io.Discard, "", 0))))
	defer reg.Close()
	ref := ",registry.insecure=true,ref=" + strings.TrimPrefix(reg.URL, "http://") + "/cache:main"
	dir := t.TempDir()
	bucket := s3mem.New()
	if err := bucket.CreateBucket(t.Context(), "cache"); err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{"AWS_ACCESS_KEY_ID": "builder", "AWS_SECRET_ACCESS_KEY": "not a secret"}
	s3 := httptest.NewServer(gofakes3.New(bucket, gofakes3.WithV4Auth(map[string]string{keys["AWS_ACCESS_KEY_ID"]: keys["AWS_SECRET_ACCESS_KEY"]})).Server())
	defer s3.Close()
	at := ",region=r,bucket=cache,use_path_style=true,endpoint_url=" + s3.URL
	gha := newActions(t)

	for _, c := range []struct {
		name, to, from string
		env            map[string]string
		check          func(t *testing.T)
	}{
		{"local", "type=local,mode=max,dest=" + dir, "type=local,src=" + dir, nil, func(t *testing.T) { compressed(t, filepath.Join(dir, "v-amd64")) }},
		{"registry", "type=registry,mode=max" + ref, "type=registry" + ref, nil, nil},
		{"s3", "type=s3,mode=max" + at, "type=s3" + at, keys, func(t *testing.T) { inBucket(t, bucket) }},
		{"gha", "type=gha,mode=max", "type=gha", nil, func(t *testing.T) { gha.check(t) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			with := func(key, value string) map[string]string {
				kv := map[string]string{key: value}
				maps.Copy(kv, c.env)
				return kv
			}
			run, locals := steps(t)
			state := llb.Merge([]llb.State{layer(run, "one", "1"), layer(run, "two", "2")})
			_, opts, log := fresh(t, with("CACHE_TO", c.to))
			first, _ := variant(t, connected(t, opts), t.TempDir(), "linux/amd64", 2, state, locals)
			if strings.Contains(log.String(), "CACHED") {
				t.Fatal("the first build was cached already")
			}
			if c.check != nil {
				c.check(t)
			}
			_, opts, log = fresh(t, with("CACHE_FROM", c.from))
			second, _ := variant(t, connected(t, opts), t.TempDir(), "linux/amd64", 2, state, locals)
			if n := strings.Count(log.String(), "CACHED"); n < 2 {
				t.Errorf("the second daemon took %d steps from the cache:\n%s", n, log)
			}
			if first.Digest != second.Digest {
				t.Errorf("from the cache %s, without %s", second.Digest, first.Digest)
			}
		})
	}
}

// compressed demands that a local cache has layers, and each of them with zstd.
func compressed(t *testing.T, dir string) {
	t.Helper()
	var index ocispecs.Index
	text, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err == nil {
		err = json.Unmarshal(text, &index)
	}
	if err != nil {
		t.Fatal(err)
	}
	var layers int
	for _, d := range index.Manifests {
		var cache ocispecs.Index // which may have the form of a manifest
		var m ocispecs.Manifest
		blob(t, dir, d.Digest, &cache)
		blob(t, dir, d.Digest, &m)
		for _, l := range append(cache.Manifests, m.Layers...) {
			if strings.Contains(l.MediaType, "layer") {
				layers++
				if !strings.HasSuffix(l.MediaType, "+zstd") {
					t.Errorf("the cache has a layer as %s", l.MediaType)
				}
			}
		}
	}
	if layers < 2 {
		t.Errorf("the cache has %d layers", layers)
	}
}

// inBucket demands the manifest of the job and layers with zstd.
func inBucket(t *testing.T, bucket *s3mem.Backend) {
	t.Helper()
	all, err := bucket.ListBucket(t.Context(), "cache", nil, gofakes3.ListBucketPage{})
	if err != nil {
		t.Fatal(err)
	}
	var layers, manifests int
	for _, o := range all.Contents {
		if o.Key == "manifests/buildkit-v-amd64" {
			manifests++
		}
		if !strings.HasPrefix(o.Key, "blobs/") {
			continue
		}
		layers++
		object, err := bucket.GetObject(t.Context(), "cache", o.Key, nil)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(object.Contents); err != nil || !bytes.HasPrefix(text, []byte("\x28\xb5\x2f\xfd")) {
			t.Errorf("%s is not compressed with zstd: %q, %v", o.Key, text[:min(4, len(text))], err)
		}
	}
	if layers < 2 || manifests != 1 {
		t.Errorf("the bucket has %d layers and %d manifests of the job", layers, manifests)
	}
}

// actions is GitHub's cache service, version 2: entries are reserved, found and
// finished over twirp (github.actions.results.api.v1.CacheService), and their
// content is in blobs of Azure (Put Blob, or Put Block and Put Block List).
type actions struct {
	url, token string

	mu      sync.Mutex
	entries map[string]*entry
}

type entry struct {
	blocks   map[string][]byte
	content  []byte
	finished bool
}

// newActions starts a service and says where it is as GitHub's runner does.
func newActions(t *testing.T) *actions {
	t.Helper()
	part := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	now := time.Now().Unix()
	a := &actions{entries: map[string]*entry{}, token: part(`{"alg":"HS256","typ":"JWT"}`) + "." +
		part(fmt.Sprintf(`{"ac":"[{\"Scope\":\"refs/heads/main\",\"Permission\":3}]","nbf":%d,"exp":%d}`, now-60, now+3600)) + "." + part("-")}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /twirp/github.actions.results.api.v1.CacheService/{method}", a.service)
	mux.HandleFunc("/blob/{key}", a.blob)
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	a.url = srv.URL
	t.Setenv("ACTIONS_CACHE_SERVICE_V2", "True")
	t.Setenv("ACTIONS_RESULTS_URL", a.url+"/")
	t.Setenv("ACTIONS_RUNTIME_TOKEN", a.token)
	return a
}

func (a *actions) service(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Key         string
		RestoreKeys []string `json:"restore_keys"`
		Version     string
		SizeBytes   int64 `json:"size_bytes"`
	}
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || req.Key == "" || req.Version == "" || r.Header.Get("Authorization") != "Bearer "+a.token {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	answer := map[string]any{"ok": false}
	switch e := a.entries[req.Key]; r.PathValue("method") {
	case "CreateCacheEntry":
		if e == nil { // an entry is never written twice
			a.entries[req.Key] = &entry{blocks: map[string][]byte{}}
			answer = map[string]any{"ok": true, "signed_upload_url": a.url + "/blob/" + url.PathEscape(req.Key) + "?sig=x"}
		}
	case "FinalizeCacheEntryUpload":
		if e != nil && int64(len(e.content)) == req.SizeBytes {
			e.finished = true
			answer = map[string]any{"ok": true, "entry_id": "1"}
		}
	case "GetCacheEntryDownloadURL":
		for _, prefix := range append([]string{req.Key}, req.RestoreKeys...) {
			for key, e := range a.entries {
				if e.finished && strings.HasPrefix(key, prefix) {
					answer = map[string]any{"ok": true, "matched_key": key, "signed_download_url": a.url + "/blob/" + url.PathEscape(key) + "?sig=x"}
				}
			}
		}
	default:
		http.NotFound(w, r)
		return
	}
	_ = json.NewEncoder(w).Encode(answer)
}

func (a *actions) blob(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	e, q := a.entries[r.PathValue("key")], r.URL.Query()
	w.Header().Set("x-ms-request-id", "1")
	switch {
	case err != nil || e == nil || q.Get("sig") != "x" || (r.Method == http.MethodPut) == e.finished:
		http.Error(w, "no such blob", http.StatusNotFound)
	case r.Method == http.MethodGet:
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(e.content))
	case q.Get("comp") == "block":
		e.blocks[q.Get("blockid")] = body
		w.WriteHeader(http.StatusCreated)
	case q.Get("comp") == "blocklist":
		var list struct{ Latest []string }
		if err := xml.Unmarshal(body, &list); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		for _, id := range list.Latest {
			e.content = append(e.content, e.blocks[id]...)
		}
		w.WriteHeader(http.StatusCreated)
	default:
		e.content = body
		w.WriteHeader(http.StatusCreated)
	}
}

// check demands layers and an index of the job.
func (a *actions) check(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	var layers, indexes int
	for key, e := range a.entries {
		if e.finished && strings.HasPrefix(key, "buildkit-blob-1-sha256:") {
			layers++
		}
		if e.finished && strings.HasPrefix(key, "index-buildkit-v-amd64-1-") {
			indexes++
		}
	}
	if layers < 2 || indexes != 1 {
		t.Errorf("the service has %d layers and %d indexes of the job among %d entries", layers, indexes, len(a.entries))
	}
}
