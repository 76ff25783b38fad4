package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

// Backoff says how often and how patiently a request is tried again.
type Backoff struct {
	Attempts int           // including the first; 0 means 8
	Base     time.Duration // of the first pause, doubled each time; 0 means 500 ms
	Max      time.Duration // of one pause, also of a Retry-After; 0 means 2 min
	// Sleep waits; nil means a timer.
	Sleep func(context.Context, time.Duration) error
}

func (b Backoff) withDefaults() Backoff {
	if b.Attempts == 0 {
		b.Attempts = 8
	}
	if b.Base == 0 {
		b.Base = 500 * time.Millisecond
	}
	if b.Max == 0 {
		b.Max = 2 * time.Minute
	}
	if b.Sleep == nil {
		b.Sleep = Sleep
	}
	return b
}

// Sleep waits, or until the context ends, whose error it returns.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// wait pauses after the nth failed attempt (the first is 0): as long as the
// registry asked for, else a doubling time, half of it random, so that many
// clients do not come back at once.
func (b Backoff) wait(ctx context.Context, n int, after time.Duration) error {
	d := min(b.Max, b.Base<<min(n, 16))
	d = d/2 + rand.N(d/2+1)
	return b.Sleep(ctx, min(b.Max, max(d, after)))
}

// retryAfter reads RFC 9110 section 10.2.3: seconds or a date.
func retryAfter(h http.Header, now time.Time) time.Duration {
	v := h.Get("Retry-After")
	if s, err := strconv.Atoi(v); err == nil {
		return time.Duration(s) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return t.Sub(now)
	}
	return 0
}

// transient tells the answers after which the same request may succeed: also those
// of a full disk (507) and of proxies (520 and on), but none that denies the
// method or the protocol.
func transient(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests:
		return true
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return false
	}
	return status >= 500
}

// idle gives a request up when nothing of it moves, which go-containerregistry's
// transport waits for: a server took it and never answers, or stops in the middle.
// A connection that carries several requests tells nothing of one of them.
type idle struct {
	inner http.RoundTripper
	limit time.Duration
}

func (i idle) RoundTrip(in *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(in.Context())
	m := &movement{cancel: cancel, limit: i.limit, still: fmt.Errorf("nothing moved for %v", i.limit)}
	m.timer = time.AfterFunc(i.limit, func() { cancel(m.still) })
	m.ctx = ctx
	req := in.Clone(ctx)
	if in.Body != nil && in.Body != http.NoBody {
		req.Body = &moving{in.Body, m, false}
	}
	if again := in.GetBody; again != nil {
		req.GetBody = func() (io.ReadCloser, error) {
			body, err := again()
			return &moving{body, m, false}, err
		}
	}
	res, err := i.inner.RoundTrip(req)
	if err != nil {
		defer m.end()
		return nil, m.named(err)
	}
	m.timer.Reset(i.limit)
	res.Body = &moving{res.Body, m, true}
	return res, nil
}

type movement struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	limit  time.Duration
	still  error
}

func (m *movement) end() {
	m.timer.Stop()
	m.cancel(nil)
}

func (m *movement) named(err error) error {
	if err != nil && err != io.EOF && context.Cause(m.ctx) == m.still {
		return m.still
	}
	return err
}

// moving is a body whose bytes are a movement.
type moving struct {
	io.ReadCloser
	*movement
	last bool // the answer's: with it the request ends
}

func (b *moving) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.timer.Reset(b.limit)
	return n, b.named(err)
}

func (b *moving) Close() error {
	if b.last {
		defer b.end()
	}
	return b.ReadCloser.Close()
}

// hopeless tells the connection errors that the next attempt meets too: no TLS
// at the other end, a certificate that isn't trusted, or nothing to send.
func hopeless(err error) bool {
	var plain tls.RecordHeaderError
	var cert *tls.CertificateVerificationError
	var source *openError
	return errors.As(err, &plain) || errors.As(err, &cert) || errors.As(err, &source)
}

// nobody tells that there is no server at an address. One that answered before may
// be starting again; one that never did is rather a wrong name.
func nobody(err error) bool {
	var name *net.DNSError
	return errors.Is(err, syscall.ECONNREFUSED) || errors.As(err, &name) && name.IsNotFound
}

type onceKey struct{}

// once marks a request that must not be replayed as it is: after a cut blob
// upload the offset has to be asked for first.
func once(ctx context.Context) context.Context { return context.WithValue(ctx, onceKey{}, true) }

// retrier tries a request again that met a dropped connection or a transient
// answer. Every attempt starts with a body of its own, so a request that the
// authenticating layer above repeats after a 401 carries its body too.
type retrier struct {
	inner   http.RoundTripper
	backoff Backoff
	log     func(format string, args ...any)
	met     atomic.Bool // it has answered
}

func (r *retrier) RoundTrip(in *http.Request) (*http.Response, error) {
	ctx := in.Context()
	if in.Body != nil && in.GetBody != nil {
		defer in.Body.Close() // it is GetBody's that are sent
	}
	replay := (in.Body == nil || in.Body == http.NoBody || in.GetBody != nil) && ctx.Value(onceKey{}) == nil
	for n := 0; ; n++ {
		req := in
		if in.GetBody != nil {
			body, err := in.GetBody()
			if err != nil {
				return nil, err
			}
			req = in.Clone(ctx)
			req.Body = body
		}
		resp, err := r.inner.RoundTrip(req)
		attempts := r.backoff.Attempts
		if err == nil {
			r.met.Store(true)
		} else if nobody(err) && !r.met.Load() {
			attempts = min(attempts, 3)
		}
		if !replay || n+1 >= attempts || ctx.Err() != nil || (err == nil && !transient(resp.StatusCode)) || hopeless(err) {
			return resp, err
		}
		var after time.Duration
		what := ""
		if err != nil {
			what = err.Error()
		} else {
			after, what = retryAfter(resp.Header, time.Now()), resp.Status
			_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
			resp.Body.Close()
		}
		r.log("%s %s: %s; trying again (%d of %d)", in.Method, in.URL.Path, what, n+2, attempts)
		if err := r.backoff.wait(ctx, n, after); err != nil {
			return nil, err
		}
	}
}
