package buildkit

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// env is an environment with only what the test says, so that a builder of the
// person who runs it is left alone.
func env(kv map[string]string) func(string) string {
	return func(k string) string {
		switch v, ok := kv[k]; {
		case ok:
			return v
		case k == "DOCKER_HOST":
			return "unix:///nonexistent/docker.sock"
		case k == "BUILDKIT_PROGRESS":
			return "plain"
		}
		return ""
	}
}

func TestParseBuildx(t *testing.T) {
	for _, c := range []struct {
		inspect string
		want    buildx
	}{
		{"Name:          wide\nDriver:        docker-container\nLast Activity: 2026-11-29 13:09:17 +0000 UTC\n\nNodes:\n" +
			"Name:     wide0\nEndpoint: unix:///var/run/docker.sock\nStatus:   running\n\nName:     wide1\nEndpoint: ssh://arm64\n", buildx{"wide", "docker-container", 2, 1}},
		{"Name:   default\nDriver: \nError:  failed to connect to the docker API\n", buildx{"default", "", 0, 0}},
	} {
		if got := parseBuildx([]byte(c.inspect)); got != c.want {
			t.Errorf("got %+v, want %+v", got, c.want)
		}
	}
}

func TestCacheEntriesAreNarrowedToTheJob(t *testing.T) {
	for _, c := range []struct{ entry, key, want string }{
		{"type=registry,ref=registry.example/cache", "ref", "registry.example/cache:toolbox-arm64"},
		{"type=registry,ref=registry.example/cache:main", "ref", "registry.example/cache:main-toolbox-arm64"},
		{"registry.example/cache:main", "ref", "registry.example/cache:main-toolbox-arm64"},
		{"type=local,src=/cache", "src", "/cache/toolbox-arm64"},
		{"type=gha,url=https://cache.example,token=x", "scope", "buildkit-toolbox-arm64"},
		{"type=gha,url=https://cache.example,token=x,scope=pr", "scope", "pr-toolbox-arm64"},
		{"type=s3,region=r,bucket=b", "name", "buildkit-toolbox-arm64"},
	} {
		e, err := remoteCaches(env(map[string]string{"CACHE_FROM": " " + c.entry + "\n"}), "toolbox-arm64")
		if err != nil || len(e.from) != 1 || e.from[0].Attrs[c.key] != c.want {
			t.Errorf("%s: %+v, %v; want %s=%s", c.entry, e.from, err, c.key, c.want)
		}
	}
	for _, bad := range []string{"ref=registry.example/cache", "type=registry,ref=Not A Ref", "type=registry,ref=registry.example/UPPER"} {
		if _, err := remoteCaches(env(map[string]string{"CACHE_TO": bad}), "x"); err == nil || !strings.Contains(err.Error(), "CACHE_TO") && !strings.Contains(err.Error(), "cache reference") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestWithoutCaches(t *testing.T) {
	getenv := WithoutCaches(env(map[string]string{"CACHE_FROM": "type=local,src=/cache", "CACHE_TO": "type=local,dest=/cache", "HOME": "/home/u"}))
	if e, err := remoteCaches(getenv, "x"); err != nil || len(e.from)+len(e.to) > 0 || getenv("HOME") != "/home/u" {
		t.Errorf("%+v, %v, HOME=%s", e, err, getenv("HOME"))
	}
}

func TestCachesAreCompressed(t *testing.T) {
	for _, c := range []struct{ entry, compression, force string }{
		{"type=registry,ref=registry.example/cache", "zstd", "true"},
		{"type=local,dest=/cache", "zstd", "true"},
		{"type=s3,region=r,bucket=b,compression=gzip", "gzip", ""},
		{"type=gha,url=https://cache.example,token=x", "", ""},
		{"type=azblob,account_url=https://cache.example", "", ""},
	} {
		e, err := remoteCaches(env(map[string]string{"CACHE_TO": c.entry}), "x")
		if err != nil || len(e.to) != 1 || e.to[0].Attrs["compression"] != c.compression || e.to[0].Attrs["force-compression"] != c.force {
			t.Errorf("%s: %+v, %v", c.entry, e.to, err)
		}
	}
}

func TestSocketPath(t *testing.T) {
	long := "/" + strings.Repeat("folder/", 20)
	for _, c := range []struct{ dir, runtime, prefix string }{
		{"/home/u/.cache/loomcycle-images/buildkit/default", "/run/user/1", "/home/u/.cache/loomcycle-images/buildkit/default/"},
		{long, "/run/user/1", "/run/user/1/loomcycle-"},
	} {
		got, err := socketPath(c.dir, env(map[string]string{"XDG_RUNTIME_DIR": c.runtime}))
		if err != nil || !strings.HasPrefix(got, c.prefix) || len(got) > 100 {
			t.Errorf("%s: %s, %v", c.dir, got, err)
		}
	}
	if got, err := socketPath(long, env(map[string]string{"XDG_RUNTIME_DIR": long})); err == nil {
		t.Errorf("no error for %s", got)
	}
}

// Two that have compiled a new pin at the same time remove the same old ones.
func TestPruneTogether(t *testing.T) {
	dir := t.TempDir()
	b := binary{path: filepath.Join(dir, "buildkitd-new")}
	old := time.Now().Add(-2 * unused)
	for i := range 500 {
		name := filepath.Join(dir, fmt.Sprintf("buildkitd-%d", i))
		if err := errors.Join(os.WriteFile(name, nil, 0o755), os.Chtimes(name, old, old)); err != nil {
			t.Fatal(err)
		}
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if err := b.prune(time.Now()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%d are left, %v", len(left), err)
	}
}

// A docker engine that hangs is not passed over in silence.
func TestSilentEngine(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var log strings.Builder
	if engine := engineAt(t.Context(), Options{Log: &log}, "unix://"+socket, 50*time.Millisecond); engine != nil {
		t.Error("an engine that does not answer is taken")
	}
	if !strings.Contains(log.String(), "passing over the docker engine at unix://"+socket) {
		t.Errorf("it says %q", &log)
	}
	log.Reset()
	if engine := engineAt(t.Context(), Options{Log: &log}, "unix:///nonexistent/docker.sock", time.Minute); engine != nil || log.Len() > 0 {
		t.Errorf("where there is none it finds %v and says %q", engine, &log)
	}
}
