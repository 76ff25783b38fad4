package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tracing"
)

// Two principals, and nobody.
const (
	main  = "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"
	other = "llllllllllllllllllllllllllllllll"
	wrong = "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm"
)

const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`

// serve starts a server that has no engine behind it.
func serve(t *testing.T, timeout time.Duration, hooks ...func(http.ConnState)) (*Server, *httptest.Server) {
	t.Helper()
	auth, err := identity.New(t.Context(), identity.Options{Tokens: []identity.Token{{Name: "main", Secret: main}, {Name: "other", Secret: other}}})
	if err != nil {
		t.Fatal(err)
	}
	m := metrics.New("1.0.0", func() (int, int) { return 0, 0 })
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s := &Server{Auth: auth, Tools: &tools.Tools{Config: &config.Config{}, Metrics: m, Log: log}, Metrics: m, MaxBody: 32 << 20, Version: "1.0.0", Log: log, timeout: timeout}
	s.Booted()
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = s.HTTP()
	srv.Listener = s.Limit(srv.Listener)
	for _, hook := range hooks {
		srv.Config.ConnState = func(_ net.Conn, state http.ConnState) { hook(state) }
	}
	srv.Start()
	t.Cleanup(srv.Close)
	return s, srv
}

// post sends the head of a request, and what there is of its body. A length
// below zero is not announced.
func post(t *testing.T, srv *httptest.Server, token string, length int64, body string) net.Conn {
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
	fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n%s\r\n\r\n%s", conn.RemoteAddr(), token, framing, body)
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

// A proxy on this machine keeps the name that its clients use; a browser is nobody's
// proxy, and without tokens a name that leads to loopback is all that one would need.
func TestHostNames(t *testing.T) {
	s, _ := serve(t, time.Minute)
	denied := map[string]int{}
	for _, tc := range []struct {
		anon                bool
		host, origin, token string
		want                int
		reason              string // in the log and the metrics
	}{
		{false, "sandbox.example.test", "", main, http.StatusOK, ""},
		{false, "sandbox.example.test", "", "", http.StatusUnauthorized, "token"},
		{false, "", "https://evil.example.test", main, http.StatusForbidden, "origin"},
		{true, "", "", "", http.StatusOK, ""},
		{true, "", "", wrong, http.StatusUnauthorized, "token"},
		{true, "sandbox.example.test", "", "", http.StatusForbidden, "host"},
		{true, "", "https://evil.example.test", "", http.StatusForbidden, "origin"},
	} {
		auth, err := identity.New(t.Context(), identity.Options{Anon: tc.anon, Tokens: []identity.Token{{Name: "main", Secret: main}}})
		if err != nil {
			t.Fatal(err)
		}
		var log syncbuf.Buffer
		s.Auth, s.Tools.Config.Anon, s.Log = auth, tc.anon, slog.New(slog.NewTextHandler(&log, nil))
		srv := httptest.NewServer(s.Handler())
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL+"/mcp", strings.NewReader(ping))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range map[string]string{"Content-Type": "application/json", "Origin": tc.origin, "Authorization": strings.TrimSuffix("Bearer "+tc.token, "Bearer ")} {
			if v != "" {
				req.Header.Set(k, v)
			}
		}
		req.Host = tc.host
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != tc.want {
			t.Errorf("%+v: %s", tc, resp.Status)
		}
		if tc.reason != "" {
			denied[tc.reason]++
			series := fmt.Sprintf("sandbox_requests_denied_total{reason=%q}", tc.reason)
			if got, want := metric(t, srv, series), fmt.Sprint(denied[tc.reason]); got != want {
				t.Errorf("%+v: %s is %q, not %s", tc, series, got, want)
			}
		}
		if logged := log.String(); (logged != "") != (tc.reason != "") || tc.reason != "" && !strings.Contains(logged, `"request refused" reason=`+tc.reason) {
			t.Errorf("%+v: the log says %q", tc, logged)
		}
		srv.Close()
	}
}

// Who has no token can be refused as often as they like, and not fill a disk.
func TestFloodOfRefusals(t *testing.T) {
	s, srv := serve(t, time.Minute)
	var log syncbuf.Buffer
	s.Log = slog.New(slog.NewTextHandler(&log, nil))
	s.Ping = func(context.Context) error { return errors.New("no engine") }
	refuse := func(path string, n int) {
		for range n {
			srv.Config.Handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path, nil))
		}
	}
	began := time.Now()
	refuse("/mcp", 5000)
	refuse("/readyz", 1000)
	most := refusalBurst + maxRefusals*(int(time.Since(began).Seconds())+1)
	if n := strings.Count(log.String(), "request refused"); n < refusalBurst || n > most {
		t.Errorf("%d of 5000 refusals were logged, not %d to %d", n, refusalBurst, most)
	}
	if n := strings.Count(log.String(), "not ready"); n < 1 || n > int(time.Since(began)/readyTTL)+1 {
		t.Errorf("%d times not ready", n)
	}
	eventually(t, "the log says how many it does not have", func() bool {
		refuse("/mcp", 1)
		_, last, _ := strings.Cut(log.String(), "unlogged=4")
		return len(last) > 0
	})
	if got := metric(t, srv, `sandbox_requests_denied_total{reason="token"}`); len(got) < 4 || got < "5001" {
		t.Errorf("%q refusals are counted", got)
	}
}

// Clients that announce large bodies and send them a byte at a time take all
// the room that there is for bodies: small requests are answered all the same,
// and the slow ones are sent away when their time is over.
func TestSlowBodies(t *testing.T) {
	const timeout = 10 * time.Second
	s, srv := serve(t, timeout)
	began := time.Now()
	var slow []net.Conn
	for range largeInFlight / s.MaxBody {
		slow = append(slow, post(t, srv, main, s.MaxBody, "{"), post(t, srv, other, s.MaxBody, "{"))
	}
	for s.large.all.TryAcquire(1) { // until they hold it all
		s.large.all.Release(1)
		if time.Since(began) > timeout {
			t.Fatal("the large bodies are not accounted for")
		}
		time.Sleep(time.Millisecond)
	}
	if resp, text := answer(t, post(t, srv, main, int64(len(ping)), ping), timeout); resp.StatusCode != http.StatusOK || !strings.Contains(text, `"result":{}`) {
		t.Errorf("a small request among them: %s %s", resp.Status, text)
	}
	if s.large.all.TryAcquire(1) {
		t.Error("it was answered only when the slow ones had gone")
	}
	ended := map[int]int{}
	for _, conn := range slow {
		resp, _ := answer(t, conn, 3*timeout)
		ended[resp.StatusCode]++
	}
	// One that waited may have had its turn as the first ones went.
	if ended[http.StatusBadRequest] < largeInFlight/int(s.MaxBody) || ended[http.StatusBadRequest]+ended[http.StatusServiceUnavailable] != len(slow) {
		t.Errorf("the slow ones were answered %v", ended)
	}
	empty(t, s.large, s.small)
}

// empty fails when a room that nobody needs any more does not become all free.
func empty(t *testing.T, rooms ...*room) {
	t.Helper()
	for _, r := range rooms {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if err := r.all.Acquire(ctx, r.size); err != nil {
			t.Fatal("room for bodies is lost")
		}
		r.all.Release(r.size)
		for {
			r.mu.Lock()
			n := len(r.shares)
			r.mu.Unlock()
			if n == 0 {
				break
			}
			if ctx.Err() != nil {
				t.Fatal("shares are kept of principals that have gone")
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// fill takes a principal's share, and returns what frees it.
func fill(t *testing.T, r *room, principal string) func() {
	t.Helper()
	p, err := r.take(t.Context(), principal, r.size/2)
	if err != nil {
		t.Fatal(err)
	}
	return func() { p.keep(0) }
}

// However many principals a tenant has, they get half of a room, and each of them a
// quarter; others get theirs meanwhile.
func TestTenantsShareOfARoom(t *testing.T) {
	r := newRoom(400)
	at := map[string]*place{}
	for _, c := range []struct {
		principal string
		n         int64
		fits      bool
	}{
		{"acme/a", 100, true}, {"acme/a", 1, false}, {"acme/b", 60, true}, {"acme/c", 41, false}, {"acme/c", 40, true}, {"acme/d", 1, false},
		{"other/a", 100, true}, {"other/a", 1, false}, {"acme", 100, true}, {"other/b", 1, false},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if c.fits {
			ctx = t.Context()
		}
		p, err := r.take(ctx, c.principal, c.n)
		cancel()
		if (err == nil) != c.fits {
			t.Fatalf("%d bytes of %s: %v", c.n, c.principal, err)
		}
		if c.fits {
			at[c.principal] = p
		}
	}
	at["acme/b"].keep(10)
	p, err := r.take(t.Context(), "acme/d", 50)
	if err != nil {
		t.Fatal(err)
	}
	p.keep(0)
	for _, p := range at {
		p.keep(0)
	}
	empty(t, r)
}

// One that waits for room in vain is told to come again, and one that gets it
// late has its whole time to arrive.
func TestNoRoom(t *testing.T) {
	const timeout = 5 * time.Second // less 0.7 of it, twice, is the margin
	s, srv := serve(t, timeout)
	body := ping + strings.Repeat(" ", 2*smallBody)
	free := fill(t, s.large, "main")
	resp, text := answer(t, post(t, srv, main, int64(len(body)), body), 3*timeout)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" || !strings.Contains(text, "try again") {
		t.Errorf("waited in vain: %s %v %s", resp.Status, resp.Header, text)
	}

	began := time.Now()
	conn := post(t, srv, main, int64(len(body)), body[:1])
	time.Sleep(timeout * 7 / 10)
	free()
	time.Sleep(time.Until(began.Add(timeout * 14 / 10)))
	fmt.Fprint(conn, body[1:])
	if resp, text := answer(t, conn, 3*timeout); resp.StatusCode != http.StatusOK {
		t.Errorf("waited, then took its time: %s %s", resp.Status, text)
	}
	empty(t, s.large, s.small)
}

// Who waits for what: small bodies, announced or not, for small ones; large ones
// for large ones; one principal's for no more than half of the room.
func TestRooms(t *testing.T) {
	const timeout = time.Second
	large := ping + strings.Repeat(" ", smallBody)
	for _, tc := range []struct {
		name      string
		fill      []string // whose shares are taken: of the large, and after a dash of the small
		token     string
		body      string
		announced bool
		want      int
	}{
		{"small, large taken", []string{"main", "other"}, main, ping, true, 200},
		{"small in chunks, large taken", []string{"main", "other"}, main, ping, false, 200},
		{"large in chunks, large taken", []string{"main", "other"}, main, large, false, 503},
		{"large in chunks", nil, main, large, false, 200},
		{"large, the other's share taken", []string{"other"}, main, large, true, 200},
		{"large, its own share taken", []string{"main"}, main, large, true, 503},
		{"small, small taken", []string{"-main", "-other"}, main, ping, true, 503},
		{"small in chunks, small taken", []string{"-main", "-other"}, main, ping, false, 503},
		{"small, the other's share taken", []string{"-other"}, main, ping, true, 200},
		{"large, small taken", []string{"-main", "-other"}, other, large, true, 200},
		{"nothing", nil, main, "", true, 400},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, srv := serve(t, timeout)
			for _, who := range tc.fill {
				if small, ok := strings.CutPrefix(who, "-"); ok {
					defer fill(t, s.small, small)()
				} else {
					defer fill(t, s.large, who)()
				}
			}
			length, body := int64(len(tc.body)), tc.body
			if !tc.announced {
				length = -1
			}
			conn := post(t, srv, tc.token, length, body)
			if !tc.announced {
				fmt.Fprint(conn, "0\r\n\r\n")
			}
			if resp, text := answer(t, conn, 5*timeout); resp.StatusCode != tc.want {
				t.Errorf("answered %s: %s", resp.Status, text)
			}
		})
	}
}

// What is not read keeps no connection: nobody waits for the end of the body of
// one that has no token.
func TestUnwantedBody(t *testing.T) {
	const timeout = 10 * time.Second
	_, srv := serve(t, timeout)
	conn := post(t, srv, wrong, -1, "{")
	if resp, _ := answer(t, conn, timeout/2); resp.StatusCode != http.StatusUnauthorized {
		t.Error(resp.Status)
	}
	_ = conn.SetReadDeadline(time.Now().Add(3 * timeout))
	if _, err := conn.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("it is not closed: %v", err)
	}
}

// Who sends a body that is turned away, and reads the answer only after it, gets the answer
// and no reset.
func TestAnswerToUnwantedBody(t *testing.T) {
	s, srv := serve(t, 10*time.Second)
	full := fill(t, s.large, "other")
	defer full()
	s.MaxBody, s.timeout = 16<<20, 5*time.Second // the latter also to wait for room
	for _, tc := range []struct {
		what, token string
		chunked     bool
		size        int64
		header      string
		want        int
	}{
		{"too large, announced", main, false, s.MaxBody + 12<<20, "", http.StatusRequestEntityTooLarge},
		{"too large, in chunks", main, true, s.MaxBody + 12<<20, "", http.StatusRequestEntityTooLarge},
		{"no room", other, false, 16 << 20, "", http.StatusServiceUnavailable},
		{"no token", wrong, false, 16 << 20, "", http.StatusUnauthorized},
		{"a run that is none", main, false, 16 << 20, strings.Repeat("x", 257), http.StatusBadRequest},
	} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		framing := fmt.Sprintf("Content-Length: %d", tc.size)
		if tc.chunked {
			framing = "Transfer-Encoding: chunked"
		}
		fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nX-Loom-Root-Run: %s\r\n%s\r\n\r\n", tc.token, tc.header, framing)
		piece := strings.Repeat(" ", 1<<20)
		if tc.chunked {
			piece = fmt.Sprintf("%x\r\n%s\r\n", 1<<20, piece)
		}
		for sent := int64(0); sent < tc.size; sent += 1 << 20 {
			if _, err := io.WriteString(conn, piece); err != nil {
				t.Errorf("%s: sending after %d bytes: %v", tc.what, sent, err)
				break
			}
		}
		resp, text := answer(t, conn, 20*time.Second)
		if resp.StatusCode != tc.want {
			t.Errorf("%s: %s %s", tc.what, resp.Status, text)
		}
		if tc.want == http.StatusRequestEntityTooLarge && !strings.Contains(text, "base64") {
			t.Errorf("%s: no remedy in %q", tc.what, text)
		}
	}
}

// A request is answered under its own name, or refused when it has none, and what is no
// request gets a JSON-RPC error.
func TestMessages(t *testing.T) {
	s, srv := serve(t, time.Minute)
	var log syncbuf.Buffer
	s.Log = slog.New(slog.NewTextHandler(&log, nil))
	name := func(n int) string { return `"` + strings.Repeat("i", n-2) + `"` }
	// meta is a call of so many bytes, in strings that are none of the long ones.
	meta := func(n int) string {
		const before, after, item = `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"x":[`, `0]}}}`, 1 << 10
		n -= len(before) + len(after)
		text := strings.Repeat(`"`+strings.Repeat("x", item-3)+`",`, n/item-1)
		return before + text + `"` + strings.Repeat("x", n-len(text)-3) + `",` + after
	}
	call := func(id string) string { return `{"jsonrpc":"2.0","method":"ping","id":` + id + `}` }
	const parse, invalid, method, badID = `"id":null,"error":{"code":-32700`, `"id":null,"error":{"code":-32600`, `"error":{"code":-32601,"message":"there is no method \"nope\""}`, `"a request's id is a string, or a whole number of at most 9007199254740991"`
	for _, tc := range []struct {
		what, body string
		status     int
		want       string
	}{
		{"the longest id", call(name(tools.LiftMin)), http.StatusOK, `"id":` + name(tools.LiftMin)},
		{"an id above it", call(name(tools.LiftMin + 1)), http.StatusBadRequest, invalid},
		{"one of a batch", `[` + ping + `,` + call(name(20<<10)) + `]`, http.StatusBadRequest, invalid},
		{"a progress token", `{"jsonrpc":"2.0","method":"ping","id":1,"params":{"_meta":{"progressToken":` + name(20<<10) + `}}}`, http.StatusBadRequest, `"id":1,"error":{"code":-32600`},
		{"another long string", `{"jsonrpc":"2.0","method":"ping","id":1,"params":{"_meta":{"x":` + name(20<<10) + `}}}`, http.StatusOK, `"id":1`},

		{"a string", call(`"a"`), http.StatusOK, `"id":"a"`},
		{"zero", call(`0`), http.StatusOK, `"id":0`},
		{"a negative number", call(`-7`), http.StatusOK, `"id":-7`},
		{"the largest number", call(`9007199254740991`), http.StatusOK, `"id":9007199254740991`},
		{"a number above it", call(`9007199254740993`), http.StatusBadRequest, badID},
		{"a huge number", call(`1e300`), http.StatusBadRequest, badID},
		{"a number that is none", call(`1e999`), http.StatusBadRequest, badID},
		{"a fraction", call(`1.5`), http.StatusBadRequest, badID},
		{"a fraction in a large body", call(`1.5`) + strings.Repeat(" ", 2*smallBody), http.StatusBadRequest, badID},
		{"a fraction in a batch", `[` + ping + `,` + call(`1.5`) + `]`, http.StatusBadRequest, badID},
		{"null", call(`null`), http.StatusBadRequest, invalid},
		{"none", `{"jsonrpc":"2.0","method":"ping"}`, http.StatusBadRequest, invalid},
		{"a truth", call(`true`), http.StatusBadRequest, invalid},
		{"an object", call(`{}`), http.StatusBadRequest, invalid},

		{"an unknown method", `{"jsonrpc":"2.0","id":8,"method":"nope"}`, http.StatusOK, `"id":8,` + method},
		{"by a string", `{"jsonrpc":"2.0","id":"x","method":"nope","params":{}}`, http.StatusOK, `"id":"x",` + method},
		{"in a batch", `[` + ping + `,{"jsonrpc":"2.0","id":8,"method":"nope"}]`, http.StatusBadRequest, invalid},
		{"with null", `{"jsonrpc":"2.0","id":null,"method":"nope"}`, http.StatusBadRequest, invalid},
		{"an unknown notification", `{"jsonrpc":"2.0","method":"notifications/nope"}`, http.StatusAccepted, ""},
		{"no method", `{"jsonrpc":"2.0","id":1}`, http.StatusBadRequest, `"id":1,"error":{"code":-32600,"message":"the message has no method`},
		{"no method in a batch", `[` + ping + `,{"jsonrpc":"2.0","id":1}]`, http.StatusBadRequest, invalid},
		{"an answer", `{"jsonrpc":"2.0","id":1,"result":{}}`, http.StatusAccepted, ""},
		{"an error", `{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"x"}}`, http.StatusAccepted, ""},
		{"an error that is none", `{"jsonrpc":"2.0","id":1,"error":5}`, http.StatusBadRequest, `"error has to be an object, not a number"`},
		{"a method that is a number", `{"jsonrpc":"2.0","id":1,"method":5}`, http.StatusBadRequest, `"method has to be a string, not a number"`},
		{"a version that is a number", `{"jsonrpc":2,"id":1,"method":"ping"}`, http.StatusBadRequest, `"jsonrpc has to be \"2.0\""`},
		{"another message after it", ping + `{}`, http.StatusBadRequest, parse},
		{"a letter after a batch", `[` + ping + `]x`, http.StatusBadRequest, parse},
		{"an empty batch", `[]`, http.StatusBadRequest, invalid},
		{"a batch of no objects", `[[]]`, http.StatusBadRequest, `"a message is a JSON object, not an array"`},
		{"no UTF-8", "{\"jsonrpc\":\"2.0\",\"id\":\"\xff\",\"method\":\"ping\"}", http.StatusBadRequest, parse},
		{"params that are an array", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}`, http.StatusOK, `"id":1,"error":{"code":-32602,"message":"params has to be an object, not an array"}`},
		{"a tool's name that is a number", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":5}}`, http.StatusOK, `"params.name has to be a string, not a number"`},
		{"one in a batch", `[` + ping + `,{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":5}}]`, http.StatusBadRequest, `"id":null,"error":{"code":-32602`},
		{"a client's name that is a number", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"clientInfo":{"name":5}}}`, http.StatusOK, `"params.clientInfo.name has to be a string, not a number"`},
		{"roots that are a truth", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"capabilities":{"roots":true}}}`, http.StatusOK, `"params.capabilities.roots has to be an object, not a boolean"`},
		{"a level that is an array", `{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":[]}}`, http.StatusOK, `"params.level has to be a string, not an array"`},
		{"an empty one", `{"jsonrpc":"2.0","id":8,"method":""}`, http.StatusOK, `"id":8,"error":{"code":-32601`},
		{"another version", `{"jsonrpc":"1.0","id":1,"method":"ping"}`, http.StatusBadRequest, `"id":1,"error":{"code":-32600`},
		{"a name of other letters", `{"jsonrpc":"2.0","method":"ping","id":1,"ID":1.5}`, http.StatusOK, `"id":1`},
		{"a fraction before it", `{"jsonrpc":"2.0","method":"ping","id":1.5,"ID":1}`, http.StatusBadRequest, badID},
		{"the largest batch", `[` + strings.Repeat(ping+",", maxBatch-1) + ping + `]`, http.StatusOK, `"id":1`},
		{"a larger one", `[` + strings.Repeat("0,", maxBatch) + `0]`, http.StatusBadRequest, "a batch may have 100 messages"},
		{"depth", `{"jsonrpc":"2.0","id":1,"method":"ping","params":` + strings.Repeat("[", 1<<20), http.StatusBadRequest, `values and names, or more, and may have 8192`},
		{"less of it", `{"jsonrpc":"2.0","id":1,"method":"ping","params":` + strings.Repeat("[", 8000), http.StatusBadRequest, parse},
		{"as many values as may be", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"x":[` + strings.Repeat("[],", maxValues/2-8) + `"\",[:{"]}}}`, http.StatusOK, `"id":1`},
		{"more", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"x":[` + strings.Repeat("[],", maxValues/2) + `0]}}}`, http.StatusBadRequest, `"id":null,"error":{"code":-32600`},
		{"as many bytes as may be", meta(maxLean), http.StatusOK, `"id":1`},
		{"more of them", meta(maxLean + 1), http.StatusBadRequest, "bytes without its strings of 16384 bytes and more, and may have 2097152"},
		{"many more in long strings", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"x":"` + strings.Repeat(`[,:\"`, 1<<20) + `"}}}`, http.StatusOK, `"id":1`},
		{"a quote left out", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"env":"x"hunter2"}}`, http.StatusBadRequest, parse},
		{"no JSON", `{"jsonrpc"`, http.StatusBadRequest, parse},
		{"nothing", ``, http.StatusBadRequest, parse},
		{"a number", `7`, http.StatusBadRequest, invalid},
	} {
		for _, accept := range []string{"application/json", "application/json, text/event-stream"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL+"/mcp", strings.NewReader(tc.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header = http.Header{"Authorization": {"Bearer " + main}, "Content-Type": {"application/json"}, "Accept": {accept}}
			resp, err := srv.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != tc.status || !strings.Contains(string(text), tc.want) || (len(text) == 0) != (tc.want == "") {
				t.Errorf("%s, %s: %s %.200s %v", tc.what, accept, resp.Status, text, err)
			}
			if kind := resp.Header.Get("Content-Type"); strings.Contains(tc.want, `"error"`) && kind != "application/json" {
				t.Errorf("%s: an error of type %q", tc.what, kind)
			}
		}
	}
	if told := log.String(); !strings.Contains(told, "the body is not JSON") || strings.Contains(told, "hunter2") {
		t.Errorf("the log has contents of requests, or does not tell of those refused:\n%s", told)
	}
	// What no client can have meant is counted.
	if got := metric(t, srv, `sandbox_requests_denied_total{reason="request"}`); got == "" || got == "0" {
		t.Errorf("%q requests that were none", got)
	}
}

// metric is the value of a series, or empty.
func metric(t *testing.T, srv *httptest.Server, series string) string {
	t.Helper()
	resp, err := srv.Client().Get(srv.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.Uncompressed {
		t.Error("the metrics came compressed")
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), series+" ")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

// A client that sends requests and takes no answers is left alone after a while.
func TestUntakenAnswers(t *testing.T) {
	const timeout = time.Second
	closed := make(chan struct{})
	_, srv := serve(t, timeout, func(state http.ConnState) {
		if state == http.StateClosed {
			close(closed)
		}
	})
	// A request's id comes back in its answer.
	body := `{"jsonrpc":"2.0","method":"ping","id":"` + strings.Repeat("i", 15<<10) + `"}`
	conn := post(t, srv, main, int64(len(body)), body)
	_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
	go func() { // until the kernel takes no more of it, or the test ends
		for err := error(nil); err == nil; {
			_, err = fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", conn.RemoteAddr(), main, len(body), body)
		}
	}()
	// The server's own word: the kernel may leave the client's side waiting.
	select {
	case <-closed:
	case <-time.After(2 * time.Minute):
		t.Error("its connection, and its answer, are kept")
	}
}

// A client that takes its answers slowly, but takes them, gets them whole; and
// one whose call is long is answered after it.
func TestSlowAnswers(t *testing.T) {
	const timeout = 3 * time.Second
	s := &Server{timeout: timeout}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w = &answerWriter{w, http.NewResponseController(w), s.timeout}
		time.Sleep(2 * timeout)
		if n, err := w.Write(make([]byte, 32<<20)); n != 32<<20 || err != nil {
			t.Errorf("wrote %d: %v", n, err)
		}
	}))
	srv.Config.WriteTimeout = timeout
	srv.Start()
	defer srv.Close()
	resp, err := srv.Client().Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got := int64(0)
	for err == nil {
		var n int64
		n, err = io.CopyN(io.Discard, resp.Body, 2<<20)
		got += n
		time.Sleep(timeout / 5) // sixteen times: more than three timeouts
	}
	if err != io.EOF || got != 32<<20 {
		t.Errorf("%d bytes came: %v", got, err)
	}
}

// watched is a response that looks around when it is written.
type watched struct {
	*httptest.ResponseRecorder
	look func()
}

func (w watched) Write(p []byte) (int, error) { w.look(); return w.ResponseRecorder.Write(p) }

// A call's body has left its room when the answer begins, but for what the SDK still has of it.
func TestRelease(t *testing.T) {
	s, srv := serve(t, time.Minute)
	s.Tools.Sessions, s.Tools.Tracing = &session.Manager{}, tracing.Off()
	for _, tc := range []struct {
		meta string
		kept int64
	}{{"", 0}, {strings.Repeat(`"`+strings.Repeat("x", tools.LiftMin-2)+`",`, 40), 40 * tools.LiftMin}} {
		body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"_meta":{"x":[` + tc.meta + `0]},"name":"sandbox_write","arguments":{"session_id":"sbx-1","path":"p","content":"` + strings.Repeat("x", 1<<20) + `"}}}`
		for _, accept := range []string{"application/json", "application/json, text/event-stream"} {
			r := httptest.NewRequest(http.MethodPost, "http://127.0.0.1/mcp", strings.NewReader(body))
			r.Header.Set("Authorization", "Bearer "+main)
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Accept", accept)
			looked := 0
			w := watched{httptest.NewRecorder(), func() {
				looked++
				free := s.large.size
				if tc.kept > 0 {
					if free -= tc.kept; s.large.all.TryAcquire(free) {
						t.Error("room is free for what the SDK still has of the body")
						s.large.all.Release(free)
					}
					free -= 1 << 10
				}
				if !s.large.all.TryAcquire(free) {
					t.Error("the body's room is taken while its answer is written")
					return
				}
				s.large.all.Release(free)
			}}
			srv.Config.Handler.ServeHTTP(w, r)
			if text := w.Body.String(); looked == 0 || !strings.Contains(text, "there is no such session") {
				t.Errorf("answered %d %s", w.Code, text)
			}
		}
	}
	empty(t, s.large, s.small)
}

// The answer of an engine that is well is not spoilt by one who asks and hangs up.
func TestReadyAfterHangup(t *testing.T) {
	s, srv := serve(t, time.Minute)
	s.Ping = func(ctx context.Context) error { return ctx.Err() }
	for _, gone := range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if gone {
			cancel()
		}
		w := httptest.NewRecorder()
		srv.Config.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil).WithContext(ctx))
		if w.Code != http.StatusOK {
			t.Errorf("answered %d: %s", w.Code, w.Body)
		}
	}
}

// The ceiling that the boot lowers is the one that clients are told.
func TestToolsAreThoseOfTheBoot(t *testing.T) {
	s, srv := serve(t, time.Minute)
	s.Tools.Config.CPU, s.Tools.Config.MaxCPU = 1, 3
	const list = `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`
	resp, body := answer(t, post(t, srv, main, int64(len(list)), list), 10*time.Second)
	if resp.StatusCode != http.StatusOK || !strings.Contains(body, "CPUs; 0.01 to 3 (more is cut), 1 by default") {
		t.Errorf("%s: %s", resp.Status, body)
	}
}
