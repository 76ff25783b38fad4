package images

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/testing/ca"
	"github.com/sigstore/sigstore-go/pkg/tlog"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
)

// shelf is a registry with an image for each repository asked for.
type shelf struct {
	t    *testing.T
	host string
}

func newShelf(t *testing.T) shelf {
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithReferrersSupport(true)))
	t.Cleanup(reg.Close)
	return shelf{t, strings.TrimPrefix(reg.URL, "http://")}
}

func (s shelf) ref(repo, tag string) name.Reference {
	r, err := name.ParseReference(s.host + "/" + repo + ":" + tag)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

func (s shelf) push(repo string) v1.Hash {
	img, err := random.Image(100, 1)
	if err == nil {
		err = remote.Write(s.ref(repo, "1"), img)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	h, _ := img.Digest()
	return h
}

// attach puts a payload with annotations where the tag scheme has signatures.
func (s shelf) attach(repo string, under v1.Hash, payload []byte, annotations map[string]string) {
	img, err := mutate.Append(empty.Image, mutate.Addendum{Layer: static.NewLayer(payload, "application/vnd.dev.cosign.simplesigning.v1+json"), Annotations: annotations})
	if err == nil {
		err = remote.Write(s.ref(repo, strings.Replace(under.String(), ":", "-", 1)+".sig"), img)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func payloadOf(h v1.Hash) []byte {
	return fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"x"},"image":{"docker-manifest-digest":%q},"type":%q},"optional":null}`, h, signatureType)
}

func policy(t *testing.T, content string) Verifier {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy")
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	v, err := LoadPolicy(path)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func newKey(t *testing.T) (*ecdsa.PrivateKey, string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	b, err := cryptoutils.MarshalPublicKeyToPEM(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	return key, string(b)
}

// Signatures by a key, in the tag scheme.
func TestPolicy(t *testing.T) {
	s := newShelf(t)
	key, pub := newKey(t)
	other, otherPub := newKey(t)
	sign := func(repo string, under, says v1.Hash, k *ecdsa.PrivateKey, change func(sig []byte) []byte) {
		payload := payloadOf(says)
		signer, err := signature.LoadSigner(k, crypto.SHA256)
		if err != nil {
			t.Fatal(err)
		}
		sig, err := signer.SignMessage(bytes.NewReader(payload))
		if err != nil {
			t.Fatal(err)
		}
		if change != nil {
			sig = change(sig)
		}
		s.attach(repo, under, payload, map[string]string{signatureKey: base64.StdEncoding.EncodeToString(sig)})
	}
	for policyName, verifier := range map[string]Verifier{
		"PEM": policy(t, pub), "YAML": policy(t, "keys: |\n  "+strings.ReplaceAll(strings.TrimSpace(pub), "\n", "\n  ")+"\n"),
		"the second key": policy(t, otherPub+pub),
	} {
		for name, tc := range map[string]struct {
			prepare func(repo string, h v1.Hash)
			want    string
		}{
			"signed":            {func(r string, h v1.Hash) { sign(r, h, h, key, nil) }, ""},
			"unsigned":          {func(string, v1.Hash) {}, "no signature"},
			"another key":       {func(r string, h v1.Hash) { k, _ := newKey(t); sign(r, h, h, k, nil) }, "none of its 1 signatures"},
			"another image":     {func(r string, h v1.Hash) { sign(r, h, s.push(r+"-b"), key, nil) }, "it is of another image"},
			"damaged signature": {func(r string, h v1.Hash) { sign(r, h, h, key, func(s []byte) []byte { s[10] ^= 1; return s }) }, "none of its 1 signatures"},
			"empty signature":   {func(r string, h v1.Hash) { sign(r, h, h, key, func([]byte) []byte { return nil }) }, "no signature in its annotations"},
		} {
			t.Run(policyName+"/"+name, func(t *testing.T) {
				repo := strings.ToLower(strings.NewReplacer(" ", "-").Replace(policyName + "/" + name))
				h := s.push(repo)
				tc.prepare(repo, h)
				wanted(t, verifier(t.Context(), s.ref(repo, "1").String(), h.String()), tc.want)
			})
		}
	}
	t.Run("the other key", func(t *testing.T) {
		h := s.push("other")
		sign("other", h, h, other, nil)
		wanted(t, policy(t, otherPub)(t.Context(), s.ref("other", "1").String(), h.String()), "")
	})
}

func wanted(t *testing.T, err error, want string) {
	t.Helper()
	if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
}

// Keyless signatures of the tag scheme, with a certificate, a log entry and a
// timestamp of a whole sigstore in memory.
func TestPolicyIdentityInTheTagScheme(t *testing.T) {
	const issuer, subject = "https://issuer.example.test", "release@example.test"
	s := newShelf(t)
	trusted, err := ca.NewVirtualSigstore()
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := ca.NewVirtualSigstore()
	if err != nil {
		t.Fatal(err)
	}
	rootFile := filepath.Join(t.TempDir(), "trusted_root.json")
	logs := trusted.RekorLogs()
	for id, l := range logs {
		if l.ID, err = hex.DecodeString(id); err != nil { // it has the text there
			t.Fatal(err)
		}
	}
	// Its certificates carry no certificate log's promise.
	r, err := root.NewTrustedRoot(root.TrustedRootMediaType01, trusted.FulcioCertificateAuthorities(), nil, trusted.TimestampingAuthorities(), logs)
	if err != nil {
		t.Fatal(err)
	}
	text, err := r.MarshalJSON()
	if err == nil {
		err = os.WriteFile(rootFile, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	sign := func(by *ca.VirtualSigstore, repo string, h v1.Hash, change func(map[string]string)) {
		payload := payloadOf(h)
		e, err := by.Sign(subject, issuer, payload)
		if err != nil {
			t.Fatal(err)
		}
		a := annotate(t, by, e)
		if change != nil {
			change(a)
		}
		s.attach(repo, h, payload, a)
	}
	identity := func(issuer, subject string) Verifier {
		return policy(t, fmt.Sprintf("identities:\n- {issuer: %q, %s}\ntrusted_root: %s\n", issuer, subject, rootFile))
	}
	mine := identity(issuer, "subject: "+subject)
	h := s.push("signed")
	sign(trusted, "signed", h, nil)
	ref := s.ref("signed", "1").String()
	_, pub := newKey(t)
	for name, tc := range map[string]struct {
		v    Verifier
		want string
	}{
		"the identity":       {mine, ""},
		"by expression":      {identity(issuer, `subject_regexp: '^release@example\.test$'`), ""},
		"another subject":    {identity(issuer, "subject: someone@example.test"), "not signed by identity someone@example.test"},
		"another issuer":     {identity("https://other.example.test", "subject: "+subject), "not signed by identity"},
		"a key, no identity": {policy(t, pub), "not signed by key 1"},
	} {
		t.Run(name, func(t *testing.T) { wanted(t, tc.v(t.Context(), ref, h.String()), tc.want) })
	}
	t.Run("another sigstore", func(t *testing.T) {
		h := s.push("stranger")
		sign(stranger, "stranger", h, nil)
		wanted(t, mine(t.Context(), s.ref("stranger", "1").String(), h.String()), "not signed by identity")
	})
	t.Run("without its log entry", func(t *testing.T) {
		h := s.push("unlogged")
		sign(trusted, "unlogged", h, func(a map[string]string) { delete(a, logKey) })
		wanted(t, mine(t.Context(), s.ref("unlogged", "1").String(), h.String()), "not signed by identity")
	})
}

// annotate writes a signature as cosign does in the tag scheme.
func annotate(t *testing.T, by *ca.VirtualSigstore, e *ca.TestEntity) map[string]string {
	t.Helper()
	content, err := e.VerificationContent()
	if err != nil {
		t.Fatal(err)
	}
	sig, err := e.SignatureContent()
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := cryptoutils.MarshalCertificateToPEM(content.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	entries, err := e.TlogEntries()
	if err != nil || len(entries) != 1 {
		t.Fatalf("%d log entries, %v", len(entries), err)
	}
	stamps, err := e.Timestamps()
	if err != nil || len(stamps) != 1 {
		t.Fatalf("%d timestamps, %v", len(stamps), err)
	}
	entry := entries[0].TransparencyLogEntry()
	said := tlog.RekorPayload{Body: entries[0].Body(), IntegratedTime: entry.IntegratedTime, LogIndex: entry.LogIndex, LogID: hex.EncodeToString(entry.LogId.KeyId)}
	promise, err := by.RekorSignPayload(said)
	if err != nil {
		t.Fatal(err)
	}
	rekor, err := json.Marshal(map[string]any{"SignedEntryTimestamp": promise, "Payload": said})
	if err != nil {
		t.Fatal(err)
	}
	stamp, err := json.Marshal(map[string]any{"SignedRFC3161Timestamp": stamps[0]})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{signatureKey: base64.StdEncoding.EncodeToString(sig.Signature()), certificateKey: string(certificate), logKey: string(rekor), timestampKey: string(stamp)}
}

func TestPolicyFiles(t *testing.T) {
	_, pub := newKey(t)
	rootFile := filepath.Join(t.TempDir(), "root.json")
	if err := os.WriteFile(rootFile, []byte(`{"mediaType":"application/vnd.dev.sigstore.trustedroot+json;version=0.1"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string]string{
		"":       "neither public keys",
		"no key": "neither public keys",
		"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n": "key 1",
		"keys: ''\n":     "names no signer",
		"signers: [x]\n": "signers",
		pub + "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n":                         "key 2",
		"identities: [{subject: a@b}]\ntrusted_root: " + rootFile:                                    "neither a transparency log nor a timestamp authority",
		"identities: [{issuer: 'https://x.example.test', subject: a}]\ntrusted_root: /nonexistent\n": "trusted_root",
	} {
		path := filepath.Join(t.TempDir(), "policy")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadPolicy(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "SANDBOX_IMAGE_POLICY") {
			t.Errorf("%q: %v does not say %q", content, err, want)
		}
	}
	if _, err := LoadPolicy("/nonexistent"); err == nil {
		t.Error("a missing file is a policy")
	}
}
