package signing_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/sigstore/sigstore-go/pkg/root"

	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// issuer is an OIDC issuer on loopback; token makes a token for an e-mail address.
func issuer(t *testing.T) (url string, token func(email string) string) {
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

func chain(t *testing.T, text []byte) []*x509.Certificate {
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
func logKey(t *testing.T, url string) (file string, log *root.TransparencyLog, id string) {
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
	return file, &root.TransparencyLog{BaseURL: url, ID: sum[:], ValidityPeriodStart: time.Now().Add(-time.Hour), ValidityPeriodEnd: time.Now().Add(time.Hour),
		HashFunc: crypto.SHA256, SignatureHashFunc: crypto.SHA256, PublicKey: key.Public()}, hex.EncodeToString(sum[:])
}

// TestKeyless signs with certificates of a real Fulcio, logged in a real
// certificate transparency log, with timestamps of a real timestamp authority
// and entries in a real Rekor 2, all on loopback, for tokens of an issuer on
// loopback; and in a private sigstore that has neither log. The release is
// verified by this package and by stock cosign.
func TestKeyless(t *testing.T) {
	fulcio := tool(t, "sigstore", "fulcio", "", "github.com/sigstore/fulcio")
	tsa := tool(t, "sigstore", "timestamp-server", "", "github.com/sigstore/timestamp-authority/v2/cmd/timestamp-server")
	rekor := tool(t, "sigstore", "rekor-server", "", "github.com/sigstore/rekor-tiles/v2/cmd/rekor-server/posix")
	ctlog := tool(t, "sigstore", "tesseract", "", "github.com/transparency-dev/tesseract/cmd/tesseract/posix")
	iss, token := issuer(t)
	write := func(name string, text []byte) string {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	address := func() (port, url string) { port = registrytest.FreePort(t); return port, "http://127.0.0.1:" + port }
	port, fulcioURL := address()
	tport, tsaURL := address()
	rport, rekorURL := address()
	cport, ctURL := address()

	config := write("fulcio.yaml", fmt.Appendf(nil, "oidc-issuers:\n  %s:\n    issuer-url: %s\n    client-id: sigstore\n    type: email\n", iss, iss))
	bundle := registrytest.Serve(t, fulcioURL+"/api/v2/trustBundle", fulcio, "serve", "--ca", "ephemeralca", "--ct-log-url", ctURL, "--config-path", config,
		"--host", "127.0.0.1", "--port", port, "--grpc-host", "127.0.0.1", "--grpc-port", registrytest.FreePort(t), "--metrics-port", registrytest.FreePort(t),
		"--legacy-unix-domain-socket", filepath.Join(t.TempDir(), "s"))
	var trustBundle struct {
		Chains []struct{ Certificates []string }
	}
	if err := json.Unmarshal(bundle, &trustBundle); err != nil || len(trustBundle.Chains) == 0 {
		t.Fatalf("fulcio's trust bundle: %v %s", err, bundle)
	}
	ca := chain(t, []byte(strings.Join(trustBundle.Chains[0].Certificates, "\n")))
	stamps := chain(t, registrytest.Serve(t, tsaURL+"/api/v1/timestamp/certchain", tsa, "serve", "--host", "127.0.0.1", "--port", tport, "--disable-ntp-monitoring", "--timestamp-signer", "memory"))
	ctKey, ct, ctID := logKey(t, ctURL)
	registrytest.Serve(t, ctURL+"/ct/v1/get-roots", ctlog, "--http_endpoint", "127.0.0.1:"+cport, "--origin", "ct.test", "--private_key", ctKey, "--storage_dir", t.TempDir(),
		"--roots_pem_file", write("roots.pem", []byte(strings.Join(trustBundle.Chains[0].Certificates, "\n"))), "--enable_publication_awaiter=false")
	rekorKey, transparency, rekorID := logKey(t, rekorURL)
	registrytest.Serve(t, rekorURL+"/healthz", rekor, "serve", "--http-port", rport, "--grpc-port", registrytest.FreePort(t), "--http-metrics-port", registrytest.FreePort(t), "--hostname", "127.0.0.1",
		"--storage-dir", t.TempDir(), "--signer-filepath", rekorKey, "--checkpoint-interval", "1s")

	from, to := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
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

	for _, c := range []struct {
		name, config, root string
		strangers          map[string]string // trusted roots that must not do
	}{
		{"with both logs", signingConfig(`,"rekorTlogUrls":` + service(rekorURL, 2)), trustedRoot(logs{ctID: ct}, logs{rekorID: transparency}), map[string]string{
			"another Rekor":                        trustedRoot(logs{ctID: ct}, logs{rekorID: otherRekor}),
			"another certificate transparency log": trustedRoot(logs{ctID: otherCT}, logs{rekorID: transparency}),
		}},
		{"without logs", signingConfig(""), trustedRoot(nil, nil), map[string]string{
			"a root that asks for Rekor": trustedRoot(logs{ctID: ct}, logs{rekorID: transparency}),
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := map[string]string{"SIGSTORE_ID_TOKEN": token("release@example.test"), "SIGSTORE_SIGNING_CONFIG": c.config, "SIGSTORE_TRUSTED_ROOT": c.root,
				"COSIGN_IDENTITY": `^release@example\.test$`, "COSIGN_ISSUER": iss}
			getenv := func(k string) string { return env[k] }
			folder := filepath.Join(t.TempDir(), "dist")
			r, err := disttest.Small("1.0.0").Write(folder)
			if err != nil {
				t.Fatal(err)
			}
			s, err := signing.Open(t.Context(), signing.FromEnv(getenv, t.TempDir()))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := signing.SignFamily(t.Context(), folder, r, s); err != nil {
				t.Fatal(err)
			}
			l := signing.Layout(filepath.Join(folder, "oci"))
			verify := func() error {
				c, err := signing.TrustFromEnv(getenv, t.TempDir())
				if err != nil {
					return err
				}
				trust, err := signing.NewTrust(t.Context(), c)
				if err != nil {
					return err
				}
				_, _, err = signing.VerifyImage(t.Context(), l, hash(t, r.Images[0].IndexDigest), trust)
				return err
			}
			if err := verify(); err != nil {
				t.Fatal(err)
			}
			for name, file := range c.strangers {
				env["SIGSTORE_TRUSTED_ROOT"] = file
				if err := verify(); err == nil || !strings.Contains(err.Error(), "not signed by identity") {
					t.Errorf("%s: %v", name, err)
				}
			}
			env["SIGSTORE_TRUSTED_ROOT"] = c.root
			env["COSIGN_IDENTITY"] = `^someone@example\.test$`
			if err := verify(); err == nil || !strings.Contains(err.Error(), "not signed by identity") {
				t.Errorf("another identity: %v", err)
			}
			env["COSIGN_IDENTITY"], env["COSIGN_ISSUER"] = `^release@example\.test$`, "https://other.example.test"
			if err := verify(); err == nil {
				t.Error("another issuer verifies")
			}
			index, err := os.ReadFile(filepath.Join(string(l), "index.json"))
			if err != nil || bytes.Contains(index, []byte(env["SIGSTORE_ID_TOKEN"])) {
				t.Errorf("the layout: %v", err)
			}
			if c.name == "without logs" {
				return // cosign's commands want a switch for each
			}
			ref := push(t, folder, r, registrytest.Start(t, registrytest.Referrers), nil)["toolbox"]
			image, err := r.Image("toolbox")
			if err != nil {
				t.Fatal(err)
			}
			platform := ref[:strings.Index(ref, "@")+1] + image.Platforms[0].Digest.String()
			for _, major := range []string{"2", "3"} {
				for _, args := range [][]string{{"verify", ref}, {"verify", platform}, {"verify-attestation", "--type", "spdxjson", platform}, {"verify-attestation", "--type", "slsaprovenance1", platform}} {
					last := len(args) - 1
					ref := args[last]
					args := args[:last:last]
					if major == "2" { // a Rekor 2 entry has no time of its own
						args = append(args, "--use-signed-timestamps")
					}
					cosigned := func(identity string) (string, error) {
						return run(t, []string{"HOME=" + t.TempDir(), "TUF_ROOT=" + t.TempDir()}, cosign(t, major),
							append(args, "--certificate-identity-regexp", identity, "--certificate-oidc-issuer", iss, "--trusted-root", c.root, ref)...)
					}
					if out, err := cosigned(`^release@example\.test$`); err != nil {
						t.Errorf("cosign %s %v: %v\n%s", major, args, err, out)
					}
					if out, err := cosigned(`^someone@example\.test$`); err == nil {
						t.Errorf("cosign %s %v: another identity verifies\n%s", major, args, out)
					}
				}
			}
		})
	}
}
