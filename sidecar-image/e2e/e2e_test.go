// Package e2e tests the built sidecar program over HTTP, on a real podman.
package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/freeport"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

const token = "test-token-0123456789abcdef"

var builder = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "loomcycle-builder-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "loomcycle-builder")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=test", "-o", path, "github.com/loomcycle/loomcycle-images/sidecar-image/cmd/loomcycle-builder")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the sidecar: %w\n%s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := builder(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// sidecar is a running loomcycle-builder.
type sidecar struct {
	t      testing.TB
	podman *enginetest.Podman // its engine, or else
	cli    interface {        // the command line of its engine
		Command(args ...string) *exec.Cmd
	}
	env   map[string]string
	URL   string
	cmd   *exec.Cmd
	log   *syncbuf.Buffer
	ended chan struct{}
}

// start runs a sidecar with the given OCI runtime and further variables.
func start(t testing.TB, runtime string, env map[string]string) *sidecar {
	t.Helper()
	p := enginetest.New(t)
	p.Options(t, runtime) // skips where the runtime does not work
	return startOn(t, runtime, env, p)
}

// startOn is start for an engine that the variables name.
func startOn(t testing.TB, runtime string, env map[string]string, cli interface{ Command(...string) *exec.Cmd }) *sidecar {
	t.Helper()
	s := prepare(t, runtime, env, cli)
	s.run()
	return s
}

// prepare is startOn without the start.
func prepare(t testing.TB, runtime string, env map[string]string, cli interface{ Command(...string) *exec.Cmd }) *sidecar {
	t.Helper()
	p := enginetest.New(t)
	s := &sidecar{t: t, podman: p, cli: cli, log: &syncbuf.Buffer{}, env: map[string]string{
		"PATH": os.Getenv("PATH"), "HOME": os.Getenv("HOME"),
		"SANDBOX_PODMAN_OPTIONS": strings.Join(p.Flags, " "), "SANDBOX_IMAGE": p.Image, "SANDBOX_IMAGE_PULL": "never",
		"SANDBOX_AUTH_TOKEN": token, "SANDBOX_RUNTIME": runtime, "SANDBOX_AGENT": p.Agent, "SANDBOX_LOG_LEVEL": "debug",
		"SANDBOX_INSTANCE":  "test-" + strings.ToLower(rand.Text()),
		"SANDBOX_STATE_DIR": filepath.Join(t.TempDir(), "state"), "SANDBOX_MEM_MB": "512", "SANDBOX_TMPFS_MB": "256",
	}}
	for k, v := range env {
		s.env[k] = v
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the sidecar's log:\n%s", s.log)
		}
		s.stop()
		s.removeAll()
	})
	return s
}

func freePort(t testing.TB) string { return freeport.Address(t) }

func (s *sidecar) run() {
	s.t.Helper()
	s.begin()
	for end := time.Now().Add(2 * time.Minute); ; {
		resp, err := http.Get(s.URL + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-s.ended:
			s.t.Fatalf("the sidecar did not start:\n%s", s.log)
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(end) {
			s.t.Fatalf("the sidecar is not ready:\n%s", s.log)
		}
	}
}

// begin starts the program and waits for nothing.
func (s *sidecar) begin() {
	s.t.Helper()
	bin, err := builder()
	if err != nil {
		s.t.Fatal(err)
	}
	if s.env["SANDBOX_LISTEN_ADDR"] == "" {
		s.env["SANDBOX_LISTEN_ADDR"] = freePort(s.t)
	}
	s.URL = "http://" + s.env["SANDBOX_LISTEN_ADDR"]
	s.cmd = exec.Command(bin)
	for k, v := range s.env {
		s.cmd.Env = append(s.cmd.Env, k+"="+v)
	}
	s.cmd.Stderr = s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	cmd, ended := s.cmd, make(chan struct{})
	s.ended = ended
	go func() { _ = cmd.Wait(); close(ended) }()
}

func (s *sidecar) stop() { s.signal(syscall.SIGTERM) }
func (s *sidecar) kill() { s.signal(syscall.SIGKILL) }

func (s *sidecar) signal(sig syscall.Signal) {
	_ = s.cmd.Process.Signal(sig)
	<-s.ended
}

func (s *sidecar) podmanOut(args ...string) string {
	out, err := s.cli.Command(args...).Output()
	if err != nil {
		s.t.Fatalf("%v: %v", args, err)
	}
	return strings.TrimSpace(string(out))
}

func (s *sidecar) list() *exec.Cmd {
	return s.cli.Command("ps", "-a", "--filter", "label=loomcycle.instance="+s.env["SANDBOX_INSTANCE"], "--format", "{{.Names}}")
}

// containers lists the names of this sidecar's containers.
func (s *sidecar) containers() []string {
	out, err := s.list().Output()
	if err != nil {
		s.t.Fatalf("listing the containers: %v", err)
	}
	return strings.Fields(string(out))
}

// removeAll removes this sidecar's containers, and those that its engine finishes
// just now. A list fails when another test's container goes while it is made.
func (s *sidecar) removeAll() {
	var out []byte
	var err error
	for range 20 {
		if out, err = s.list().Output(); err == nil && len(out) == 0 {
			return
		}
		if names := strings.Fields(string(out)); len(names) > 0 {
			_ = s.cli.Command(append([]string{"kill"}, names...)...).Run()
			_ = s.cli.Command(append([]string{"rm", "-f"}, names...)...).Run()
		}
	}
	s.t.Errorf("containers are left: %s %v", out, err)
}

// eventually waits for a condition, and fails with what it was about.
func eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// answer is a tool's result.
type answer struct {
	Text       string
	IsError    bool
	Structured map[string]any
	Status     int    // of HTTP
	Body       string // when it is no result
}

// client makes calls as one caller, in plain JSON as a 2024-11-05 client does.
type client struct {
	s       *sidecar
	headers map[string]string
}

func (s *sidecar) as(headers map[string]string) *client { return &client{s, headers} }
func (s *sidecar) client() *client                      { return s.as(nil) }

func (c *client) post(ctx context.Context, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.s.URL+"/mcp", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	for k, v := range c.headers {
		if v == "" {
			req.Header.Del(k)
		} else {
			req.Header.Set(k, v)
		}
	}
	return http.DefaultClient.Do(req)
}

func (c *client) try(ctx context.Context, tool string, args any) (answer, error) {
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": tool, "arguments": args}})
	if err != nil {
		return answer{}, err
	}
	resp, err := c.post(ctx, body)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	var m struct {
		Result *struct {
			Content    []struct{ Text string }
			IsError    bool
			Structured map[string]any `json:"structuredContent"`
		}
		Error *struct{ Message string }
	}
	a := answer{Status: resp.StatusCode, Body: string(b)}
	if json.Unmarshal(b, &m) == nil && m.Result != nil {
		if len(m.Result.Content) != 1 {
			return a, fmt.Errorf("%d content items instead of one: %s", len(m.Result.Content), b)
		}
		a.Text, a.IsError, a.Structured = m.Result.Content[0].Text, m.Result.IsError, m.Result.Structured
	}
	return a, nil
}

func (c *client) call(tool string, args any) answer {
	c.s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	a, err := c.try(ctx, tool, args)
	if err != nil {
		c.s.t.Fatalf("%s: %v", tool, err)
	}
	return a
}

type m = map[string]any

// open opens a session and returns its id.
func (c *client) open(args m) string {
	c.s.t.Helper()
	a := c.call("sandbox_open", args)
	id, _ := a.Structured["session_id"].(string)
	if id == "" || a.IsError {
		c.s.t.Fatalf("sandbox_open %v: %s%s", args, a.Text, a.Body)
	}
	return id
}

func (c *client) exec(id, command string) answer {
	c.s.t.Helper()
	return c.call("sandbox_exec", m{"session_id": id, "command": command, "timeout_seconds": 60})
}
