package mirror

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// ErrNotFound says that no mirror in the list has a source.
var ErrNotFound = errors.New("it is on no mirror")

// ErrRefused says that a server answers another 4xx than 404: a bucket, say,
// has 403 for what it does not hold. So the message for one that is locked says both.
var ErrRefused = errors.New("the server refuses it")

// tries is how often one mirror is asked before it counts as failed.
const tries = 4

// WrongContentError says that a mirror served something else than was locked.
type WrongContentError struct {
	Source     lock.Source
	URL        string // redacted
	FoundSize  int64  // bytes; counted to at most one past the expected size
	Found      digest.Digest
	Incomplete bool // the connection broke each time
}

func (e *WrongContentError) Error() string {
	what := "has another content"
	switch {
	case e.Incomplete:
		what = "was cut off each time"
	case e.FoundSize < e.Source.Size:
		what = "is truncated"
	case e.FoundSize > e.Source.Size:
		what = "is longer than it should be"
	}
	return fmt.Sprintf("%s from %s %s: expected %s (%d bytes), found %s (%s): the mirror is wrong, set %s to another one",
		e.Source.Name, e.URL, what, e.Source.Digest, e.Source.Size, e.Found, e.bytes(), e.Source.Kind.Variable())
}

func (e *WrongContentError) bytes() string {
	if e.FoundSize > e.Source.Size {
		return fmt.Sprintf("more than %d bytes", e.Source.Size)
	}
	return fmt.Sprintf("%d bytes", e.FoundSize)
}

// Fetch stores a source at file, whose folder it makes, replacing it in one
// step once size and sha256 are right; a file that is already right stays as
// it is. Errors are WrongContentError, ErrNotFound, or the mirror's failure.
func (m *Mirrors) Fetch(ctx context.Context, s lock.Source, file string) error {
	if s.Digest == "" || s.Size <= 0 {
		return fmt.Errorf("%s has no size and digest to check it against", s.Name)
	}
	if Intact(file, s) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return m.try(ctx, s, func(u *url.URL) error {
		f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*.tmp")
		if err != nil {
			return err
		}
		defer os.Remove(f.Name()) // fails harmlessly once renamed
		defer f.Close()
		if err := m.copyTo(ctx, s, u, f); err != nil {
			return err
		}
		if err := errors.Join(f.Chmod(0o644), f.Close()); err != nil {
			return err
		}
		return os.Rename(f.Name(), file)
	})
}

// Diagnose finds out why a download of a source failed: it downloads it from
// each mirror in turn and returns the URL of the first that serves the right
// bytes, or the error that Fetch would give.
func (m *Mirrors) Diagnose(ctx context.Context, s lock.Source) (workingURL string, err error) {
	err = m.try(ctx, s, func(u *url.URL) error {
		workingURL = u.String()
		return m.copyTo(ctx, s, u, io.Discard)
	})
	if err != nil {
		return "", err
	}
	return workingURL, nil
}

// Read returns the content of a small file that is not pinned: an InRelease
// file, a registry's metadata, an answer of the checksum database. It reads
// at most limit bytes. accept, when not empty, is sent as the Accept header.
// from is the URL that it came from, redacted, for a message.
func (m *Mirrors) Read(ctx context.Context, s lock.Source, accept string, limit int64) (content []byte, from string, err error) {
	err = m.try(ctx, s, func(u *url.URL) (err error) {
		from = Redact(u.String())
		content, err = m.readAll(ctx, u, accept, limit)
		return err
	})
	return content, from, err
}

// ReadURL is Read for a URL outside the lists.
func (m *Mirrors) ReadURL(ctx context.Context, raw string, limit int64) (content []byte, err error) {
	u, err := parseBase(raw)
	if err != nil {
		return nil, err
	}
	err = m.retry(ctx, func() error {
		content, err = m.readAll(ctx, u, "", limit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Redact(raw), err)
	}
	return content, nil
}

func (m *Mirrors) readAll(ctx context.Context, u *url.URL, accept string, limit int64) ([]byte, error) {
	body, err := m.open(ctx, u, accept)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	content, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err != nil {
		return nil, &mirrorError{err: err}
	}
	if int64(len(content)) > limit {
		return nil, fmt.Errorf("%s is longer than %d bytes", Redact(u.String()), limit)
	}
	return content, nil
}

// Download stores a source that is not pinned yet at file and returns its
// size in bytes, its sha256 and the URL that it came from, redacted. The caller
// must check it by other means.
func (m *Mirrors) Download(ctx context.Context, s lock.Source, file string) (size int64, sum digest.Digest, from string, err error) {
	err = m.try(ctx, s, func(u *url.URL) error {
		from = Redact(u.String())
		body, err := m.open(ctx, u, "")
		if err != nil {
			return err
		}
		defer body.Close()
		f, err := os.Create(file)
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		if size, err = io.Copy(io.MultiWriter(f, h), networkReader{body}); err != nil {
			return err
		}
		sum = hexDigest(h)
		return f.Close()
	})
	return size, sum, from, err
}

// Intact reports whether a file is there with the bytes that are locked.
func Intact(file string, s lock.Source) bool {
	info, err := os.Stat(file)
	if err != nil || info.Size() != s.Size {
		return false
	}
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	found, err := digest.SHA256.FromReader(f)
	return err == nil && found == s.Digest
}

// mirrorError is a failure of one mirror, which the next need not have: a
// broken connection, a 5xx, a refusal.
type mirrorError struct {
	err   error
	final bool // asking again is no use
}

func (e *mirrorError) Error() string { return e.err.Error() }
func (e *mirrorError) Unwrap() error { return e.err }

// try calls get with each candidate in turn, again after a failure that may
// go away. It goes on to the next mirror when one does not have the file or
// does not serve it, never after wrong content: that someone must see.
func (m *Mirrors) try(ctx context.Context, s lock.Source, get func(*url.URL) error) error {
	bases, err := m.bases(s.Kind)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Name, err)
	}
	var failed error    // what mirrors said that did not serve it
	var absent []string // folders that are not there
	lacked := false
	for _, b := range bases {
		u := at(b.url, s)
		err := m.retry(ctx, func() error { return get(u) })
		var wrong *WrongContentError
		var fault *mirrorError
		switch {
		case err == nil:
			return nil
		case errors.Is(err, ErrNotFound):
			lacked = true
			if dir, ok := LocalPath(b.url.String()); ok {
				if _, err := os.Stat(dir); err != nil {
					absent = append(absent, dir)
				}
			}
			continue
		case errors.As(err, &wrong):
			return err
		case !errors.As(err, &fault) || ctx.Err() != nil:
			return fmt.Errorf("%s from %s: %w", s.Name, Redact(u.String()), err)
		case failed == nil:
			failed = fmt.Errorf("from %s: %w", Redact(u.String()), err)
		default:
			failed = fmt.Errorf("%w; from %s: %w", failed, Redact(u.String()), err)
		}
		if b.last {
			break
		}
	}
	where := s.Kind.Variable()
	if len(absent) > 0 {
		where += fmt.Sprintf(" (which names %s, where no folder is)", strings.Join(absent, ", "))
	}
	what := fmt.Sprintf("%s (%s)", s.Name, s.Path)
	missing := "set it to a complete one" // nothing is locked yet
	if s.Digest != "" {
		what = fmt.Sprintf("%s (%s, %d bytes, %s)", s.Name, s.Path, s.Size, s.Digest)
		missing = "it was superseded or the mirror is not complete: run lock:update, or add a mirror that keeps old files"
	}
	if failed == nil {
		return fmt.Errorf("%s: %w in %s: %s", what, ErrNotFound, where, missing)
	}
	advice := fmt.Sprintf(": if that stays so, set %s to another mirror", where)
	if lacked {
		advice = fmt.Sprintf("; none of the others asked of %s has it: if that stays so, add a mirror that does", where)
	}
	if errors.Is(failed, ErrRefused) && s.Digest != "" {
		advice += "; a server may refuse what it does not hold: then " + missing
	}
	return fmt.Errorf("%s %w%s", what, failed, advice)
}

func (m *Mirrors) retry(ctx context.Context, get func() error) error {
	for i := 0; ; i++ {
		err := get()
		var fault *mirrorError
		var wrong *WrongContentError
		again := errors.As(err, &fault) && !fault.final || errors.As(err, &wrong) && wrong.Incomplete
		if !again || i == tries-1 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(m.wait << i):
		}
	}
}

// copyTo streams a source from a URL to w and checks size and sha256.
func (m *Mirrors) copyTo(ctx context.Context, s lock.Source, u *url.URL, w io.Writer) error {
	body, err := m.open(ctx, u, "")
	if err != nil {
		return err
	}
	defer body.Close()
	sum := sha256.New()
	// One byte past the end is enough to know that there is too much.
	n, err := io.Copy(io.MultiWriter(w, sum), &io.LimitedReader{R: networkReader{body}, N: s.Size + 1})
	wrong := &WrongContentError{Source: s, URL: Redact(u.String()), FoundSize: n, Found: hexDigest(sum)}
	var fault *mirrorError
	switch {
	case errors.As(err, &fault) && errors.Is(err, io.ErrUnexpectedEOF):
		wrong.Incomplete = true
		return wrong
	case err != nil:
		return err
	case n != s.Size || wrong.Found != s.Digest:
		return wrong
	}
	return nil
}

// networkReader marks read errors as the mirror's, so that a full disk, say,
// is not taken for one.
type networkReader struct{ r io.Reader }

func (r networkReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = &mirrorError{err: err}
	}
	return n, err
}

func hexDigest(h hash.Hash) digest.Digest { return digest.NewDigest(digest.SHA256, h) }

// open starts reading a URL of any supported scheme.
func (m *Mirrors) open(ctx context.Context, u *url.URL, accept string) (io.ReadCloser, error) {
	if name, ok := LocalPath(u.String()); ok {
		f, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			return nil, ErrNotFound
		}
		if err != nil {
			return nil, &mirrorError{err: err, final: true}
		}
		return f, nil
	}
	return m.request(ctx, http.MethodGet, u, accept)
}

// request starts reading an answer, with an end when the server falls silent.
func (m *Mirrors) request(ctx context.Context, method string, u *url.URL, accept string) (io.ReadCloser, error) {
	inner, cancel := context.WithCancelCause(ctx)
	// The timer runs until the first byte and starts anew with each read.
	timer := time.AfterFunc(m.stall, func() { cancel(fmt.Errorf("the server has sent nothing for %s", m.stall)) })
	stop := func() { timer.Stop(); cancel(nil) }
	req, err := http.NewRequestWithContext(inner, method, u.String(), nil)
	if err != nil {
		stop()
		return nil, errors.New("the request cannot be made: the URL is malformed")
	}
	req.Header.Set("User-Agent", "loomcycle-images")
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	resp, err := m.client.Do(req)
	if err != nil {
		defer stop()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if inner.Err() != nil {
			return nil, &mirrorError{err: context.Cause(inner)}
		}
		// The outer error repeats the URL, of a redirect's target even, with
		// what it may hold of credentials.
		var outer *url.Error
		if errors.As(err, &outer) {
			err = outer.Err
		}
		return nil, &mirrorError{err: err}
	}
	if resp.StatusCode == http.StatusOK {
		return &body{resp.Body, func() { timer.Reset(m.stall) }, stop, inner}, nil
	}
	resp.Body.Close()
	stop()
	switch {
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusGone:
		return nil, ErrNotFound
	case resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusRequestTimeout:
		return nil, &mirrorError{err: fmt.Errorf("the server answers %s", resp.Status)}
	case resp.StatusCode >= 400:
		return nil, &mirrorError{err: fmt.Errorf("%w: it answers %s", ErrRefused, resp.Status), final: true}
	}
	return nil, &mirrorError{err: fmt.Errorf("the server answers %s", resp.Status), final: true}
}

// body is a response whose read fails when the server falls silent.
type body struct {
	io.ReadCloser
	alive, stop func()
	ctx         context.Context
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil {
		b.alive()
	} else if cause := context.Cause(b.ctx); cause != nil && !errors.Is(err, io.EOF) {
		err = cause
	}
	return n, err
}

func (b *body) Close() error {
	b.stop()
	return b.ReadCloser.Close()
}
