package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

const content = "the bytes of a package"

func bash() lock.Source {
	return lock.Source{
		Kind: lock.KindDebian, Name: "bash 5.2.37-2+b5 amd64", Path: "pool/main/b/bash/bash_5.2.37-2+b5_amd64.deb",
		Size: int64(len(content)), Digest: digest.FromString(content),
	}
}

// env is an environment that names everything, so that no test depends on
// the machine's own configuration.
func env(vars map[string]string) func(string) string {
	return func(name string) string { return vars[name] }
}

func machine(t *testing.T, vars map[string]string, opts ...mirror.Option) *mirror.Mirrors {
	return mirror.FromMachine(t.Context(), env(vars), append(opts, mirror.WithAptDir(t.TempDir()), mirror.WithWait(time.Millisecond))...)
}

// tree is a folder that holds bash as a mirror does, with the given bytes.
func tree(t *testing.T, bytes string) string {
	dir := t.TempDir()
	file := filepath.Join(dir, filepath.FromSlash(bash().Path))
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(bytes), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func serve(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func files(t *testing.T, bytes string) string {
	return serve(t, http.FileServer(http.Dir(tree(t, bytes))))
}

func TestFetch(t *testing.T) {
	good, empty := files(t, content), serve(t, http.NotFoundHandler())
	wrongByte, truncated := files(t, strings.Replace(content, "bytes", "bites", 1)), files(t, content[:5])
	longer := files(t, content+"!")
	cutOff := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		io.WriteString(w, content[:7])
	}))
	var flakyAsked, downAsked atomic.Int32
	flaky := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch flakyAsked.Add(1) {
		case 1:
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2:
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
			io.WriteString(w, content[:7])
		default:
			io.WriteString(w, content)
		}
	}))
	down := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		downAsked.Add(1)
		w.WriteHeader(http.StatusBadGateway)
	}))
	silent := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	forbidden := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	unauthorized := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }))
	gone := "http://" + unusedAddress(t)
	folder := t.TempDir()
	if err := os.MkdirAll(filepath.Join(folder, filepath.FromSlash(bash().Path)), 0o755); err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct {
		name, mirrors string
		want          []string // parts of the error; none when it succeeds
		notFound      bool
	}{
		{name: "right", mirrors: good},
		{name: "superseded, on the second mirror", mirrors: empty + " " + good},
		{name: "file mirror", mirrors: "file://" + tree(t, content)},
		{name: "file mirror without it, then http", mirrors: "file:" + t.TempDir() + "," + good},
		{name: "heals from 503 and a broken connection", mirrors: flaky},
		{name: "unreachable, then the second mirror", mirrors: gone + " " + good},
		{name: "nowhere", mirrors: empty + " file:" + t.TempDir(), notFound: true,
			want: []string{"bash 5.2.37-2+b5 amd64", bash().Path, bash().Digest.String(), "22 bytes", "run lock:update", "DEBIAN_MIRROR"}},
		{name: "wrong byte stops, whatever the second mirror has", mirrors: wrongByte + " " + good,
			want: []string{"bash 5.2.37-2+b5 amd64", "another content", bash().Digest.String(), digest.FromString("the bites of a package").String(), "set DEBIAN_MIRROR"}},
		{name: "truncated stops", mirrors: truncated + " " + good,
			want: []string{"is truncated", bash().Digest.String(), digest.FromString(content[:5]).String(), "found", "5 bytes", "set DEBIAN_MIRROR"}},
		{name: "too long", mirrors: longer, want: []string{"is longer than it should be", "more than 22 bytes", "set DEBIAN_MIRROR"}},
		{name: "cut off each time", mirrors: cutOff, want: []string{"was cut off each time", bash().Digest.String(), "7 bytes"}},
		{name: "wrong file mirror", mirrors: "file:" + tree(t, "x"), want: []string{"is truncated", "file:///", "set DEBIAN_MIRROR"}},
		{name: "down", mirrors: down, want: []string{"502 Bad Gateway", "set DEBIAN_MIRROR"}},
		{name: "silent", mirrors: silent, want: []string{"sent nothing for 200ms", "set DEBIAN_MIRROR"}},
		{name: "forbidden", mirrors: forbidden,
			want: []string{"403 Forbidden", "bash 5.2.37-2+b5 amd64", "set DEBIAN_MIRROR", bash().Path, bash().Digest.String(), "22 bytes", "run lock:update"}},
		{name: "a bucket answers 403 for what it lacks, then the second mirror", mirrors: forbidden + " " + good},
		{name: "wants a password, then the second mirror", mirrors: unauthorized + " " + good},
		{name: "forbidden here, down there", mirrors: forbidden + " " + gone, want: []string{forbidden, "403 Forbidden", gone, "connection refused", "set DEBIAN_MIRROR"}},
		{name: "forbidden here, absent there", mirrors: forbidden + " " + empty, want: []string{forbidden, "403 Forbidden", "none of the others asked of DEBIAN_MIRROR has it", "run lock:update"}},
		{name: "no such folder, then the second mirror", mirrors: "file:/no/such/folder " + good},
		{name: "no such folder", mirrors: "file:/no/such/folder " + empty, notFound: true, want: []string{"DEBIAN_MIRROR (which names /no/such/folder, where no folder is)"}},
		{name: "a folder where the file should be, then the second mirror", mirrors: "file:" + folder + " " + good},
		{name: "unset", mirrors: "", want: []string{"set DEBIAN_MIRROR to its URL", "bash 5.2.37-2+b5 amd64"}},
		{name: "no scheme", mirrors: "mirror.example.test/debian", want: []string{"DEBIAN_MIRROR", "scheme must be http, https or file"}},
		{name: "file with a host", mirrors: "file://mirror/debian", want: []string{"file:///DIR"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var opts []mirror.Option
			if c.name == "silent" {
				opts = append(opts, mirror.WithStall(200*time.Millisecond))
			}
			m := machine(t, map[string]string{"DEBIAN_MIRROR": c.mirrors}, opts...)
			dir := t.TempDir()
			file := filepath.Join(dir, "sub", "bash.deb")
			err := m.Fetch(t.Context(), bash(), file)
			working, diagnosis := m.Diagnose(t.Context(), bash())
			if len(c.want) == 0 {
				if err != nil || diagnosis != nil {
					t.Fatal(err, diagnosis)
				}
				if got, err := os.ReadFile(file); err != nil || string(got) != content {
					t.Fatalf("fetched %q, %v", got, err)
				}
				if list, err := m.Candidates(bash()); err != nil || !slices.Contains(list, working) {
					t.Fatalf("the working URL %s is none of the candidates %q, %v", working, list, err)
				}
			} else {
				for _, part := range c.want {
					if err == nil || !strings.Contains(err.Error(), part) {
						t.Errorf("error %v lacks %q", err, part)
					}
				}
				if errors.Is(err, mirror.ErrNotFound) != c.notFound {
					t.Errorf("ErrNotFound is %v: %v", !c.notFound, err)
				}
				if diagnosis == nil || diagnosis.Error() != err.Error() {
					t.Errorf("Diagnose says %v, Fetch %v", diagnosis, err)
				}
				if _, err := os.Stat(file); err == nil {
					t.Error("a file is there after a failure")
				}
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "sub", ".*")); len(left) > 0 {
				t.Errorf("temporary files are left: %q", left)
			}
		})
	}
	if n := downAsked.Load(); n != 8 {
		t.Errorf("a mirror that is down was asked %d times by two downloads, not 8", n)
	}
}

// Asked whether they have a file, mirrors may lack it, not know HEAD, or say nothing.
func TestLocate(t *testing.T) {
	good := files(t, content)
	answers := func(h http.HandlerFunc) string { return serve(t, h) }
	swallows := answers(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	refuses := answers(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusMethodNotAllowed) })
	forbids := answers(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	for _, c := range []struct{ name, mirrors, at, err string }{
		{"right", good + " " + swallows, good, ""},
		{"lacks it", "file:" + t.TempDir() + " " + serve(t, http.NotFoundHandler()) + " " + good, good, ""},
		{"forbids it", forbids + " " + good, good, ""},
		{"forbids it, and no other", forbids, "", "set DEBIAN_MIRROR"},
		{"does not know HEAD", refuses + " " + good, good, ""},
		{"says nothing", swallows + " " + good, good, ""},
		{"says nothing, and no other", swallows, "", "sent nothing for 500ms"},
		{"nowhere", "file:" + t.TempDir(), "", "run lock:update"},
	} {
		var opts []mirror.Option
		if strings.HasPrefix(c.name, "says nothing") {
			opts = append(opts, mirror.WithStall(500*time.Millisecond))
		}
		at, err := machine(t, map[string]string{"DEBIAN_MIRROR": c.mirrors}, opts...).Locate(t.Context(), bash())
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: error %v, want one with %q", c.name, err, c.err)
			}
		case err != nil || !strings.HasPrefix(at, c.at+"/pool/main/b/bash/"):
			t.Errorf("%s: at %s, %v", c.name, at, err)
		}
	}
}

// A bucket that answers 403 for one file is asked for the next nevertheless.
func TestLocateAsksABucketAgain(t *testing.T) {
	held := http.FileServer(http.Dir(tree(t, content)))
	bucket := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, bash().Path) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		held.ServeHTTP(w, r)
	}))
	m := machine(t, map[string]string{"DEBIAN_MIRROR": bucket + " " + serve(t, http.NotFoundHandler())})
	lacking := bash()
	lacking.Path = "pool/none.deb"
	if at, err := m.Locate(t.Context(), lacking); err == nil {
		t.Errorf("what the bucket forbids is at %s", at)
	}
	if at, err := m.Locate(t.Context(), bash()); err != nil || !strings.HasPrefix(at, bucket) {
		t.Errorf("what it has is at %q, %v", at, err)
	}
}

// unusedAddress is a loopback address that nobody listens on.
func unusedAddress(t *testing.T) string {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	return s.Listener.Addr().String()
}

func TestFetchKeepsWhatIsRight(t *testing.T) {
	m := machine(t, map[string]string{"DEBIAN_MIRROR": "http://" + unusedAddress(t)})
	file := filepath.Join(t.TempDir(), "bash.deb")
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := m.Fetch(t.Context(), bash(), file); err != nil {
		t.Fatal(err)
	}
}

func TestHTTPProxy(t *testing.T) {
	var asked atomic.Value
	proxy := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Store(r.URL.String())
		io.WriteString(w, content)
	}))
	m := machine(t, map[string]string{"DEBIAN_MIRROR": "http://mirror.example.test/debian", "http_proxy": proxy})
	if err := m.Fetch(t.Context(), bash(), filepath.Join(t.TempDir(), "bash.deb")); err != nil {
		t.Fatal(err)
	}
	if want := "http://mirror.example.test/debian/" + bash().Path; asked.Load() != want {
		t.Fatalf("the proxy was asked for %v, not %s", asked.Load(), want)
	}
}

func TestCredentialsStayOut(t *testing.T) {
	for _, c := range []struct {
		name    string
		handler http.HandlerFunc
	}{
		{"wrong content", func(w http.ResponseWriter, r *http.Request) {
			if user, pass, _ := r.BasicAuth(); user != "robot" || pass != "hunter2" {
				t.Errorf("the mirror got %q %q", user, pass)
			}
			io.WriteString(w, "x")
		}},
		{"not found", http.NotFound},
		{"down", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }},
		{"redirect into the void", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://"+unusedAddress(t)+"/x?signature=hunter2", http.StatusFound)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			u, err := url.Parse(serve(t, c.handler))
			if err != nil {
				t.Fatal(err)
			}
			u.User = url.UserPassword("robot", "hunter2")
			_, err = machine(t, map[string]string{"DEBIAN_MIRROR": u.String()}).Diagnose(t.Context(), bash())
			if err == nil || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "robot") {
				t.Fatalf("error %v", err)
			}
		})
	}
	m := machine(t, map[string]string{"DEBIAN_MIRROR": "https://robot:hunter2@mirror.example.test:port/debian"})
	if _, err := m.Candidates(bash()); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Fatalf("error %v", err)
	}
}

func TestCredentials(t *testing.T) {
	for raw, want := range map[string][2]string{
		"https://robot:hunter2@mirror.example.test/debian/x": {"https://mirror.example.test/debian/x", "Basic cm9ib3Q6aHVudGVyMg=="},
		"https://token@mirror.example.test/x":                {"https://mirror.example.test/x", "Basic dG9rZW46"},
		"http://mirror.example.test/x":                       {"http://mirror.example.test/x", ""},
	} {
		bare, authorization, err := mirror.Credentials(raw)
		if err != nil || bare != want[0] || authorization != want[1] {
			t.Errorf("%s: %q %q %v", raw, bare, authorization, err)
		}
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := machine(t, map[string]string{"DEBIAN_MIRROR": serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}))})
	if _, err := m.Diagnose(ctx, bash()); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
}

func TestCandidates(t *testing.T) {
	module := lock.Source{Kind: lock.KindGo, Name: "go", Path: "golang.org/toolchain/@v/v0.0.1-go1.27.4.linux-amd64.zip"}
	for _, c := range []struct {
		name string
		vars map[string]string
		src  lock.Source
		want []string
	}{
		{"debian list", map[string]string{"DEBIAN_MIRROR": "http://a.example/debian/, https://b.example/x y"}, bash(), nil},
		{"debian", map[string]string{"DEBIAN_MIRROR": "http://a.example/debian/,https://u:p@b.example/x"}, bash(),
			[]string{"http://a.example/debian/pool/main/b/bash/bash_5.2.37-2+b5_amd64.deb", "https://u:p@b.example/x/pool/main/b/bash/bash_5.2.37-2+b5_amd64.deb"}},
		{"go", map[string]string{"GOPROXY": "https://a.example,direct|b.example/go|file:///srv/go,off,https://never.example"}, module,
			[]string{"https://a.example/" + module.Path, "https://b.example/go/" + module.Path, "file:///srv/go/" + module.Path}},
		{"npm", map[string]string{"npm_config_registry": "https://r.example/npm/"}, lock.Source{Kind: lock.KindNPM, Path: "npm/-/npm-12.2.2.tgz"},
			[]string{"https://r.example/npm/npm/-/npm-12.2.2.tgz"}},
		{"go, direct alone", map[string]string{"GOPROXY": "direct"}, module, nil},
		{"unknown kind", nil, lock.Source{Kind: "rpm"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := machine(t, c.vars).Candidates(c.src)
			if !slices.Equal(got, c.want) || (err != nil) != (c.want == nil) {
				t.Fatalf("candidates %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// A comma in GOPROXY hands over only what a proxy does not have, a bar on
// any failure.
func TestGoProxyList(t *testing.T) {
	src := bash()
	src.Kind = lock.KindGo
	down := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
	forbids := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) }))
	empty, good := serve(t, http.NotFoundHandler()), files(t, content)
	for list, works := range map[string]bool{empty + "," + good: true, "file:///no/such/folder," + good: true, forbids + "," + good: false, forbids + "|" + good: true, down + "|" + good: true, down + "," + good: false} {
		_, err := machine(t, map[string]string{"GOPROXY": list}).Diagnose(t.Context(), src)
		if (err == nil) != works {
			t.Errorf("%s: %v", list, err)
		}
	}
}

func TestAptSources(t *testing.T) {
	dir := t.TempDir()
	list := filepath.Join(dir, "mirrors.txt")
	for name, text := range map[string]string{
		list: "# comment\nhttp://third.example/debian\tpriority:1\n",
		filepath.Join(dir, "sources.list"): `
# deb http://commented.example/debian trixie main
deb-src http://source.example/debian trixie main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://first.example/some/cache trixie main contrib # note
deb http://vendor.example/php/ trixie main
deb http://vendor.example/linux/debian trixie stable
deb http://vendor.example/debian trixie-pgdg main
deb http://vendor.example/ubuntu noble main
`,
		filepath.Join(dir, "sources.list.d/debian.sources"): `Types: deb deb-src
URIs: http://first.example/some/cache http://second.example/debian/
Suites: bookworm bookworm-updates
Components: main
signed-by: /usr/share/keyrings/debian-archive-keyring.pgp

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
Enabled: no
URIs: http://disabled.example/debian
Suites: trixie
Components: main

Types: deb
URIs: mirror+file://` + list + `
Suites: trixie
Components: main
`,
		filepath.Join(dir, "sources.list.d/off.list.disabled"): "deb http://unread.example/debian trixie main\n",
	} {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m := mirror.FromMachine(t.Context(), env(nil), mirror.WithAptDir(dir))
	src := lock.Source{Kind: lock.KindDebian, Path: "x"}
	got, err := m.Candidates(src)
	if want := []string{"http://first.example/some/cache/x", "http://second.example/debian/x", "http://third.example/debian/x"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("main archive %q, %v; want %q", got, err, want)
	}
	src.Kind = lock.KindSecurity
	got, err = m.Candidates(src)
	if want := []string{"http://security.example/debian-security/x"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("security archive %q, %v; want %q", got, err, want)
	}
	// A machine that configures one archive alone is told which variable the other needs.
	m = mirror.FromMachine(t.Context(), env(map[string]string{"DEBIAN_MIRROR": "http://a.example/debian"}), mirror.WithAptDir(t.TempDir()))
	if _, err := m.Candidates(src); err == nil || !strings.Contains(err.Error(), "set DEBIAN_SECURITY_MIRROR") {
		t.Errorf("error %v", err)
	}
}

func TestGoEnv(t *testing.T) {
	if v, err := mirror.GoEnv(t.Context(), env(map[string]string{"GOPROXY": "https://a.example"}), "GOPROXY"); v != "https://a.example" || err != nil {
		t.Errorf("passed in, it is %q, %v", v, err)
	}
	t.Setenv("GOPROXY", "https://b.example") // as go env -w would
	if v, err := mirror.GoEnv(t.Context(), env(nil), "GOPROXY"); v != "https://b.example" || err != nil {
		t.Errorf("of the go command, it is %q, %v", v, err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := mirror.GoEnv(t.Context(), env(nil), "GOPROXY"); err == nil || !strings.Contains(err.Error(), "GOPROXY is not set and `go env GOPROXY` fails") {
		t.Errorf("without a go command: %v", err)
	}
}
