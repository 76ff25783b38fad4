// Package sigstoretest gives tests a sigstore of their own on loopback: a real
// Fulcio with a real certificate transparency log, a real timestamp authority, a
// real Rekor 2, and an OIDC issuer.
package sigstoretest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/sigstore/sigstore-go/pkg/root"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/freeport"
	"github.com/loomcycle/loomcycle-images/internal/proctest"
)

// lifetime is how long tokens and keys are valid: longer than any test.
const lifetime = 24 * time.Hour

// Subject is whom Start's token is for.
const Subject = "release@example.test"

// issuer is an OIDC issuer on loopback; token makes a token for an e-mail address.
func issuer(t testing.TB) (url string, token func(email string) string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	answer := func(path string, v any) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(v)
		})
	}
	answer("/.well-known/openid-configuration", map[string]any{"issuer": s.URL, "jwks_uri": s.URL + "/keys",
		"authorization_endpoint": s.URL + "/auth", "token_endpoint": s.URL + "/token",
		"response_types_supported": []string{"id_token"}, "subject_types_supported": []string{"public"}, "id_token_signing_alg_values_supported": []string{"ES256"}})
	answer("/keys", jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "1", Algorithm: "ES256", Use: "sig"}}})
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "1"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s.URL, func(email string) string {
		now := time.Now()
		text, err := jwt.Signed(signer).Claims(map[string]any{"iss": s.URL, "aud": "sigstore", "sub": email, "email": email, "email_verified": true,
			"iat": now.Unix(), "exp": now.Add(lifetime).Unix()}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
}

func chain(t testing.TB, text []byte) []*x509.Certificate {
	t.Helper()
	var all []*x509.Certificate
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		t.Fatalf("no certificates in %q", text)
	}
	return all
}

// logKey makes a transparency log's key: its file, and how a trusted root names
// the log (RFC 6962, 3.2; Rekor 2 does the same for ECDSA).
func logKey(t testing.TB, url string) (file string, log *root.TransparencyLog, id string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "log.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(public)
	return file, &root.TransparencyLog{BaseURL: url, ID: sum[:], ValidityPeriodStart: time.Now().Add(-time.Hour), ValidityPeriodEnd: time.Now().Add(lifetime),
		HashFunc: crypto.SHA256, SignatureHashFunc: crypto.SHA256, PublicKey: key.Public()}, hex.EncodeToString(sum[:])
}

// Environment is a way to sign as Subject, and to trust what was signed.
type Environment struct {
	Vars map[string]string // what our signer and verifier read
	// Strangers are trusted roots that must not do.
	Strangers map[string]string
}

// Sigstore is a running one: Logged asks for entries in both logs, Plain is a
// private one that has neither.
type Sigstore struct{ Logged, Plain Environment }

// alone waits until no other test has a timestamp authority: its metrics are
// on port 2112, whatever one asks for. The lock is an abstract socket, which
// belongs to the same network namespace as the port, and to no user.
func alone(t testing.TB) {
	t.Helper()
	for {
		l, err := net.Listen("unix", "@loomcycle-sigstoretest")
		if err == nil {
			t.Cleanup(func() { l.Close() })
			return
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
		select {
		case <-time.After(100 * time.Millisecond): // polling another process
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		}
	}
}

// Start runs the services until the test ends.
func Start(t testing.TB) Sigstore {
	t.Helper()
	fulcio := citest.Tool(t, "sigstore", "fulcio", "", "github.com/sigstore/fulcio")
	tsa := citest.Tool(t, "sigstore", "timestamp-server", "", "github.com/sigstore/timestamp-authority/v2/cmd/timestamp-server")
	rekor := citest.Tool(t, "sigstore", "rekor-server", "", "github.com/sigstore/rekor-tiles/v2/cmd/rekor-server/posix")
	ctlog := citest.Tool(t, "sigstore", "tesseract", "", "github.com/transparency-dev/tesseract/cmd/tesseract/posix")
	alone(t)
	iss, token := issuer(t)
	write := func(name string, text []byte) string {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	address := func() (port, url string) { port = freeport.Port(t); return port, "http://127.0.0.1:" + port }
	port, fulcioURL := address()
	tport, tsaURL := address()
	rport, rekorURL := address()
	cport, ctURL := address()

	config := write("fulcio.yaml", fmt.Appendf(nil, "oidc-issuers:\n  %s:\n    issuer-url: %s\n    client-id: sigstore\n    type: email\n", iss, iss))
	bundle := proctest.Serve(t, fulcioURL+"/api/v2/trustBundle", fulcio, "serve", "--ca", "ephemeralca", "--ct-log-url", ctURL, "--config-path", config,
		"--host", "127.0.0.1", "--port", port, "--grpc-host", "127.0.0.1", "--grpc-port", freeport.Port(t), "--metrics-port", freeport.Port(t),
		"--legacy-unix-domain-socket", filepath.Join(t.TempDir(), "s"))
	var trustBundle struct {
		Chains []struct{ Certificates []string }
	}
	if err := json.Unmarshal(bundle, &trustBundle); err != nil || len(trustBundle.Chains) == 0 {
		t.Fatalf("fulcio's trust bundle: %v %s", err, bundle)
	}
	ca := chain(t, []byte(strings.Join(trustBundle.Chains[0].Certificates, "\n")))
	stamps := chain(t, proctest.Serve(t, tsaURL+"/api/v1/timestamp/certchain", tsa, "serve", "--host", "127.0.0.1", "--port", tport, "--disable-ntp-monitoring", "--timestamp-signer", "memory"))
	ctKey, ct, ctID := logKey(t, ctURL)
	proctest.Serve(t, ctURL+"/ct/v1/get-roots", ctlog, "--http_endpoint", "127.0.0.1:"+cport, "--origin", "ct.test", "--private_key", ctKey, "--storage_dir", t.TempDir(),
		"--roots_pem_file", write("roots.pem", []byte(strings.Join(trustBundle.Chains[0].Certificates, "\n"))), "--enable_publication_awaiter=false")
	rekorKey, transparency, rekorID := logKey(t, rekorURL)
	proctest.Serve(t, rekorURL+"/healthz", rekor, "serve", "--http-port", rport, "--grpc-port", freeport.Port(t), "--http-metrics-port", freeport.Port(t), "--hostname", "127.0.0.1",
		"--storage-dir", t.TempDir(), "--signer-filepath", rekorKey, "--checkpoint-interval", "1s")

	from, to := time.Now().Add(-time.Hour), time.Now().Add(lifetime)
	type logs = map[string]*root.TransparencyLog
	trustedRoot := func(ctLogs, rekorLogs logs) string {
		r, err := root.NewTrustedRoot(root.TrustedRootMediaType01,
			[]root.CertificateAuthority{&root.FulcioCertificateAuthority{Root: ca[len(ca)-1], Intermediates: ca[:len(ca)-1], ValidityPeriodStart: from, ValidityPeriodEnd: to, URI: fulcioURL}}, ctLogs,
			[]root.TimestampingAuthority{&root.SigstoreTimestampingAuthority{Root: stamps[len(stamps)-1], Intermediates: stamps[1 : len(stamps)-1], Leaf: stamps[0], ValidityPeriodStart: from, ValidityPeriodEnd: to, URI: tsaURL}}, rekorLogs)
		if err != nil {
			t.Fatal(err)
		}
		text, err := r.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		return write("trusted_root.json", text)
	}
	service := func(url string, version int) string {
		return fmt.Sprintf(`[{"url":%q,"majorApiVersion":%d,"validFor":{"start":"2020-01-01T00:00:00Z"},"operator":"test"}]`, url, version)
	}
	signingConfig := func(more string) string {
		return write("signing_config.json", fmt.Appendf(nil, `{"mediaType":"application/vnd.dev.sigstore.signingconfig.v0.2+json","caUrls":%s,"tsaUrls":%s,"tsaConfig":{"selector":"ANY"},"rekorTlogConfig":{"selector":"ANY"}%s}`,
			service(fulcioURL, 1), service(tsaURL+"/api/v1/timestamp", 1), more))
	}
	_, otherCT, _ := logKey(t, ctURL)
	otherCT.ID = ct.ID
	_, otherRekor, _ := logKey(t, rekorURL)
	otherRekor.ID = transparency.ID

	environment := func(config, root string, strangers map[string]string) Environment {
		return Environment{map[string]string{"SIGSTORE_ID_TOKEN": token(Subject), "SIGSTORE_SIGNING_CONFIG": config, "SIGSTORE_TRUSTED_ROOT": root,
			"COSIGN_IDENTITY": `^release@example\.test$`, "COSIGN_ISSUER": iss}, strangers}
	}
	both := trustedRoot(logs{ctID: ct}, logs{rekorID: transparency})
	return Sigstore{
		Logged: environment(signingConfig(`,"rekorTlogUrls":`+service(rekorURL, 2)), both, map[string]string{
			"another Rekor":                        trustedRoot(logs{ctID: ct}, logs{rekorID: otherRekor}),
			"another certificate transparency log": trustedRoot(logs{ctID: otherCT}, logs{rekorID: transparency}),
		}),
		Plain: environment(signingConfig(""), trustedRoot(nil, nil), map[string]string{"a root that asks for Rekor": both}),
	}
}
