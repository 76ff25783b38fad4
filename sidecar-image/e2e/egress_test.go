package e2e

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// A network only where the operator allows it and the caller asks for it.
func TestEgress(t *testing.T) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "outside") })}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close() })
	host := address(t)
	// Python, because the stand-in image has no curl.
	fetch := fmt.Sprintf("python3 -c 'import urllib.request; print(urllib.request.urlopen(\"http://%s:%d\", timeout=5).read().decode())'", host, l.Addr().(*net.TCPAddr).Port)

	s := start(t, "runc", map[string]string{"SANDBOX_ALLOW_EGRESS": "1", "SANDBOX_WARM_POOL": "1"})
	c := s.client()
	a := c.call("sandbox_open", m{"network": "egress"})
	id, _ := a.Structured["session_id"].(string)
	if a.IsError || a.Structured["network"] != "egress" {
		t.Fatalf("%+v", a)
	}
	if a := c.exec(id, fetch); a.Text != "outside\n" {
		t.Errorf("a session with egress: %+v", a)
	}
	if a := c.exec(id, "grep ^CapEff /proc/self/status; python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'"); !a.IsError || !strings.Contains(a.Text, "CapEff:\t0000000000000000") {
		t.Errorf("a session with egress may send raw packets: %+v", a)
	}
	for _, args := range []m{{}, {"network": "none"}} {
		id := c.open(args)
		if a := c.exec(id, fetch); !a.IsError || strings.Contains(a.Text, "outside\n") {
			t.Errorf("a session without a network reaches it: %+v", a)
		}
		if a := c.exec(id, "ls /sys/class/net"); a.Text != "lo\n" {
			t.Errorf("its interfaces: %+v", a)
		}
	}
	if a := c.call("sandbox_list", m{}); strings.Count(a.Text, `"network":"egress"`) != 1 || strings.Count(a.Text, `"network":"none"`) != 2 {
		t.Errorf("list: %s", a.Text)
	}
}

// address is one of this machine's, which containers on a bridge can reach.
func address(t *testing.T) string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	citest.Skip(t, "the machine has no address but loopback, so no session could reach it")
	return ""
}
