package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
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
