package server

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
)

// Clients that announce large bodies and send them a byte at a time take all
// the room that there is for bodies: small requests are answered all the same,
// and the slow ones are sent away when their time is over.
func TestSlowBodies(t *testing.T) {
	const timeout = 2 * time.Second
	auth, err := identity.New(t.Context(), identity.Options{Tokens: []identity.Token{{Name: "main", Secret: strings.Repeat("k", 32)}}})
	if err != nil {
		t.Fatal(err)
	}
	m := metrics.New("1.0.0", func() (int, int) { return 0, 0 })
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s := &Server{Auth: auth, Tools: &tools.Tools{Config: &config.Config{}, Metrics: m, Log: log}, Metrics: m, MaxBody: 32 << 20, Version: "1.0.0", Log: log, timeout: timeout}
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = s.HTTP()
	srv.Start()
	defer srv.Close()

	authorization := "Bearer " + strings.Repeat("k", 32)
	began := time.Now()
	var slow []net.Conn
	for range 2 * bodiesInFlight / s.MaxBody {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: sidecar\r\nAuthorization: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", authorization, s.MaxBody)
		slow = append(slow, conn)
	}
	for s.bodies.TryAcquire(1) { // until they hold it all
		s.bodies.Release(1)
		if time.Since(began) > timeout {
			t.Fatal("the large bodies are not accounted for")
		}
		time.Sleep(time.Millisecond)
	}
	req, err := http.NewRequest(http.MethodPost, srv.URL+"/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", authorization)
	req.Header.Set("Content-Type", "application/json")
	resp, err := srv.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(answer), `"result":{}`) {
		t.Errorf("a small request among them: %s %s", resp.Status, answer)
	}
	if s.bodies.TryAcquire(1) {
		t.Error("it was answered only when the slow ones had gone")
	}
	for _, conn := range slow {
		if err := conn.SetReadDeadline(began.Add(3 * timeout)); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "HTTP/1.1 400") {
			t.Errorf("a slow one: %q %v", line, err)
		}
	}
	if !s.bodies.TryAcquire(bodiesInFlight) {
		t.Error("room for bodies is lost")
	}
}
