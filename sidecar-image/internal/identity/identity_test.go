package identity

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
	"go.yaml.in/yaml/v3"
)

const secret = "secret-0123456789"

func header(kv ...string) http.Header {
	h := http.Header{"Authorization": {"Bearer " + secret}}
	for i := 0; i < len(kv); i += 2 {
		h.Add(kv[i], kv[i+1])
	}
	return h
}

func TestBearer(t *testing.T) {
	tokens, err := ParseTokens("old=first-token,old=second-token\nabc123==\n# a comment\nnew=x==", true)
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(t.Context(), Options{Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	for auth, want := range map[string]string{
		"Bearer first-token": "old", "bearer second-token": "old", "Bearer abc123==": "shared", "Bearer x==": "new",
		"Bearer ": "", "Bearer": "", "": "", "Bearer first-toke": "", "Bearer old=first-token": "", "Basic first-token": "", "Bearer first-token,second-token": "",
	} {
		who, err := a.Authenticate(http.Header{"Authorization": {auth}})
		if (err == nil) != (want != "") || who.Principal != want {
			t.Errorf("%q is %q, %v; want %q", auth, who.Principal, err, want)
		}
	}
	if _, err := a.Authenticate(http.Header{"Authorization": {"Bearer first-token", "Bearer first-token"}}); err == nil {
		t.Error("two Authorization headers were let in")
	}
	if _, err := New(t.Context(), Options{}); err == nil || !strings.Contains(err.Error(), "SANDBOX_AUTH_TOKEN") {
		t.Errorf("no token at all: %v", err)
	}
}

// Tokens in a file rotate without a restart, also while it is half written.
func TestTokenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	age := 0
	write := func(text string) {
		t.Helper()
		err := os.WriteFile(path, []byte(text), 0o600)
		if err == nil {
			age++
			err = os.Chtimes(path, time.Unix(int64(age), 0), time.Unix(int64(age), 0))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write("")
	if _, err := New(t.Context(), Options{File: path}); err == nil || !strings.Contains(err.Error(), "SANDBOX_AUTH_TOKEN_FILE") {
		t.Errorf("an empty file at the start: %v", err)
	}
	write("a=first-token")
	var log bytes.Buffer
	a, err := New(t.Context(), Options{Tokens: []Token{{"env", "env-token"}}, File: path, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ write, first, second string }{
		{"", "a", ""}, {"a=first-token\nb=second-token", "a", "b"}, {"b=second token", "a", "b"}, {"b=second-token", "", "b"}, {"b=second-token\n# end", "", "b"},
	} {
		write(step.write)
		for token, want := range map[string]string{"first-token": step.first, "second-token": step.second, "env-token": "env"} {
			if who, err := a.Authenticate(http.Header{"Authorization": {"Bearer " + token}}); (err == nil) != (want != "") || who.Principal != want {
				t.Errorf("with %q in the file %s is %q, %v", step.write, token, who.Principal, err)
			}
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if who, err := a.Authenticate(http.Header{"Authorization": {"Bearer second-token"}}); err != nil || who.Principal != "b" {
		t.Errorf("without the file %q, %v", who.Principal, err)
	}
	if n := strings.Count(log.String(), "level=ERROR"); n != 3 || strings.Contains(log.String(), "second") {
		t.Errorf("of an empty file, a bad one and none the log says, %d times:\n%s", n, log.String())
	}
}

func TestTokensThatAreNone(t *testing.T) {
	for text, want := range map[string]string{
		"team-accounting-prod=": "token 1 has no secret",
		"a=first-one\nalice=":   "token 2 has no secret",
		"=x":                    "a name that is not",
		"Alice=y-secret":        "a name that is not",
		"../x=y-secret":         "a name that is not",
		"alice=same,bob=same":   "alice and bob have one secret",
	} {
		got, err := ParseTokens(text, true)
		if err == nil {
			_, err = New(t.Context(), Options{Tokens: got})
		}
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "y-secret") {
			t.Errorf("%q: %v, %v, want %q", text, got, err, want)
		}
	}
	for _, text := range []string{"alice=x,bob", "alice=x,shared=y,bob", "alice=x,c2VjcmV0cw=="} {
		if got, err := ParseTokens(text, false); err == nil {
			t.Errorf("%q without names: %v", text, got)
		}
	}
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte("bob=same\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(t.Context(), Options{Tokens: []Token{{"alice", "same"}}, File: file}); err == nil || !strings.Contains(err.Error(), "alice and bob") {
		t.Errorf("one secret here and in the file: %v", err)
	}
	if got, err := ParseTokens("alice=same,alice=same,c2VjcmV0cw==", true); err != nil || got[2] != (Token{"shared", "c2VjcmV0cw=="}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestSeveral(t *testing.T) {
	for _, tc := range []struct {
		opts Options
		want bool
	}{
		{Options{Tokens: []Token{{"a", secret}, {"a", secret + "2"}}}, false},
		{Options{Tokens: []Token{{"a", secret}, {"b", secret + "2"}}}, true},
		{Options{Anon: true}, false},
		{Options{Anon: true, Tokens: []Token{{"a", secret}}}, true},
	} {
		if a, err := New(t.Context(), tc.opts); err != nil || a.Several() != tc.want {
			t.Errorf("%+v: several principals are %v, %v", tc.opts, !tc.want, err)
		}
	}
}

func TestTags(t *testing.T) {
	a, err := New(t.Context(), Options{Tokens: []Token{{"shared", secret}}})
	if err != nil {
		t.Fatal(err)
	}
	who, err := a.Authenticate(header(HeaderRun, "run-1", HeaderTenant, "acme"))
	if err != nil || who.RootRun != "run-1" || who.Tenant != "acme" || who.Principal != "shared" {
		t.Errorf("%+v, %v", who, err)
	}
	for _, h := range []http.Header{
		header(HeaderRun, "a", HeaderRun, "b"), header(HeaderRun, strings.Repeat("x", 257)), header(HeaderTenant, "a\x00b"), header(HeaderTenant, "\xff"),
	} {
		if who, err := a.Authenticate(h); !errors.Is(err, ErrHeader) {
			t.Errorf("%v was let in as %+v, or refused for another reason: %v", h, who, err)
		}
	}
}

// Each attack on the signed identity, and the tokens that have to work.
func TestAttestedIdentity(t *testing.T) {
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	other, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	rsaKey, _ := rsa.GenerateKey(rand.Reader, 2048)
	path := filepath.Join(t.TempDir(), "jwks.json")
	writeKeys(t, path, map[string]any{"k1": key.Public(), "k2": rsaKey.Public()})
	now := time.Now()
	clock := now
	a, err := New(t.Context(), Options{Tokens: []Token{{"shared", secret}}, JWKS: path, Issuer: "loom", Audience: "sandbox", Leeway: 10 * time.Second, Now: func() time.Time { return clock }})
	if err != nil {
		t.Fatal(err)
	}
	good := func(change func(jwt.MapClaims)) jwt.MapClaims {
		c := jwt.MapClaims{"iss": "loom", "aud": "sandbox", "exp": now.Add(time.Minute).Unix(), "iat": now.Unix(), "tenant": "acme", "principal": "p1", "root_run": "r1"}
		if change != nil {
			change(c)
		}
		return c
	}
	sign := func(m jwt.SigningMethod, kid string, key any, c jwt.MapClaims) string {
		tok := jwt.NewWithClaims(m, c)
		tok.Header["kid"] = kid
		s, err := tok.SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	crit := func(m jwt.SigningMethod, kid string, key any, header map[string]any) string {
		tok := jwt.NewWithClaims(m, good(nil))
		tok.Header["kid"] = kid
		maps.Copy(tok.Header, header)
		s, err := tok.SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	es := func(change func(jwt.MapClaims)) string { return sign(jwt.SigningMethodES256, "k1", key, good(change)) }
	valid := es(nil)
	parts := strings.Split(valid, ".")
	forged := strings.Split(es(func(c jwt.MapClaims) { c["principal"] = "p2" }), ".")
	rsaPublic, _ := json.Marshal(rsaKey.PublicKey)
	for _, tc := range []struct{ name, token, want string }{
		{"valid", valid, ""},
		{"valid, RSA", sign(jwt.SigningMethodRS256, "k2", rsaKey, good(nil)), ""},
		{"valid, several audiences", es(func(c jwt.MapClaims) { c["aud"] = []string{"x", "sandbox"} }), ""},
		{"expired", es(func(c jwt.MapClaims) { c["exp"] = now.Add(-time.Minute).Unix() }), "expired"},
		{"no expiry", es(func(c jwt.MapClaims) { delete(c, "exp") }), "lacks"},
		{"not yet valid", es(func(c jwt.MapClaims) { c["nbf"] = now.Add(time.Minute).Unix() }), "not valid yet"},
		{"an expiry as a string", es(func(c jwt.MapClaims) { c["exp"] = fmt.Sprint(now.Add(time.Minute).Unix()) }), "its exp is not a valid time"},
		{"a start as a string", es(func(c jwt.MapClaims) { c["nbf"] = "0" }), "its nbf is not a valid time"},
		{"an expiry beyond all calendars", es(func(c jwt.MapClaims) { c["exp"] = 1e30 }), "its exp is not a valid time"},
		{"an expiry before 1970", es(func(c jwt.MapClaims) { c["exp"] = -1 }), "its exp is not a valid time"},
		{"an expiry of an object", es(func(c jwt.MapClaims) { c["exp"] = map[string]any{} }), "its exp is not a valid time"},
		{"a fraction of a second", es(func(c jwt.MapClaims) { c["exp"] = float64(now.Unix()) + 59.5 }), ""},
		{"null as a start", es(func(c jwt.MapClaims) { c["nbf"] = nil }), ""},
		{"an unknown critical header", crit(jwt.SigningMethodES256, "k1", key, map[string]any{"crit": []string{"x"}, "x": 1}), "crit"},
		{"a payload that is not encoded", crit(jwt.SigningMethodRS256, "k2", rsaKey, map[string]any{"crit": []string{"b64"}, "b64": false}), "crit"},
		{"no critical header in the list", crit(jwt.SigningMethodES256, "k1", key, map[string]any{"crit": []string{}}), "crit"},
		{"wrong audience", es(func(c jwt.MapClaims) { c["aud"] = "other" }), "audience"},
		{"no audience", es(func(c jwt.MapClaims) { delete(c, "aud") }), ""},
		{"wrong issuer", es(func(c jwt.MapClaims) { c["iss"] = "mallory" }), "issuer"},
		{"no principal", es(func(c jwt.MapClaims) { delete(c, "principal") }), "no principal"},
		{"no tenant", es(func(c jwt.MapClaims) { delete(c, "tenant") }), "no tenant"},
		{"another key", sign(jwt.SigningMethodES256, "k1", other, good(nil)), "signature"},
		{"an unknown key", sign(jwt.SigningMethodES256, "k9", other, good(nil)), "key"},
		{"alg none", sign(jwt.SigningMethodNone, "k1", jwt.UnsafeAllowNoneSignatureType, good(nil)), "algorithm"},
		{"unsigned", parts[0] + "." + parts[1] + ".", "signature"},
		{"another's payload", parts[0] + "." + forged[1] + "." + parts[2], "signature"},
		{"public key as HMAC secret", sign(jwt.SigningMethodHS256, "k2", rsaPublic, good(nil)), "algorithm"},
		{"garbage", "garbage", "not a valid"},
		{"empty", "", "not a valid"},
		{"huge", strings.Repeat("a", 20<<10), "longer"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			who, err := a.Authenticate(header(HeaderIdentity, tc.token))
			if tc.name == "no audience" { // whichever reason, it is not let in
				if err == nil {
					t.Errorf("let in as %+v", who)
				}
				return
			}
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%+v, %v; want %q", who, err, tc.want)
			}
			if err == nil && (!who.Known || who.Principal != "acme/p1" || who.RootRun != "r1") {
				t.Errorf("%+v", who)
			}
			if err != nil && len(tc.token) > 20 && strings.Contains(err.Error(), tc.token[:20]) {
				t.Errorf("the error repeats the token: %v", err)
			}
		})
	}

	t.Run("a replayed jti", func(t *testing.T) {
		use := func(token string) error {
			t.Helper()
			who, err := a.Authenticate(header(HeaderIdentity, token))
			if err != nil {
				t.Fatal(err) // looked at only
			}
			return a.Use(who)
		}
		once := es(func(c jwt.MapClaims) { c["jti"] = "one" })
		if _, err := a.Authenticate(header(HeaderIdentity, once)); err != nil {
			t.Fatal(err) // turned away after it
		}
		if err := use(once); err != nil {
			t.Fatal(err)
		}
		if err := use(once); err == nil || !strings.Contains(err.Error(), "used before") {
			t.Errorf("used twice: %v", err)
		}
		late, err := a.Authenticate(header(HeaderIdentity, once))
		if err != nil {
			t.Fatal(err)
		}
		clock = now.Add(2 * time.Minute)
		if err := a.Use(late); err == nil || !strings.Contains(err.Error(), "expired") {
			t.Errorf("used again by a request that took until it had expired: %v", err)
		}
		if err := use(es(func(c jwt.MapClaims) { c["jti"], c["exp"] = "two", now.Add(5*time.Minute).Unix() })); err != nil {
			t.Fatal(err)
		}
		if len(a.seen) != 1 {
			t.Errorf("%d ids are remembered, the expired one too", len(a.seen))
		}
		clock = now
	})
	t.Run("no jti", func(t *testing.T) {
		var log bytes.Buffer
		for _, once := range []bool{false, true} {
			opts := a.opts
			opts.Once, opts.Log = once, slog.New(slog.NewTextHandler(&log, nil))
			a, err := New(t.Context(), opts)
			if err != nil {
				t.Fatal(err)
			}
			for _, tc := range []struct {
				name string
				jti  any
				want string
			}{{"none", nil, "no jti"}, {"an empty one", "", "no jti"}, {"one of its own", "j", ""}} {
				token := es(func(c jwt.MapClaims) { c["jti"] = tc.jti })
				for uses := range 2 {
					who, err := a.Authenticate(header(HeaderIdentity, token))
					if refused := once && tc.want != ""; (err != nil) != refused || refused && !strings.Contains(err.Error(), tc.want) {
						t.Errorf("%s, required %v: %v", tc.name, once, err)
					}
					if err != nil {
						continue
					}
					if err := a.Use(who); (err != nil) != (tc.jti == "j" && uses == 1) {
						t.Errorf("%s, required %v, use %d: %v", tc.name, once, uses+1, err)
					}
				}
			}
			if err := a.Use(Who{}); err != nil { // the bearer alone
				t.Error(err)
			}
		}
		if n := strings.Count(log.String(), "SANDBOX_IDENTITY_REQUIRE_JTI"); n != 1 {
			t.Errorf("the log tells of it %d times:\n%s", n, log.String())
		}
	})
	t.Run("the bearer alone", func(t *testing.T) {
		if who, err := a.Authenticate(header(HeaderTenant, "acme")); err != nil || who.Known || who.Principal != "" {
			t.Errorf("%+v, %v", who, err)
		}
	})
	t.Run("the identity alone", func(t *testing.T) {
		if _, err := a.Authenticate(http.Header{HeaderIdentity: {valid}}); err == nil {
			t.Error("let in without the bearer token")
		}
	})
	t.Run("two identities", func(t *testing.T) {
		if _, err := a.Authenticate(header(HeaderIdentity, valid, HeaderIdentity, valid)); err == nil {
			t.Error("let in")
		}
	})
	t.Run("headers do not overrule claims", func(t *testing.T) {
		who, err := a.Authenticate(header(HeaderIdentity, valid, HeaderRun, "r2", HeaderTenant, "evil"))
		if err != nil || who.RootRun != "r1" || who.Tenant != "acme" {
			t.Errorf("%+v, %v", who, err)
		}
	})
	t.Run("tenant and principal do not run together", func(t *testing.T) {
		one, _ := a.Authenticate(header(HeaderIdentity, es(func(c jwt.MapClaims) { c["tenant"], c["principal"] = "a/b", "c" })))
		two, _ := a.Authenticate(header(HeaderIdentity, es(func(c jwt.MapClaims) { c["tenant"], c["principal"] = "a", "b/c" })))
		if one.Principal == two.Principal || one.Principal == "" {
			t.Errorf("%q and %q", one.Principal, two.Principal)
		}
	})
	t.Run("a rotated key set", func(t *testing.T) {
		writeKeys(t, path, map[string]any{"k3": other.Public()})
		if err := os.Chtimes(path, now.Add(time.Hour), now.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Authenticate(header(HeaderIdentity, sign(jwt.SigningMethodES256, "k3", other, good(nil)))); err != nil {
			t.Errorf("the new key: %v", err)
		}
		if _, err := a.Authenticate(header(HeaderIdentity, valid)); err == nil {
			t.Error("the old key still opens")
		}
	})
}

// The key set of a URL that is down at boot, rotates, and loses a key, while someone
// sends tokens that name no key of it.
func TestKeySetURL(t *testing.T) {
	one, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	two, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	path := filepath.Join(t.TempDir(), "jwks.json")
	var up atomic.Bool
	var fetches atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fetches.Add(1); !up.Load() {
			http.Error(w, "down", http.StatusBadGateway)
			return
		}
		http.ServeFile(w, r, path)
	}))
	defer srv.Close()
	var log syncbuf.Buffer
	boot := func(p pace) *Authenticator {
		t.Helper()
		a, err := New(t.Context(), Options{Tokens: []Token{{"shared", secret}}, JWKS: strings.Replace(srv.URL, "://", "://reader:pa55word@", 1) + "/jwks.json", Audience: "sandbox", Log: slog.New(slog.NewJSONHandler(&log, nil)), pace: p})
		if err != nil {
			t.Error(err)
		}
		return a
	}
	token := func(kid string, key any) http.Header {
		tok := jwt.NewWithClaims(jwt.SigningMethodES256, jwt.MapClaims{"aud": "sandbox", "exp": time.Now().Add(time.Minute).Unix(), "tenant": "acme", "principal": "p1"})
		tok.Header["kid"] = kid
		s, err := tok.SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return header(HeaderIdentity, s)
	}
	eventually := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}

	writeKeys(t, path, map[string]any{"k1": one.Public()})
	ready := make(chan *Authenticator)
	go func() {
		ready <- boot(pace{boot: time.Millisecond, refresh: time.Hour, unknown: 10 * time.Millisecond})
	}()
	eventually("the key set is not asked for again", func() bool { return fetches.Load() > 2 })
	select {
	case <-ready:
		t.Fatal("ready without a key")
	default:
	}
	up.Store(true)
	a := <-ready
	if a == nil {
		t.FailNow()
	}
	if _, err := a.Authenticate(token("k1", one)); err != nil {
		t.Errorf("the first call: %v", err)
	}
	if _, err := a.Authenticate(token("k9", two)); err == nil {
		t.Error("a key that is not in the set opens")
	}
	writeKeys(t, path, map[string]any{"k1": one.Public(), "k2": two.Public()})
	if _, err := a.Authenticate(token("k2", two)); err != nil {
		t.Errorf("the new key, after a token that named an unknown one: %v", err)
	}

	a = boot(pace{refresh: time.Millisecond, unknown: time.Hour})
	writeKeys(t, path, map[string]any{"k2": two.Public()})
	eventually("a key that was taken away still opens", func() bool { _, err := a.Authenticate(token("k1", one)); return err != nil })
	up.Store(false)
	eventually("nothing in the log", func() bool { return strings.Contains(log.String(), "stays in force") })
	if _, err := a.Authenticate(token("k2", two)); err != nil {
		t.Errorf("the key of the set before, with the URL down: %v", err)
	}
	for line := range strings.Lines(log.String()) {
		if !json.Valid([]byte(line)) || strings.Contains(line, "pa55word") {
			t.Errorf("in the log: %s", line)
		}
	}

	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := New(ended, Options{Anon: true, JWKS: srv.URL}); err == nil || !strings.Contains(err.Error(), "SANDBOX_IDENTITY_JWKS=http") {
		t.Errorf("told to end while the URL is down: %v", err)
	}
	if _, err := New(t.Context(), Options{Anon: true, JWKS: "http://["}); err == nil || !strings.Contains(err.Error(), "SANDBOX_IDENTITY_JWKS") {
		t.Errorf("no URL: %v", err)
	}
}

func writeKeys(t *testing.T, path string, keys map[string]any) {
	t.Helper()
	set := jwkset.NewMemoryStorage()
	for id, k := range keys {
		jwk, err := jwkset.NewJWKFromKey(k, jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: id}})
		if err != nil {
			t.Fatal(err)
		}
		if err := set.KeyWrite(t.Context(), jwk); err != nil {
			t.Fatal(err)
		}
	}
	b, err := set.JSONPublic(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestEnv(t *testing.T) {
	got, err := Env(http.Header{"X-Loom-Sandbox-Env-Gh-Token": {"s3cret"}, "X-Loom-Sandbox-Env-Foo_bar": {""}, "X-Other": {"x"}})
	if err != nil || len(got) != 2 || got["GH_TOKEN"] != "s3cret" {
		t.Errorf("%v, %v", got, err)
	}
	many := http.Header{}
	for i := range 40 {
		many.Set(HeaderEnv+"A"+strings.Repeat("B", i), "x")
	}
	// The longest that is allowed: four values, and as many names of two letters.
	full := func(more int) http.Header {
		h := http.Header{}
		for i, n := range []int{MaxEnvValue, MaxEnvValue, MaxEnvValue, MaxEnvBytes - 3*MaxEnvValue - 4*2 + more} {
			h.Set(HeaderEnv+"A"+string(rune('a'+i)), strings.Repeat("x", n))
		}
		return h
	}
	if got, err := Env(full(0)); err != nil || len(got) != 4 {
		t.Errorf("%d bytes: %d variables, %v", MaxEnvBytes, len(got), err)
	}
	refused := map[string]http.Header{
		"PATH": {HeaderEnv + "Path": {"x"}}, "LD_PRELOAD": {HeaderEnv + "Ld-Preload": {"x"}}, "HOME": {HeaderEnv + "Home": {"x"}},
		"a cache": {HeaderEnv + "Gocache": {"x"}}, "npm": {HeaderEnv + "Npm_config_cache": {"x"}}, "bash": {HeaderEnv + "Bash-Env": {"x"}}, "shellshock": {HeaderEnv + "Bash_func_x%%": {"x"}},
		"no name": {HeaderEnv: {"x"}}, "a digit": {HeaderEnv + "1a": {"x"}}, "twice": {HeaderEnv + "A": {"x", "y"}}, "two spellings": {HeaderEnv + "A-B": {"x"}, HeaderEnv + "A_b": {"y"}},
		"a large value": {HeaderEnv + "A": {strings.Repeat("x", MaxEnvValue+1)}}, "too many": many, "one byte more than all may have": full(1),
	}
	// What the session image sets is the image's.
	text, err := os.ReadFile("../../../session-image/image.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var image struct {
		Config struct{ Env []string }
	}
	if err := yaml.Unmarshal(text, &image); err != nil || len(image.Config.Env) == 0 {
		t.Fatalf("the session image's environment is %v, %v", image.Config.Env, err)
	}
	for _, kv := range image.Config.Env {
		name, _, _ := strings.Cut(kv, "=")
		refused[name+" of the image"] = http.Header{http.CanonicalHeaderKey(HeaderEnv + strings.ReplaceAll(name, "_", "-")): {"x"}}
	}
	for name, h := range refused {
		env, err := Env(h)
		if err == nil {
			t.Errorf("%s: allowed: %v", name, env)
		} else if strings.Contains(err.Error(), "xxxx") {
			t.Errorf("%s: the error holds the value", name)
		}
	}
}
