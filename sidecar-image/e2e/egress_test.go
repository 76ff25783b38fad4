package e2e

import (
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// fetch is a command that gets the word "outside" from a server of this machine.
func fetch(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "outside") })}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close() })
	// Python, because the stand-in image has no curl.
	return fmt.Sprintf("python3 -c 'import urllib.request; print(urllib.request.urlopen(\"http://%s:%d\", timeout=5).read().decode())'", address(t), l.Addr().(*net.TCPAddr).Port)
}

// A network only where the operator allows it and the caller asks for it.
func TestEgress(t *testing.T) {
	fetch := fetch(t)
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
	if a := c.exec(id, hostFiles); !strings.HasPrefix(a.Text, ownHosts) || strings.TrimPrefix(a.Text, ownHosts) == "" { // the names of its servers it needs
		t.Errorf("its hosts and resolv.conf are %+v", a)
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

// What podman would copy into each session are names of the operator's machines.
const (
	hostFiles = "cat /etc/hosts /etc/resolv.conf"
	ownHosts  = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost\n"
)

// gVisor has a network, or its own words for why it has none and what to do stop the boot;
// and that does it.
func TestEgressUnderGVisor(t *testing.T) {
	fetch := fetch(t)
	p := enginetest.New(t)
	p.Options(t, "runsc")
	s := prepare(t, "runsc", map[string]string{"SANDBOX_ALLOW_EGRESS": "1"}, p)
	s.begin()
	ready := func() bool {
		resp, err := http.Get(s.URL + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}
	eventually(t, 2*time.Minute, "it serves or ends", func() bool {
		select {
		case <-s.ended:
			return true
		default:
			return ready()
		}
	})
	if !ready() {
		remedy := regexp.MustCompile(`SANDBOX_PODMAN_OPTIONS=(\S*network=\w+)`).FindStringSubmatch(s.log.String())
		if remedy == nil || !strings.Contains(s.log.String(), "cannot run with network enabled in root network namespace") {
			t.Fatalf("it does not say why it ended and what to do:\n%s", s.log)
		}
		s.env["SANDBOX_PODMAN_OPTIONS"] += " " + remedy[1]
		s.run()
	}
	c := s.client()
	if a := c.exec(c.open(m{"network": "egress"}), fetch); a.Text != "outside\n" {
		t.Errorf("a session with egress: %+v", a)
	}
	if a := c.exec(c.open(m{}), fetch); !a.IsError || strings.Contains(a.Text, "outside\n") {
		t.Errorf("a session without a network reaches it: %+v", a)
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
