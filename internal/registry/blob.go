package registry

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// whole is the size up to which a blob goes in one request.
const whole = 1 << 20

// Blob is what can be pushed. Open may be called many times; a reader that can
// seek is not read up to the offset.
type Blob struct {
	Digest v1.Hash
	Size   int64 // bytes
	Open   func(context.Context) (io.ReadCloser, error)
}

// Bytes makes a blob of bytes.
func Bytes(b []byte) Blob {
	h, size, _ := v1.SHA256(bytes.NewReader(b))
	return Blob{h, size, func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }}
}

// Checked reads a blob of a disk, where it may have been cut or have rotted. In the
// place of its last bytes it fails, and that isn't tried again, where they do not
// match the digest.
func Checked(r io.ReadCloser, h v1.Hash, where string) io.ReadCloser {
	return &checked{r, bufio.NewReaderSize(r, 64<<10), sha256.New(), h, where}
}

type checked struct {
	io.Closer
	r     *bufio.Reader
	sum   hash.Hash
	want  v1.Hash
	where string
}

func (c *checked) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.sum.Write(p[:n])
	if _, end := c.r.Peek(1); !errors.Is(end, io.EOF) {
		return n, err
	}
	if got := hex.EncodeToString(c.sum.Sum(nil)); got != c.want.Hex {
		return 0, &openError{fmt.Errorf("blob %s in %s has the digest sha256:%s: it was cut or changed since it was written; build again", c.want, c.where, got)}
	}
	return n, err
}

// blobs knows which repository has or is getting a blob, so that one push of a
// family sends each blob once and mounts it elsewhere.
type blobs struct {
	mu   sync.Mutex
	seen map[v1.Hash]*placed
}

type placed struct {
	mu    sync.Mutex
	repos []string
}

func (b *blobs) of(h v1.Hash) *placed {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.seen == nil {
		b.seen = map[v1.Hash]*placed{}
	}
	if b.seen[h] == nil {
		b.seen[h] = &placed{}
	}
	return b.seen[h]
}

// PushBlob makes sure that a repository has a blob: it is left if there, else
// mounted from a repository that this client knows to have it, else sent.
func (c *Client) PushBlob(ctx context.Context, repository string, b Blob) error {
	p := c.blobs.of(b.Digest)
	p.mu.Lock()
	defer p.mu.Unlock()
	repo, err := c.Repository(repository)
	if err != nil {
		return err
	}
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	err = c.pushBlob(ctx, repo.RepositoryStr(), b, p.repos)
	if err != nil {
		return fmt.Errorf("push blob %s (%d bytes) to %s: %w", b.Digest, b.Size, repo, c.plain(err))
	}
	p.repos = append(p.repos, repo.RepositoryStr())
	return nil
}

func (c *Client) pushBlob(ctx context.Context, repo string, b Blob, from []string) error {
	there, err := c.hasBlob(ctx, repo, b.Digest)
	if err != nil {
		return err
	}
	if there {
		c.Skipped.Add(1)
		return nil
	}
	for n := 0; ; n++ {
		err := c.upload(ctx, repo, b, from)
		var cut *cutError
		if err == nil || ctx.Err() != nil || n+1 >= c.options.Backoff.Attempts || !errors.As(err, &cut) {
			return err
		}
		c.options.Log("blob %s to %s: %v; starting the upload again (%d of %d)", b.Digest, repo, err, n+2, c.options.Backoff.Attempts)
		if err := c.options.Backoff.wait(ctx, n, cut.after); err != nil {
			return err
		}
		// The answer to the last request may be all that was lost.
		if there, err := c.hasBlob(ctx, repo, b.Digest); err == nil && there {
			c.Pushed.Add(1)
			return nil
		}
	}
}

// cutError is an upload session that ended early: another one may do better.
// Everything else was tried again by the transport already.
type cutError struct {
	error
	after time.Duration // what the registry asked to wait
}

func (e *cutError) Unwrap() error { return e.error }

func (c *Client) endpoint(repo, rest string) *url.URL {
	return &url.URL{Scheme: c.registry.Scheme(), Host: c.registry.RegistryStr(), Path: "/v2/" + repo + "/" + rest}
}

// hasBlob only spares an upload, so a 500 means no, as for HasManifest.
func (c *Client) hasBlob(ctx context.Context, repo string, h v1.Hash) (bool, error) {
	resp, err := c.do(ctx, http.MethodHead, c.endpoint(repo, "blobs/"+h.String()), nil, nil, http.StatusOK, http.StatusNotFound, http.StatusInternalServerError)
	if err != nil {
		return false, err
	}
	return resp.StatusCode == http.StatusOK, nil
}

// body is what a request sends: size bytes, opened anew for every attempt.
type body struct {
	open func() (io.ReadCloser, error)
	size int64
}

// lazy opens a body when it is first read: of a request that is wrapped, tried
// again or never sent, no more are opened than are read.
type lazy struct {
	open func() (io.ReadCloser, error)
	mu   sync.Mutex // net/http may close while it reads
	r    io.ReadCloser
	done bool
}

// openError is a body that could not be opened or is not what it should be, which is
// no fault of the link.
type openError struct{ error }

func (e *openError) Unwrap() error { return e.error }

func (l *lazy) Read(p []byte) (int, error) {
	l.mu.Lock()
	var err error
	if l.done {
		err = http.ErrBodyReadAfterClose
	} else if l.r == nil {
		if l.r, err = l.open(); err != nil {
			err = &openError{err}
		}
	}
	r := l.r
	l.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return r.Read(p)
}

func (l *lazy) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done = true; l.r == nil {
		return nil
	}
	return l.r.Close()
}

// do sends a request and returns the answer with its body closed.
func (c *Client) do(ctx context.Context, method string, u *url.URL, header http.Header, b *body, want ...int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if b != nil {
		req.GetBody = func() (io.ReadCloser, error) { return &lazy{open: b.open}, nil }
		req.Body, _ = req.GetBody()
		req.ContentLength = b.size
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var e *url.Error
		if errors.As(err, &e) { // the query of an upload or of a redirect may be a signature
			e.URL, _, _ = strings.Cut(e.URL, "?")
		}
		return nil, err
	}
	defer resp.Body.Close()
	return resp, transport.CheckError(resp, want...)
}

// upload tries one upload session, going on after a cut as long as the registry
// still knows it (OCI distribution-spec 1.1, "Pushing a blob in chunks" and
// "GET /v2/<name>/blobs/uploads/<reference>").
func (c *Client) upload(ctx context.Context, repo string, b Blob, from []string) error {
	start := c.endpoint(repo, "blobs/uploads/")
	for _, f := range from {
		if f != repo {
			start.RawQuery = url.Values{"mount": {b.Digest.String()}, "from": {f}}.Encode()
			break
		}
	}
	resp, err := c.do(ctx, http.MethodPost, start, nil, nil, http.StatusCreated, http.StatusAccepted)
	if err != nil {
		return err
	}
	if resp.StatusCode == http.StatusCreated {
		c.Mounted.Add(1)
		return nil
	}
	at, err := resp.Location()
	if err != nil {
		return fmt.Errorf("the registry opened an upload without saying where: %w", err)
	}
	content := func(offset int64) *body {
		return &body{func() (io.ReadCloser, error) {
			r, err := b.Open(ctx)
			if err != nil {
				return nil, err
			}
			if s, ok := r.(io.Seeker); ok {
				_, err = s.Seek(offset, io.SeekStart)
			} else {
				_, err = io.CopyN(io.Discard, r, offset)
			}
			if err != nil {
				r.Close()
				return nil, err
			}
			return &counted{r, &c.Sent}, nil
		}, b.Size - offset}
	}
	octets := http.Header{"Content-Type": {"application/octet-stream"}}
	var last *body
	if b.Size > whole {
		if at, err = c.stream(ctx, at, b, content, octets); err != nil {
			return err
		}
	} else {
		last = content(0)
	}
	q := at.Query()
	q.Set("digest", b.Digest.String())
	at.RawQuery = q.Encode()
	if _, err := c.do(ctx, http.MethodPut, at, octets, last, http.StatusCreated, http.StatusNoContent); err != nil {
		if lostSession(err) { // perhaps its first closing was answered to nobody
			return &cutError{err, 0}
		}
		return err
	}
	c.Pushed.Add(1)
	return nil
}

// lostSession tells an upload session that the registry no longer knows, or
// knows at another offset: a new one may do better.
func lostSession(err error) bool {
	var e *transport.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.StatusCode {
	case http.StatusNotFound, http.StatusBadRequest, http.StatusRequestedRangeNotSatisfiable:
		return true
	}
	return false
}

func (c *Client) stream(ctx context.Context, at *url.URL, b Blob, content func(int64) *body, octets http.Header) (*url.URL, error) {
	offset := int64(0)
	for n := 0; ; n++ {
		header := octets.Clone()
		if offset > 0 {
			header.Set("Content-Range", fmt.Sprintf("%d-%d", offset, b.Size-1))
		}
		resp, err := c.do(once(ctx), http.MethodPatch, at, header, content(offset), http.StatusAccepted, http.StatusNoContent, http.StatusCreated)
		if err == nil {
			return resp.Location()
		}
		if lostSession(err) {
			return nil, &cutError{err, 0}
		}
		var e *transport.Error
		if ctx.Err() != nil || hopeless(err) || (errors.As(err, &e) && !transient(e.StatusCode)) {
			return nil, err
		}
		cut := &cutError{error: err}
		if resp != nil {
			cut.after = retryAfter(resp.Header, time.Now())
		}
		if n+1 >= c.options.Backoff.Attempts {
			return nil, cut
		}
		state, serr := c.do(ctx, http.MethodGet, at, nil, nil, http.StatusNoContent, http.StatusAccepted)
		if serr != nil {
			return nil, cut // the session is gone
		}
		var end int64
		if _, serr := fmt.Sscanf(strings.TrimPrefix(state.Header.Get("Range"), "bytes="), "0-%d", &end); serr != nil || end >= b.Size {
			return nil, cut
		}
		if loc, lerr := state.Location(); lerr == nil {
			at = loc
		}
		offset = 0
		if end > 0 { // "0-0" also means that nothing arrived
			offset = end + 1
			c.Resumed.Add(1)
		}
		if err := c.options.Backoff.wait(ctx, n, cut.after); err != nil {
			return nil, err
		}
		c.options.Log("blob %s: going on at byte %d of %d", b.Digest, offset, b.Size)
	}
}

type counted struct {
	io.ReadCloser
	n interface{ Add(int64) int64 }
}

func (r *counted) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.n.Add(int64(n))
	return n, err
}

// MaxBlob is the size in bytes up to which ReadBlob reads a blob: some forty times
// that of the family's largest bundle. Whoever may push can attach a larger one.
const MaxBlob = 32 << 20

// ReadBlob reads a small blob whole and checks it against its digest.
func (c *Client) ReadBlob(ctx context.Context, repository string, h v1.Hash) ([]byte, error) {
	r, err := c.OpenBlob(ctx, repository, h)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, MaxBlob+1))
	if err == nil && len(b) > MaxBlob {
		err = fmt.Errorf("it has more than %d bytes, which nothing does that belongs to a release", MaxBlob)
	}
	if err != nil {
		return nil, fmt.Errorf("read blob %s of %s: %w", h, repository, err)
	}
	return b, nil
}

// OpenBlob reads a blob; the reader fails at its end if the bytes do not match the digest.
func (c *Client) OpenBlob(ctx context.Context, repository string, h v1.Hash) (io.ReadCloser, error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return nil, err
	}
	l, err := remote.Layer(repo.Digest(h.String()), c.Remote(ctx)...)
	if err != nil {
		return nil, err
	}
	r, err := l.Compressed()
	if err != nil {
		return nil, fmt.Errorf("read blob %s: %w", repo.Digest(h.String()), c.plain(err))
	}
	return r, nil
}
