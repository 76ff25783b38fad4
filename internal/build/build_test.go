package build

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	digest "github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/tonistiigi/fsutil"
	"golang.org/x/mod/sumdb/dirhash"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
	"github.com/loomcycle/loomcycle-images/internal/unpack/differential"
	"github.com/loomcycle/loomcycle-images/internal/upstream"
)

const repo = "../.."

// pooled is the folder of pool, if a test asked for it.
var pooled string

// pool is the group of the distroless image, of the packages that the cache folder
// has; a mirror has a version until Debian has a later one.
var pool = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "build-test-*")
	if err != nil {
		return "", err
	}
	pooled = dir
	l, err := lock.Load(filepath.Join(repo, "images", "lock"))
	if err != nil {
		return "", err
	}
	cached, err := cache.Dir(os.Getenv)
	if err != nil {
		return "", err
	}
	m := mirror.FromMachine(context.Background(), os.Getenv)
	for _, arch := range lock.Arches() {
		for _, p := range l.Packages("static", arch) {
			s := l.Source(p)
			deb, file := filepath.Join(cached, "debs", differential.File(p)), filepath.Join(dir, s.Path)
			if err := m.Fetch(context.Background(), s, deb); err != nil {
				return "", err
			}
			text, err := os.ReadFile(deb)
			if err := errors.Join(err, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, text, 0o644)); err != nil {
				return "", err
			}
		}
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(pooled)
	os.Exit(code)
}

// prebuilt compiles the stand-in runtime for both platforms.
func prebuilt(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, arch := range lock.Arches() {
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "loomcycle-linux-"+arch), "./runtime/cmd/loomcycle")
		cmd.Dir = repo
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	return dir
}

// daemon starts a BuildKit with a state of its own.
func daemon(t *testing.T, name string, env map[string]string) *buildkit.Builder {
	t.Helper()
	return daemonTo(t, name, env, t.Output())
}

func daemonTo(t *testing.T, name string, env map[string]string, log io.Writer) *buildkit.Builder {
	t.Helper()
	return connect(t, privately(t, name, env, log))
}

// privately are the options of a daemon with a state of its own, which goes
// with the test.
func privately(t *testing.T, name string, env map[string]string, log io.Writer) buildkit.Options {
	t.Helper()
	root, err := buildkit.TempRoot(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	o := buildkit.Options{Getenv: getenv(env), Log: log, CacheDir: citest.CacheDir(t, root), Private: name, Root: repo}
	t.Cleanup(func() {
		d, err := buildkit.NewDaemon(o)
		if err == nil {
			err = d.Remove(context.Background())
		}
		if err != nil {
			t.Error(err)
		}
	})
	return o
}

func connect(t *testing.T, o buildkit.Options) *buildkit.Builder {
	t.Helper()
	b, err := buildkit.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func getenv(env map[string]string) func(string) string {
	return func(name string) string {
		if v, ok := env[name]; ok {
			return v
		}
		if strings.HasPrefix(name, "BUILDKIT_") {
			return ""
		}
		return os.Getenv(name)
	}
}

func options(t *testing.T, b *buildkit.Builder, env map[string]string) Options {
	return Options{Root: repo, Dist: filepath.Join(t.TempDir(), "dist"), Images: []string{"loomcycle"}, Getenv: getenv(env), Log: t.Output(), Builder: b}
}

// faulty serves the pool, but for what break does to a request.
func faulty(t *testing.T, dir string, breakIt func(http.ResponseWriter, *http.Request) bool) string {
	t.Helper()
	files := http.FileServer(http.Dir(dir))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if breakIt == nil || !breakIt(w, r) {
			files.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// The faults of a mirror, each with the sentence that an operator gets. The
// dist folder must be as it was: absent.
func TestMirrorFaults(t *testing.T) {
	dir, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	bin := prebuilt(t)
	b := daemon(t, "faults", nil)
	victim := func(r *http.Request) bool { return strings.Contains(r.URL.Path, "netbase") }
	for _, tc := range []struct {
		name  string
		fault func(http.ResponseWriter, *http.Request) bool
		want  []string
	}{
		{"a wrong byte", func(w http.ResponseWriter, r *http.Request) bool {
			if !victim(r) {
				return false
			}
			text, err := os.ReadFile(filepath.Join(dir, r.URL.Path))
			if err != nil {
				t.Error(err)
			}
			text[len(text)/2] ^= 1
			w.Write(text)
			return true
		}, []string{"netbase", "expected sha256:", "found sha256:", "DEBIAN_MIRROR"}},
		{"a truncated file", func(w http.ResponseWriter, r *http.Request) bool {
			if !victim(r) {
				return false
			}
			text, err := os.ReadFile(filepath.Join(dir, r.URL.Path))
			if err != nil {
				t.Error(err)
			}
			w.Write(text[:len(text)/2])
			return true
		}, []string{"netbase", "truncated", "expected sha256:", "found sha256:", "DEBIAN_MIRROR"}},
		{"a missing package", func(w http.ResponseWriter, r *http.Request) bool {
			if !victim(r) {
				return false
			}
			http.NotFound(w, r)
			return true
		}, []string{"netbase", "DEBIAN_MIRROR", "lock:update"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := options(t, b, map[string]string{
				"DEBIAN_MIRROR": faulty(t, dir, tc.fault), "LOOMCYCLE_SOURCE": "bin:" + bin,
			})
			_, err := Run(t.Context(), o)
			if err == nil {
				t.Fatal("the build went through")
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the error lacks %q:\n%v", part, err)
				}
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("the error is not one sentence:\n%v", err)
			}
			left, err := os.ReadDir(filepath.Dir(o.Dist))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v %v", left, err)
			}
		})
	}
}

// The same of a folder; a second mirror has what it lacks, also when that is a folder.
func TestFaultsOfAFolder(t *testing.T) {
	whole, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	bin := prebuilt(t)
	b := daemon(t, "folders", nil)
	// spoilt is a copy of the pool in which change was called with the path of a package.
	spoilt := func(name string, change func(string) error) string {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join(dir, "pool/*/*/*/"+name+"_*.deb"))
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, file := range files {
			if err := change(file); err != nil {
				t.Fatal(err)
			}
		}
		return "file:" + dir
	}
	wrong := func(file string) error {
		text, err := os.ReadFile(file)
		if err == nil {
			text[len(text)/2] ^= 1
			err = os.WriteFile(file, text, 0o644)
		}
		return err
	}
	for _, tc := range []struct {
		name, mirror string
		want         []string
	}{
		{"a wrong byte", spoilt("netbase", wrong), []string{"netbase", "expected sha256:", "found sha256:", "DEBIAN_MIRROR"}},
		{"a truncated file", spoilt("netbase", func(file string) error { return os.Truncate(file, 1) }), []string{"netbase", "truncated", "DEBIAN_MIRROR"}},
		{"a missing package", spoilt("netbase", os.Remove), []string{"netbase", "DEBIAN_MIRROR", "lock:update"}},
		{"a second mirror", spoilt("netbase", os.Remove) + " " + faulty(t, whole, nil), nil},
		{"a second folder", spoilt("netbase", os.Remove) + " " + spoilt("tzdata", os.Remove), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Run(t.Context(), options(t, b, map[string]string{"DEBIAN_MIRROR": tc.mirror, "LOOMCYCLE_SOURCE": "bin:" + bin}))
			if (err == nil) != (tc.want == nil) {
				t.Fatal(err)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), "\n") {
					t.Errorf("the error is not one sentence with %q:\n%v", part, err)
				}
			}
		})
	}
}

// Of a folder only what the graph reads is sent.
func TestFolderIsNotSentWhole(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"README", "dists/x/Packages", "pool/a/a.deb", "pool/a/b.deb", "pool/c/c.deb"} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755), os.WriteFile(filepath.Join(dir, name), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	s := newSources(mirror.FromMachine(t.Context(), getenv(map[string]string{"DEBIAN_MIRROR": "file:" + dir})))
	for _, name := range []string{"pool/a/b.deb", "pool/c/c.deb"} {
		s.fetch(t.Context(), lock.Source{Kind: lock.KindDebian, Name: name, Path: name})
	}
	if s.err != nil || len(s.mounts) != 1 {
		t.Fatal(s.mounts, s.err)
	}
	var sent []string
	for _, mount := range s.mounts {
		if err := mount.Walk(t.Context(), "", func(name string, _ fs.DirEntry, err error) error {
			sent = append(sent, name)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"pool", "pool/a", "pool/a/b.deb", "pool/c", "pool/c/c.deb"}; !slices.Equal(sent, want) {
		t.Errorf("sent %q, not %q", sent, want)
	}
}

// One daemon, two daemons, a second mirror that has what the first lost, and
// a file: mirror: the digests are the same.
func TestDigestsDoNotDependOnTheBuilder(t *testing.T) {
	dir, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	bin := prebuilt(t)
	whole := faulty(t, dir, nil)
	lossy := faulty(t, dir, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.Contains(r.URL.Path, "netbase"):
			http.NotFound(w, r)
		case strings.Contains(r.URL.Path, "tzdata"): // as a bucket answers
			w.WriteHeader(http.StatusForbidden)
		default:
			return false
		}
		return true
	})
	one, two := daemon(t, "one", nil), daemon(t, "two", nil)
	base := map[string]string{"LOOMCYCLE_SOURCE": "bin:" + bin}
	with := func(more map[string]string) map[string]string {
		all := map[string]string{}
		for _, m := range []map[string]string{base, more} {
			for k, v := range m {
				all[k] = v
			}
		}
		return all
	}
	build := func(name string, b *buildkit.Builder, env map[string]string) *dist.Release {
		t.Helper()
		o := options(t, b, with(env))
		r, err := Run(t.Context(), o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := dist.Check(o.Dist); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return r
	}
	var want *dist.Release
	again := options(t, one, with(map[string]string{"DEBIAN_MIRROR": whole}))
	for i, compressed := range []bool{true, false} { // the second time into a dist that has it all
		var log syncbuf.Buffer
		again.Log = &log
		r, err := Run(t.Context(), again)
		if err != nil {
			t.Fatal(err)
		}
		if err := dist.Check(again.Dist); err != nil {
			t.Errorf("build %d: %v", i+1, err)
		}
		if strings.Contains(log.String(), "build: compressed ") != compressed {
			t.Errorf("build %d: layers were compressed: %v\n%s", i+1, !compressed, log.String())
		}
		if want != nil && r.Images[0].IndexDigest != want.Images[0].IndexDigest {
			t.Errorf("built again, the index is %s, not %s", r.Images[0].IndexDigest, want.Images[0].IndexDigest)
		}
		want = r
	}
	annotated(t, again.Dist, &want.Images[0])

	hosts := map[string]string{"BUILDKIT_HOST_AMD64": one.ForPlatform("linux/amd64").Address, "BUILDKIT_HOST_ARM64": two.ForPlatform("linux/arm64").Address}
	split, err := buildkit.Connect(t.Context(), buildkit.Options{Getenv: getenv(hosts), Log: t.Output(), CacheDir: t.TempDir(), Root: repo})
	if err != nil {
		t.Fatal(err)
	}
	defer split.Close()
	if n := len(split.Nodes()); n != 2 {
		t.Fatalf("the builder has %d nodes, not 2", n)
	}
	third := daemon(t, "three", nil)
	for name, got := range map[string]*dist.Release{
		"two daemons":           build("two daemons", split, map[string]string{"DEBIAN_MIRROR": whole}),
		"a mirror lost files":   build("a mirror lost files", third, map[string]string{"DEBIAN_MIRROR": lossy + " " + whole}),
		"a file: mirror":        build("a file: mirror", third, map[string]string{"DEBIAN_MIRROR": "file:" + dir}),
		"a build without cache": build("a build without cache", daemon(t, "four", nil), map[string]string{"DEBIAN_MIRROR": "file:" + dir}),
	} {
		if got.Images[0].IndexDigest != want.Images[0].IndexDigest {
			t.Errorf("%s: the index is %s, not %s:\n%+v\n%+v", name, got.Images[0].IndexDigest, want.Images[0].IndexDigest, got, want)
		}
	}
}

// Layers with zstd and the earliest time that SOURCE_DATE_EPOCH may name.
func TestZstdOf1970(t *testing.T) {
	dir, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	o := options(t, daemon(t, "zstd", nil), map[string]string{
		"LOOMCYCLE_SOURCE": "bin:" + prebuilt(t), "DEBIAN_MIRROR": "file:" + dir, "COMPRESSION": "zstd", "SOURCE_DATE_EPOCH": "0",
	})
	o.Platform = []string{"linux/" + runtime.GOARCH}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := dist.Check(o.Dist); err != nil {
		t.Error(err)
	}
	if r.Compression != "zstd" || r.Epoch != 0 {
		t.Errorf("release.json says %s, %d", r.Compression, r.Epoch)
	}
	img, err := dist.Content(o.Dist, &r.Images[0], &r.Images[0].Platforms[0])
	if err != nil {
		t.Fatal(err)
	}
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	files, err := store.Open(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files.All() {
		if f.ModTime.Unix() != 0 {
			t.Errorf("/%s is of %s", f.Path, f.ModTime)
		}
	}
	if files.Lstat("usr/local/bin/loomcycle") == nil {
		t.Error("the image has no runtime")
	}
}

// annotated demands of an index and its manifests the annotations that the
// configurations repeat as labels.
func annotated(t *testing.T, folder string, img *dist.Image) {
	t.Helper()
	read := func(d digest.Digest, into any) {
		text, err := os.ReadFile(filepath.Join(folder, "oci", "blobs", "sha256", d.Encoded()))
		if err == nil {
			err = json.Unmarshal(text, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var index ocispec.Index
	read(img.IndexDigest, &index)
	if index.Annotations[ocispec.AnnotationTitle] != img.Name || len(index.Manifests) != len(img.Platforms) {
		t.Errorf("the index has the annotations %q and %d manifests", index.Annotations, len(index.Manifests))
	}
	for _, v := range img.Platforms {
		var m ocispec.Manifest
		var c ocispec.Image
		read(v.Digest, &m)
		read(v.Config, &c)
		if !maps.Equal(index.Annotations, c.Config.Labels) || !maps.Equal(m.Annotations, c.Config.Labels) {
			t.Errorf("%s: annotations of the index %q, of the manifest %q, and labels %q", v.Platform, index.Annotations, m.Annotations, c.Config.Labels)
		}
	}
}

// A mirror that asks for a password gets it, and nobody else does: it is in
// no line of the display and in no file of the result.
func TestMirrorWithPassword(t *testing.T) {
	dir, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	closed := faulty(t, dir, func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, ok := r.BasicAuth(); ok && user == "who" && password == "open-sesame" {
			asked++
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="mirror"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	var log strings.Builder
	o := options(t, daemonTo(t, "password", nil, &log), map[string]string{
		"DEBIAN_MIRROR": strings.Replace(closed, "://", "://who:open-sesame@", 1), "LOOMCYCLE_SOURCE": "bin:" + prebuilt(t),
	})
	o.Log = &log
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if asked == 0 || !strings.Contains(log.String(), "fetch netbase") {
		t.Errorf("the mirror was asked %d times; the display was\n%s", asked, log.String())
	}
	if text := fmt.Sprintf("%s%+v", log.String(), r); strings.Contains(text, "open-sesame") {
		t.Error("the password is shown")
	}
}

// BuildKit itself fetches packages from an https mirror whose authority
// SSL_CERT_FILE or SSL_CERT_DIR names, and through a proxy: also a daemon that
// was up before the variables were set.
func TestHowBuildKitReachesAMirror(t *testing.T) {
	dir, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	files := http.FileServer(http.Dir(dir))
	secure := httptest.NewTLSServer(files)
	defer secure.Close()
	trusted := filepath.Join(t.TempDir(), "ca.pem")
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})
	if err := os.WriteFile(trusted, authority, 0o644); err != nil {
		t.Fatal(err)
	}
	var fetched atomic.Int64
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Host != "mirror.example.test" { // which only this proxy finds
			http.Error(w, "not through here", http.StatusBadGateway)
			return
		}
		fetched.Add(1)
		files.ServeHTTP(w, r)
	}))
	defer proxy.Close()
	bin := prebuilt(t)
	for _, tc := range []struct {
		name, mirror string
		env          map[string]string
	}{
		{"file", secure.URL, map[string]string{"SSL_CERT_FILE": trusted}},
		{"folder", secure.URL, map[string]string{"SSL_CERT_DIR": filepath.Dir(trusted)}},
		{"proxy", "http://mirror.example.test", map[string]string{"HTTP_PROXY": proxy.URL, "http_proxy": proxy.URL, "NO_PROXY": "", "no_proxy": ""}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR"} {
				t.Setenv(name, "")
			}
			o := privately(t, "reach-"+tc.name, nil, t.Output())
			connect(t, o).Close()
			for name, value := range tc.env {
				t.Setenv(name, value) // the daemon's own environment is this process's
			}
			if _, err := Run(t.Context(), options(t, connect(t, o), map[string]string{"DEBIAN_MIRROR": tc.mirror, "LOOMCYCLE_SOURCE": "bin:" + bin})); err != nil {
				t.Error(err)
			}
		})
	}
	if fetched.Load() == 0 {
		t.Error("the proxy was not asked for a package")
	}
}

// A cancelled build ends and leaves nothing. How long it waits for the daemon is
// measured in internal/buildkit, without the load of the machine.
func TestCancel(t *testing.T) {
	dir, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var stopped time.Time
	stuck := faulty(t, dir, func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "tzdata") {
			return false
		}
		stopped = time.Now()
		cancel()
		<-r.Context().Done()
		return true
	})
	o := options(t, daemon(t, "cancel", nil), map[string]string{"DEBIAN_MIRROR": stuck, "LOOMCYCLE_SOURCE": "bin:" + prebuilt(t)})
	_, err = Run(ctx, o)
	if err == nil || stopped.IsZero() {
		t.Fatalf("the build was not cancelled: %v", err)
	}
	d := time.Since(stopped)
	t.Logf("it took %v to stop", d)
	if d > time.Minute {
		t.Error("that is too long")
	}
	left, err := os.ReadDir(filepath.Dir(o.Dist))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// behindProxy serves a module from http://modules.example.test, which only an
// HTTP proxy finds: the server's own address. Asked directly it is the machine's
// module proxy without that module. It returns the address, GOPROXY, and go.sum.
func behindProxy(t *testing.T, path, version string) (address, goproxy, sum string) {
	t.Helper()
	toolchain := lock.Source{Kind: lock.KindGo, Path: "x"}
	machine, err := mirror.FromMachine(t.Context(), os.Getenv).Candidates(toolchain)
	if err != nil {
		t.Fatal(err)
	}
	gomod, archive, sum := packed(t, path, version)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ours := strings.HasPrefix(r.URL.Path, "/"+path+"/@v/"+version)
		switch {
		case r.URL.Host != "modules.example.test" && !ours: // for BuildKit and the tests' own compiling
			http.Redirect(w, r, strings.TrimSuffix(machine[0], "/x")+r.URL.Path, http.StatusFound)
		case r.URL.Host != "modules.example.test" || !ours:
			http.NotFound(w, r)
		case strings.HasSuffix(r.URL.Path, ".info"):
			fmt.Fprintf(w, `{"Version": %q}`, version)
		case strings.HasSuffix(r.URL.Path, ".mod"):
			io.WriteString(w, gomod)
		case strings.HasSuffix(r.URL.Path, ".zip"):
			w.Write(archive)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, s.URL + ",http://modules.example.test", sum
}

// packed is a module with the constant Word: its go.mod, archive and go.sum.
func packed(t *testing.T, path, version string) (gomod string, archive []byte, sum string) {
	t.Helper()
	gomod = "module " + path + "\n\ngo 1.24\n"
	files := map[string]string{"go.mod": gomod, "dep.go": "package dep\n\nconst Word = \"found behind a proxy\"\n"}
	var archived bytes.Buffer
	z := zip.NewWriter(&archived)
	hash := func(names ...string) string {
		h, err := dirhash.Hash1(names, func(name string) (io.ReadCloser, error) {
			return io.NopCloser(strings.NewReader(files[name[strings.LastIndex(name, "/")+1:]])), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	var names []string
	for name, text := range files {
		names = append(names, path+"@"+version+"/"+name)
		w, err := z.Create(names[len(names)-1])
		if err == nil {
			_, err = io.WriteString(w, text)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return gomod, archived.Bytes(), fmt.Sprintf("%s %s %s\n%[1]s %[2]s/go.mod %[4]s\n", path, version, hash(names...), hash("go.mod"))
}

// Another loomcycle, at a tag of its own repository: its user interface is
// built with npm, compiled in with a module from behind an HTTP proxy, and the
// binary has that repository's version.
func TestRuntimeWithUserInterface(t *testing.T) {
	t.Setenv("GIT_CONFIG_GLOBAL", "/dev/null") // whoever runs it may sign commits and tags
	npm, err := mirror.FromMachine(t.Context(), os.Getenv).Candidates(lock.Source{Kind: lock.KindNPM})
	if err != nil {
		t.Fatal(err)
	}
	registry, err := url.Parse(npm[0])
	if err != nil {
		t.Fatal(err)
	}
	// A version that no cache has.
	version := fmt.Sprintf("v1.0.%d", time.Now().UnixNano())
	proxy, goproxy, sum := behindProxy(t, "example.test/dep", version)
	t.Setenv("GOPROXY", goproxy)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.org/loomcycle\n\ngo 1.24\n\nrequire example.test/dep " + version + "\n",
		"go.sum": sum,
		"cmd/loomcycle/main.go": `package main

import (
	"example.org/loomcycle/web"
	"example.test/dep"
)

var version, commit string

func main() { println(version, commit, web.Page, dep.Word) }
`,
		"web/web.go":       "package web\n\nimport _ \"embed\"\n\n//go:embed dist/page\nvar Page string\n",
		"web/build.js":     `require("fs").mkdirSync("dist"); require("fs").writeFileSync("dist/page", "made by npm: " + require("is-number")("42"))`,
		"web/package.json": `{"name": "ui", "version": "1.0.0", "scripts": {"build": "node build.js"}, "dependencies": {"is-number": "7.0.0"}}`,
		"web/package-lock.json": `{"name": "ui", "version": "1.0.0", "lockfileVersion": 3, "packages": {
			"": {"name": "ui", "version": "1.0.0", "dependencies": {"is-number": "7.0.0"}},
			"node_modules/is-number": {"version": "7.0.0",
				"integrity": "sha512-41Cifkg6e8TylSpdtTpeLVMqvSBEVzTttHvERD741+pnZ8ANv0004MRL43QKPDlK9cGvNp6NZWZUBlbGXYxxng=="}}}`,
	} {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	var commit string
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "one"}, {"tag", "v3.2.1"}, {"rev-parse", "HEAD"}} {
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %s: %v\n%s", args, err, out)
		}
		commit = strings.TrimSpace(string(out))
	}
	// The BuildKit of ordinary builds: Node's image has most of the toolchain.
	o := options(t, nil, map[string]string{"LOOMCYCLE_SOURCE": "git:" + dir + "#v3.2.1", "LOOMCYCLE_CACHE": "",
		"HTTP_PROXY": "", "http_proxy": proxy, "NO_PROXY": registry.Hostname(),
		"DOCKER_HOST": "unix:///dev/null", "BUILDKIT_HOST": "", "BUILDKIT_HOST_AMD64": "", "BUILDKIT_HOST_ARM64": ""})
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	img, err := r.Image("loomcycle")
	if err != nil {
		t.Fatal(err)
	}
	for i := range img.Platforms {
		v := &img.Platforms[i]
		binary := runtimeOf(t, o.Dist, img, v)
		for _, want := range []string{"made by npm: true", "found behind a proxy", "3.2.1", commit} {
			if !bytes.Contains(binary, []byte(want)) {
				t.Errorf("%s: the binary does not have %q", v.Platform, want)
			}
		}
	}
	if want := "git:" + dir + "#" + commit; r.Source.Loomcycle != want {
		t.Errorf("release.json has the source %q, not %q", r.Source.Loomcycle, want)
	}
}

// runtimeOf is the binary of the runtime in a variant.
func runtimeOf(t *testing.T, folder string, img *dist.Image, v *dist.Variant) []byte {
	t.Helper()
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	content, err := dist.Content(folder, img, v)
	if err != nil {
		t.Fatal(err)
	}
	fs, err := store.Open(t.Context(), content)
	if err != nil {
		t.Fatal(err)
	}
	binary, err := fs.ReadFile("/usr/local/bin/loomcycle")
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

// A folder outside git, with a package and linker flags of the operator's choice.
func TestRuntimeOfAFolder(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":                "module example.org/agent\n\ngo 1.24\n",
		"cmd/loomcycle/main.go": "package main\n\nfunc main() { panic(\"the package that nobody asked for\") }\n",
		"cmd/agent/main.go":     "package main\n\nimport \"os\"\n\nvar version, flavor = \"unset\", \"unset\"\n\nfunc main() { os.Stdout.WriteString(version + \" \" + flavor) }\n",
	} {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	// The BuildKit of ordinary builds has the toolchain.
	o := options(t, nil, map[string]string{"LOOMCYCLE_SOURCE": "dir:" + dir, "LOOMCYCLE_PACKAGE": "./cmd/agent",
		"LOOMCYCLE_LDFLAGS": "-X main.version=9.8.7  -X main.flavor=plain", "LOOMCYCLE_CACHE": "",
		"DOCKER_HOST": "unix:///dev/null", "BUILDKIT_HOST": "", "BUILDKIT_HOST_AMD64": "", "BUILDKIT_HOST_ARM64": ""})
	o.Platform = []string{"linux/" + runtime.GOARCH}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "loomcycle")
	if err := os.WriteFile(program, runtimeOf(t, o.Dist, &r.Images[0], &r.Images[0].Platforms[0]), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), program).CombinedOutput(); err != nil || string(out) != "9.8.7 plain" {
		t.Errorf("the runtime prints %q: %v", out, err)
	}
	want := dist.Source{Repository: r.Source.Repository, Commit: r.Source.Commit, Loomcycle: "dir:" + filepath.Base(dir) + "#unknown",
		LoomcyclePackage: "./cmd/agent", LoomcycleLDFlags: "-X main.version=9.8.7 -X main.flavor=plain"}
	if r.Source != want {
		t.Errorf("release.json has the source %+v, not %+v", r.Source, want)
	}
}

// The folder of lock:fetch is enough, with the variables that it prints: for
// packages, the toolchain, and the modules of what is compiled.
func TestBuildWithoutNetwork(t *testing.T) {
	packages, err := pool()
	if err != nil {
		t.Fatal(err)
	}
	l, err := lock.Load(filepath.Join(repo, "images", "lock"))
	if err != nil {
		t.Fatal(err)
	}
	dir, version := t.TempDir(), "v1.0.0"
	toolchain := l.Go[runtime.GOARCH].Source()
	gomod, archive, sum := packed(t, "example.test/dep", version)
	err = mirror.FromMachine(t.Context(), os.Getenv).Fetch(t.Context(), toolchain, filepath.Join(dir, string(lock.KindGo), toolchain.Path))
	for _, kind := range []lock.Kind{lock.KindDebian, lock.KindSecurity} { // which of them has a package does not matter here
		err = errors.Join(err, os.CopyFS(filepath.Join(dir, string(kind)), os.DirFS(packages)))
	}
	source, module := t.TempDir(), filepath.Join(dir, filepath.FromSlash(upstream.Modules), "example.test/dep/@v", version)
	for name, text := range map[string]string{
		module + ".info": `{"Version": "` + version + `"}`, module + ".mod": gomod, module + ".zip": string(archive),
		source + "/go.mod": "module example.org/loomcycle\n\ngo 1.24\n\nrequire example.test/dep " + version + "\n", source + "/go.sum": sum,
		source + "/cmd/loomcycle/main.go": "package main\n\nimport \"example.test/dep\"\n\nfunc main() { println(dep.Word) }\n",
	} {
		err = errors.Join(err, os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644))
	}
	variables, verr := upstream.Variables(dir)
	if err := errors.Join(err, verr); err != nil {
		t.Fatal(err)
	}
	for _, v := range variables {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
	for _, name := range images.ProxyVariables() { // whatever asks the network finds none
		t.Setenv(name, "http://127.0.0.1:1")
		t.Setenv(strings.ToLower(name), "http://127.0.0.1:1")
	}
	t.Setenv("NO_PROXY", "")
	t.Setenv("no_proxy", "")
	o := options(t, daemon(t, "offline", nil), map[string]string{"LOOMCYCLE_SOURCE": "dir:" + source})
	o.Platform = []string{"linux/" + runtime.GOARCH}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if binary := runtimeOf(t, o.Dist, &r.Images[0], &r.Images[0].Platforms[0]); !bytes.Contains(binary, []byte("found behind a proxy")) {
		t.Error("the module is not in the runtime")
	}
}

// npm in a build step uses the registry that this machine's npm would.
func TestRegistryOfTheUserInterface(t *testing.T) {
	const want = "https://registry.example.test/npm"
	home := t.TempDir()
	if err := os.WriteFile(filepath.Join(home, ".npmrc"), []byte("registry="+want+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("npm_config_userconfig", filepath.Join(home, ".npmrc"))
	for _, env := range []map[string]string{{"NPM_CONFIG_REGISTRY": want}, {"npm_config_registry": want}, {}} {
		if len(env) == 0 {
			if _, err := exec.LookPath("npm"); err != nil {
				continue
			}
			t.Setenv("NPM_CONFIG_REGISTRY", "")
			t.Setenv("npm_config_registry", "")
		}
		b := &builder{Options: Options{Getenv: func(name string) string { return env[name] }}, runtime: loomcycle{web: true}}
		b.sources = newSources(mirror.FromMachine(t.Context(), b.Getenv))
		if got := string(b.secrets()[images.SecretNPMRegistry]); got != want {
			t.Errorf("%v: the registry is %q", env, got)
		}
	}
}

func TestBadSources(t *testing.T) {
	dir := t.TempDir()
	for value, want := range map[string]string{
		"ftp:x":                "is none of git:URL#REF, dir:PATH, bin:DIR",
		"git:https://u:p@x":    "is none of", // no ref
		"dir:" + dir:           "is not a Go module",
		"git:" + dir + "#nope": "cannot fetch nope",
	} {
		_, err := resolveLoomcycle(t.Context(), getenv(map[string]string{"LOOMCYCLE_SOURCE": value}), t.TempDir(), nil)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(fmt.Sprint(err), "u:p") {
			t.Errorf("%s: %v", value, err)
		}
	}
}

// A prebuilt runtime is a static program of the architecture that its name says.
func TestBadBinaries(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "main.go")
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// compiled is a folder with that program under the name for an architecture.
	compiled := func(name, arch string, args ...string) string {
		folder := t.TempDir()
		cmd := exec.CommandContext(t.Context(), "go", append(append([]string{"build", "-o", filepath.Join(folder, "loomcycle-linux-"+name)}, args...), source)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return folder
	}
	for arch, other := range map[string]string{"amd64": "arm64", "arm64": "amd64"} {
		script := t.TempDir()
		if err := os.WriteFile(filepath.Join(script, "loomcycle-linux-"+arch), []byte("#!/bin/sh\nexec /opt/loomcycle \"$@\"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		for folder, want := range map[string]string{
			compiled(arch, arch):                   "",
			compiled(arch, other):                  "is for EM_" + map[string]string{"amd64": "X86_64", "arm64": "AARCH64"}[other] + ", not for " + arch,
			compiled(arch, arch, "-buildmode=pie"): "is dynamically linked; the distroless image has no loader: build it with CGO_ENABLED=0",
			compiled(other, arch):                  "no such file",
			script:                                 "bad magic number",
		} {
			n := &node{mounts: map[string]fsutil.FS{}}
			_, err := n.prebuilt(folder, arch)
			if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "LOOMCYCLE_SOURCE: "+folder)) {
				t.Errorf("%s for %s: the error is %v, not with %q", folder, arch, err, want)
			}
		}
	}
}

// What decides about the runtime's bytes besides its source is in release.json.
func TestOptionsOfTheRuntimeAreRecorded(t *testing.T) {
	for _, tc := range []struct{ source, pkg, ldflags string }{
		{"", "", "-s -w"}, // the package is that of another source
		{"dir:" + repo, "./x", "-s -w"},
		{"bin:" + t.TempDir(), "", ""},
	} {
		env := map[string]string{"LOOMCYCLE_SOURCE": tc.source, "LOOMCYCLE_PACKAGE": "./x", "LOOMCYCLE_LDFLAGS": " -s  -w"}
		l, err := resolveLoomcycle(t.Context(), getenv(env), t.TempDir(), nil)
		if err != nil || l.asked.pkg != tc.pkg || l.asked.ldflags != tc.ldflags {
			t.Errorf("%q: %+v, %v", tc.source, l.asked, err)
		}
	}
}
