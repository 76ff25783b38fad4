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
	azure := newBlobs(func(r *http.Request) bool {
		return strings.HasPrefix(r.Header.Get("Authorization"), "SharedKey builder:")
	})
	account := httptest.NewServer(azure)
	defer account.Close()
	in := ",account_name=builder,container=cache,secret_access_key=" + base64.StdEncoding.EncodeToString([]byte("not a secret")) + ",account_url=" + account.URL

	for _, c := range []struct {
		name, to, from string
		env            map[string]string
		check          func(t *testing.T)
	}{
		{"local", "type=local,mode=max,dest=" + dir, "type=local,src=" + dir, nil, func(t *testing.T) { compressed(t, filepath.Join(dir, "v-amd64")) }},
		{"registry", "type=registry,mode=max" + ref, "type=registry" + ref, nil, nil},
		{"s3", "type=s3,mode=max" + at, "type=s3" + at, keys, func(t *testing.T) { inBucket(t, bucket) }},
		{"gha", "type=gha,mode=max", "type=gha", nil, func(t *testing.T) { gha.check(t, "/blob/buildkit-blob-1-sha256:", "/blob/index-buildkit-v-amd64-1-") }},
		{"azblob", "type=azblob,mode=max" + in, "type=azblob" + in, nil, func(t *testing.T) { azure.check(t, "/cache/blobs/sha256:", "/cache/manifests/buildkit-v-amd64") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			with := func(key, value string) map[string]string {
				kv := map[string]string{key: value}
				maps.Copy(kv, c.env)
				return kv
			}
			run, locals := steps(t)
			large := llb.Scratch().File(llb.Copy(llb.Local("t"), "/step", "/step")) // uploaded in parts
			state := llb.Merge([]llb.State{layer(run, "one", "1"), large})
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

// blobs is the Blob service of Azure as far as a cache uses it: Put Blob, Put Block
// and Put Block List, Get Blob and its properties, and those of a container.
type blobs struct {
	admits func(*http.Request) bool

	mu      sync.Mutex
	blocks  map[string][]byte // by path and id
	content map[string][]byte // by path
}

func newBlobs(admits func(*http.Request) bool) *blobs {
	return &blobs{admits: admits, blocks: map[string][]byte{}, content: map[string][]byte{}}
}

func (b *blobs) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	b.mu.Lock()
	defer b.mu.Unlock()
	path, q := r.URL.Path, r.URL.Query()
	content, there := b.content[path]
	w.Header().Set("x-ms-request-id", "1")
	switch read := r.Method == http.MethodGet || r.Method == http.MethodHead; {
	case err != nil || !b.admits(r):
		w.WriteHeader(http.StatusForbidden)
	case read && q.Get("restype") == "container":
	case read && !there:
		w.Header().Set("x-ms-error-code", "BlobNotFound")
		w.WriteHeader(http.StatusNotFound)
	case read:
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	case r.Method != http.MethodPut:
		w.WriteHeader(http.StatusMethodNotAllowed)
	case q.Get("comp") == "block":
		b.blocks[path+" "+q.Get("blockid")] = body
		w.WriteHeader(http.StatusCreated)
	case q.Get("comp") == "blocklist":
		var list struct{ Latest []string }
		if err := xml.Unmarshal(body, &list); err != nil || len(list.Latest) < 2 {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		var whole []byte
		for _, id := range list.Latest {
			whole = append(whole, b.blocks[path+" "+id]...)
		}
		b.content[path] = whole
		w.WriteHeader(http.StatusCreated)
	default:
		b.content[path] = body
		w.WriteHeader(http.StatusCreated)
	}
}

// check demands layers, and one record of the job with them.
func (b *blobs) check(t *testing.T, layer, record string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	var layers, records int
	for path := range b.content {
		if strings.HasPrefix(path, layer) {
			layers++
		}
		if strings.HasPrefix(path, record) {
			records++
		}
	}
	if layers < 2 || records != 1 {
		t.Errorf("%d layers and %d records of the job are among the %d blobs", layers, records, len(b.content))
	}
}

// actions is GitHub's cache service, version 2: entries are reserved, finished and
// found over twirp (github.actions.results.api.v1.CacheService), and are blobs of Azure.
type actions struct {
	*blobs
	url, token string

	mu       sync.Mutex
	finished map[string]bool // by key; false is an entry that is being written
}

// newActions starts a service and says where it is as GitHub's runner does.
func newActions(t *testing.T) *actions {
	t.Helper()
	part := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	now := time.Now().Unix()
	a := &actions{finished: map[string]bool{}, token: part(`{"alg":"HS256","typ":"JWT"}`) + "." +
		part(fmt.Sprintf(`{"ac":"[{\"Scope\":\"refs/heads/main\",\"Permission\":3}]","nbf":%d,"exp":%d}`, now-60, now+3600)) + "." + part("-")}
	a.blobs = newBlobs(func(r *http.Request) bool { return r.URL.Query().Get("sig") == "x" })
	mux := http.NewServeMux()
	mux.HandleFunc("POST /twirp/github.actions.results.api.v1.CacheService/{method}", a.service)
	mux.Handle("/blob/", a.blobs)
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
		SizeBytes   int `json:"size_bytes"`
	}
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || req.Key == "" || req.Version == "" || r.Header.Get("Authorization") != "Bearer "+a.token {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	signed := func(key string) string { return a.url + "/blob/" + url.PathEscape(key) + "?sig=x" }
	a.mu.Lock()
	defer a.mu.Unlock()
	answer := map[string]any{"ok": false}
	switch _, reserved := a.finished[req.Key]; r.PathValue("method") {
	case "CreateCacheEntry":
		if !reserved { // an entry is never written twice
			a.finished[req.Key] = false
			answer = map[string]any{"ok": true, "signed_upload_url": signed(req.Key)}
		}
	case "FinalizeCacheEntryUpload":
		a.blobs.mu.Lock()
		size := len(a.content["/blob/"+req.Key])
		a.blobs.mu.Unlock()
		if reserved && size == req.SizeBytes {
			a.finished[req.Key] = true
			answer = map[string]any{"ok": true, "entry_id": "1"}
		}
	case "GetCacheEntryDownloadURL":
		for _, prefix := range append([]string{req.Key}, req.RestoreKeys...) {
			for key, finished := range a.finished {
				if finished && strings.HasPrefix(key, prefix) {
					answer = map[string]any{"ok": true, "matched_key": key, "signed_download_url": signed(key)}
				}
			}
		}
	default:
		http.NotFound(w, r)
		return
	}
	_ = json.NewEncoder(w).Encode(answer)
}
