// Package registry writes to container registries that fail: it tries again
// with backoff, resumes a cut upload where the registry can, mounts what another
// repository already has, sends nothing twice, and calls a tag free only when
// the registry itself says so.
package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Options are what a client needs from outside; the zero value is usable.
type Options struct {
	Transport   http.RoundTripper // nil means go-containerregistry's default, with Idle
	Idle        time.Duration     // until a request is given up of which nothing moves; 0 means 5 min
	Keychain    authn.Keychain    // nil means the docker configuration and its helpers
	Backoff     Backoff
	Concurrency int  // blobs sent at once; 0 means 4
	ReadOnly    bool // ask for pull scopes only
	Log         func(format string, args ...any)
}

// Client is one registry, with the credentials for a fixed set of repositories.
type Client struct {
	registry name.Registry
	prefix   string
	options  Options
	auth     http.RoundTripper
	http     http.Client // for uploads and referrers, which the library lacks
	Stats
	blobs blobs
	slots chan struct{} // one for each blob that is being sent
}

// Stats counts what was done for blobs since the client was opened.
type Stats struct {
	Sent    atomic.Int64 // bytes put on the wire, also those sent again
	Pushed  atomic.Int64 // blobs
	Mounted atomic.Int64 // blobs
	Skipped atomic.Int64 // blobs that were there
	Resumed atomic.Int64 // uploads that went on where they were cut
}

// Open connects to a registry given as HOST[:PORT][/PREFIX] and authenticates
// for the repositories, which are relative to the prefix. It fails when the
// registry does not answer or refuses the credentials.
func Open(ctx context.Context, address string, repositories []string, o Options) (*Client, error) {
	host, prefix, _ := strings.Cut(strings.TrimSuffix(address, "/"), "/")
	reg, err := name.NewRegistry(host, name.StrictValidation)
	if err != nil {
		return nil, fmt.Errorf("%q is not a registry; write HOST[:PORT][/PREFIX]: %w", address, err)
	}
	if o.Idle == 0 {
		o.Idle = 5 * time.Minute
	}
	if o.Transport == nil {
		o.Transport = idle{remote.DefaultTransport, o.Idle}
	}
	if o.Keychain == nil {
		o.Keychain = authn.DefaultKeychain
	}
	if o.Concurrency == 0 {
		o.Concurrency = 4
	}
	if o.Log == nil {
		o.Log = func(string, ...any) {}
	}
	o.Backoff = o.Backoff.withDefaults()
	c := &Client{registry: reg, prefix: prefix, options: o, slots: make(chan struct{}, o.Concurrency)}
	var credentials authn.Authenticator
	if credentials, err = authn.Resolve(ctx, o.Keychain, reg); err != nil {
		return nil, fmt.Errorf("find the credentials of %s: %w", host, err)
	}
	var scopes []string
	for _, r := range repositories {
		repo, err := c.Repository(r)
		if err != nil {
			return nil, err
		}
		scope := transport.PushScope
		if o.ReadOnly {
			scope = transport.PullScope
		}
		scopes = append(scopes, repo.Scope(scope))
	}
	c.auth, err = transport.NewWithContext(ctx, reg, credentials, &retrier{inner: o.Transport, backoff: o.Backoff, log: o.Log}, scopes)
	if err != nil {
		return nil, fmt.Errorf("log in to registry %s: %w", host, c.plain(err))
	}
	c.http.Transport = c.auth
	return c, nil
}

// deniedError is a refusal with what to do about it.
type deniedError struct {
	error
	host string
}

func (e *deniedError) Error() string {
	return e.error.Error() + "; log in as a user who may do this: docker login " + e.host
}
func (e *deniedError) Unwrap() error { return e.error }

// plain says what to do about a 401 or 403, in the place of the scopes that some
// registries list, which would be printed as a data structure.
func (c *Client) plain(err error) error {
	var e *transport.Error
	var told *deniedError
	if !errors.As(err, &e) || e.StatusCode != http.StatusUnauthorized && e.StatusCode != http.StatusForbidden || errors.As(err, &told) {
		return err
	}
	for i := range e.Errors {
		e.Errors[i].Detail = nil
	}
	return &deniedError{err, c.registry.RegistryStr()}
}

// Address is the registry with its prefix, as it was opened.
func (c *Client) Address() string { return path.Join(c.registry.RegistryStr(), c.prefix) }

// Repository is a repository of the registry, under its prefix.
func (c *Client) Repository(repository string) (name.Repository, error) {
	full := path.Join(c.prefix, repository)
	r, err := name.NewRepository(c.registry.RegistryStr()+"/"+full, name.StrictValidation)
	if err != nil {
		return name.Repository{}, fmt.Errorf("%q is not a repository name: %w", full, err)
	}
	return r, nil
}

// Remote are the options for go-containerregistry's functions to share the
// client's login and retries.
func (c *Client) Remote(ctx context.Context) []remote.Option {
	once := remote.WithRetryPredicate(func(error) bool { return false }) // the transport has tried again
	return []remote.Option{remote.WithContext(ctx), remote.WithTransport(c.auth), once}
}

// Digest reads what a tag points to. Absent is true only when the registry
// says that it has no such manifest or repository: a proxy's 404, a refused
// login, a timeout and a 5xx are errors.
func (c *Client) Digest(ctx context.Context, repository, tag string) (digest v1.Hash, absent bool, err error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return v1.Hash{}, false, err
	}
	d, err := remote.Get(repo.Tag(tag), c.Remote(ctx)...)
	if Absent(err) {
		return v1.Hash{}, true, nil
	}
	if err != nil {
		return v1.Hash{}, false, fmt.Errorf("ask whether tag %s is taken: %w", repo.Tag(tag), c.plain(err))
	}
	return d.Digest, false, nil
}

// Absent tells whether an error is a registry's own statement that there is no
// such manifest or repository (OCI distribution-spec 1.1, "Error Codes").
func Absent(err error) bool {
	var e *transport.Error
	if !errors.As(err, &e) || e.StatusCode != http.StatusNotFound || len(e.Errors) == 0 {
		return false
	}
	for _, d := range e.Errors {
		switch d.Code {
		case transport.ManifestUnknownErrorCode, transport.NameUnknownErrorCode, "NOT_FOUND":
		default:
			return false
		}
	}
	return true
}

// Tags lists a repository's tags; one that does not exist has none.
func (c *Client) Tags(ctx context.Context, repository string) ([]string, error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return nil, err
	}
	tags, err := remote.List(repo, c.Remote(ctx)...)
	if err != nil && !Absent(err) {
		return nil, fmt.Errorf("list the tags of %s: %w", repo, c.plain(err))
	}
	return tags, nil
}

// Manifest is a manifest as bytes; it satisfies remote.Taggable.
type Manifest struct {
	Raw  []byte
	Type types.MediaType
}

// RawManifest implements remote.Taggable.
func (m Manifest) RawManifest() ([]byte, error) { return m.Raw, nil }

// MediaType implements remote.Taggable.
func (m Manifest) MediaType() (types.MediaType, error) { return m.Type, nil }

// Fetch reads a manifest by tag or digest (sha256:...).
func (c *Client) Fetch(ctx context.Context, repository, ref string) (Manifest, v1.Hash, error) {
	r, err := c.reference(repository, ref)
	if err != nil {
		return Manifest{}, v1.Hash{}, err
	}
	d, err := remote.Get(r, c.Remote(ctx)...)
	if err != nil {
		return Manifest{}, v1.Hash{}, fmt.Errorf("read manifest %s: %w", r, c.plain(err))
	}
	return Manifest{d.Manifest, d.MediaType}, d.Digest, nil
}

func (c *Client) reference(repository, ref string) (name.Reference, error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return nil, err
	}
	if strings.Contains(ref, ":") {
		return repo.Digest(ref), nil
	}
	return repo.Tag(ref), nil
}

// PutManifest writes a manifest under a tag or digest. For one with a subject
// on a registry without the referrers API the fallback tag is kept up too, so
// manifests of one subject must not be put at once.
func (c *Client) PutManifest(ctx context.Context, repository, ref string, m Manifest) error {
	r, err := c.reference(repository, ref)
	if err != nil {
		return err
	}
	if err := remote.Put(r, m, c.Remote(ctx)...); err != nil {
		return fmt.Errorf("write manifest %s: %w", r, c.plain(err))
	}
	return nil
}

// HasManifest asks for a manifest by digest, to spare writing it again: a 404
// means no, and so does a 500, which a registry that once ran out of disk gives
// for an empty link until the manifest is written anew. Any other answer is an error.
func (c *Client) HasManifest(ctx context.Context, repository string, h v1.Hash) (bool, error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return false, err
	}
	_, err = remote.Head(repo.Digest(h.String()), c.Remote(ctx)...)
	var e *transport.Error
	if errors.As(err, &e) && (e.StatusCode == http.StatusNotFound || e.StatusCode == http.StatusInternalServerError) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for manifest %s: %w", repo.Digest(h.String()), c.plain(err))
	}
	return true, nil
}

// Referrers lists the manifests whose subject is the digest, on all pages (OCI
// distribution-spec 1.1, "Listing Referrers"). A registry without the API has a
// tag in its place.
func (c *Client) Referrers(ctx context.Context, repository string, h v1.Hash) ([]v1.Descriptor, error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return nil, err
	}
	var all []v1.Descriptor
	next := c.endpoint(repo.RepositoryStr(), "referrers/"+h.String())
	for pages := 0; err == nil && next != nil; pages++ {
		var found *v1.IndexManifest
		if found, next, err = c.referrers(ctx, next); err == nil && found == nil && pages == 0 {
			found, err = c.referrersTag(ctx, repository, h)
		}
		switch {
		case err != nil:
		case found == nil:
			err = errors.New("a later page is no list")
		case pages == 1000:
			err = errors.New("the pages have no end")
		default:
			all = append(all, found.Manifests...)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list the referrers of %s: %w", repo.Digest(h.String()), c.plain(err))
	}
	return all, nil
}

var nextPage = regexp.MustCompile(`^\s*<([^>]*)>\s*;\s*rel="?next"?`)

// referrers reads one page; nil means that the registry does not know the API.
func (c *Client) referrers(ctx context.Context, u *url.URL) (page *v1.IndexManifest, next *url.URL, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Accept", string(types.OCIImageIndex))
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	if err := transport.CheckError(resp, http.StatusOK, http.StatusNotFound, http.StatusBadRequest, http.StatusNotAcceptable); err != nil {
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != string(types.OCIImageIndex) {
		return nil, nil, nil
	}
	if link := nextPage.FindStringSubmatch(resp.Header.Get("Link")); link != nil {
		if next, err = u.Parse(link[1]); err != nil || next.Host != u.Host || next.Scheme != u.Scheme {
			return nil, nil, fmt.Errorf("the next page lies elsewhere: %s", link[1])
		}
	}
	page, err = v1.ParseIndexManifest(io.LimitReader(resp.Body, MaxBlob))
	return page, next, err
}

// referrersTag reads the tag of a registry without the API ("Referrers Tag Schema").
func (c *Client) referrersTag(ctx context.Context, repository string, h v1.Hash) (*v1.IndexManifest, error) {
	m, _, err := c.Fetch(ctx, repository, h.Algorithm+"-"+h.Hex)
	if Absent(err) { // a gateway's 404 would have all attached a second time
		return &v1.IndexManifest{}, nil
	}
	if err != nil {
		return nil, err
	}
	return v1.ParseIndexManifest(bytes.NewReader(m.Raw))
}
