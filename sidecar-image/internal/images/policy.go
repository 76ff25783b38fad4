package images

import (
	"bytes"
	"context"
	"crypto"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/verify"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"go.yaml.in/yaml/v3"
)

// policyFile is SANDBOX_IMAGE_POLICY when it is not plain PEM.
type policyFile struct {
	Keys       string `yaml:"keys"` // PEM
	Identities []struct {
		Issuer        string `yaml:"issuer"`
		Subject       string `yaml:"subject"`
		SubjectRegexp string `yaml:"subject_regexp"`
	} `yaml:"identities"`
	TrustedRoot string `yaml:"trusted_root"`
}

// signer is one who may sign session images.
type signer struct {
	whom     string
	verifier *verify.Verifier
	with     verify.PolicyOption
}

// LoadPolicy reads who may sign session images: a file of public keys in PEM,
// or YAML with keys, and with identities as `cosign sign` proves them with a
// certificate. An image is accepted when one of them has signed its digest. The
// certificates' root is the file trusted_root, or sigstore's public one, which
// is fetched once, here.
func LoadPolicy(path string) (Verifier, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("SANDBOX_IMAGE_POLICY: %w", err)
	}
	fail := func(format string, args ...any) (Verifier, error) {
		return nil, fmt.Errorf("SANDBOX_IMAGE_POLICY: %s: %w", path, fmt.Errorf(format, args...))
	}
	f := policyFile{Keys: string(b)}
	if block, _ := pem.Decode(b); block == nil { // PEM inside of YAML is indented
		f = policyFile{}
		d := yaml.NewDecoder(bytes.NewReader(b))
		d.KnownFields(true)
		if err := d.Decode(&f); err != nil {
			return fail("it is neither public keys in PEM nor YAML with keys or identities: %w", err)
		}
	}
	signers, err := keySigners(f.Keys)
	if err != nil {
		return fail("%w", err)
	}
	if len(f.Identities) > 0 {
		if f.TrustedRoot != "" && !filepath.IsAbs(f.TrustedRoot) {
			f.TrustedRoot = filepath.Join(filepath.Dir(path), f.TrustedRoot)
		}
		v, err := certificateVerifier(f.TrustedRoot)
		if err != nil {
			return fail("%w", err)
		}
		for _, id := range f.Identities {
			if id.Issuer == "" || (id.Subject == "") == (id.SubjectRegexp == "") {
				return fail("an identity needs its issuer, and either subject or subject_regexp")
			}
			ci, err := verify.NewShortCertificateIdentity(id.Issuer, "", id.Subject, id.SubjectRegexp)
			if err != nil {
				return fail("identity %s%s of %s: %w", id.Subject, id.SubjectRegexp, id.Issuer, err)
			}
			signers = append(signers, signer{fmt.Sprintf("identity %s%s of %s", id.Subject, id.SubjectRegexp, id.Issuer), v, verify.WithCertificateIdentity(ci)})
		}
	}
	if len(signers) == 0 {
		return fail("it names no signer: put in a public key (PEM) or an identity")
	}
	return func(ctx context.Context, ref, digest string) error { return check(ctx, signers, ref, digest) }, nil
}

func keySigners(text string) (signers []signer, err error) {
	for rest := []byte(text); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return signers, nil
		}
		whom := fmt.Sprintf("key %d", len(signers)+1)
		pub, err := cryptoutils.UnmarshalPEMToPublicKey(pem.EncodeToMemory(block))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", whom, err)
		}
		key, err := signature.LoadVerifier(pub, crypto.SHA256)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", whom, err)
		}
		trusted := root.NewTrustedPublicKeyMaterial(func(string) (root.TimeConstrainedVerifier, error) {
			return root.NewExpiringKey(key, time.Time{}, time.Time{}), nil
		})
		v, err := verify.NewVerifier(trusted, verify.WithNoObserverTimestamps())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", whom, err)
		}
		signers = append(signers, signer{whom, v, verify.WithKey()})
	}
}

// certificateVerifier asks of a certificate what its root of trust can show: a
// private sigstore may have no certificate log, and timestamps in the place of
// a transparency log. Who trusts its root has chosen so.
func certificateVerifier(path string) (*verify.Verifier, error) {
	var trusted *root.TrustedRoot
	var err error
	if path == "" {
		if trusted, err = root.FetchTrustedRoot(); err != nil {
			return nil, fmt.Errorf("sigstore's trusted root cannot be fetched; offline, name its file as trusted_root: %w", err)
		}
	} else if trusted, err = root.NewTrustedRootFromPath(path); err != nil {
		return nil, fmt.Errorf("trusted_root: %w", err)
	}
	options := []verify.VerifierOption{verify.WithObserverTimestamps(1)}
	if len(trusted.CTLogs()) > 0 {
		options = append(options, verify.WithSignedCertificateTimestamps(1))
	}
	if len(trusted.RekorLogs()) > 0 {
		options = append(options, verify.WithTransparencyLog(1))
	} else if len(trusted.TimestampingAuthorities()) == 0 {
		return nil, errors.New("trusted_root names neither a transparency log nor a timestamp authority, so it cannot say when a certificate was used")
	}
	return verify.NewVerifier(trusted, options...)
}

// candidate is something in the registry that may be a signature of the digest.
type candidate struct {
	entity   verify.SignedEntity
	artifact func() verify.ArtifactPolicyOption     // afresh each time: it may be read
	says     func(*verify.VerificationResult) error // whether what was signed is a signature of the image
}

func check(ctx context.Context, signers []signer, ref, digest string) error {
	r, err := name.ParseReference(ref)
	if err != nil {
		return fmt.Errorf("the reference: %w", err)
	}
	h, err := v1.NewHash(digest)
	if err != nil {
		return fmt.Errorf("the digest: %w", err)
	}
	raw, err := hex.DecodeString(h.Hex)
	if err != nil {
		return fmt.Errorf("the digest: %w", err)
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	var reasons []error
	found := 0
	for _, scheme := range []func(name.Repository, v1.Hash, []byte, []remote.Option) ([]candidate, error){bundles, tagged} {
		candidates, err := scheme(r.Context(), h, raw, options)
		if err != nil {
			reasons = append(reasons, err)
		}
		found += len(candidates)
		for _, c := range candidates {
			for _, s := range signers {
				result, err := s.verifier.Verify(c.entity, verify.NewPolicy(c.artifact(), s.with))
				if err == nil {
					err = c.says(result)
				}
				if err == nil {
					return nil
				}
				reasons = append(reasons, fmt.Errorf("not signed by %s: %w", s.whom, err))
			}
		}
	}
	if found == 0 {
		return errors.Join(append([]error{fmt.Errorf("no signature of it can be read in %s", r.Context())}, reasons...)...)
	}
	if len(reasons) > maxReasons {
		reasons = reasons[:maxReasons]
	}
	return errors.Join(append([]error{fmt.Errorf("none of its %d signatures is by a signer of the policy", found)}, reasons...)...)
}

const maxReasons = 8
