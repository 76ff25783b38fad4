package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// What a session's container is, as the engine has it: each flag of the cage.
func TestCage(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_ALLOW_ENV_INJECTION": "1"})
	s.stop()
	s.env["SANDBOX_IMAGES"] = "other=" + s.env["SANDBOX_IMAGE"]
	s.run()
	c := s.as(map[string]string{"X-Loom-Root-Run": "run-1", "X-Loom-Tenant": "acme", "X-Loom-Sandbox-Env-Gh-Token": "s3cret-value"})
	id := c.open(m{"image": "other"})
	var in []struct {
		Image  string
		Mounts []struct {
			Type, Source, Destination string
			RW                        bool
		}
		EffectiveCaps, BoundingCaps []string
		Config                      struct {
			User       string
			Labels     map[string]string
			Env        []string
			WorkingDir string
		}
		HostConfig struct {
			Memory, MemorySwap, PidsLimit, NanoCpus   int64
			NetworkMode, IpcMode, PidMode, CgroupMode string
			ReadonlyRootfs, Privileged                bool
			SecurityOpt                               []string
			Tmpfs                                     map[string]string
			LogConfig                                 struct{ Type string }
			Ulimits                                   []struct {
				Name       string
				Soft, Hard int64
			}
		}
	}
	text := s.podmanOut("inspect", "loomcycle-"+id)
	if err := json.Unmarshal([]byte(text), &in); err != nil {
		t.Fatal(err)
	}
	x, h := in[0], in[0].HostConfig
	for what, ok := range map[string]bool{
		"no network":                 h.NetworkMode == "none",
		"read-only root":             h.ReadonlyRootfs && !h.Privileged,
		"no capability":              len(x.EffectiveCaps) == 0 && len(x.BoundingCaps) == 0,
		"no-new-privileges":          slices.Contains(h.SecurityOpt, "no-new-privileges"),
		"the default seccomp":        !strings.Contains(strings.Join(h.SecurityOpt, " "), "seccomp=unconfined"),
		"user and directory":         x.Config.User == "1000:1000" && x.Config.WorkingDir == "/work",
		"memory without swap":        h.Memory == 512<<20 && h.MemorySwap == h.Memory,
		"pids and CPU":               h.PidsLimit == 512 && h.NanoCpus == 1e9,
		"namespaces of its own":      (h.IpcMode == "private" || h.IpcMode == "shareable") && h.PidMode == "private", // podman 4.3 makes it joinable, by root
		"no log":                     h.LogConfig.Type == "none",
		"/work and /tmp with a size": strings.Contains(h.Tmpfs["/work"], "size=") && strings.Contains(h.Tmpfs["/work"], "mode=0777") && strings.Contains(h.Tmpfs["/tmp"], "size="),
		"an image by its id":         len(x.Image) == 64,
		"its labels": x.Config.Labels["loomcycle.managed"] == "1" && x.Config.Labels["loomcycle.instance"] == s.env["SANDBOX_INSTANCE"] && x.Config.Labels["loomcycle.session"] == id &&
			x.Config.Labels["loomcycle.principal"] == "shared" && x.Config.Labels["loomcycle.run"] == "run-1",
		"no injected value in the engine": !strings.Contains(text, "s3cret"),
	} {
		if !ok {
			t.Errorf("not so: %s\n%+v", what, x)
		}
	}
	// Podman's inspect says nothing of limits that it was given; the kernel does.
	if a := c.exec(id, "grep -E 'open files|core file' /proc/self/limits | tr -s ' '; grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t'"); a.Text != "Max core file size 0 0 bytes \nMax open files 4096 4096 files \nNoNewPrivs:1\nSeccomp:2\n" {
		t.Errorf("the limits inside: %q", a.Text)
	}
	for path, options := range h.Tmpfs {
		if !strings.Contains(options, "size=") {
			t.Errorf("%s has no size: %s", path, options)
		}
	}
	if a := c.exec(id, "for d in / /run /etc /usr /var /dev /opt /home; do touch $d/x 2>/dev/null && echo $d; done; true"); a.Text != "" {
		t.Errorf("it may write to %s", a.Text)
	}
	if len(x.Mounts) != 1 || x.Mounts[0].Destination != "/run/loomcycle-agent/session-agent" || x.Mounts[0].RW {
		t.Errorf("its mounts: %+v", x.Mounts)
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
		for _, want := range []string{"sandbox_sessions 1", `sandbox_tool_seconds_count{outcome="ok",tool="sandbox_exec"} 2`, `sandbox_open_seconds_count{outcome="ok",source="cold"} 1`, `sandbox_build_info{version="test"} 1`} {
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
		eventually(t, 5*time.Second, "the close is logged", func() bool { return strings.Contains(s.log.String(), `"session closed"`) })
		calls := map[string]bool{}
		for _, line := range strings.Split(strings.TrimSpace(s.log.String()), "\n") {
			var entry map[string]any
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				t.Errorf("no JSON: %s", line)
			}
			if entry["msg"] == "session closed" && entry["session"] == id && (entry["principal"] != "shared" || entry["run"] != "run-1") {
				t.Errorf("the close is logged as %s", line)
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
