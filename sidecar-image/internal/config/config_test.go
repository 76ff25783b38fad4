package config

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func load(env map[string]string) (*Config, error) {
	return Load(func(k string) string { return env[k] })
}

func TestDefaults(t *testing.T) {
	c, err := load(map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_AUTH_TOKEN": "t"})
	if err != nil {
		t.Fatal(err)
	}
	if c.Listen != "127.0.0.1:9000" || c.IdleTTL != 30*time.Minute || c.MemMB != (Range{2048, 8192}) || c.Tokens[0].Secret != "t" || c.Pull != "missing" {
		t.Errorf("%+v", c)
	}
}

// Every wrong variable is named, with what is allowed, all at once.
func TestErrors(t *testing.T) {
	_, err := load(map[string]string{
		"SANDBOX_RUNTIME": "lxc", "SANDBOX_MEM_MB": "lots", "SANDBOX_ALLOW_ANON": "1", "SANDBOX_LISTEN_ADDR": "0.0.0.0:9000", "DOCKER_HOST": "/var/run/docker.sock",
		"SANDBOX_CPU": "9", "SANDBOX_IMAGES": "x", "SANDBOX_RUN_STATUS_URL": "http://runtime/", "SANDBOX_MAX_SESSIONS": "-1", "SANDBOX_IMAGE_PULL": "always",
		"SANDBOX_RUN_STATUS_INTERVAL_SECONDS": "0", "SANDBOX_EXEC_TIMEOUT_SECONDS": "0", "SANDBOX_IDENTITY_LEEWAY_SECONDS": "-1",
	})
	for _, want := range []string{
		`SANDBOX_RUNTIME: "lxc" is not one of runc, crun, runsc, kata`, `SANDBOX_MEM_MB: "lots"`, "loopback", "SANDBOX_IMAGE is not set", "DOCKER_HOST",
		"SANDBOX_CPU=9 is above SANDBOX_MAX_CPU=4", "NAME=REFERENCE", "{root_run_id}", "SANDBOX_MAX_SESSIONS", `"always" is not one of missing, never`,
		`SANDBOX_RUN_STATUS_INTERVAL_SECONDS: "0" is not a whole number of seconds, at least 1`, "SANDBOX_EXEC_TIMEOUT_SECONDS", "LEEWAY_SECONDS: \"-1\"",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

// RLIMIT_NPROC counts the session uid over all containers: below what one
// principal may fill, it has every other tenant's commands fail.
func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		nproc, pids, sessions, each string
		all                         int64
		refused                     bool
	}{
		{"", "", "", "", 4096 * 200, false},
		{"16384", "", "", "", 4096 * 200, true},
		{"86015", "", "", "", 4096 * 200, true},
		{"86016", "", "", "", 4096 * 200, false},
		{"16384", "512", "", "", 512 * 200, false},
		{"16384", "", "", "3", 4096 * 200, false},
		{"16384", "", "4", "", 4096 * 4, false}, // the whole sidecar's
		{"16383", "", "4", "", 4096 * 4, true},
		{"", "512", "0", "0", 512, false},
	} {
		got, err := load(map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_ULIMIT_NPROC": c.nproc, "SANDBOX_MAX_PIDS": c.pids, "SANDBOX_MAX_SESSIONS": c.sessions, "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": c.each})
		if refused := err != nil && strings.Contains(err.Error(), "SANDBOX_ULIMIT_NPROC="); refused != c.refused || err != nil && !refused {
			t.Errorf("%+v: %v", c, err)
		}
		if all := got.AllProcesses(); all != c.all {
			t.Errorf("%+v: %d for all", c, all)
		}
	}
}

func TestDocumentation(t *testing.T) {
	var text, md bytes.Buffer
	Help(&text)
	Markdown(&md)
	for _, v := range Vars {
		if !strings.Contains(text.String(), v.Name) || !strings.Contains(md.String(), "`"+v.Name+"`") || v.Doc == "" {
			t.Errorf("%s is not documented", v.Name)
		}
	}
}
