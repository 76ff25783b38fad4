package workflows

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/freeport"
)

// The blocks of the documents that use the built family, as a reader types them,
// on a podman with a storage of its own. A service is asked for its health and
// stopped; a shell gets a command.
func TestDocumentsUseDist(t *testing.T) {
	if os.Geteuid() != 0 {
		citest.Skip(t, "podman needs root for a storage of its own")
	}
	release, err := dist.Read(filepath.Join(root, "dist"))
	if err != nil {
		disttest.Missing(t, err)
	}
	for _, program := range []string{"bash", "curl", "openssl", "podman", "runc", "skopeo"} {
		citest.Program(t, program, "apt-get install "+program)
	}
	env := private(t)
	block := regexp.MustCompile("(?sm)^```sh\n(.*?)^```|^((?:    [^\n]*\n)+)")
	service := regexp.MustCompile(`(?m)^(podman run .*) -p 127\.0\.0\.1:8787:8787 (.*)$`)
	shell := regexp.MustCompile(`(?m)^(podman run .*) -it (.*)$`)
	for _, c := range []struct{ file, load, says string }{
		{"README.md", "loomcycle-toolbox", `"Architecture": `},
		{"images/README.md", "loomcycle", "healthy"},
		{"toolbox/README.md", "loomcycle-toolbox", "inside 65532\n"},
		{"session-image/README.md", "loomcycle-sandbox-session", "inside 1000\n"},
	} {
		t.Run(c.file, func(t *testing.T) {
			if _, err := release.Image(c.load); err != nil {
				disttest.Missing(t, err)
			}
			text, err := os.ReadFile(filepath.Join(root, c.file))
			if err != nil {
				t.Fatal(err)
			}
			load, script := "go run mage.go images:load "+c.load, ""
			for _, m := range block.FindAllStringSubmatch(string(text), -1) {
				if b := m[1] + m[2]; strings.Contains(b, load) || strings.Contains(b, "podman run") {
					script += b
				}
			}
			if !strings.Contains(script, load) {
				script = load + "\n" + script
			}
			// The load takes minutes; a port is free at the moment.
			loaded := regexp.MustCompile(`(?m)^podman has (\S+)$`).FindStringSubmatch(bash(t, load, env))
			if loaded == nil {
				t.Fatalf("%s does not say what podman has", load)
			}
			address := freeport.Address(t)
			script = regexp.MustCompile(`(?m)^    | *# .*$`).ReplaceAllString(strings.ReplaceAll(script, "\\\n", ""), "")
			script = strings.Replace(script, load, "REF="+loaded[1], 1)
			script = regexp.MustCompile(`\bREF(\s)`).ReplaceAllString(script, `"$$REF"$1`)
			script = service.ReplaceAllString(script, "$1 -p "+address+":8787 $2 &\nuntil curl -fsS http://"+address+"/healthz; do kill -0 %1; sleep 0.2; done; echo healthy; kill %1; wait %1")
			script = shell.ReplaceAllString(script, `$1 -i $2 <<< 'echo inside $$(id -u)'`)
			if out := bash(t, script, env); !strings.Contains(out, c.says) {
				t.Errorf("there is no %q in\n%s", c.says, out)
			}
		})
	}
}

// private is the environment of a podman that leaves nothing on the machine.
func private(t *testing.T) []string {
	temp, err := cache.Temp(os.Getenv) // gigabytes
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(temp, "documents-*")
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for file, text := range map[string]string{
		"storage.conf":    "[storage]\ndriver = \"overlay\"\ngraphroot = \"" + at("root") + "\"\nrunroot = \"" + at("run") + "\"\n",
		"containers.conf": "[containers]\ndefault_ulimits = [\"nofile=4096:4096\", \"nproc=16384:16384\"]\n[engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\ntmp_dir = \"" + at("tmp") + "\"\n",
	} {
		if err := os.WriteFile(at(file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	env := append(os.Environ(), "CONTAINERS_STORAGE_CONF="+at("storage.conf"), "CONTAINERS_CONF="+at("containers.conf"), "DOCKER_HOST=unix:///dev/null", "TMPDIR="+temp)
	t.Cleanup(func() {
		for _, args := range [][]string{{"rm", "-af", "-t", "0"}, {"volume", "rm", "-af"}, {"rmi", "-af"}} {
			cmd := exec.Command("podman", args...)
			if cmd.Env = env; cmd.Run() != nil {
				t.Errorf("podman %v failed", args)
			}
		}
		_ = syscall.Unmount(at("root/overlay"), syscall.MNT_DETACH) // which podman binds to itself
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return env
}

func bash(t *testing.T, script string, env []string) string {
	t.Helper()
	ctx := t.Context()
	if end, ok := t.Deadline(); ok { // a minute before go test's, which shows no output
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, end.Add(-time.Minute))
		defer cancel()
	}
	cmd := exec.CommandContext(ctx, "bash", "-c", "set -m -e -o pipefail\ntrap 'for job in $(jobs -p); do kill -- -$job; done' EXIT\n"+script)
	cmd.Dir, cmd.Env = root, env
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v in\n%s\n%s", err, script, out.String())
	}
	return out.String()
}
