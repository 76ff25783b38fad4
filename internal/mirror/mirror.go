// Package mirror knows where sources come from: the mirrors that variables or
// the machine's own configuration name, in order. No host name is written in
// this repository; because every source is pinned by hash, any mirror will do.
package mirror

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Mirrors are the ordered mirrors of each kind of source. What a kind needs
// is read when a source of it is first asked for, so that a machine without
// npm, say, can fetch Debian packages. It is safe for concurrent use.
type Mirrors struct {
	client *http.Client
	wait   time.Duration
	stall  time.Duration
	aptDir string
	lists  map[lock.Kind]func() ([]base, error)
	away   sync.Map // the roots that Locate had no answer from, with the reason
}

// base is a mirror's root.
type base struct {
	url *url.URL
	// last says that the list does not go on to the next mirror when this one
	// fails in another way than not having the file.
	last bool
}

// Option changes how mirrors are reached.
type Option func(*Mirrors)

// WithWait sets the pause before the first retry of a failed request, 500 ms
// by default; each further pause is twice as long.
func WithWait(d time.Duration) Option { return func(m *Mirrors) { m.wait = d } }

// WithStall sets how long a mirror may send nothing before the connection
// counts as broken, one minute by default.
func WithStall(d time.Duration) Option { return func(m *Mirrors) { m.stall = d } }

// WithAptDir sets the folder of the machine's apt configuration, /etc/apt by default.
func WithAptDir(dir string) Option { return func(m *Mirrors) { m.aptDir = dir } }

// FromMachine takes the mirrors from the variables DEBIAN_MIRROR,
// DEBIAN_SECURITY_MIRROR (lists separated by spaces or commas), GOPROXY and
// NPM_CONFIG_REGISTRY; where one is unset, from the machine's apt sources,
// `go env GOPROXY` and `npm config get registry`. HTTP_PROXY, HTTPS_PROXY and
// NO_PROXY are followed.
func FromMachine(ctx context.Context, env func(string) string, options ...Option) *Mirrors {
	m := &Mirrors{client: newClient(env), wait: 500 * time.Millisecond, stall: time.Minute, aptDir: "/etc/apt"}
	for _, o := range options {
		o(m)
	}
	apt := sync.OnceValues(func() (aptMirrors, error) { return readAptSources(m.aptDir) })
	deb := func(kind lock.Kind) ([]base, error) {
		list := strings.FieldsFunc(env(kind.Variable()), func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' })
		if len(list) == 0 {
			found, err := apt()
			if err != nil {
				return nil, fmt.Errorf("%s is not set and the machine's apt sources cannot be read: %w", kind.Variable(), err)
			}
			if list = found[kind]; len(list) == 0 {
				return nil, fmt.Errorf("no mirror for %s: the machine's apt sources name none of the %s archive: set %s to its URL", kind, kind, kind.Variable())
			}
		}
		var bases []base
		for _, text := range list {
			u, err := parseBase(text)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", kind.Variable(), err)
			}
			bases = append(bases, base{url: u})
		}
		return bases, nil
	}
	m.lists = map[lock.Kind]func() ([]base, error){
		lock.KindDebian:   sync.OnceValues(func() ([]base, error) { return deb(lock.KindDebian) }),
		lock.KindSecurity: sync.OnceValues(func() ([]base, error) { return deb(lock.KindSecurity) }),
		lock.KindGo:       sync.OnceValues(func() ([]base, error) { return goProxies(ctx, env) }),
		lock.KindNPM:      sync.OnceValues(func() ([]base, error) { return npmRegistry(ctx, env) }),
	}
	return m
}

func newClient(env func(string) string) *http.Client {
	either := func(name string) string { return cmp.Or(env(name), env(strings.ToLower(name))) }
	proxy := (&httpproxy.Config{HTTPProxy: either("HTTP_PROXY"), HTTPSProxy: either("HTTPS_PROXY"), NoProxy: either("NO_PROXY")}).ProxyFunc()
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy = func(r *http.Request) (*url.URL, error) { return proxy(r.URL) }
	t.MaxIdleConnsPerHost = 16
	// What a server compresses on the way is not what was hashed.
	t.DisableCompression = true
	return &http.Client{Transport: t}
}

// Candidates lists the URLs at which a source may be, in the order in which
// to try them. A mirror's credentials are part of its URL: use Redact to print one.
func (m *Mirrors) Candidates(s lock.Source) ([]string, error) {
	bases, err := m.bases(s.Kind)
	if err != nil {
		return nil, err
	}
	var urls []string
	for _, b := range bases {
		urls = append(urls, at(b.url, s).String())
	}
	return urls, nil
}

func (m *Mirrors) bases(kind lock.Kind) ([]base, error) {
	list, ok := m.lists[kind]
	if !ok {
		return nil, fmt.Errorf("there is no mirror for sources of kind %q", kind)
	}
	return list()
}

func at(b *url.URL, s lock.Source) *url.URL {
	return b.JoinPath((&url.URL{Path: s.Path}).EscapedPath())
}

// Redact is a URL fit for a message: without user, password or query, any of
// which may be a credential.
func Redact(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "(a malformed URL)"
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	return u.String()
}

// Credentials takes the user and password out of a mirror's URL and returns
// the URL without them and the value of the Authorization header that they
// stand for (empty when there are none), so that the URL can be shown,
// logged or attested.
func Credentials(raw string) (bare, authorization string, err error) {
	u, err := url.Parse(raw)
	if err != nil {
		return "", "", errors.New("a mirror's URL is malformed")
	}
	if u.User != nil {
		password, _ := u.User.Password()
		authorization = "Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password))
		u.User = nil
	}
	return u.String(), authorization, nil
}

// LocalPath is the file that a file: URL names.
func LocalPath(raw string) (string, bool) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "file" {
		return "", false
	}
	return filepath.FromSlash(u.Path), true
}

// parseBase reads a mirror's root. A file: URL may name a relative folder
// (file:mirror/debian), which is taken from the working directory.
func parseBase(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be read as a URL", Redact(text))
	}
	switch u.Scheme {
	case "http", "https":
		if u.Host == "" {
			return nil, fmt.Errorf("%s has no host", Redact(text))
		}
	case "file":
		if u.Host != "" && u.Host != "localhost" {
			return nil, fmt.Errorf("%s names the host %q: a file mirror is written file:///DIR or file:DIR", Redact(text), u.Host)
		}
		dir := u.Path
		if u.Opaque != "" {
			if dir, err = url.PathUnescape(u.Opaque); err != nil {
				return nil, fmt.Errorf("%s: %w", Redact(text), err)
			}
		}
		if dir, err = filepath.Abs(filepath.FromSlash(dir)); err != nil {
			return nil, err
		}
		u = &url.URL{Scheme: "file", Path: filepath.ToSlash(dir)}
	default:
		return nil, fmt.Errorf("%s is no mirror: its scheme must be http, https or file", Redact(text))
	}
	return u, nil
}

// goProxies reads a GOPROXY list: after a comma the next proxy is asked only
// for what the one before does not have, after a bar on any failure.
// https://go.dev/ref/mod#goproxy-protocol
func goProxies(ctx context.Context, env func(string) string) ([]base, error) {
	list, err := GoEnv(ctx, env, "GOPROXY")
	if err != nil {
		return nil, fmt.Errorf("no Go module proxy: %w", err)
	}
	var bases []base
	for list != "" {
		item, rest, last := list, "", false
		if i := strings.IndexAny(list, ",|"); i >= 0 {
			item, rest, last = list[:i], list[i+1:], list[i] == ','
		}
		list = rest
		item = strings.TrimSpace(item)
		if item == "off" {
			break
		}
		if item == "" || item == "direct" {
			continue
		}
		if !strings.Contains(item, "://") && !strings.HasPrefix(item, "file:") {
			item = "https://" + item
		}
		u, err := parseBase(item)
		if err != nil {
			return nil, fmt.Errorf("GOPROXY: %w", err)
		}
		bases = append(bases, base{url: u, last: last})
	}
	if len(bases) == 0 {
		return nil, fmt.Errorf("GOPROXY names no module proxy (direct and off serve no toolchain): set it to one's URL")
	}
	return bases, nil
}

func npmRegistry(ctx context.Context, env func(string) string) ([]base, error) {
	registry := env("NPM_CONFIG_REGISTRY")
	if registry == "" {
		registry = env("npm_config_registry") // npm reads either case
	}
	if registry == "" {
		out, err := output(ctx, "npm", "config", "get", "registry")
		if err != nil {
			return nil, fmt.Errorf("no npm registry: NPM_CONFIG_REGISTRY is not set and `npm config get registry` fails: set it to a registry's URL: %w", err)
		}
		registry = out
	}
	u, err := parseBase(registry)
	if err != nil {
		return nil, fmt.Errorf("NPM_CONFIG_REGISTRY: %w", err)
	}
	return []base{{url: u}}, nil
}

// GoEnv is a setting of the go command: a variable of env, else what the
// command has for itself (go env -w, its defaults).
func GoEnv(ctx context.Context, env func(string) string, name string) (string, error) {
	if v := env(name); v != "" {
		return v, nil
	}
	v, err := output(ctx, "go", "env", name)
	if err != nil {
		return "", fmt.Errorf("%s is not set and `go env %s` fails: %w", name, name, err)
	}
	return v, nil
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, name, args...).Output()
	return strings.TrimSpace(string(out)), err
}
