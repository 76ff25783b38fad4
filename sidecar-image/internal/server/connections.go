package server

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
)

// maxConnections is how many are open at once. A shut door would keep out the health checks and
// every client for as long as one who has no token holds it shut: above it the connection is
// closed that has been longest without a request which was let in.
const maxConnections = 2048

// spareConnections is the part of them that never has such a request: for new ones, and for health.
const spareConnections = 16

var errRequests = errors.New("as many requests are under way as the sidecar takes of you, or of all: try again when one has ended")

// connections are those that are open.
type connections struct {
	most    int
	dropped func()

	mu   sync.Mutex
	open int
	idle *list.List // of those without a request that was let in, since when
}

// conn is one of them. It is a *net.TCPConn for net/http's sake, which ends with CloseWrite
// those whose answer would be lost in a reset.
type conn struct {
	*net.TCPConn
	all    *connections
	at     *list.Element // in idle
	closed bool
}

// mostConnections leaves half of the process's open files to the sessions.
func mostConnections() int {
	var files syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files) != nil {
		return maxConnections
	}
	return int(min(files.Cur/2, maxConnections))
}

// limited is a listener whose connections are.
type limited struct {
	net.Listener
	all *connections
}

// Limit bounds the connections of a TCP listener, for the server that HTTP returned.
func (s *Server) Limit(l net.Listener) net.Listener { return &limited{l, s.connections} }

func (l *limited) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("a connection over %s, not TCP", c.LocalAddr().Network())
	}
	return l.all.add(tcp), nil
}

// add takes a new connection in, and closes another where there is no room for both.
func (a *connections) add(tcp *net.TCPConn) *conn {
	c := &conn{TCPConn: tcp, all: a}
	a.mu.Lock()
	a.open++
	var last *conn
	if a.open > a.most && a.idle.Len() > 0 {
		last = a.idle.Front().Value.(*conn)
	}
	c.at = a.idle.PushBack(c)
	a.mu.Unlock()
	if last != nil {
		_ = last.Close()
		a.dropped()
	}
	return c
}

func (c *conn) Close() error {
	c.all.mu.Lock()
	if !c.closed {
		c.closed = true
		c.all.open--
		if c.at != nil {
			c.all.idle.Remove(c.at)
		}
	}
	c.all.mu.Unlock()
	return c.TCPConn.Close()
}

type connKey struct{}

// withConn is http.Server.ConnContext.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// letIn keeps a request's connection open until it is over.
func letIn(r *http.Request) (over func()) {
	c, ok := r.Context().Value(connKey{}).(*conn)
	if !ok { // not limited
		return func() {}
	}
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.at != nil {
		c.all.idle.Remove(c.at)
		c.at = nil
	}
	return func() {
		c.all.mu.Lock()
		defer c.all.mu.Unlock()
		if !c.closed {
			c.at = c.all.idle.PushBack(c)
		}
	}
}
