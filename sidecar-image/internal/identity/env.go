package identity

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// HeaderEnv is the prefix of headers that become session environment:
// X-Loom-Sandbox-Env-Gh-Token is GH_TOKEN.
const HeaderEnv = "X-Loom-Sandbox-Env-"

// Bounds of injected environment.
const (
	MaxEnv      = 32
	MaxEnvValue = 8 << 10
	MaxEnvBytes = 32 << 10
)

var (
	envName = regexp.MustCompile(`^[A-Z_][A-Z0-9_]{0,127}$`)
	// What decides how programs are found, loaded and where they write is the
	// image's, not a header's.
	reservedEnv    = []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "IFS", "ENV", "BASH_ENV", "BASHOPTS", "SHELLOPTS", "PS4", "PROMPT_COMMAND", "TMPDIR", "LANG", "GOPATH", "GOROOT", "GOCACHE", "GOMODCACHE", "GOTOOLCHAIN", "GOFLAGS", "GOENV", "CARGO_HOME", "RUSTUP_HOME", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUSERBASE", "PIP_CACHE_DIR", "NODE_OPTIONS", "NODE_PATH", "PERL5LIB", "PERL5OPT", "RUBYOPT", "RUBYLIB", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_EXEC_PATH", "HOSTALIASES", "GCONV_PATH", "LOCPATH", "NLSPATH"}
	reservedPrefix = []string{"LD_", "GLIBC_", "MALLOC_", "XDG_", "LC_", "NPM_CONFIG_", "BASH_FUNC_", "LOOM_", "LOOMCYCLE_", "SANDBOX_"}
)

// Env returns the environment that a request's headers carry. Errors name the
// header, never its value.
func Env(h http.Header) (map[string]string, error) {
	env := map[string]string{}
	total := 0
	for key, values := range h {
		if len(key) < len(HeaderEnv) || !strings.EqualFold(key[:len(HeaderEnv)], HeaderEnv) {
			continue
		}
		name := strings.ToUpper(strings.ReplaceAll(key[len(HeaderEnv):], "-", "_"))
		switch {
		case !envName.MatchString(name):
			return nil, fmt.Errorf("header %s: %q is no name of an environment variable", key, name)
		case slices.Contains(reservedEnv, name) || slices.ContainsFunc(reservedPrefix, func(p string) bool { return strings.HasPrefix(name, p) }):
			return nil, fmt.Errorf("header %s: %s is reserved to the image and cannot be set", key, name)
		case len(values) != 1:
			return nil, fmt.Errorf("header %s is there %d times", key, len(values))
		case len(values[0]) > MaxEnvValue:
			return nil, fmt.Errorf("header %s: the value has %d bytes, %d are allowed", key, len(values[0]), MaxEnvValue)
		}
		if _, twice := env[name]; twice {
			return nil, fmt.Errorf("header %s: %s is set by another header too", key, name)
		}
		env[name] = values[0]
		if total += len(name) + len(values[0]); total > MaxEnvBytes || len(env) > MaxEnv {
			return nil, fmt.Errorf("headers %s*: more than %d variables or %d bytes", HeaderEnv, MaxEnv, MaxEnvBytes)
		}
	}
	return env, nil
}
