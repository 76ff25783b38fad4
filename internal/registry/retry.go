package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
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

func transient(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// hopeless tells the connection errors that the next attempt meets too: no TLS
// at the other end, a certificate that isn't trusted, or nothing to send.
func hopeless(err error) bool {
	var plain tls.RecordHeaderError
	var cert *tls.CertificateVerificationError
	var source *openError
	return errors.As(err, &plain) || errors.As(err, &cert) || errors.As(err, &source)
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
		if !replay || n+1 >= r.backoff.Attempts || ctx.Err() != nil || (err == nil && !transient(resp.StatusCode)) || hopeless(err) {
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
		r.log("%s %s: %s; trying again (%d of %d)", in.Method, in.URL.Path, what, n+2, r.backoff.Attempts)
		if err := r.backoff.wait(ctx, n, after); err != nil {
			return nil, err
		}
	}
}
