// Package config reads the sidecar's environment. One table says every
// variable's name, default and meaning; --help and the documentation are made
// from it.
package config

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
)

// DefaultListen is where the sidecar listens, and is asked for its health.
const DefaultListen = "127.0.0.1:9000"

// dockerHost is where docker is without DOCKER_HOST.
const dockerHost = "unix:///var/run/docker.sock"

// DefaultStateDir is where the session records are.
const DefaultStateDir = "/var/lib/loomcycle-builder"

// DefaultImage is what sandbox_open may call SANDBOX_IMAGE.
const DefaultImage = "default"

// The least of what a session, or the operator, may ask for.
const (
	LeastMemMB = 16
	LeastPids  = 16
	LeastCPU   = 0.01
)

// Config is the sidecar's configuration.
type Config struct {
	Listen string
	Log    string

	Tokens    []identity.Token
	TokenFile string
	Anon      bool
	JWKS      string
	Issuer    string
	Audience  string
	Leeway    time.Duration
	Once      bool
	InjectEnv bool

	Engine        string
	Host          string // of a running engine; empty for a podman that the sidecar starts
	Runtime       string
	PodmanOptions []string
	Agent         string
	AgentPath     string
	NoFile        int64
	NProc         int64 // 0 for AllProcesses

	Image       string
	Images      map[string]string
	Pull        string
	ImagePolicy string

	AllowEgress   bool
	EgressNetwork string
	CPU, MaxCPU   float64
	MemMB         Range
	TmpfsMB       Range
	TmpMB         int64
	Pids          Range
	IdleTTL       time.Duration
	TTL, MaxTTL   time.Duration

	Timeout, MaxTimeout time.Duration
	Output              Range // bytes
	MaxFile             int64 // bytes

	Sessions     int
	PerPrincipal int
	PerTenant    int
	WarmPool     int

	StateDir      string
	Instance      string
	WorkspaceRoot string
	WorkspaceHost string
	WorkspaceMB   int64
	Workspaces    int // of one principal, 0 for no limit

	Traces string // any endpoint; the OpenTelemetry SDK reads the variables itself

	RunStatusURL      string
	RunStatusToken    string
	RunStatusInterval time.Duration
}

// Range is a default and a ceiling.
type Range struct{ Default, Max int64 }

// Var is one variable of the environment.
type Var struct {
	Name    string
	Default string
	Doc     string
	set     func(*Config, string) error
}

// Vars is every variable, in the order of the documentation.
var Vars = []Var{
	{"SANDBOX_LISTEN_ADDR", DefaultListen, "address to listen on; the images set 0.0.0.0:9000", str(func(c *Config) *string { return &c.Listen })},
	{"SANDBOX_LOG_LEVEL", "info", "debug, info, warn or error; logs are JSON lines on stderr", oneOf(func(c *Config) *string { return &c.Log }, "debug", "info", "warn", "error")},

	{"SANDBOX_AUTH_TOKEN", "", "bearer token that every request must carry; required (or one of the two below)", tokens(true)},
	{"SANDBOX_AUTH_TOKENS", "", "more tokens, NAME=SECRET separated by commas; a token's name is its principal, and several may share a name while one replaces another", tokens(false)},
	{"SANDBOX_AUTH_TOKEN_FILE", "", "file of tokens, one a line, as SECRET or NAME=SECRET; read again when it has changed", str(func(c *Config) *string { return &c.TokenFile })},
	{"SANDBOX_ALLOW_ANON", "0", "1 lets requests in without a token, on a loopback address only", boolean(func(c *Config) *bool { return &c.Anon })},
	{"SANDBOX_IDENTITY_JWKS", "", "file or URL of a JSON Web Key Set; when set, each call needs a token signed by one of its keys in X-Loom-Identity", str(func(c *Config) *string { return &c.JWKS })},
	{"SANDBOX_IDENTITY_ISSUER", "", "issuer (iss) that identities must have; empty accepts any. It and the three below are refused without SANDBOX_IDENTITY_JWKS", str(func(c *Config) *string { return &c.Issuer })},
	{"SANDBOX_IDENTITY_AUDIENCE", "sandbox", "audience (aud) that identities must have", str(func(c *Config) *string { return &c.Audience })},
	{"SANDBOX_IDENTITY_LEEWAY_SECONDS", "30", "difference allowed between the signer's clock and ours", seconds(func(c *Config) *time.Duration { return &c.Leeway }, 0)},
	{"SANDBOX_IDENTITY_REQUIRE_JTI", "0", "1 refuses an identity without an id of its own (jti): one that has it is accepted once, one without it until it expires", boolean(func(c *Config) *bool { return &c.Once })},
	{"SANDBOX_ALLOW_ENV_INJECTION", "0", "1 turns X-Loom-Sandbox-Env-NAME headers of sandbox_open into session environment", boolean(func(c *Config) *bool { return &c.InjectEnv })},

	{"SANDBOX_ENGINE", "podman", "podman or docker; podman without an address below is started by the sidecar", oneOf(func(c *Config) *string { return &c.Engine }, "podman", "docker")},
	{"CONTAINER_HOST", "", "address of a running podman service (unix:///run/podman/podman.sock)", host},
	{"DOCKER_HOST", "", "address of a running engine; empty for " + dockerHost + " with SANDBOX_ENGINE=docker", host},
	{"SANDBOX_RUNTIME", "", "OCI runtime of the sessions: runc, crun, runsc (gVisor), kata (docker only); empty for the engine's default", oneOf(func(c *Config) *string { return &c.Runtime }, "", "runc", "crun", "runsc", "kata")},
	{"SANDBOX_PODMAN_OPTIONS", "", "global options for the podman that the sidecar starts, separated by spaces", func(c *Config, v string) error { c.PodmanOptions = strings.Fields(v); return nil }},
	{"SANDBOX_AGENT", "/usr/local/bin/session-agent", "the session agent's binary, as the sidecar sees it", str(func(c *Config) *string { return &c.Agent })},
	{"SANDBOX_AGENT_PATH", "", "the same binary as the engine's host sees it; empty lets the sidecar hand it over itself", str(func(c *Config) *string { return &c.AgentPath })},
	{"SANDBOX_ULIMIT_NOFILE", "4096", "open files of a process", integer(func(c *Config) *int64 { return &c.NoFile }, 64)},
	{"SANDBOX_ULIMIT_NPROC", "", "processes and threads of the session uid, over all sessions (the kernel counts by uid; SANDBOX_PIDS bounds one session); empty for SANDBOX_MAX_PIDS times SANDBOX_MAX_SESSIONS, or as near to it as the machine allows", integer(func(c *Config) *int64 { return &c.NProc }, 64)},

	{"SANDBOX_IMAGE", "", "session image, best by digest; required", str(func(c *Config) *string { return &c.Image })},
	{"SANDBOX_IMAGES", "", "further images that sandbox_open may name, NAME=REFERENCE separated by commas", images},
	{"SANDBOX_IMAGE_PULL", "missing", "missing pulls an image that the engine does not have, never refuses it", oneOf(func(c *Config) *string { return &c.Pull }, "missing", "never")},
	{"SANDBOX_IMAGE_POLICY", "", "file of who may sign session images: public keys in PEM, or YAML with keys and identities; one of them must have signed an image (cosign sign) before its digest is used", str(func(c *Config) *string { return &c.ImagePolicy })},

	{"SANDBOX_ALLOW_EGRESS", "0", "1 lets sessions ask for a network with network=egress", boolean(func(c *Config) *bool { return &c.AllowEgress })},
	{"SANDBOX_EGRESS_NETWORK", "bridge", "the engine's network for those, by its name; host, none and other modes are refused", str(func(c *Config) *string { return &c.EgressNetwork })},
	{"SANDBOX_CPU", "1", "CPUs of a session that asks for none", float(func(c *Config) *float64 { return &c.CPU })},
	{"SANDBOX_MAX_CPU", "4", "most CPUs that a session may ask for; lowered to those of the engine's host", float(func(c *Config) *float64 { return &c.MaxCPU })},
	{"SANDBOX_MEM_MB", "2048", "memory of a session in MiB; its tmpfs counts, swap is off", integer(func(c *Config) *int64 { return &c.MemMB.Default }, LeastMemMB)},
	{"SANDBOX_MAX_MEM_MB", "8192", "most memory in MiB", integer(func(c *Config) *int64 { return &c.MemMB.Max }, LeastMemMB)},
	{"SANDBOX_TMPFS_MB", "1024", "size of /work in MiB, when it is not a workspace", integer(func(c *Config) *int64 { return &c.TmpfsMB.Default }, 1)},
	{"SANDBOX_MAX_TMPFS_MB", "4096", "largest /work in MiB", integer(func(c *Config) *int64 { return &c.TmpfsMB.Max }, 1)},
	{"SANDBOX_TMP_MB", "512", "size of /tmp in MiB", integer(func(c *Config) *int64 { return &c.TmpMB }, 1)},
	{"SANDBOX_PIDS", "512", "processes and threads of a session", integer(func(c *Config) *int64 { return &c.Pids.Default }, LeastPids)},
	{"SANDBOX_MAX_PIDS", "4096", "most processes and threads", integer(func(c *Config) *int64 { return &c.Pids.Max }, LeastPids)},
	{"SANDBOX_IDLE_TTL_SECONDS", "1800", "a session that is not used for so long is closed", seconds(func(c *Config) *time.Duration { return &c.IdleTTL }, 1)},
	{"SANDBOX_TTL_SECONDS", "14400", "lifetime of a session that asks for none", seconds(func(c *Config) *time.Duration { return &c.TTL }, 1)},
	{"SANDBOX_MAX_TTL_SECONDS", "86400", "longest lifetime", seconds(func(c *Config) *time.Duration { return &c.MaxTTL }, 1)},

	{"SANDBOX_EXEC_TIMEOUT_SECONDS", "120", "time for a command that asks for none", seconds(func(c *Config) *time.Duration { return &c.Timeout }, 1)},
	{"SANDBOX_MAX_EXEC_TIMEOUT_SECONDS", "1800", "longest time for a command", seconds(func(c *Config) *time.Duration { return &c.MaxTimeout }, 1)},
	{"SANDBOX_OUTPUT_BYTES", "65536", "output kept of a command that asks for no other limit: half from its head, half from its tail", integer(func(c *Config) *int64 { return &c.Output.Default }, 256)},
	{"SANDBOX_MAX_OUTPUT_BYTES", "4194304", "largest max_output_bytes", integer(func(c *Config) *int64 { return &c.Output.Max }, 256)},
	{"SANDBOX_MAX_FILE_BYTES", "16777216", "largest content of one sandbox_write or sandbox_read", integer(func(c *Config) *int64 { return &c.MaxFile }, 1024)},

	{"SANDBOX_MAX_SESSIONS", "200", "sessions open at once; when of closed ones more than that, or than the next two, still have containers, sandbox_open waits for those to be removed", count(func(c *Config) *int { return &c.Sessions })},
	{"SANDBOX_MAX_SESSIONS_PER_PRINCIPAL", "20", "sessions of one principal open at once", count(func(c *Config) *int { return &c.PerPrincipal })},
	{"SANDBOX_MAX_SESSIONS_PER_TENANT", "", "sessions of one tenant's principals open at once, where identities are signed; empty for SANDBOX_MAX_SESSIONS less SANDBOX_MAX_SESSIONS_PER_PRINCIPAL, or the latter if that is more", count(func(c *Config) *int { return &c.PerTenant })},
	{"SANDBOX_WARM_POOL", "0", "containers of the default shape kept ready, SANDBOX_MAX_SESSIONS at most", count(func(c *Config) *int { return &c.WarmPool })},

	{"SANDBOX_STATE_DIR", DefaultStateDir, "directory of the session records; keep it over restarts", str(func(c *Config) *string { return &c.StateDir })},
	{"SANDBOX_INSTANCE", "", "this sidecar's id on its engine; empty makes one and keeps it in the state directory", str(func(c *Config) *string { return &c.Instance })},
	{"SANDBOX_WORKSPACE_ROOT", "", "directory of the durable workspaces, in one that is there; empty refuses them", str(func(c *Config) *string { return &c.WorkspaceRoot })},
	{"SANDBOX_WORKSPACE_HOST_ROOT", "", "the same directory as the engine's host sees it, where that differs", str(func(c *Config) *string { return &c.WorkspaceHost })},
	{"SANDBOX_WORKSPACE_QUOTA_MB", "4096", "size of one workspace in MiB; 0 for no limit", integer(func(c *Config) *int64 { return &c.WorkspaceMB }, 0)},
	{"SANDBOX_MAX_WORKSPACES_PER_PRINCIPAL", "0", "workspaces of one principal, in use or not; 0 for no limit: a shared token is one principal", count(func(c *Config) *int { return &c.Workspaces })},

	{"SANDBOX_RUN_STATUS_URL", "", "where to ask whether a run still lives; {root_run_id} is replaced", address(func(c *Config) *string { return &c.RunStatusURL })},
	{"SANDBOX_RUN_STATUS_TOKEN", "", "bearer token for it", str(func(c *Config) *string { return &c.RunStatusToken })},
	{"SANDBOX_RUN_STATUS_INTERVAL_SECONDS", "30", "how often to ask", seconds(func(c *Config) *time.Duration { return &c.RunStatusInterval }, 1)},

	{"OTEL_EXPORTER_OTLP_ENDPOINT", "", "where to send OpenTelemetry traces, as OTLP over HTTP; with none of the two there are no traces. OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and the others of the specification are read too", address(func(c *Config) *string { return &c.Traces })},
	{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "the same, as the full URL of traces", address(func(c *Config) *string { return &c.Traces })},
}

// needs are variables that protect, or keep, nothing where another is not set: who sets
// one alone believes in what is not there.
var needs = map[string]string{
	"SANDBOX_IDENTITY_ISSUER": "SANDBOX_IDENTITY_JWKS", "SANDBOX_IDENTITY_AUDIENCE": "SANDBOX_IDENTITY_JWKS", "SANDBOX_IDENTITY_LEEWAY_SECONDS": "SANDBOX_IDENTITY_JWKS", "SANDBOX_IDENTITY_REQUIRE_JTI": "SANDBOX_IDENTITY_JWKS",
	"SANDBOX_MAX_SESSIONS_PER_TENANT": "SANDBOX_IDENTITY_JWKS", "SANDBOX_WORKSPACE_HOST_ROOT": "SANDBOX_WORKSPACE_ROOT",
}

// Load reads the configuration through getenv, which is os.Getenv outside of
// tests. It names every variable that is wrong, not only the first.
func Load(getenv func(string) string) (*Config, error) {
	c := &Config{Images: map[string]string{}, PerTenant: -1}
	var errs []error
	for _, v := range Vars {
		value := getenv(v.Name)
		if on := needs[v.Name]; value != "" && on != "" && getenv(on) == "" {
			errs = append(errs, fmt.Errorf("%s is set, but means nothing without %s: set that too, or none of them", v.Name, on))
		}
		if value == "" {
			value = v.Default
		}
		if value == "" {
			continue
		}
		if err := v.set(c, value); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", v.Name, err))
		}
	}
	if c.Host == "" && c.Engine == "docker" {
		c.Host = dockerHost
	}
	if c.PerTenant < 0 {
		c.PerTenant = max(c.Sessions-c.PerPrincipal, c.PerPrincipal)
	}
	return c, errors.Join(append(errs, c.check()...)...)
}

func (c *Config) check() (errs []error) {
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Image == "" {
		add("SANDBOX_IMAGE is not set: name the session image")
	}
	if c.Anon {
		h, _, err := net.SplitHostPort(c.Listen)
		ip := net.ParseIP(h)
		if err != nil || h != "localhost" && (ip == nil || !ip.IsLoopback()) {
			add("SANDBOX_ALLOW_ANON=1 is for local use: it needs a loopback SANDBOX_LISTEN_ADDR, not %q", c.Listen)
		}
	}
	for _, r := range []struct {
		name     string
		def, max float64
	}{
		{"SANDBOX_CPU", c.CPU, c.MaxCPU}, {"SANDBOX_MEM_MB", float64(c.MemMB.Default), float64(c.MemMB.Max)},
		{"SANDBOX_TMPFS_MB", float64(c.TmpfsMB.Default), float64(c.TmpfsMB.Max)}, {"SANDBOX_PIDS", float64(c.Pids.Default), float64(c.Pids.Max)},
		{"SANDBOX_TTL_SECONDS", c.TTL.Seconds(), c.MaxTTL.Seconds()}, {"SANDBOX_EXEC_TIMEOUT_SECONDS", c.Timeout.Seconds(), c.MaxTimeout.Seconds()},
		{"SANDBOX_OUTPUT_BYTES", float64(c.Output.Default), float64(c.Output.Max)},
	} {
		if r.def > r.max {
			add("%s=%g is above SANDBOX_MAX_%s=%g", r.name, r.def, strings.TrimPrefix(r.name, "SANDBOX_"), r.max)
		}
	}
	if c.AllowEgress {
		if err := checkEgress(c.EgressNetwork); err != nil {
			add("SANDBOX_EGRESS_NETWORK: %w", err)
		}
	}
	if c.WarmPool > c.Sessions {
		add("SANDBOX_WARM_POOL=%d is above SANDBOX_MAX_SESSIONS=%d: no more of its containers could be used", c.WarmPool, c.Sessions)
	}
	owner, most := "principal", "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL"
	if c.JWKS != "" {
		owner, most = "tenant", "SANDBOX_MAX_SESSIONS_PER_TENANT"
	}
	if least := c.LeastProcesses(); c.NProc > 0 && c.NProc < least {
		add("SANDBOX_ULIMIT_NPROC=%d counts over all sessions, and one %s's alone may have %d processes (SANDBOX_MAX_PIDS for each of %s, and one session of another): raise it, lower those, or leave it empty", c.NProc, owner, least, most)
	}
	if c.RunStatusURL != "" && !strings.Contains(c.RunStatusURL, "{root_run_id}") {
		add("SANDBOX_RUN_STATUS_URL has no {root_run_id} in it")
	}
	return errs
}

// AllProcesses is how many processes and threads all sessions may have together.
func (c *Config) AllProcesses() int64 { return c.Pids.Max * int64(max(c.Sessions, 1)) }

// LeastProcesses is the lowest limit of them all under which no principal, or no tenant
// where identities are signed, can take the processes of every other: the kernel counts
// those of one uid, which all sessions have.
func (c *Config) LeastProcesses() int64 {
	each := c.PerPrincipal
	if c.JWKS != "" {
		each = c.PerTenant
	}
	return c.Pids.Max * int64(max(min(each+1, c.Sessions), 1))
}

// MaxBody is the longest request body in bytes: the largest file in base64,
// with room for the JSON around it.
func (c *Config) MaxBody() int64 { return c.MaxFile/3*4 + 1<<20 }

// Help writes the table as text.
func Help(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, v := range Vars {
		fmt.Fprintf(t, "  %s\t%s\t%s\n", v.Name, v.Default, v.Doc)
	}
	_ = t.Flush()
}

// Markdown writes the table for the documentation.
func Markdown(w io.Writer) {
	fmt.Fprint(w, "| variable | default | meaning |\n| --- | --- | --- |\n")
	for _, v := range Vars {
		def := v.Default
		if def != "" {
			def = "`" + def + "`"
		}
		fmt.Fprintf(w, "| `%s` | %s | %s |\n", v.Name, def, v.Doc)
	}
}

func str(at func(*Config) *string) func(*Config, string) error {
	return func(c *Config, v string) error { *at(c) = v; return nil }
}

func oneOf(at func(*Config) *string, allowed ...string) func(*Config, string) error {
	return func(c *Config, v string) error {
		for _, a := range allowed {
			if v == a {
				*at(c) = v
				return nil
			}
		}
		return fmt.Errorf("%q is not one of %s", v, strings.TrimPrefix(strings.Join(allowed, ", "), ", "))
	}
}

func boolean(at func(*Config) *bool) func(*Config, string) error {
	return func(c *Config, v string) (err error) {
		if *at(c), err = strconv.ParseBool(v); err != nil {
			return fmt.Errorf("%q is neither 1 nor 0", v)
		}
		return nil
	}
}

func integer(at func(*Config) *int64, least int64) func(*Config, string) error {
	return func(c *Config, v string) error {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < least || n > 1<<40 {
			return fmt.Errorf("%q is not a whole number of at least %d", v, least)
		}
		*at(c) = n
		return nil
	}
}

func count(at func(*Config) *int) func(*Config, string) error {
	return func(c *Config, v string) error {
		var n int64
		err := integer(func(*Config) *int64 { return &n }, 0)(c, v)
		*at(c) = int(n)
		return err
	}
}

func float(at func(*Config) *float64) func(*Config, string) error {
	return func(c *Config, v string) error {
		n, err := strconv.ParseFloat(v, 64)
		if err != nil || !(n >= LeastCPU && n <= 1024) {
			return fmt.Errorf("%q is not a number from %v to 1024", v, LeastCPU)
		}
		*at(c) = n
		return nil
	}
}

func seconds(at func(*Config) *time.Duration, least int64) func(*Config, string) error {
	return func(c *Config, v string) error {
		n, err := strconv.ParseInt(v, 10, 32)
		if err != nil || n < least {
			return fmt.Errorf("%q is not a whole number of seconds, at least %d", v, least)
		}
		*at(c) = time.Duration(n) * time.Second
		return nil
	}
}

// address takes an absolute URL of HTTP. Messages do not show it: it may hold a password.
func address(at func(*Config) *string) func(*Config, string) error {
	return func(c *Config, v string) error {
		u, err := url.Parse(v)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
			return errors.New("it is no URL such as http://name:8080/path")
		}
		*at(c) = v
		return nil
	}
}

func host(c *Config, v string) error {
	u, err := url.Parse(v)
	switch {
	case err == nil && strings.HasPrefix(v, "unix://") && u.Host == "" && path.IsAbs(u.Path):
	case err == nil && u.Scheme == "tcp" && u.Hostname() != "" && u.Port() != "":
	default:
		return fmt.Errorf("%q is no address of an engine such as unix:///var/run/docker.sock or tcp://name:2375", v)
	}
	c.Host = v
	return nil
}

func tokens(bare bool) func(*Config, string) error {
	return func(c *Config, v string) error {
		t, err := identity.ParseTokens(v, bare)
		c.Tokens = append(c.Tokens, t...)
		return err
	}
}

var networkName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// checkEgress takes networks alone. The modes of every engine are not: host and another's namespace
// (container:, ns:) are what sessions are kept from. Those of podman alone its engine refuses, as
// they may be networks of docker.
func checkEgress(v string) error {
	if !networkName.MatchString(v) || slices.Contains([]string{"host", "none"}, strings.ToLower(v)) {
		return fmt.Errorf("%q is no network of an engine: bridge, or the name of one that was made with `network create`; a mode such as host, container:NAME or slirp4netns gives sessions what is not theirs", v)
	}
	return nil
}

var imageName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)

func images(c *Config, v string) error {
	for _, part := range strings.Split(v, ",") {
		name, ref, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || !imageName.MatchString(name) || ref == "" {
			return fmt.Errorf("%q is not NAME=REFERENCE", part)
		}
		if name == DefaultImage {
			return fmt.Errorf("%s is the name of SANDBOX_IMAGE: give %s another", name, ref)
		}
		if c.Images[name] != "" {
			return fmt.Errorf("%s stands for two images: give one another name", name)
		}
		c.Images[name] = ref
	}
	return nil
}
