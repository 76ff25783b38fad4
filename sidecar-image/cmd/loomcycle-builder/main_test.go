package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
)

// The health check asks where the sidecar listens, and no proxy.
func TestHealthcheck(t *testing.T) {
	// Which is read once, before a test could set it.
	if proxy := "HTTP_PROXY=http://127.0.0.1:1"; !slices.Contains(os.Environ(), proxy) {
		again := exec.Command(os.Args[0], "-test.run=^TestHealthcheck$")
		again.Env = append(os.Environ(), proxy, "NO_PROXY=", "no_proxy=")
		if out, err := again.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	for _, tc := range []struct{ listen, variable, want string }{
		{"127.0.0.1:0", "127.0.0.1:%s", ""},
		{"127.0.0.3:0", "127.0.0.3:%s", ""},
		{"127.0.0.3:0", "127.0.0.1:%s", "refused"},
		{"127.0.0.1:0", "0.0.0.0:%s", ""},
		{"127.0.0.1:0", ":%s", ""},
		{"127.0.0.1:0", "[::]:%s", ""},
		{"127.0.0.1:0", "localhost:%s", ""},
		{"127.0.0.1:0", "%s", "SANDBOX_LISTEN_ADDR"},
	} {
		l, err := net.Listen("tcp", tc.listen)
		if err != nil {
			t.Fatal(err)
		}
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ready") }))
		srv.Listener.Close()
		srv.Listener = l
		srv.Start()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		err = healthcheck(func(string) string { return fmt.Sprintf(tc.variable, port) })
		srv.Close()
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("listening on %s, asked at %s: %v", tc.listen, tc.variable, err)
		}
	}
}

// A boot that fails for want of a variable names the one with the typo.
func TestTypo(t *testing.T) {
	env := []string{"SANDBOX_IMGE=registry.example/s3cret", "SANDBOX_AUTH_TOKEN=t"}
	err := run(nil, func(string) string { return "" }, env, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "SANDBOX_IMAGE is not set") || !strings.Contains(err.Error(), "no variable SANDBOX_IMGE; SANDBOX_IMAGE may be meant") || strings.Contains(err.Error(), "s3cret") {
		t.Error(err)
	}
}

// The workspaces' commands refuse what they do not understand, in one sentence, and make
// no directory.
func TestWorkspaces(t *testing.T) {
	root := t.TempDir()
	work := filepath.Join(root, "p", "w1")
	missing := filepath.Join(root, "missing")
	used := time.Now().Add(-48 * time.Hour)
	state, busy, none := t.TempDir(), t.TempDir(), filepath.Join(root, "none")
	for dir, record := range map[string]session.Record{state: {ID: "sbx-a"}, busy: {ID: "sbx-b", State: session.Open, Principal: "p", Workspace: "w1"}} {
		store, err := session.OpenStore(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		defer store.Close() // the sidecar may run
		if err := store.Put(record); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct{ root, args, want, refused string }{
		{root, "list", "w1", ""},
		{root, "list --json", `"name":"w1"`, ""},
		{root, "prune --older-than 3d", "PRINCIPAL", ""},
		{root, "prune --older-than 0h --dry-run", "w1", ""},
		{root, "prune --older-than 47h --dry-run", "w1", ""},
		{root, "prune --help", "loomcycle-builder workspaces prune", ""},
		{root, "prune", "", "needs --older-than"},
		{root, "prune --older-than 30", "", `workspaces prune: invalid value "30" for flag -older-than: it is no age such as 30d, 720h or 0h`},
		{root, "prune --older-than -1h", "", "it is no age such as"},
		{root, "prune --older-than -1d", "", "it is no age such as"},
		{root, "prune --older-than 1d now", "", `no argument "now"`},
		{root, "list --older-than 1d", "", "older-than"},
		{root, "list p", "", `no argument "p"`},
		{root, "", "", "takes list or prune"},
		{root, "empty", "", "takes list or prune"},
		{missing, "list", "", "looking for SANDBOX_WORKSPACE_ROOT: stat " + missing},
		{missing, "prune --older-than 1h", "", "looking for SANDBOX_WORKSPACE_ROOT: stat " + missing},
		{"", "list", "", "SANDBOX_WORKSPACE_ROOT is not set"},
		{root, "in-use list", "true", ""},
		{root, "in-use prune --older-than 1d", "PRINCIPAL", ""},
		{root, "unknown list", "w1", ""},
		{root, "unknown prune --older-than 1d", "", "SANDBOX_STATE_DIR has to be the sidecar's"},
		{root, "prune --older-than 1d", "w1", ""},
		{root, "prune --older-than 0h", "PRINCIPAL", ""},
	} {
		if err := os.MkdirAll(work, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(work, used, used); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		args := strings.Fields(tc.args)
		records := state
		if len(args) > 0 && (args[0] == "in-use" || args[0] == "unknown") { // is the workspace, by the records
			records, args = map[string]string{"in-use": busy, "unknown": none}[args[0]], args[1:]
		}
		env := map[string]string{"SANDBOX_WORKSPACE_ROOT": tc.root, "SANDBOX_STATE_DIR": records}
		err := run(append([]string{"workspaces"}, args...), func(name string) string { return env[name] }, nil, &out)
		if tc.refused == "" && (err != nil || !strings.Contains(out.String(), tc.want)) {
			t.Errorf("%s: %v, %s", tc.args, err, &out)
		}
		if tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused) || out.Len() > 0) {
			t.Errorf("%s: %v, %s", tc.args, err, &out)
		}
		_, err = os.Stat(work)
		if pruned := strings.HasPrefix(tc.args, "prune --older-than 1d") || tc.args == "prune --older-than 0h"; tc.refused == "" && pruned != os.IsNotExist(err) {
			t.Errorf("%s: after it the workspace is %v", tc.args, err)
		}
	}
	if _, err := os.Stat(missing); !os.IsNotExist(err) {
		t.Errorf("a directory was made: %v", err)
	}
}
