// Package sigstoretest gives tests a sigstore of their own on loopback: a real
// Fulcio, a real timestamp authority, and an OIDC issuer. Rekor needs a database
// server and is not part of it: the trusted root names no log.
package sigstoretest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/sigstore/sigstore-go/pkg/root"
)

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
			"iat": now.Unix(), "exp": now.Add(time.Hour).Unix()}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
}

func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// service starts a server program and waits until a URL answers with 200.
func service(t testing.TB, ready, program string, args ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(out)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, t.TempDir()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); f.Close() })
	for deadline := time.Now().Add(time.Minute); ; {
		resp, err := http.Get(ready)
		if err == nil {
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return body
			}
			err = fmt.Errorf("%s: %s", resp.Status, body)
		}
		if time.Now().After(deadline) {
			log, _ := os.ReadFile(out)
			t.Fatalf("%s does not answer: %v\n%s", program, err, log)
		}
		time.Sleep(50 * time.Millisecond) // polling another program's start
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

// tool builds a program of tools/sigstore, once, into the cache folder.
func tool(t testing.TB, name, pkg string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("building " + name + " takes minutes")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	_, here, _, _ := runtime.Caller(0)
	program := filepath.Join(cache, "loomcycle-images", "bin", name)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, pkg)
	cmd.Dir = filepath.Join(filepath.Dir(here), "..", "..", "..", "tools", "sigstore")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return program
}

// Start runs the services until the test ends. What it returns is the
// environment in which our signer signs keylessly, as Subject, and a verifier
// trusts that.
func Start(t testing.TB) map[string]string {
	t.Helper()
	fulcio := tool(t, "fulcio", "github.com/sigstore/fulcio")
	tsa := tool(t, "timestamp-server", "github.com/sigstore/timestamp-authority/v2/cmd/timestamp-server")
	iss, token := issuer(t)
	config := filepath.Join(t.TempDir(), "fulcio.yaml")
	if err := os.WriteFile(config, []byte(fmt.Sprintf("oidc-issuers:\n  %s:\n    issuer-url: %s\n    client-id: sigstore\n    type: email\n", iss, iss)), 0o644); err != nil {
		t.Fatal(err)
	}
	port, tport := freePort(t), freePort(t)
	fulcioURL, tsaURL := "http://127.0.0.1:"+port, "http://127.0.0.1:"+tport
	bundle := service(t, fulcioURL+"/api/v2/trustBundle", fulcio, "serve", "--ca", "ephemeralca", "--ct-log-url", "", "--config-path", config,
		"--host", "127.0.0.1", "--port", port, "--grpc-host", "127.0.0.1", "--grpc-port", freePort(t), "--metrics-port", freePort(t),
		"--legacy-unix-domain-socket", filepath.Join(t.TempDir(), "s"))
	var trustBundle struct {
		Chains []struct{ Certificates []string }
	}
	if err := json.Unmarshal(bundle, &trustBundle); err != nil || len(trustBundle.Chains) == 0 {
		t.Fatalf("fulcio's trust bundle: %v %s", err, bundle)
	}
	ca := chain(t, []byte(strings.Join(trustBundle.Chains[0].Certificates, "\n")))
	stamps := chain(t, service(t, tsaURL+"/api/v1/timestamp/certchain", tsa, "serve", "--host", "127.0.0.1", "--port", tport, "--disable-ntp-monitoring", "--timestamp-signer", "memory"))
	long := func() (time.Time, time.Time) { return time.Now().Add(-time.Hour), time.Now().Add(time.Hour) }
	from, to := long()
	trusted, err := root.NewTrustedRoot(root.TrustedRootMediaType01,
		[]root.CertificateAuthority{&root.FulcioCertificateAuthority{Root: ca[len(ca)-1], Intermediates: ca[:len(ca)-1], ValidityPeriodStart: from, ValidityPeriodEnd: to, URI: fulcioURL}}, nil,
		[]root.TimestampingAuthority{&root.SigstoreTimestampingAuthority{Root: stamps[len(stamps)-1], Intermediates: stamps[1 : len(stamps)-1], Leaf: stamps[0], ValidityPeriodStart: from, ValidityPeriodEnd: to, URI: tsaURL}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	rootFile, signFile := filepath.Join(t.TempDir(), "trusted_root.json"), filepath.Join(t.TempDir(), "signing_config.json")
	text, err := trusted.MarshalJSON()
	if err == nil {
		err = os.WriteFile(rootFile, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	service := func(url string) string {
		return fmt.Sprintf(`[{"url":%q,"majorApiVersion":1,"validFor":{"start":"2020-01-01T00:00:00Z"},"operator":"test"}]`, url)
	}
	signing1 := fmt.Sprintf(`{"mediaType":"application/vnd.dev.sigstore.signingconfig.v0.2+json","caUrls":%s,"tsaUrls":%s,"tsaConfig":{"selector":"ANY"},"rekorTlogConfig":{"selector":"ANY"}}`,
		service(fulcioURL), service(tsaURL+"/api/v1/timestamp"))
	if err := os.WriteFile(signFile, []byte(signing1), 0o644); err != nil {
		t.Fatal(err)
	}
	return map[string]string{"SIGSTORE_ID_TOKEN": token(Subject), "SIGSTORE_SIGNING_CONFIG": signFile, "SIGSTORE_TRUSTED_ROOT": rootFile,
		"COSIGN_IDENTITY": `^release@example\.test$`, "COSIGN_ISSUER": iss}
}
