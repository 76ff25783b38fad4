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

const secret = "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"

const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`

// serve starts a server that has no engine behind it.
func serve(t *testing.T, timeout time.Duration) (*Server, *httptest.Server) {
	t.Helper()
	auth, err := identity.New(t.Context(), identity.Options{Tokens: []identity.Token{{Name: "main", Secret: secret}}})
	if err != nil {
		t.Fatal(err)
	}
	m := metrics.New("1.0.0", func() (int, int) { return 0, 0 })
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s := &Server{Auth: auth, Tools: &tools.Tools{Config: &config.Config{}, Metrics: m, Log: log}, Metrics: m, MaxBody: 32 << 20, Version: "1.0.0", Log: log, timeout: timeout}
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = s.HTTP()
	srv.Start()
	t.Cleanup(srv.Close)
	return s, srv
}

// post sends the head of a request, and what there is of its body. A length
// below zero is not announced.
func post(t *testing.T, srv *httptest.Server, length int64, body string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	framing := fmt.Sprintf("Content-Length: %d", length)
	if length < 0 {
		framing, body = "Transfer-Encoding: chunked", fmt.Sprintf("%x\r\n%s\r\n", len(body), body)
	}
	fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n%s\r\n\r\n%s", conn.RemoteAddr(), secret, framing, body)
	return conn
}

// answer reads a response to its end.
func answer(t *testing.T, conn net.Conn, patience time.Duration) (*http.Response, string) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal("no answer: ", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return resp, string(body)
}

// Clients that announce large bodies and send them a byte at a time take all
// the room that there is for bodies: small requests are answered all the same,
// and the slow ones are sent away when their time is over.
func TestSlowBodies(t *testing.T) {
	const timeout = 2 * time.Second
	s, srv := serve(t, timeout)
	began := time.Now()
	var slow []net.Conn
	for range 2 * bodiesInFlight / s.MaxBody {
		slow = append(slow, post(t, srv, s.MaxBody, "{"))
	}
	for s.bodies.TryAcquire(1) { // until they hold it all
		s.bodies.Release(1)
		if time.Since(began) > timeout {
			t.Fatal("the large bodies are not accounted for")
		}
		time.Sleep(time.Millisecond)
	}
	if resp, text := answer(t, post(t, srv, int64(len(ping)), ping), timeout); resp.StatusCode != http.StatusOK || !strings.Contains(text, `"result":{}`) {
		t.Errorf("a small request among them: %s %s", resp.Status, text)
	}
	if s.bodies.TryAcquire(1) {
		t.Error("it was answered only when the slow ones had gone")
	}
	ended := map[int]int{}
	for _, conn := range slow {
		resp, _ := answer(t, conn, 3*timeout)
		ended[resp.StatusCode]++
	}
	// One that waited may have had its turn as the first ones went.
	if ended[http.StatusBadRequest] < bodiesInFlight/int(s.MaxBody) || ended[http.StatusBadRequest]+ended[http.StatusServiceUnavailable] != len(slow) {
		t.Errorf("the slow ones were answered %v", ended)
	}
	if !s.bodies.TryAcquire(bodiesInFlight) {
		t.Error("room for bodies is lost")
	}
}

// One that waits for room in vain is told to come again, and one that gets it
// late has its whole time to arrive.
func TestNoRoom(t *testing.T) {
	const timeout = time.Second
	s, srv := serve(t, timeout)
	body := ping + strings.Repeat(" ", 2*smallBody)
	if !s.bodies.TryAcquire(bodiesInFlight) {
		t.Fatal("there is no room at the start")
	}
	resp, text := answer(t, post(t, srv, int64(len(body)), body), 3*timeout)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" || !strings.Contains(text, "busy") {
		t.Errorf("waited in vain: %s %v %s", resp.Status, resp.Header, text)
	}

	began := time.Now()
	conn := post(t, srv, int64(len(body)), body[:1])
	time.Sleep(timeout * 7 / 10)
	s.bodies.Release(bodiesInFlight)
	time.Sleep(time.Until(began.Add(timeout * 14 / 10)))
	fmt.Fprint(conn, body[1:])
	if resp, text := answer(t, conn, 3*timeout); resp.StatusCode != http.StatusOK {
		t.Errorf("waited, then took its time: %s %s", resp.Status, text)
	}
}
