package signing

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/sigstore/cosign/v2/pkg/cosign"
	sigs "github.com/sigstore/cosign/v2/pkg/signature"
	"github.com/sigstore/sigstore-go/pkg/bundle"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/verify"
)

// TrustConfig says whose signatures count. TrustFromEnv reads it from the environment.
type TrustConfig struct {
	Key string // public key file or KMS URI; empty means an identity
	// Identity is a regular expression for the certificate's subject, Issuer the OIDC issuer's URL.
	Identity, Issuer string
	TrustedRoot      string // file; empty means sigstore's, fetched with TUF
	// Log asks for a transparency log entry also of what a key signed.
	Log bool
}

// TrustFromEnv reads COSIGN_PUBLIC_KEY (else the public half of COSIGN_KEY, else
// of the throw-away key), or COSIGN_IDENTITY and COSIGN_ISSUER for keyless signatures.
func TrustFromEnv(getenv func(string) string, cacheDir string) (TrustConfig, error) {
	t := TrustConfig{
		Key: getenv("COSIGN_PUBLIC_KEY"), Identity: getenv("COSIGN_IDENTITY"), Issuer: getenv("COSIGN_ISSUER"),
		TrustedRoot: getenv("SIGSTORE_TRUSTED_ROOT"), Log: getenv("SIGNING_LOG") == "1",
	}
	switch {
	case t.Key != "" && t.Identity != "":
		return t, fmt.Errorf("COSIGN_PUBLIC_KEY and COSIGN_IDENTITY are both set; a signature is checked by one of them")
	case t.Identity != "" && t.Issuer == "":
		return t, fmt.Errorf("COSIGN_IDENTITY is set without COSIGN_ISSUER: the same subject from another issuer would pass")
	case t.Key != "" || t.Identity != "":
		return t, nil
	}
	key := getenv("COSIGN_KEY")
	if strings.Contains(key, "://") {
		t.Key = key
		return t, nil
	}
	if key == "" {
		key = Config{CacheDir: cacheDir}.throwaway()
	}
	t.Key = strings.TrimSuffix(key, ".key") + ".pub"
	if _, err := os.Stat(t.Key); err != nil {
		return t, fmt.Errorf("no signer is trusted yet: set COSIGN_PUBLIC_KEY to a key, or COSIGN_IDENTITY and COSIGN_ISSUER: %w", err)
	}
	return t, nil
}

// Trust checks bundles.
type Trust struct {
	options cosign.CheckOpts
	whom    string
}

// NewTrust loads what a TrustConfig names.
func NewTrust(ctx context.Context, c TrustConfig) (*Trust, error) {
	t := &Trust{options: cosign.CheckOpts{NewBundleFormat: true}}
	var err error
	if c.Key != "" {
		t.whom = "key " + c.Key
		if t.options.SigVerifier, err = sigs.PublicKeyFromKeyRef(ctx, c.Key); err != nil {
			return nil, fmt.Errorf("open the public key %s: %w", c.Key, err)
		}
		if t.options.IgnoreTlog = !c.Log; t.options.IgnoreTlog {
			// A key needs no root of trust; this one is empty and offline.
			t.options.TrustedMaterial, err = root.NewTrustedRoot(root.TrustedRootMediaType01, nil, nil, nil, nil)
			return t, err
		}
	} else {
		t.whom = fmt.Sprintf("identity %s of %s", c.Identity, c.Issuer)
		t.options.Identities = []cosign.Identity{{SubjectRegExp: c.Identity, Issuer: c.Issuer}}
	}
	t.options.TrustedMaterial, err = trustedRoot(c.TrustedRoot)
	if err != nil {
		return nil, err
	}
	// A private sigstore may have no certificate transparency log, and timestamps
	// in the place of a transparency log. Who trusts its root has chosen so.
	t.options.IgnoreSCT = len(t.options.TrustedMaterial.CTLogs()) == 0
	t.options.IgnoreTlog = c.Key == "" && len(t.options.TrustedMaterial.RekorLogs()) == 0
	t.options.UseSignedTimestamps = len(t.options.TrustedMaterial.TimestampingAuthorities()) > 0
	return t, nil
}

// Whom names who is trusted, for messages.
func (t *Trust) Whom() string { return t.whom }

// Verify checks that a bundle is a statement about the digest signed by who is trusted.
func (t *Trust) Verify(ctx context.Context, subject v1.Hash, raw []byte) (*Statement, error) {
	var b bundle.Bundle
	if err := b.UnmarshalJSON(raw); err != nil {
		return nil, fmt.Errorf("not a sigstore bundle: %w", err)
	}
	digest, err := hex.DecodeString(subject.Hex)
	if err != nil {
		return nil, err
	}
	if _, err := cosign.VerifyNewBundle(ctx, &t.options, verify.WithArtifactDigest(subject.Algorithm, digest), &b); err != nil {
		return nil, fmt.Errorf("not signed by %s: %w", t.whom, err)
	}
	return statement(&b)
}

// statementOf reads what a bundle says without asking who says it.
func statementOf(raw []byte) (*Statement, error) {
	var b bundle.Bundle
	if err := b.UnmarshalJSON(raw); err != nil {
		return nil, fmt.Errorf("not a sigstore bundle: %w", err)
	}
	return statement(&b)
}

func statement(b *bundle.Bundle) (*Statement, error) {
	envelope, err := b.Envelope()
	if err != nil {
		return nil, err
	}
	payload, err := envelope.RawEnvelope().DecodeB64Payload()
	if err != nil {
		return nil, err
	}
	var s Statement
	if err := json.Unmarshal(payload, &s); err != nil {
		return nil, fmt.Errorf("the signed statement: %w", err)
	}
	return &s, nil
}
