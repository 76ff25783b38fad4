package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/citest"
)

type withHeaders struct{ headers map[string]string }

func (w withHeaders) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for k, v := range w.headers {
		r.Header.Set(k, v)
	}
	return http.DefaultTransport.RoundTrip(r)
}

var toolNames = []string{"sandbox_close", "sandbox_close_run", "sandbox_exec", "sandbox_list", "sandbox_open", "sandbox_read", "sandbox_touch", "sandbox_write"}

// The SDK's own client: the newest protocol, schemas, and progress of a long
// command over the event stream.
func TestSDKClient(t *testing.T) {
	s := start(t, "runc", nil)
	var mu sync.Mutex
	var progress []string
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, &mcp.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			mu.Lock()
			defer mu.Unlock()
			progress = append(progress, r.Params.Message)
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cs, err := client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: s.URL + "/mcp", HTTPClient: &http.Client{Transport: withHeaders{map[string]string{"Authorization": "Bearer " + token}}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer cs.Close()
	if got, want := cs.InitializeResult().ProtocolVersion, mcp.SupportedProtocolVersions()[0]; got != want {
		t.Errorf("protocol %s was agreed upon, and the newest is %s", got, want)
	}
	tools, err := cs.ListTools(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range tools.Tools {
		names = append(names, tool.Name)
		if tool.OutputSchema == nil || tool.Annotations == nil || tool.Description == "" {
			t.Errorf("%s has no output schema, annotations or description", tool.Name)
		}
		if want := slices.Contains([]string{"sandbox_read", "sandbox_list"}, tool.Name); tool.Annotations.ReadOnlyHint != want {
			t.Errorf("%s: readOnlyHint is %v", tool.Name, !want)
		}
	}
	slices.Sort(names)
	if !slices.Equal(names, toolNames) {
		t.Errorf("the tools are %v", names)
	}
	opened, err := cs.CallTool(ctx, &mcp.CallToolParams{Name: "sandbox_open"})
	if err != nil || opened.IsError {
		t.Fatalf("%+v, %v", opened, err)
	}
	id := opened.StructuredContent.(map[string]any)["session_id"]
	params := &mcp.CallToolParams{Name: "sandbox_exec", Arguments: m{"session_id": id, "command": "echo begun; sleep 2.5; echo over"}}
	params.SetProgressToken("p1")
	res, err := cs.CallTool(ctx, params)
	if err != nil || res.IsError {
		t.Fatalf("%+v, %v", res, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Contains(progress, "begun\n") {
		t.Errorf("progress: %q", progress)
	}
	out := res.StructuredContent.(map[string]any)
	if out["stdout"] != "begun\nover\n" || out["exit_code"] != 0.0 {
		t.Errorf("structured: %v", out)
	}
}

// What a client of the first protocol version sends: no protocol header, plain
// JSON, numbers and strings as ids, and no session id.
func TestRaw2024(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	post := func(body string) (int, http.Header, map[string]any) {
		resp, err := c.post(t.Context(), []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		var v map[string]any
		_ = json.Unmarshal(b, &v)
		return resp.StatusCode, resp.Header, v
	}
	var ids []string
	for _, version := range []string{"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"} { // the newest has no initialize: TestSDKClient
		status, h, v := post(`{"jsonrpc":"2.0","id":"a","method":"initialize","params":{"protocolVersion":"` + version + `","capabilities":{},"clientInfo":{"name":"old","version":"0"}}}`)
		result, _ := v["result"].(map[string]any)
		if status != 200 || result["protocolVersion"] != version || h.Get("Content-Type") != "application/json" || v["id"] != "a" {
			t.Errorf("initialize %s: %d %v", version, status, v)
		}
		given := h.Get("Mcp-Session-Id")
		if given == "" || slices.Contains(ids, given) {
			t.Errorf("initialize %s: the session id %q after %q", version, given, ids)
		}
		ids = append(ids, given)
		if a := s.as(map[string]string{"Mcp-Protocol-Version": version, "Mcp-Session-Id": given}).call("sandbox_list", m{}); a.IsError || a.Text != `{"sessions":[]}` {
			t.Errorf("a call with %s: %+v", version, a)
		}
	}
	if status, _, _ := post(`{"jsonrpc":"2.0","method":"notifications/initialized"}`); status != http.StatusAccepted {
		t.Errorf("notification: %d", status)
	}
	_, _, v := post(`{"jsonrpc":"2.0","id":7,"method":"tools/list"}`)
	if result, _ := v["result"].(map[string]any); len(result["tools"].([]any)) != len(toolNames) || v["id"] != 7.0 {
		t.Errorf("tools/list: %v", v)
	}
	if status, _, v := post(`{"jsonrpc":"2.0","id":8,"method":"nope"}`); status != http.StatusOK || v["id"] != 8.0 || v["error"].(map[string]any)["code"] != -32601.0 {
		t.Errorf("an unknown method: %d %v", status, v)
	}
	if a := s.as(map[string]string{"Mcp-Session-Id": "whatever"}).call("sandbox_list", m{}); a.IsError || a.Text != `{"sessions":[]}` {
		t.Errorf("with a session id: %+v", a)
	}
	for _, auth := range []string{"", "Bearer wrong", "Bearer " + token + "x"} {
		if a := s.as(map[string]string{"Authorization": auth}).call("sandbox_list", m{}); a.Status != 401 || strings.Contains(a.Body, token) {
			t.Errorf("%q: %d %s", auth, a.Status, a.Body)
		}
	}
	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		resp, err := http.Get(s.URL + path)
		if err != nil || resp.StatusCode != 200 {
			t.Errorf("%s without a token: %v %v", path, resp, err)
		}
		resp.Body.Close()
	}
}

const tsClient = `
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
const [url, token] = process.argv.slice(2);
const client = new Client({ name: "ts", version: "1" });
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers: { Authorization: "Bearer " + token } } }));
const tools = (await client.listTools()).tools.map((t) => t.name).sort();
const opened = await client.callTool({ name: "sandbox_open", arguments: {} });
const session_id = opened.structuredContent.session_id;
await client.callTool({ name: "sandbox_write", arguments: { session_id, path: "a.txt", content: "from ts" } });
let progress = 0;
const ran = await client.callTool({ name: "sandbox_exec", arguments: { session_id, command: "cat a.txt; sleep 1.5; exit 4" } }, undefined, { onprogress: () => progress++ });
const closed = await client.callTool({ name: "sandbox_close", arguments: { session_id } });
console.log(JSON.stringify({ tools, text: ran.content[0].text, isError: ran.isError, progress, closed: closed.content[0].text }));
await client.close();
`

// nodeModules is a folder with a package of npm's and what that needs, which the first run
// of all puts into the cache folder: from then on no registry is asked.
func nodeModules(t *testing.T, pkg, version string) string {
	t.Helper()
	base, err := cache.Dir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(base, "sandbox-test", "npm", strings.ReplaceAll(strings.TrimPrefix(pkg, "@"), "/", "-")+"-"+version)
	modules := filepath.Join(kept, "node_modules")
	if _, err := os.Stat(modules); err == nil {
		return modules
	}
	if err := os.MkdirAll(filepath.Dir(kept), 0o755); err != nil {
		t.Fatal(err)
	}
	var out []byte
	for range 3 { // a registry's bad moment
		tmp, err := os.MkdirTemp(filepath.Dir(kept), "partial-")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(tmp)
		install := exec.Command("npm", "install", "--prefix", tmp, "--no-audit", "--no-fund", pkg+"@"+version)
		install.Dir = tmp
		if out, err = install.CombinedOutput(); err != nil {
			continue
		}
		if err := os.Rename(tmp, kept); err != nil && !errors.Is(err, os.ErrExist) { // by another run
			t.Fatal(err)
		}
		return modules
	}
	citest.Skip(t, "npm could not install the TypeScript SDK: %s", out)
	return ""
}

// A client that shares no code with the server.
func TestTypeScriptClient(t *testing.T) {
	citest.Program(t, "npm", "apt-get install npm")
	s := start(t, "runc", nil)
	dir := t.TempDir()
	for name, content := range map[string]string{"package.json": `{"private":true,"type":"module"}`, "client.js": tsClient} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(nodeModules(t, "@modelcontextprotocol/sdk", "1.32.2"), filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	run := exec.Command("node", "client.js", s.URL+"/mcp", token)
	run.Dir = dir
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var got struct {
		Tools    []string
		Text     string
		IsError  bool
		Progress int
		Closed   string
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !slices.Equal(got.Tools, toolNames) || got.Text != "from ts\n[exit: 4]" || !got.IsError || got.Progress == 0 || got.Closed != "closed" {
		t.Errorf("%+v", got)
	}
}
