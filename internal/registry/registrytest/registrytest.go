// Package registrytest runs real registries on loopback and puts faults between
// them and their clients.
package registrytest

import (
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/freeport"
	"github.com/loomcycle/loomcycle-images/internal/proctest"
)

// Kind names a registry server.
type Kind string

const (
	// Distribution is Debian's docker-registry, without the referrers API.
	Distribution Kind = "docker-registry"
	// Referrers is go-containerregistry's server, with the referrers API.
	Referrers Kind = "go-containerregistry"
)

// Start runs a registry and returns its HOST:PORT. A test of docker-registry is
// skipped where it is not installed, but fails in CI.
func Start(t testing.TB, k Kind) string {
	t.Helper()
	if k == Distribution {
		return StartDistribution(t, t.TempDir(), "")
	}
	s := httptest.NewServer(registry.New(registry.WithReferrersSupport(true), registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// StartDistribution runs docker-registry over a folder, with more configuration
// if given, and waits until it answers.
func StartDistribution(t testing.TB, folder, more string) string {
	t.Helper()
	program := citest.Program(t, "docker-registry", "apt-get install docker-registry")
	address := freeport.Address(t)
	config := filepath.Join(t.TempDir(), "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %q}}\nhttp: {addr: %q}\n%s", folder, address, more)
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	proctest.Serve(t, "http://"+address+"/v2/", program, "serve", config)
	return address
}

// EmptyLinks empties every link under the folder of a distribution registry, which
// is how those are left that it wrote while its disk was full, and counts them. A
// manifest that was left empty itself it removes: the registry would take the empty
// file for the manifest ever after, which only its operator can mend.
func EmptyLinks(t testing.TB, folder string) (n int) {
	t.Helper()
	if err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.Name() == "link":
			n++
			return os.Truncate(path, 0)
		case e.Name() == "data" && strings.Contains(path, "/blobs/sha256/"):
			if info, err := e.Info(); err != nil || info.Size() > 0 {
				return err
			}
			return os.Remove(path)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// Fault looks at a request on its way to the registry. It returns an answer of
// its own, or nil to let it pass; it may replace the body.
type Fault func(*http.Request) *http.Response

// Proxy puts a fault before a registry and returns the proxy's HOST:PORT.
func Proxy(t testing.TB, address string, fault Fault) string {
	t.Helper()
	p := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: address})
			r.Out.Host = r.In.Host // so that Location leads back here
		},
		ErrorLog: log.New(io.Discard, "", 0),
		Transport: transport(func(req *http.Request) (*http.Response, error) {
			if resp := fault(req); resp != nil {
				resp.Request = req
				if req.Body != nil {
					req.Body.Close()
				}
				return resp, nil
			}
			return http.DefaultTransport.RoundTrip(req)
		}),
		// A broken body ends the client's connection as a broken link would.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) },
	}
	s := httptest.NewUnstartedServer(p)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Answer is a response with a status, headers in pairs and a body.
func Answer(status int, body string, header ...string) *http.Response {
	h := http.Header{}
	for i := 0; i+1 < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	return &http.Response{StatusCode: status, Status: fmt.Sprintf("%d %s", status, http.StatusText(status)), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body))}
}
