package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// caged are variables of a sidecar whose sessions inCage looks at.
var caged = map[string]string{"SANDBOX_ULIMIT_NPROC": "30000", "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": "4"}

// inCage checks each flag of a session's container, as the engine has it and as the
// kernel does that the session meets. It returns what the engine says of it.
func inCage(t *testing.T, s *sidecar, c *client, id string) string {
	t.Helper()
	type mounted struct {
		Destination string
		RW          bool
	}
	var in []struct {
		OCIRuntime string // of podman
		Mounts     []mounted
		Config     struct {
			Image, User, WorkingDir string
			Labels                  map[string]string
		}
		HostConfig struct {
			Memory, MemorySwap, PidsLimit, NanoCpus int64
			Runtime, NetworkMode, IpcMode, PidMode  string
			ReadonlyRootfs, Privileged              bool
			SecurityOpt                             []string
			Tmpfs                                   map[string]string
			LogConfig                               struct{ Type string }
		}
	}
	text := s.podmanOut("inspect", "loomcycle-"+id)
	if err := json.Unmarshal([]byte(text), &in); err != nil {
		t.Fatal(err)
	}
	x, h, runtime := in[0], in[0].HostConfig, s.env["SANDBOX_RUNTIME"]
	pids, kernel := int64(512), "NoNewPrivs:1\nSeccomp:2\n"
	if runtime == "runsc" {
		pids, kernel = 8*pids+1024, "Seccomp:0\n" // counted with gVisor's own threads; it is gVisor that the host's seccomp holds
	}
	podman := x.OCIRuntime != ""
	if podman { // whose copies of the host's files they take the place of
		n := len(x.Mounts)
		x.Mounts = slices.DeleteFunc(x.Mounts, func(m mounted) bool {
			return !m.RW && (m.Destination == "/etc/hosts" || m.Destination == "/etc/resolv.conf")
		})
		if a := c.exec(id, hostFiles); a.Text != ownHosts || len(x.Mounts) != n-2 {
			t.Errorf("its hosts and resolv.conf are %+v", a)
		}
	}
	for what, ok := range map[string]bool{
		"its runtime":             podman && filepath.Base(x.OCIRuntime) == runtime || !podman && h.Runtime == runtime,
		"an image by its id":      podman || strings.HasPrefix(x.Config.Image, "sha256:"), // podman puts the image's name there
		"no network":              h.NetworkMode == "none",
		"read-only root":          h.ReadonlyRootfs && !h.Privileged,
		"no-new-privileges":       slices.Contains(h.SecurityOpt, "no-new-privileges"),
		"the default seccomp":     !strings.Contains(strings.Join(h.SecurityOpt, " "), "seccomp"),
		"user and directory":      x.Config.User == "1000:1000" && x.Config.WorkingDir == "/work",
		"memory without swap":     h.Memory == 512<<20 && h.MemorySwap == h.Memory,
		"pids and CPU":            h.PidsLimit == pids && h.NanoCpus == 1e9,
		"an IPC namespace":        h.IpcMode == "private" || h.IpcMode == "shareable", // podman 4.3 makes it joinable, by root
		"a PID namespace":         h.PidMode == "private" || h.PidMode == "",
		"no log":                  h.LogConfig.Type == "none",
		"modes of /work and /tmp": strings.Contains(h.Tmpfs["/work"], "mode=0777") && strings.Contains(h.Tmpfs["/tmp"], "mode=1777"),
		"the agent's mount alone": len(x.Mounts) == 1 && strings.HasPrefix(x.Mounts[0].Destination, "/run/loomcycle-agent") && !x.Mounts[0].RW,
		"its labels":              x.Config.Labels["loomcycle.managed"] == "1" && x.Config.Labels["loomcycle.instance"] == s.env["SANDBOX_INSTANCE"] && x.Config.Labels["loomcycle.session"] == id && x.Config.Labels["loomcycle.principal"] == "shared",
	} {
		if !ok {
			t.Errorf("not so: %s\n%+v", what, x)
		}
	}
	for path, options := range h.Tmpfs {
		if !strings.Contains(options, "size=") {
			t.Errorf("%s has no size: %s", path, options)
		}
	}
	// Limits, soft and hard, and what the inspections of some versions leave out.
	want := "4096 4096 30000 30000 0 0\n" + strings.Repeat("0000000000000000\n", 4) + kernel
	if a := c.exec(id, "echo $(ulimit -Sn; ulimit -Hn; ulimit -Su; ulimit -Hu; ulimit -Sc; ulimit -Hc); grep -E '^Cap(Inh|Prm|Eff|Bnd):' /proc/self/status | cut -f 2; grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t'"); a.Text != want {
		t.Errorf("inside there is\n%s instead of\n%s", a.Text, want)
	}
	if a := c.exec(id, "for d in / /run /etc /usr /var /dev /opt /home; do touch $d/x 2>/dev/null && echo $d; done; ls /sys/class/net 2>/dev/null | grep -vx lo; true"); a.Text != "" {
		t.Errorf("it may write to, or reach, %s", a.Text)
	}
	return text
}

// What a session's container is, and what is told of it. Other runtimes' are in
// TestTextForms, docker's in TestDockerStoppedAndStarted.
func TestCage(t *testing.T) {
	s := start(t, "runc", caged)
	s.stop()
	s.env["SANDBOX_IMAGES"], s.env["SANDBOX_ALLOW_ENV_INJECTION"] = "other="+s.env["SANDBOX_IMAGE"], "1"
	s.run()
	c := s.as(map[string]string{"X-Loom-Root-Run": "run-1", "X-Loom-Tenant": "acme", "X-Loom-Sandbox-Env-Gh-Token": "s3cret-value"})
	id := c.open(m{"image": "other"})
	text := inCage(t, s, c, id)
	if strings.Contains(text, "s3cret") || !strings.Contains(text, `"loomcycle.run": "run-1"`) {
		t.Errorf("the engine has an injected value, or no label of the run: %s", text)
	}
	list := c.call("sandbox_list", m{})
	for _, want := range []string{`"image":"other"`, `"root_run_id":"run-1"`, `"tenant":"acme"`, `"created_at"`, `"last_used"`} {
		if !strings.Contains(list.Text, want) {
			t.Errorf("the list has no %s: %s", want, list.Text)
		}
	}
	// The tags are those of the open, whatever later calls claim.
	other := s.as(map[string]string{"X-Loom-Root-Run": "run-2", "X-Loom-Tenant": "evil"})
	other.call("sandbox_touch", m{"session_id": id})
	if a := other.call("sandbox_close_run", m{"root_run_id": "run-2"}); a.Text != "closed 0 sessions" {
		t.Errorf("a later header moved the session: %+v", a)
	}

	t.Run("metrics", func(t *testing.T) {
		resp, err := http.Get(s.URL + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		for _, want := range []string{"sandbox_sessions 1", `sandbox_tool_seconds_count{outcome="ok",tool="sandbox_exec"} 3`, `sandbox_open_seconds_count{outcome="ok",source="cold"} 1`, `sandbox_build_info{version="test"} 1`} {
			if !strings.Contains(string(b), want) {
				t.Errorf("no %s", want)
			}
		}
		for _, private := range []string{id, "run-1", "acme", "s3cret", "shared"} {
			if strings.Contains(string(b), private) {
				t.Errorf("%q is in the metrics", private)
			}
		}
	})
	t.Run("log", func(t *testing.T) {
		c.call("sandbox_exec", m{"session_id": id, "command": "echo content-of-mine", "env": m{"A": "env-of-mine"}, "stdin": "stdin-of-mine"})
		c.call("sandbox_write", m{"session_id": id, "path": "path-of-mine/../../x", "content": "content-of-mine"})
		c.call("sandbox_close", m{"session_id": id})
		eventually(t, 30*time.Second, "the close is logged", func() bool { return strings.Contains(s.log.String(), `"msg":"call","tool":"sandbox_close"`) })
		calls := map[string]bool{}
		for _, line := range strings.Split(strings.TrimSpace(s.log.String()), "\n") {
			var entry map[string]any
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				t.Errorf("no JSON: %s", line)
			}
			if entry["msg"] == "session closed" && entry["session"] == id && (entry["principal"] != "shared" || entry["run"] != "run-1") {
				t.Errorf("the close is logged as %s", line)
			}
			// A time has its unit in its name.
			if name := map[any]string{"call": "took_seconds", "call failed": "took_seconds", "session opened": "took_seconds", "session closed": "age_seconds"}[entry["msg"]]; name != "" {
				if n, _ := entry[name].(float64); n <= 0 || n > 600 {
					t.Errorf("%s is %v in %s", name, entry[name], line)
				}
			}
			if entry["session"] == id && entry["principal"] == "shared" && entry["run"] == "run-1" {
				calls[fmt.Sprint(entry["msg"], ", ", entry["tool"], ", ", entry["kind"])] = true
			}
		}
		for _, want := range []string{"call, sandbox_open, ", "call, sandbox_exec, ", "call failed, sandbox_write, wrong_argument", "call, sandbox_close, "} {
			if !calls[want] {
				t.Errorf("the log of the session has no %q, but %v", want, calls)
			}
		}
		for _, private := range []string{"of-mine", "s3cret", token} {
			if strings.Contains(s.log.String(), private) {
				t.Errorf("%q is in the log", private)
			}
		}
	})
}
