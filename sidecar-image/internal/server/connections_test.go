package server

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// few starts a server with room for 32 connections, 30 of them with a request.
func few(t *testing.T, timeout time.Duration) (*Server, *httptest.Server) {
	t.Helper()
	s, _ := serve(t, timeout)
	s.most = 32
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = s.HTTP()
	srv.Listener = s.Limit(srv.Listener)
	srv.Start()
	t.Cleanup(srv.Close)
	return s, srv
}

// Who floods the sidecar with connections keeps nobody out, whatever little they send, and
// has no more of them than there is room for.
func TestFloodOfConnections(t *testing.T) {
	s, srv := few(t, time.Minute)
	health := "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
	for what, send := range map[string]string{
		"nothing": "", "half a head": "POST /mcp HTTP/1.1\r\nHost:", "a health check": health,
		"a wrong token": "POST /mcp HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + wrong + "\r\nContent-Length: 9\r\n\r\n",
	} {
		t.Run(what, func(t *testing.T) {
			held := post(t, srv, main, int64(len(ping)), ping[:1]) // a request under way
			defer held.Close()
			eventually(t, "a request is under way", func() bool {
				s.connections.mu.Lock()
				defer s.connections.mu.Unlock()
				return s.connections.open > s.connections.idle.Len()
			})
			var flood []net.Conn
			for range 4 * s.most {
				conn, err := net.Dial("tcp", srv.Listener.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				fmt.Fprint(conn, send)
				flood = append(flood, conn)
			}
			if resp, text := answer(t, post(t, srv, other, int64(len(ping)), ping), 10*time.Second); resp.StatusCode != http.StatusOK {
				t.Errorf("a new client: %s %s", resp.Status, text)
			}
			resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(srv.URL + "/healthz")
			if err != nil {
				t.Fatal("the health check: ", err)
			}
			resp.Body.Close()
			fmt.Fprint(held, ping[1:])
			if resp, text := answer(t, held, 10*time.Second); resp.StatusCode != http.StatusOK {
				t.Errorf("a request that was under way: %s %s", resp.Status, text)
			}
			// The first of the flood have been closed.
			_ = flood[0].SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.Copy(io.Discard, flood[0]); err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("the first of the flood: %v", err)
			}
			s.connections.mu.Lock()
			open := s.connections.open
			s.connections.mu.Unlock()
			if open > s.most {
				t.Errorf("%d connections are open", open)
			}
		})
	}
	if got := metric(t, srv, `sandbox_requests_denied_total{reason="connections"}`); got == "" || got == "0" {
		t.Errorf("%q connections were closed for others", got)
	}
}

// A principal's requests take no more than its share of the connections, and all that go
// are forgotten.
func TestShareOfConnections(t *testing.T) {
	const timeout = time.Second
	s, srv := few(t, timeout)
	free := fill(t, s.requests, "main")
	if resp, text := answer(t, post(t, srv, other, int64(len(ping)), ping), 10*timeout); resp.StatusCode != http.StatusOK {
		t.Errorf("another principal: %s %s", resp.Status, text)
	}
	resp, text := answer(t, post(t, srv, main, int64(len(ping)), ping), 10*timeout)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" || !strings.Contains(text, "requests are under way") {
		t.Errorf("one above its share: %s %v %s", resp.Status, resp.Header, text)
	}
	free()
	if resp, text := answer(t, post(t, srv, main, int64(len(ping)), ping), 10*timeout); resp.StatusCode != http.StatusOK {
		t.Errorf("when others have ended: %s %s", resp.Status, text)
	}
	empty(t, s.requests)
	srv.CloseClientConnections()
	eventually(t, "all connections are forgotten", func() bool {
		s.connections.mu.Lock()
		defer s.connections.mu.Unlock()
		return s.connections.open == 0 && s.connections.idle.Len() == 0
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in thirty seconds: %s", what)
		}
	}
}
