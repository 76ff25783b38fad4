package config

import (
	"bytes"
	"fmt"
	"slices"
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
	// A shared token is one principal, whose names nobody deletes but the operator.
	if c.Workspaces != 0 {
		t.Errorf("%d workspaces are all that a deployment with one token may ever have", c.Workspaces)
	}
}

// Each variable reaches the field that is read of it.
func TestVariables(t *testing.T) {
	env, want := map[string]string{"SANDBOX_IMAGE": "i"}, map[string]string{}
	for _, row := range [][3]string{
		{"SANDBOX_LISTEN_ADDR", "127.0.0.2:1", "Listen:127.0.0.2:1"}, {"SANDBOX_LOG_LEVEL", "warn", "Log:warn"},
		{"SANDBOX_AUTH_TOKENS", "a=one", "Tokens:[{Name:a Secret:one}]"}, {"SANDBOX_AUTH_TOKEN_FILE", "/tokens", "TokenFile:/tokens"}, {"SANDBOX_ALLOW_ANON", "1", "Anon:true"},
		{"SANDBOX_IDENTITY_JWKS", "/jwks", "JWKS:/jwks"}, {"SANDBOX_IDENTITY_ISSUER", "loom", "Issuer:loom"}, {"SANDBOX_IDENTITY_AUDIENCE", "us", "Audience:us"}, {"SANDBOX_IDENTITY_LEEWAY_SECONDS", "7", "Leeway:7s"}, {"SANDBOX_IDENTITY_REQUIRE_JTI", "1", "Once:true"},
		{"SANDBOX_ALLOW_ENV_INJECTION", "1", "InjectEnv:true"},
		{"SANDBOX_ENGINE", "docker", "Engine:docker"}, {"CONTAINER_HOST", "unix:///p", "Host:unix:///p"}, {"SANDBOX_RUNTIME", "crun", "Runtime:crun"}, {"SANDBOX_PODMAN_OPTIONS", "--a --b", "PodmanOptions:[--a --b]"},
		{"SANDBOX_AGENT", "/agent", "Agent:/agent"}, {"SANDBOX_AGENT_PATH", "/host/agent", "AgentPath:/host/agent"}, {"SANDBOX_ULIMIT_NOFILE", "101", "NoFile:101"}, {"SANDBOX_ULIMIT_NPROC", "102000", "NProc:102000"},
		{"SANDBOX_IMAGE", "image", "Image:image"}, {"SANDBOX_IMAGES", "a=b", "Images:map[a:b]"}, {"SANDBOX_IMAGE_PULL", "never", "Pull:never"}, {"SANDBOX_IMAGE_POLICY", "/policy", "ImagePolicy:/policy"},
		{"SANDBOX_ALLOW_EGRESS", "1", "AllowEgress:true"}, {"SANDBOX_EGRESS_NETWORK", "out", "EgressNetwork:out"},
		{"SANDBOX_CPU", "0.5", "CPU:0.5"}, {"SANDBOX_MAX_CPU", "1.5", "MaxCPU:1.5"}, {"SANDBOX_MEM_MB", "103", "MemMB:{Default:103 Max:104}"}, {"SANDBOX_MAX_MEM_MB", "104", "MemMB:{Default:103 Max:104}"},
		{"SANDBOX_TMPFS_MB", "105", "TmpfsMB:{Default:105 Max:106}"}, {"SANDBOX_MAX_TMPFS_MB", "106", "TmpfsMB:{Default:105 Max:106}"}, {"SANDBOX_TMP_MB", "107", "TmpMB:107"},
		{"SANDBOX_PIDS", "108", "Pids:{Default:108 Max:109}"}, {"SANDBOX_MAX_PIDS", "109", "Pids:{Default:108 Max:109}"},
		{"SANDBOX_IDLE_TTL_SECONDS", "11", "IdleTTL:11s"}, {"SANDBOX_TTL_SECONDS", "12", "TTL:12s"}, {"SANDBOX_MAX_TTL_SECONDS", "13", "MaxTTL:13s"},
		{"SANDBOX_EXEC_TIMEOUT_SECONDS", "14", "Timeout:14s"}, {"SANDBOX_MAX_EXEC_TIMEOUT_SECONDS", "15", "MaxTimeout:15s"},
		{"SANDBOX_OUTPUT_BYTES", "1001", "Output:{Default:1001 Max:1002}"}, {"SANDBOX_MAX_OUTPUT_BYTES", "1002", "Output:{Default:1001 Max:1002}"}, {"SANDBOX_MAX_FILE_BYTES", "1025", "MaxFile:1025"},
		{"SANDBOX_MAX_SESSIONS", "21", "Sessions:21"}, {"SANDBOX_MAX_SESSIONS_PER_PRINCIPAL", "22", "PerPrincipal:22"}, {"SANDBOX_MAX_SESSIONS_PER_TENANT", "20", "PerTenant:20"}, {"SANDBOX_WARM_POOL", "19", "WarmPool:19"},
		{"SANDBOX_STATE_DIR", "/state", "StateDir:/state"}, {"SANDBOX_INSTANCE", "me", "Instance:me"},
		{"SANDBOX_WORKSPACE_ROOT", "/ws", "WorkspaceRoot:/ws"}, {"SANDBOX_WORKSPACE_HOST_ROOT", "/host/ws", "WorkspaceHost:/host/ws"}, {"SANDBOX_WORKSPACE_QUOTA_MB", "24", "WorkspaceMB:24"}, {"SANDBOX_MAX_WORKSPACES_PER_PRINCIPAL", "26", "Workspaces:26"},
		{"SANDBOX_RUN_STATUS_URL", "http://r/{root_run_id}", "RunStatusURL:http://r/{root_run_id}"}, {"SANDBOX_RUN_STATUS_TOKEN", "status", "RunStatusToken:status"}, {"SANDBOX_RUN_STATUS_INTERVAL_SECONDS", "25", "RunStatusInterval:25s"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://o", "Traces:http://o"},
	} {
		env[row[0]], want[row[0]] = row[1], row[2]
	}
	c, err := load(env)
	if err != nil {
		t.Fatal(err)
	}
	got := " " + strings.Trim(fmt.Sprintf("%+v", *c), "{}") + " "
	for _, v := range Vars {
		switch field, ok := want[v.Name]; {
		case !ok && !slices.Contains([]string{"SANDBOX_AUTH_TOKEN", "DOCKER_HOST", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}, v.Name): // of which each has a twin above
			t.Errorf("%s has no row here", v.Name)
		case ok && !strings.Contains(got, " "+field+" "):
			t.Errorf("%s=%s: no %s in %s", v.Name, env[v.Name], field, got)
		}
	}
}

// Every wrong variable is named, with what is allowed, all at once.
func TestErrors(t *testing.T) {
	_, err := load(map[string]string{
		"SANDBOX_RUNTIME": "lxc", "SANDBOX_MEM_MB": "lots", "SANDBOX_ALLOW_ANON": "1", "SANDBOX_LISTEN_ADDR": "0.0.0.0:9000", "DOCKER_HOST": "/var/run/docker.sock",
		"SANDBOX_CPU": "9", "SANDBOX_IMAGES": "x", "SANDBOX_RUN_STATUS_URL": "http://runtime/", "SANDBOX_MAX_SESSIONS": "-1", "SANDBOX_IMAGE_PULL": "always",
		"SANDBOX_RUN_STATUS_INTERVAL_SECONDS": "0", "SANDBOX_EXEC_TIMEOUT_SECONDS": "0", "SANDBOX_IDENTITY_LEEWAY_SECONDS": "-1", "SANDBOX_AUTH_TOKENS": "alice=x-secret,bob",
	})
	for _, want := range []string{
		`SANDBOX_RUNTIME: "lxc" is not one of runc, crun, runsc, kata`, `SANDBOX_MEM_MB: "lots"`, "loopback", "SANDBOX_IMAGE is not set", "DOCKER_HOST",
		"SANDBOX_CPU=9 is above SANDBOX_MAX_CPU=4", "NAME=REFERENCE", "{root_run_id}", "SANDBOX_MAX_SESSIONS", `"always" is not one of missing, never`,
		`SANDBOX_RUN_STATUS_INTERVAL_SECONDS: "0" is not a whole number of seconds, at least 1`, "SANDBOX_EXEC_TIMEOUT_SECONDS", "SANDBOX_AUTH_TOKENS: token 2 has no name", "LEEWAY_SECONDS: \"-1\"",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

// What any engine takes for a network and is none, or not the session's own, is refused where
// sessions may have one at all.
func TestEgressNetwork(t *testing.T) {
	for name, refused := range map[string]bool{
		"bridge": false, "podman": false, "sandbox-egress": false, "Net_1.x": false, "hostnet": false, "nonesuch": false,
		"host": true, "Host": true, "none": true, "container:abc": true, "ns:/proc/1/ns/net": true, "pod:x": true, "private": false, "default": false, "pasta": false,
		"slirp4netns:allow_host_loopback=true": true, "pasta:-T,auto": true, "bridge:ip=10.88.0.9": true, "bridge,other": true, "../x": true, " ": true, "-x": true,
	} {
		env := map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_EGRESS_NETWORK": name}
		if _, err := load(env); err != nil {
			t.Errorf("%q, without egress: %v", name, err)
		}
		env["SANDBOX_ALLOW_EGRESS"] = "1"
		c, err := load(env)
		if (err != nil) != refused || err == nil && c.EgressNetwork != name || err != nil && !strings.Contains(err.Error(), "SANDBOX_EGRESS_NETWORK: ") {
			t.Errorf("%q: %q, %v", name, c.EgressNetwork, err)
		}
	}
}

// What would only show when it is too late is refused at boot, with the variable named
// and without what it may hold of a password.
func TestRefused(t *testing.T) {
	for _, c := range []struct{ set, want string }{ // NAME=VALUE, separated by spaces
		{"SANDBOX_RUN_STATUS_URL=notaurl/{root_run_id}", "SANDBOX_RUN_STATUS_URL: it is no URL"},
		{"SANDBOX_RUN_STATUS_URL=http:///{root_run_id}", "SANDBOX_RUN_STATUS_URL: it is no URL"},
		{"SANDBOX_RUN_STATUS_URL=ftp://u:s3cret@r/{root_run_id}", "SANDBOX_RUN_STATUS_URL: it is no URL"},
		{"SANDBOX_RUN_STATUS_URL=http://u:s3cret@r:8080/runs?id={root_run_id}", ""},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=:::", "OTEL_EXPORTER_OTLP_ENDPOINT: it is no URL"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT: it is no URL"},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: it is no URL"},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://[::1]:4318/v1/traces", ""},
		{"SANDBOX_IDENTITY_ISSUER=loom", "SANDBOX_IDENTITY_ISSUER is set, but means nothing without SANDBOX_IDENTITY_JWKS"},
		{"SANDBOX_IDENTITY_AUDIENCE=sandbox", "SANDBOX_IDENTITY_AUDIENCE is set"},
		{"SANDBOX_IDENTITY_LEEWAY_SECONDS=1", "SANDBOX_IDENTITY_LEEWAY_SECONDS is set"},
		{"SANDBOX_IDENTITY_REQUIRE_JTI=1", "SANDBOX_IDENTITY_REQUIRE_JTI is set"},
		{"SANDBOX_MAX_SESSIONS_PER_TENANT=3", "SANDBOX_MAX_SESSIONS_PER_TENANT is set"},
		{"SANDBOX_IDENTITY_JWKS=/keys SANDBOX_IDENTITY_ISSUER=loom SANDBOX_MAX_SESSIONS_PER_TENANT=3", ""},
		{"SANDBOX_WORKSPACE_HOST_ROOT=/srv/ws", "SANDBOX_WORKSPACE_HOST_ROOT is set, but means nothing without SANDBOX_WORKSPACE_ROOT"},
		{"SANDBOX_IMAGES=default=registry.example/x", "SANDBOX_IMAGES: default is the name of SANDBOX_IMAGE"},
		{"SANDBOX_IMAGES=a=registry.example/x,a=registry.example/y", "SANDBOX_IMAGES: a stands for two images"},
		{"SANDBOX_WARM_POOL=9 SANDBOX_MAX_SESSIONS=8", "SANDBOX_WARM_POOL=9 is above SANDBOX_MAX_SESSIONS=8"},
		{"SANDBOX_WARM_POOL=8 SANDBOX_MAX_SESSIONS=8", ""},
		{"DOCKER_HOST=unix://run/docker.sock", "DOCKER_HOST: "},
		{"DOCKER_HOST=unix:///run/docker.sock", ""},
		{"DOCKER_HOST=unix:/run/docker.sock", "DOCKER_HOST: "},
		{"CONTAINER_HOST=ssh://u@h/run/podman.sock", "CONTAINER_HOST: "},
		{"DOCKER_HOST=tcp://h", "DOCKER_HOST: "},
		{"DOCKER_HOST=tcp://[::1]:2375", ""},
	} {
		env := map[string]string{"SANDBOX_IMAGE": "i"}
		for _, kv := range strings.Fields(c.set) {
			name, value, _ := strings.Cut(kv, "=")
			env[name] = value
		}
		_, err := load(env)
		if (err != nil) != (c.want != "") || err != nil && (!strings.HasPrefix(err.Error(), c.want) || strings.Contains(err.Error(), "s3cret")) {
			t.Errorf("%s: %v", c.set, err)
		}
	}
}

// Docker is a running engine, also where only its name was given: the sidecar neither makes
// room for its containers nor ends its sessions.
func TestHost(t *testing.T) {
	for _, c := range []struct{ engine, podman, docker, want string }{
		{"", "", "", ""}, {"podman", "", "", ""}, {"docker", "", "", "unix:///var/run/docker.sock"}, {"docker", "", "tcp://h:2375", "tcp://h:2375"},
		{"docker", "unix:///p", "", "unix:///p"}, {"", "unix:///p", "", "unix:///p"}, {"podman", "", "unix:///d", "unix:///d"},
	} {
		got, err := load(map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_ENGINE": c.engine, "CONTAINER_HOST": c.podman, "DOCKER_HOST": c.docker})
		if err != nil || got.Host != c.want {
			t.Errorf("%+v: %q, %v", c, got.Host, err)
		}
	}
}

// RLIMIT_NPROC counts the session uid over all containers: below what one
// principal may fill, it has every other tenant's commands fail.
func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		nproc, pids, sessions, each, tenants string // tenants for SANDBOX_MAX_SESSIONS_PER_TENANT, with signed identities
		all                                  int64
		refused                              bool
	}{
		{"", "", "", "", "none", 4096 * 200, false},
		{"16384", "", "", "", "none", 4096 * 200, true},
		{"86015", "", "", "", "none", 4096 * 200, true},
		{"86016", "", "", "", "none", 4096 * 200, false},
		{"16384", "512", "", "", "none", 512 * 200, false},
		{"16384", "", "", "3", "none", 4096 * 200, false},
		{"16384", "", "4", "", "none", 4096 * 4, false}, // the whole sidecar's
		{"16383", "", "4", "", "none", 4096 * 4, true},
		{"", "512", "0", "0", "none", 512, false},
		{"741376", "", "", "", "", 4096 * 200, false}, // 181 sessions: 200 less the 20 of one principal, and one
		{"741375", "", "", "", "", 4096 * 200, true},
		{"86015", "", "", "", "20", 4096 * 200, true},
		{"86016", "", "", "", "20", 4096 * 200, false},
		{"", "", "30", "20", "", 4096 * 30, false},
	} {
		env := map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_ULIMIT_NPROC": c.nproc, "SANDBOX_MAX_PIDS": c.pids, "SANDBOX_MAX_SESSIONS": c.sessions, "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": c.each}
		if c.tenants != "none" {
			env["SANDBOX_MAX_SESSIONS_PER_TENANT"], env["SANDBOX_IDENTITY_JWKS"] = c.tenants, "/keys"
		}
		got, err := load(env)
		if refused := err != nil && strings.Contains(err.Error(), "SANDBOX_ULIMIT_NPROC="); refused != c.refused || err != nil && !refused {
			t.Errorf("%+v: %v", c, err)
		}
		if all := got.AllProcesses(); all != c.all {
			t.Errorf("%+v: %d for all", c, all)
		}
	}
}

// A tenant leaves room for a principal of another, unless the operator says otherwise.
func TestTenants(t *testing.T) {
	for _, c := range []struct {
		sessions, each, tenants string
		want                    int
	}{
		{"", "", "", 180}, {"30", "20", "", 20}, {"10", "20", "", 20}, {"", "", "7", 7}, {"", "", "0", 0},
	} {
		got, err := load(map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_IDENTITY_JWKS": "/keys", "SANDBOX_MAX_SESSIONS": c.sessions, "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": c.each, "SANDBOX_MAX_SESSIONS_PER_TENANT": c.tenants})
		if err != nil || got.PerTenant != c.want {
			t.Errorf("%+v: %d, %v", c, got.PerTenant, err)
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

func TestUnknownVars(t *testing.T) {
	environ := []string{"PATH=/bin", "SANDBOX_IMAGE=i", "DOCKER_HOST=unix:///x", "OTEL_EXPORTER_OTLP_ENDPOINT=http://o", "MY_SANDBOX_CPU=1",
		"SANDBOX_SERVICE_HOST=10.0.0.1", "SANDBOX_SERVICE_PORT=9000", "SANDBOX_SERVICE_PORT_MCP=9000", "SANDBOX_PORT=tcp://10.0.0.1:9000", "SANDBOX_PORT_9000_TCP=tcp://10.0.0.1:9000", "SANDBOX_PORT_9000_TCP_ADDR=10.0.0.1"} // Kubernetes'
	want := []Unknown{}
	for name, nearest := range map[string]string{
		"SANDBOX_MAX_SESSION": "SANDBOX_MAX_SESSIONS", "SANDBOX_IMAGE_PUL": "SANDBOX_IMAGE_PULL", "SANDBOX_MEMORY_MB": "SANDBOX_MEM_MB", "SANDBOX_CPUS": "SANDBOX_CPU",
		"SANDBOX_RUNTIM": "SANDBOX_RUNTIME", "SANDBOX_PORT": "", "SANDBOX_AUTH_TOKN": "SANDBOX_AUTH_TOKEN", "SANDBOX_image": "", "SANDBOX_": "", "SANDBOX_COLOUR_OF_THE_HOUSE": "",
	} {
		environ, want = append(environ, name+"=s3cret"), append(want, Unknown{name, nearest})
	}
	slices.SortFunc(want, func(a, b Unknown) int { return strings.Compare(a.Name, b.Name) })
	got := UnknownVars(environ)
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	for _, u := range got {
		if text := u.Error(); strings.Contains(text, "s3cret") || !strings.Contains(text, u.Name) || !strings.Contains(text, u.Nearest) {
			t.Error(text)
		}
	}
}
