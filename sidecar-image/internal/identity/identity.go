// Package identity says who makes a request, from that request alone: a bearer
// token that opens the door, and, where the operator has set a key set, a
// signed token that names tenant, principal and run.
package identity

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"golang.org/x/time/rate"
)

const (
	fetchTimeout = 10 * time.Second // of a key set
	maxToken     = 16 << 10         // bytes of a signed identity
	maxTag       = 256              // bytes of a tenant, a principal or a run
)

// Header names.
const (
	HeaderIdentity = "X-Loom-Identity"
	HeaderRun      = "X-Loom-Root-Run"
	HeaderTenant   = "X-Loom-Tenant"
)

// Anonymous is everyone's principal when SANDBOX_ALLOW_ANON is set.
const Anonymous = "anonymous"

// Token is a bearer token. Several may have one name, so that a new one works
// before the old one goes.
type Token struct{ Name, Secret string }

// ParseTokens reads one token per line or comma: NAME=SECRET, or, where bare says
// so, SECRET alone, whose name is "shared".
func ParseTokens(text string, bare bool) ([]Token, error) {
	var out []Token
	for _, part := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == '\n' || r == '\r' }) {
		part = strings.TrimSpace(part)
		if part == "" || strings.HasPrefix(part, "#") {
			continue
		}
		t := Token{"shared", part}
		// A secret may end in the = of base64, which makes its length a multiple of
		// four; a name never holds one. Messages show no secret.
		switch name, secret, ok := strings.Cut(part, "="); {
		case bare && (!ok || strings.Trim(secret, "=") == "" && name != "" && len(part)%4 == 0):
		case !ok:
			return nil, fmt.Errorf("token %d has no name: it is NAME=SECRET", len(out)+1)
		case secret == "":
			return nil, fmt.Errorf("token %d has no secret after its =: it is NAME=SECRET", len(out)+1)
		case !tokenName.MatchString(name):
			return nil, fmt.Errorf("token %d has a name that is not lower-case letters, digits, _ and -, at most 32: it is NAME=SECRET", len(out)+1)
		default:
			t = Token{name, secret}
		}
		if strings.ContainsAny(t.Secret, " \t") {
			return nil, fmt.Errorf("the token named %s holds white space, which no Authorization header can carry", t.Name)
		}
		out = append(out, t)
	}
	return out, nil
}

// distinct refuses a secret that opens the door to two principals.
func distinct(tokens []Token) error {
	names := map[string]string{}
	for _, t := range tokens {
		if name, ok := names[t.Secret]; ok && name != t.Name {
			return fmt.Errorf("the tokens named %s and %s have one secret, so there is no telling them apart", name, t.Name)
		}
		names[t.Secret] = t.Name
	}
	return nil
}

var tokenName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}$`)

// Algorithms that an identity may be signed with: asymmetric only, so that a
// public key can never be taken for a shared secret.
var Algorithms = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

// Options configure an Authenticator.
type Options struct {
	Tokens   []Token
	File     string // of more tokens; empty for none
	Anon     bool
	JWKS     string // a file or an http(s) URL; empty for no attested identity
	Issuer   string // required of tokens when not empty
	Audience string
	Leeway   time.Duration
	Once     bool // refuse an identity without a jti, which could be used again until it expires
	Now      func() time.Time
	Log      *slog.Logger

	pace pace
}

// pace is how often a key set is fetched from its URL.
type pace struct {
	boot    time.Duration // until it was there once
	refresh time.Duration // from then on; a key that was taken away opens for so long
	unknown time.Duration // at most, because a token names a key that is not in it
}

// Authenticator judges requests.
type Authenticator struct {
	opts   Options
	tokens *file[[]Token] // nil without Options.File
	keys   jwt.Keyfunc
	parser *jwt.Parser

	replayable sync.Once // until the log has told of an identity without a jti

	mu   sync.Mutex
	seen map[string]time.Time // jti of used identities, until they expire
	swep time.Time
}

// New returns an Authenticator. It waits for a key set that is at a URL; ctx ends
// that, and later the refreshing.
func New(ctx context.Context, opts Options) (*Authenticator, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if len(opts.Tokens) == 0 && opts.File == "" && !opts.Anon {
		return nil, errors.New("SANDBOX_AUTH_TOKEN is not set: set it (or SANDBOX_AUTH_TOKENS), or SANDBOX_ALLOW_ANON=1 for local use on loopback")
	}
	if err := distinct(opts.Tokens); err != nil {
		return nil, err
	}
	a := &Authenticator{opts: opts, seen: map[string]time.Time{}}
	if opts.File != "" {
		a.tokens = &file[[]Token]{path: opts.File, log: opts.Log, parse: func(b []byte) ([]Token, error) {
			t, err := ParseTokens(string(b), true)
			if err == nil && len(t) == 0 {
				err = errors.New("it holds no token")
			}
			return t, errors.Join(err, distinct(slices.Concat(opts.Tokens, t)))
		}}
		if _, err := a.tokens.load(); err != nil {
			return nil, fmt.Errorf("SANDBOX_AUTH_TOKEN_FILE: reading the tokens in %s: %w", opts.File, err)
		}
	}
	if opts.JWKS == "" {
		return a, nil
	}
	if opts.pace == (pace{}) {
		opts.pace = pace{boot: 5 * time.Second, refresh: time.Minute, unknown: 10 * time.Second}
	}
	var err error
	if a.keys, err = keySet(ctx, opts); err != nil {
		return nil, err
	}
	p := []jwt.ParserOption{jwt.WithValidMethods(Algorithms), jwt.WithAudience(opts.Audience), jwt.WithExpirationRequired(),
		jwt.WithIssuedAt(), jwt.WithLeeway(opts.Leeway), jwt.WithTimeFunc(opts.Now)}
	if opts.Issuer != "" {
		p = append(p, jwt.WithIssuer(opts.Issuer))
	}
	a.parser = jwt.NewParser(p...)
	return a, nil
}

func keySet(ctx context.Context, opts Options) (jwt.Keyfunc, error) {
	where, log := opts.JWKS, opts.Log
	if strings.HasPrefix(where, "https://") || strings.HasPrefix(where, "http://") {
		return fetched(ctx, where, log, opts.pace)
	}
	f := &file[keyfunc.Keyfunc]{path: where, log: log, parse: func(b []byte) (keyfunc.Keyfunc, error) { return keyfunc.NewJWKSetJSON(b) }}
	if _, err := f.load(); err != nil {
		return nil, fmt.Errorf("SANDBOX_IDENTITY_JWKS: reading the key set %s: %w", where, err)
	}
	return func(t *jwt.Token) (any, error) {
		k, err := f.load()
		if err != nil {
			return nil, err
		}
		return k.Keyfunc(t)
	}, nil
}

// fetched is the key set at a URL, once that has answered.
func fetched(ctx context.Context, where string, log *slog.Logger, every pace) (jwt.Keyfunc, error) {
	u, err := url.ParseRequestURI(where)
	if err != nil {
		var reason *url.Error
		errors.As(err, &reason)
		return nil, fmt.Errorf("SANDBOX_IDENTITY_JWKS is no URL: %w", reason.Err) // which may hold a password
	}
	log = log.With("url", u.Redacted())
	said := func(err error) string { return strings.ReplaceAll(err.Error(), where, u.Redacted()) }
	for {
		try, stop := context.WithCancel(ctx) // a try that fails leaves its refreshing behind
		firstMustCome := false
		k, err := keyfunc.NewDefaultOverrideCtx(try, []string{where}, keyfunc.Override{
			HTTPTimeout: fetchTimeout, NoErrorReturnFirstHTTPReq: &firstMustCome, RefreshInterval: every.refresh,
			RefreshUnknownKID: rate.NewLimiter(rate.Every(every.unknown), 1), RateLimitWaitMax: every.unknown + fetchTimeout,
			RefreshErrorHandlerFunc: func(string) func(context.Context, error) {
				return func(_ context.Context, err error) {
					log.Error("the key set cannot be fetched; the one before stays in force", "error", said(err))
				}
			},
		})
		if err == nil {
			context.AfterFunc(ctx, stop) // not before
			return k.Keyfunc, nil
		}
		stop()
		log.Warn("the key set cannot be fetched; the sidecar is not ready before it is", "error", said(err))
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("SANDBOX_IDENTITY_JWKS=%s: %s", u.Redacted(), said(err))
		case <-time.After(every.boot):
		}
	}
}

// Tokens are those that open the door now.
func (a *Authenticator) Tokens() []Token {
	if a.tokens == nil {
		return a.opts.Tokens
	}
	held, _ := a.tokens.load() // it has been loaded once
	return slices.Concat(a.opts.Tokens, held)
}

// Several tells whether calls may come from more than one principal, by the tokens
// that there are now.
func (a *Authenticator) Several() bool {
	names := map[string]bool{}
	for _, t := range a.Tokens() {
		names[t.Name] = true
	}
	if a.opts.Anon {
		names[Anonymous] = true
	}
	return a.opts.JWKS != "" || len(names) > 1
}

// ErrToken answers a request without a valid bearer token.
var ErrToken = errors.New("a valid Authorization: Bearer token is required")

// ErrNoIdentity is returned for the calls of a request that carries no signed
// identity where one is required.
var ErrNoIdentity = fmt.Errorf("this sidecar requires a signed identity: send it in the %s header of the request", HeaderIdentity)

// ErrHeader is wrapped by the errors of headers that are malformed, whoever sent them.
var ErrHeader = errors.New("the request's headers are not valid")

// Who is a request's author.
type Who struct {
	session.Caller
	Known bool // false: the door is open, but calls need an identity

	jti   string // of an identity that is good for one request
	until time.Time
}

// Authenticate judges a request by its headers; Use comes after it. The error is
// fit to be shown.
func (a *Authenticator) Authenticate(h http.Header) (Who, error) {
	name, err := a.bearer(h)
	if err != nil {
		return Who{}, err
	}
	if a.keys != nil {
		switch values := h.Values(HeaderIdentity); len(values) {
		case 0:
			return Who{}, nil
		case 1:
			return a.identity(values[0])
		default:
			return Who{}, fmt.Errorf("more than one %s header", HeaderIdentity)
		}
	}
	c := session.Caller{Principal: name}
	for _, x := range []struct {
		header string
		to     *string
	}{{HeaderRun, &c.RootRun}, {HeaderTenant, &c.Tenant}} {
		values := h.Values(x.header)
		if len(values) > 1 {
			return Who{}, fmt.Errorf("%w: more than one %s", ErrHeader, x.header)
		}
		if len(values) == 1 {
			if *x.to, err = tag(x.header, values[0]); err != nil {
				return Who{}, fmt.Errorf("%w: %w", ErrHeader, err)
			}
		}
	}
	return Who{Caller: c, Known: true}, nil
}

// bearer finds the token's name, taking the same time whichever it is.
func (a *Authenticator) bearer(h http.Header) (string, error) {
	values := h.Values("Authorization")
	if len(values) == 0 && a.opts.Anon {
		return Anonymous, nil
	}
	secret := ""
	if len(values) == 1 {
		if scheme, rest, ok := strings.Cut(values[0], " "); ok && strings.EqualFold(scheme, "Bearer") {
			secret = strings.TrimSpace(rest)
		}
	}
	got := sha256.Sum256([]byte(secret))
	match, tokens := -1, a.Tokens()
	for i, t := range tokens {
		sum := sha256.Sum256([]byte(t.Secret))
		match = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(got[:], sum[:]), i, match)
	}
	if match < 0 || secret == "" {
		return "", ErrToken
	}
	return tokens[match].Name, nil
}

type claims struct {
	jwt.RegisteredClaims
	Tenant    string `json:"tenant"`
	Principal string `json:"principal"`
	RootRun   string `json:"root_run"`
}

// maxTime is the last second of the year 9999, the last that RFC 3339 can write.
const maxTime = 253402300799

// noTime is a claim that is not the time which it has to be.
type noTime string

func (c noTime) Error() string {
	return fmt.Sprintf("its %s is not a valid time, which is a number of seconds since 1970", string(c))
}

// UnmarshalJSON refuses times that the library would take for others: it reads a string as a
// number (RFC 7519 section 2 has only numbers), and one beyond all calendars as long past.
func (c *claims) UnmarshalJSON(b []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	for name, v := range all {
		for _, t := range []string{"exp", "nbf", "iat"} {
			if !strings.EqualFold(name, t) || string(v) == "null" {
				continue
			}
			if n, err := strconv.ParseFloat(string(v), 64); err != nil || n < 0 || n > maxTime {
				return noTime(t)
			}
		}
	}
	type plain claims
	return json.Unmarshal(b, (*plain)(c))
}

func (a *Authenticator) identity(token string) (Who, error) {
	refuse := func(err error) (Who, error) {
		return Who{}, fmt.Errorf("%s: %w", HeaderIdentity, err)
	}
	if len(token) > maxToken {
		return refuse(fmt.Errorf("the token is longer than the %d bytes that are allowed", maxToken))
	}
	var c claims
	t, err := a.parser.ParseWithClaims(token, &c, a.keys)
	if err != nil {
		return refuse(reason(err))
	}
	if !slices.Contains(Algorithms, t.Method.Alg()) {
		return refuse(errors.New("its algorithm is not allowed"))
	}
	// Whoever does not understand one that is named there has to refuse the token (RFC 7515
	// section 4.1.11), and no extension is understood here.
	if _, ok := t.Header["crit"]; ok {
		return refuse(errors.New("its header has crit, which names extensions that are not understood here"))
	}
	if a.opts.Once && c.ID == "" {
		return refuse(errors.New("it has no jti, which this sidecar requires (SANDBOX_IDENTITY_REQUIRE_JTI): give each token one of its own"))
	}
	who := session.Caller{Tenant: c.Tenant, RootRun: c.RootRun}
	subject := c.Principal
	if subject == "" {
		subject = c.Subject
	}
	switch "" {
	case c.Tenant: // those of two tenants would be one
		return refuse(errors.New("it names no tenant"))
	case subject:
		return refuse(errors.New("it names no principal"))
	}
	for name, v := range map[string]string{"tenant": c.Tenant, "principal": subject, "root_run": c.RootRun} {
		if _, err := tag(name, v); err != nil {
			return refuse(err)
		}
	}
	// The tenant's own slashes are escaped (as in RFC 6901), so that ("a/b", "c")
	// and ("a", "b/c") stay two principals.
	who.Principal = strings.ReplaceAll(strings.ReplaceAll(c.Tenant, "~", "~0"), "/", "~1") + "/" + subject
	return Who{who, true, c.ID, c.ExpiresAt.Add(a.opts.Leeway)}, nil
}

// Use marks the identity of a request used, when the request is about to be
// served: one that is turned away may come again with it. It fails for an identity
// that was used before, by its jti, and for one that has expired since it was judged,
// which may have been forgotten. One without a jti is good until it expires.
func (a *Authenticator) Use(w Who) error {
	if w.jti == "" {
		if w.Known && a.keys != nil {
			a.replayable.Do(func() {
				a.opts.Log.Warn("an identity has no jti: whoever gets hold of such a token can use it again until it expires; have each token signed with a jti of its own, and set SANDBOX_IDENTITY_REQUIRE_JTI=1")
			})
		}
		return nil
	}
	key := w.jti
	if len(key) > 64 {
		key = fmt.Sprintf("%x", sha256.Sum256([]byte(key)))
	}
	now := a.opts.Now()
	if !now.Before(w.until) {
		return fmt.Errorf("%s: it has expired", HeaderIdentity)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if now.Sub(a.swep) > time.Minute {
		a.swep = now
		for k, exp := range a.seen {
			if exp.Before(now) {
				delete(a.seen, k)
			}
		}
	}
	if _, ok := a.seen[key]; ok {
		return fmt.Errorf("%s: it has been used before (its jti is known)", HeaderIdentity)
	}
	a.seen[key] = w.until
	return nil
}

// reason says what is wrong with a token without repeating any of it.
func reason(err error) error {
	if claim := noTime(""); errors.As(err, &claim) {
		return claim
	}
	for _, x := range []struct {
		is  error
		say string
	}{
		{jwt.ErrTokenExpired, "it has expired"},
		{jwt.ErrTokenNotValidYet, "it is not valid yet"},
		{jwt.ErrTokenUsedBeforeIssued, "it was issued in the future"},
		{jwt.ErrTokenInvalidAudience, "it is for another audience"},
		{jwt.ErrTokenInvalidIssuer, "it is from another issuer"},
		{jwt.ErrTokenRequiredClaimMissing, "it lacks a required claim (exp, aud)"},
		{jwt.ErrTokenSignatureInvalid, "its signature or algorithm is not accepted"},
		{jwt.ErrTokenUnverifiable, "no key of the key set verifies it"},
	} {
		if errors.Is(err, x.is) {
			return errors.New(x.say)
		}
	}
	return errors.New("it is not a valid signed token")
}

// tag checks a value that labels a session.
func tag(name, v string) (string, error) {
	if len(v) > maxTag || !utf8.ValidString(v) || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return "", fmt.Errorf("%s has to be at most %d bytes of printable text", name, maxTag)
	}
	return v, nil
}
