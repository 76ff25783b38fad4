// Package server is the sidecar's HTTP face: MCP at /mcp behind the identity
// check, and health, readiness and metrics beside it.
package server

import (
	"bytes"
	"cmp"
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"crypto/rand"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/time/rate"
)

const (
	sessionHeader = "Mcp-Session-Id"
	// transferTimeout is what a body has to arrive, and a piece of an answer to
	// be taken.
	transferTimeout = time.Minute
	answerPiece     = 1 << 20 // bytes
	// The request bodies held at once are bounded, in bytes. Small ones have a
	// room of their own: they never wait for large ones that are slow to come.
	largeInFlight = 128 << 20
	smallInFlight = 64 << 20
	smallBody     = 64 << 10
	readyTTL      = time.Second
	maxHeader     = 128 << 10 // bytes of a request's headers
	// headerTimeout is what they have to arrive, and idleTimeout what a connection
	// without a request is kept.
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	// drainTimeout is for what is still sent of a body that nobody wants.
	drainTimeout = 2 * time.Second
	// bodyOnTrust bounds what is reserved for a body before it has come, in bytes.
	bodyOnTrust = 2 << 20
	// So are the answers, from before they are made until the client has them, and in
	// rooms of its own what commands write while they run: who waits to answer for one
	// holds nothing that another needs who does.
	largeAnswers = 512 << 20
	largeOutputs = 256 << 20
	smallAnswers = 128 << 20
	smallAnswer  = 768 << 10
	// maxRefusals of each reason go into the log, a second, and as many more as refusalBurst at first.
	maxRefusals  = 10
	refusalBurst = 100
)

var errBusy = errors.New("the sidecar holds all the request bodies that it has room for; try again")

// Server serves the sidecar.
type Server struct {
	Auth    *identity.Authenticator
	Tools   *tools.Tools
	Metrics *metrics.Metrics
	Ping    func(context.Context) error
	MaxBody int64
	Version string
	Log     *slog.Logger

	connections *connections
	requests    *room // of one each
	large       *room
	small       *room
	outputs     rooms
	answers     rooms
	stream      http.Handler
	plain       http.Handler
	booted      atomic.Bool
	draining    atomic.Bool
	timeout     time.Duration // transferTimeout when 0
	most        int           // connections; mostConnections() when 0

	mu    sync.Mutex
	calls map[string][]chan struct{} // calls under way that a notification can cancel
	told  map[string]*told           // refusals by reason

	ready struct {
		sync.Mutex
		at  time.Time
		err error
	}
}

// Handler builds the routes. Call it once.
func (s *Server) Handler() http.Handler {
	// The SDK tells of every request at the level info.
	sdk := slog.New(quiet{s.Log.Handler()})
	// At the first call, after the boot: what tools say of their arguments depends on
	// the engine's host.
	srv := sync.OnceValue(func() *mcp.Server {
		srv := mcp.NewServer(&mcp.Implementation{Name: "loomcycle-sandbox", Title: "loomcycle sandbox", Version: s.Version},
			&mcp.ServerOptions{Instructions: tools.Instructions, Logger: sdk, Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}}})
		s.Tools.Register(srv)
		return srv
	})
	handler := func(plain bool) http.Handler {
		return mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return srv() }, &mcp.StreamableHTTPOptions{
			Stateless: true, JSONResponse: plain, Logger: sdk, MaxRequestBodyBytes: s.MaxBody,
			// A name that was rebound to loopback brings a browser here, but not a token; a proxy on this
			// machine brings both the token and the name that its clients use.
			DisableLocalhostProtection: !s.Tools.Config.Anon})
	}
	s.stream, s.plain = handler(false), handler(true)
	s.timeout = cmp.Or(s.timeout, transferTimeout)
	s.connections = &connections{most: cmp.Or(s.most, mostConnections()), idle: list.New(), dropped: func() { s.Metrics.Denied("connections") }}
	s.requests = newRoom(int64(s.connections.most - s.connections.most/spareConnections))
	s.large, s.small = newRoom(max(largeInFlight, 4*s.MaxBody)), newRoom(smallInFlight)
	s.outputs = rooms{newRoom(max(largeOutputs, 4*s.Tools.MaxAnswer())), newRoom(smallAnswers), errNoOutput}
	s.answers = rooms{newRoom(max(largeAnswers, 4*s.Tools.MaxAnswer())), newRoom(smallAnswers), errNoAnswer}
	s.calls, s.told = map[string][]chan struct{}{}, map[string]*told{}
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.deny(w, r, http.StatusForbidden, "origin", errors.New("a browser sent the request from another origin"))
	}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.Handle("GET /readyz", s.afterBoot(http.HandlerFunc(s.readyz)))
	mux.Handle("GET /metrics", s.afterBoot(s.Metrics.Handler()))
	mux.Handle("/mcp", s.afterBoot(origin.Handler(http.HandlerFunc(s.mcp))))
	return mux
}

// quiet lets warnings and errors through.
type quiet struct{ slog.Handler }

func (quiet) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

// HTTP returns the http.Server with the limits that keep slow and large
// clients from costing more than their share.
func (s *Server) HTTP() *http.Server {
	h := s.Handler()
	// For the bodies that nobody wants, and for the answers of other paths than
	// /mcp, which renews both as it waits and works.
	return &http.Server{Handler: h, ConnContext: withConn, ReadHeaderTimeout: headerTimeout, ReadTimeout: s.timeout, WriteTimeout: s.timeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug)}
}

// Booted opens what needs sessions: before it, only health is answered.
func (s *Server) Booted() { s.booted.Store(true) }

func (s *Server) afterBoot(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.booted.Load() {
			w.Header().Set("Retry-After", "5")
			s.turnAway(w, r, http.StatusServiceUnavailable, "the sidecar is starting: it fetches the key set of identities, pulls the session image where that is missing, and tries a session")
			return
		}
		h.ServeHTTP(w, r)
	})
}

// Drain makes the sidecar unready, before it shuts down.
func (s *Server) Drain() { s.draining.Store(true) }

func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	if s.draining.Load() {
		http.Error(w, "the sidecar is shutting down", http.StatusServiceUnavailable)
		return
	}
	s.ready.Lock()
	defer s.ready.Unlock()
	if time.Since(s.ready.at) > readyTTL { // nobody with a token stands behind this: one ping a second
		// Nor does one who hangs up decide what the next is told.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 2*time.Second)
		s.ready.err = s.Ping(ctx)
		cancel()
		s.ready.at = time.Now()
		if s.ready.err != nil { // nor does one who asks often fill the log
			s.Log.Warn("not ready", "error", s.ready.err)
		}
	}
	if s.ready.err != nil {
		http.Error(w, "the container engine does not answer", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ready")
}

// told is what the log has of one reason.
type told struct {
	*rate.Limiter
	unlogged int
}

// refused tells the metrics and the log of a request that is refused. Nobody has to have a
// token to be refused, so a flood of them fills no disk.
func (s *Server) refused(r *http.Request, reason string, err error) {
	s.Metrics.Denied(reason)
	s.mu.Lock()
	of := s.told[reason]
	if of == nil {
		of = &told{Limiter: rate.NewLimiter(maxRefusals, refusalBurst)}
		s.told[reason] = of
	}
	if !of.Allow() {
		of.unlogged++
		s.mu.Unlock()
		return
	}
	log := s.Log.With("reason", reason, "remote", r.RemoteAddr, "error", fmt.Sprintf("%.200s", err)) // it may quote the request
	if of.unlogged > 0 {
		log = log.With("unlogged", of.unlogged)
		of.unlogged = 0
	}
	s.mu.Unlock()
	log.Warn("request refused")
}

func (s *Server) deny(w http.ResponseWriter, r *http.Request, status int, reason string, err error) {
	s.refused(r, reason, err)
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="sandbox"`)
	}
	s.turnAway(w, r, status, err.Error())
}

// turnAway answers a request whose body has not been read, and closes its connection. What
// the client still sends is taken for a while, and dropped: a connection that is closed while it
// sends is reset, and the answer lost with it.
func (s *Server) turnAway(w http.ResponseWriter, r *http.Request, status int, text string) {
	w.Header().Set("Connection", "close")
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)+1)) // whole before its connection ends
	w.WriteHeader(status)
	fmt.Fprintln(w, text)
	rc := http.NewResponseController(w)
	if rc.Flush() != nil || r.ContentLength == 0 {
		return
	}
	_ = rc.SetReadDeadline(time.Now().Add(min(drainTimeout, s.timeout)))
	_, _ = io.CopyN(io.Discard, r.Body, 6*s.MaxBody) // the largest content, all of it escaped, fits
}

func (s *Server) mcp(w http.ResponseWriter, r *http.Request) {
	w = &answerWriter{w, http.NewResponseController(w), s.timeout}
	who, err := s.Auth.Authenticate(r.Header)
	if err != nil {
		status, reason := http.StatusUnauthorized, "identity"
		switch {
		case errors.Is(err, identity.ErrToken):
			reason = "token"
		case errors.Is(err, identity.ErrHeader):
			status, reason = http.StatusBadRequest, "header"
		}
		s.deny(w, r, status, reason, err)
		return
	}
	switch r.Method {
	case http.MethodDelete:
		// There is nothing to forget: no state hangs on a session id.
		w.WriteHeader(http.StatusNoContent)
		return
	case http.MethodPost:
	default:
		w.Header().Set("Allow", "POST, DELETE")
		http.Error(w, "only POST and DELETE are served here", http.StatusMethodNotAllowed)
		return
	}
	over, err := s.admit(r, who.Principal)
	if err != nil {
		w.Header().Set("Retry-After", "1")
		s.deny(w, r, http.StatusServiceUnavailable, "busy", err)
		return
	}
	defer over()
	body, keep, err := s.body(w, r, who.Principal)
	if err != nil {
		var tooLong *http.MaxBytesError
		status, reason := http.StatusBadRequest, "body"
		if errors.As(err, &tooLong) {
			status, reason = http.StatusRequestEntityTooLarge, "too_large"
			err = fmt.Errorf("the request body is larger than %d bytes; characters that are escaped in JSON take up to six times their length: send a large content with encoding base64, or write it in parts", s.MaxBody)
		} else if errors.Is(err, errBusy) {
			status, reason = http.StatusServiceUnavailable, "busy"
			w.Header().Set("Retry-After", "1")
		}
		s.deny(w, r, status, reason, err)
		return
	}
	defer keep(0)
	if err := s.Auth.Use(who); err != nil {
		s.deny(w, r, http.StatusUnauthorized, "identity", err)
		return
	}
	req := &tools.Request{Who: who, JSON: !accepts(r.Header, "text/event-stream")}
	var msgs []message
	if !utf8.Valid(body) { // what is none would be replaced without a word
		err = &fault{jsonrpc.CodeParseError, http.StatusBadRequest, "the body is not UTF-8, which JSON has to be"}
	} else {
		body = req.Lift(body)
		msgs, err = messages(body)
	}
	if err == nil {
		err = names(msgs, req)
	}
	if err != nil {
		wrong, id := (*fault)(nil), idOf(msgs)
		_ = errors.As(err, &wrong) // both return no other
		if len(msgs) != 1 || req.StandsIn(id) {
			id, wrong.status = nil, http.StatusBadRequest
		}
		if wrong.status != http.StatusOK {
			s.refused(r, "request", err)
		}
		writeError(w, wrong.status, id, wrong.code, wrong.text)
		return
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	refusal := &refusal{ResponseWriter: req.Writer(w), server: s, request: r, msgs: msgs}
	defer refusal.end()
	w = refusal
	var msg message
	if len(msgs) == 1 {
		msg = msgs[0]
	}
	key := func(id json.RawMessage) string {
		return strings.Join([]string{who.Principal, r.Header.Get("Authorization"), r.Header.Get(sessionHeader), string(id)}, "\x00")
	}
	cancelled := make(chan struct{})
	switch {
	case msg.Method == "initialize" && r.Header.Get(sessionHeader) == "":
		// Taken back from clients that like to have one, to tell their request ids
		// from those of others; never a sign of who they are.
		w.Header().Set(sessionHeader, rand.Text())
	case msg.Method == "tools/call" && len(msg.ID) > 0:
		req.Release = func() {
			if len(body) < tools.LiftMin { // else the SDK still has as much of it
				keep(0)
			} else {
				keep(int64(len(body)))
			}
		}
		defer s.track(key(msg.ID), cancelled)()
	case msg.Method == "notifications/cancelled" && len(msg.requestID) > 0:
		s.cancel(key(msg.requestID))
	}
	done := make(chan struct{})
	defer close(done)
	gone, left := make(chan struct{}), r.Context().Done()
	go func() {
		select {
		case <-left:
			close(gone)
		case <-cancelled:
			close(gone)
		case <-done:
		}
	}()
	req.Done, req.Run, req.Hold = gone, s.hold(s.outputs, who.Principal, done), s.hold(s.answers, who.Principal, done)
	r = r.WithContext(tools.WithRequest(r.Context(), req))
	if req.JSON {
		r.Header.Set("Accept", "application/json, text/event-stream") // what the SDK insists on
		s.plain.ServeHTTP(w, r)
		return
	}
	s.stream.ServeHTTP(w, r)
}

// admit waits for a request's place among those under way. Its connection may be closed
// for another's until it has one.
func (s *Server) admit(r *http.Request, principal string) (over func(), err error) {
	ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
	defer cancel()
	p, err := s.requests.take(ctx, principal, 1)
	if err != nil {
		return nil, errRequests
	}
	idle := letIn(r)
	return func() { idle(); p.keep(0) }, nil
}

// body reads the request's body within its bounds in size, time and in the sum
// of all that are held. keep gives back what is above n bytes of that.
func (s *Server) body(w http.ResponseWriter, r *http.Request, principal string) (_ []byte, keep func(n int64), err error) {
	if r.ContentLength > s.MaxBody {
		return nil, nil, &http.MaxBytesError{Limit: s.MaxBody}
	}
	rc := http.NewResponseController(w)
	var held *place
	move := func(to *room, weight int64) error {
		ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
		defer cancel()
		p, err := to.take(ctx, principal, weight)
		if err != nil {
			return errBusy
		}
		if held != nil {
			held.keep(0)
		}
		held = p
		// The body's time begins again: it may have waited.
		_ = rc.SetReadDeadline(time.Now().Add(s.timeout))
		_ = rc.SetWriteDeadline(time.Now().Add(s.timeout)) // for "100 Continue"
		return nil
	}
	defer func() {
		if err != nil && held != nil {
			held.keep(0)
		}
	}()
	switch n := r.ContentLength; {
	case n > smallBody:
		err = move(s.large, n)
	case n >= 0:
		err = move(s.small, max(n, 1))
	default: // not announced, and small until it shows that it is not
		err = move(s.small, smallBody)
	}
	if err != nil {
		return nil, nil, err
	}
	// Room for what was announced, but no more than a little of it on trust.
	buf := bytes.NewBuffer(make([]byte, 0, min(max(r.ContentLength, 0), bodyOnTrust)+bytes.MinRead))
	src := http.MaxBytesReader(w, r.Body, s.MaxBody)
	if r.ContentLength < 0 {
		if _, err = io.CopyN(buf, src, smallBody+1); err == nil {
			if err = move(s.large, s.MaxBody); err != nil {
				return nil, nil, err
			}
		}
	}
	if err == nil {
		_, err = buf.ReadFrom(src)
	}
	if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
		return nil, nil, err
	}
	if err != nil && err != io.EOF { // CopyN's word for a body that is small
		return nil, nil, errors.New("the request body did not arrive whole")
	}
	_ = rc.SetReadDeadline(time.Time{})
	held.keep(int64(buf.Len()))
	return buf.Bytes(), held.keep, nil
}

// answerWriter gives each piece of an answer its time: a client that takes
// none keeps no memory.
type answerWriter struct {
	http.ResponseWriter
	rc      *http.ResponseController
	timeout time.Duration
}

// Unwrap is for http.ResponseController.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *answerWriter) renew() { _ = w.rc.SetWriteDeadline(time.Now().Add(w.timeout)) }

func (w *answerWriter) WriteHeader(status int) {
	w.renew()
	w.ResponseWriter.WriteHeader(status)
}

// FlushError is for http.ResponseController.
func (w *answerWriter) FlushError() error {
	w.renew()
	return w.rc.Flush()
}

func (w *answerWriter) Write(p []byte) (done int, err error) {
	for {
		w.renew()
		n, err := w.ResponseWriter.Write(p[done:min(done+answerPiece, len(p))])
		if done += n; err != nil || done == len(p) {
			return done, err
		}
	}
}

func accepts(h http.Header, want string) bool {
	for _, v := range h.Values("Accept") {
		for part := range strings.SplitSeq(v, ",") {
			if t, _, err := mime.ParseMediaType(part); err == nil && t == want {
				return true
			}
		}
	}
	return false
}

func (s *Server) track(key string, c chan struct{}) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[key] = append(s.calls[key], c)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		left := s.calls[key][:0]
		for _, x := range s.calls[key] {
			if x != c {
				left = append(left, x)
			}
		}
		if s.calls[key] = left; len(left) == 0 {
			delete(s.calls, key)
		}
	}
}

// cancel ends the call that a notification names. Where two clients without a
// session id use the same request id it ends neither: better a call too long
// than another's call ended.
func (s *Server) cancel(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if calls := s.calls[key]; len(calls) == 1 {
		close(calls[0])
		delete(s.calls, key)
	}
}
