package e2e

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// compileTestFix is the loop that it is all for, with the real session image: a
// failing Go test, the fix, a Rust build, an artifact, and a workspace that is
// still warm after again has killed the sidecar and started it anew. Where
// sessions outlive that, the same session goes on.
func compileTestFix(t *testing.T, s *sidecar, again func(), outlive bool) {
	t.Helper()
	c := s.client()
	for _, args := range []m{{}, {"workspace": "loop"}} {
		id := c.open(args)
		if a := c.exec(id, "command -v go cargo"); a.IsError {
			citest.Skip(t, "the session image has no Go and Rust: set SANDBOX_TEST_IMAGE to the built one")
		}
		write := func(path, content string) {
			t.Helper()
			if a := c.call("sandbox_write", m{"session_id": id, "path": path, "content": content}); a.IsError {
				t.Fatal(a.Text)
			}
		}
		run := func(command string) answer {
			t.Helper()
			return c.call("sandbox_exec", m{"session_id": id, "command": command, "timeout_seconds": 300})
		}
		write("add/go.mod", "module example.test/add\n")
		write("add/add.go", "package add\n\nfunc Add(a, b int) int { return a - b }\n")
		write("add/add_test.go", "package add\n\nimport \"testing\"\n\nfunc TestAdd(t *testing.T) {\n\tif got := Add(1, 2); got != 3 {\n\t\tt.Fatalf(\"Add(1, 2) = %d\", got)\n\t}\n}\n")
		if a := run("cd add && go test ./..."); !a.IsError || !strings.Contains(a.Text, "Add(1, 2) = -1") || !strings.HasSuffix(a.Text, "[exit: 1]") {
			t.Fatalf("the failing test: %+v", a)
		}
		write("add/add.go", "package add\n\nfunc Add(a, b int) int { return a + b }\n")
		if a := run("cd add && go test ./..."); a.IsError || !strings.Contains(a.Text, "ok") {
			t.Fatalf("the mended test: %+v", a)
		}
		if a := run("cargo new --quiet --vcs none hello && cd hello && cargo build --quiet --offline && ./target/debug/hello > ../out.txt"); a.IsError {
			t.Fatalf("cargo: %+v", a)
		}
		if a := c.call("sandbox_read", m{"session_id": id, "path": "out.txt"}); a.Text != "Hello, world!\n" {
			t.Fatalf("the artifact: %+v", a)
		}
		if args["workspace"] == nil {
			c.call("sandbox_close", m{"session_id": id})
			continue
		}
		again()
		if outlive {
			if a := run("cd add && go test ./..."); !strings.Contains(a.Text, "(cached)") {
				t.Errorf("after the sidecar was killed: %+v", a)
			}
			c.call("sandbox_close", m{"session_id": id})
		}
		id = c.open(args)
		if a := run("cd add && go test ./..."); !strings.Contains(a.Text, "(cached)") {
			t.Errorf("the reopened workspace is not warm: %+v", a)
		}
		c.call("sandbox_close", m{"session_id": id})
	}
}

// large is the size of sessions that compile.
func large(t *testing.T) map[string]string {
	return map[string]string{"SANDBOX_WORKSPACE_ROOT": filepath.Join(t.TempDir(), "ws"), "SANDBOX_MEM_MB": "2048", "SANDBOX_TMPFS_MB": "1024"}
}

// With podman, under each runtime.
func TestCompileTestFix(t *testing.T) {
	for _, rt := range []string{"runc", "crun", "runsc"} {
		t.Run(rt, func(t *testing.T) {
			s := start(t, rt, large(t))
			compileTestFix(t, s, func() { s.kill(); s.run() }, true)
		})
	}
}

// With docker, under each runtime that it can have.
func TestCompileTestFixDocker(t *testing.T) {
	d := enginetest.NewDocker(t)
	for _, rt := range []string{"runc", "runsc"} {
		t.Run(rt, func(t *testing.T) {
			d.Try(t, rt)
			env := large(t)
			env["DOCKER_HOST"], env["SANDBOX_ENGINE"], env["SANDBOX_IMAGE"], env["SANDBOX_RUNTIME"] = d.Host, "docker", d.Image, rt
			s := startOn(t, rt, env, d)
			compileTestFix(t, s, func() { s.kill(); s.run() }, true)
			eventually(t, 30*time.Second, "no container is left", func() bool { return len(s.containers()) == 0 })
		})
	}
}
