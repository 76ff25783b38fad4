package signing

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/sigstore/cosign/v2/cmd/cosign/cli/attest"
	"github.com/sigstore/cosign/v2/cmd/cosign/cli/options"
	"github.com/sigstore/cosign/v2/cmd/cosign/cli/sign"
	"github.com/sigstore/cosign/v2/pkg/oci"
	ociremote "github.com/sigstore/cosign/v2/pkg/oci/remote"
	"github.com/sigstore/sigstore/pkg/signature/dsse"
	"github.com/sigstore/sigstore/pkg/signature/payload"

	"github.com/loomcycle/loomcycle-images/internal/registry"
)

// CheckLegacy fails when there is no key to sign with in the tag scheme. Keyless
// signatures in it have an entry in a Rekor 1, and could be told from a stranger's
// only by that and their certificate.
func (c Config) CheckLegacy() error {
	if c.Keyless {
		return errors.New("cosign's older tag scheme (legacySignatures) is signed with a key, which podman, CRI-O and skopeo are given: set COSIGN_KEY, or leave legacySignatures out")
	}
	return nil
}

// Legacy also signs a digest in cosign's older tag scheme (sha256-HEX.sig and
// .att), for clients that know no bundles: podman, CRI-O, skopeo, older cosign.
// These signatures name the repository, so they are made per registry, by
// cosign's own commands. What this signer has put there already is left as it is,
// type by type: a run that was killed between two attestations is finished by the
// next. What another put there is added to. No transparency log is told of them.
func (s *Signer) Legacy(ctx context.Context, c *registry.Client, repository string, subject v1.Hash, bundles []Attachment) error {
	if err := s.config.CheckLegacy(); err != nil {
		return err
	}
	repo, err := c.Repository(repository)
	if err != nil {
		return err
	}
	ref := repo.Digest(subject.String())
	signed, attested, err := s.legacyState(ref, c.Remote(ctx))
	if err != nil {
		return err
	}
	ko := options.KeyOpts{KeyRef: s.file, PassFunc: func(bool) ([]byte, error) { return s.password, nil }, SkipConfirmation: true}
	reg := options.RegistryOptions{RegistryClientOpts: c.Remote(ctx)}
	if !signed {
		err := sign.SignCmd(&options.RootOptions{Timeout: 5 * time.Minute}, ko, options.SignOptions{Upload: true, TlogUpload: false, Registry: reg}, []string{ref.String()})
		if err != nil {
			return fmt.Errorf("sign %s in the tag scheme: %w", ref, err)
		}
		if signed, _, err = s.legacyState(ref, c.Remote(ctx)); err != nil {
			return err
		} else if !signed {
			return fmt.Errorf("the tag of the signatures of %s does not have the one that was just written: another writer replaced it; run the release again", ref)
		}
	}
	for _, b := range bundles {
		if b.PredicateType == Signature || slices.Contains(attested, b.PredicateType) {
			continue
		}
		predicate, err := predicateOf(b.Bundle)
		if err != nil {
			return err
		}
		f, err := os.CreateTemp("", "predicate-*.json")
		if err != nil {
			return err
		}
		defer os.Remove(f.Name())
		if _, err := f.Write(predicate); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
		a := attest.AttestCommand{KeyOpts: ko, RegistryOptions: reg, PredicatePath: f.Name(), PredicateType: b.PredicateType, TlogUpload: false, RekorEntryType: "dsse", Timeout: 5 * time.Minute}
		if err := a.Exec(ctx, ref.String()); err != nil {
			return fmt.Errorf("attest the %s of %s in the tag scheme: %w", Title(b.PredicateType), ref, err)
		}
	}
	return nil
}

// legacyState tells what the tag scheme holds of a digest by this signer:
// whether there is a signature, and the predicate types of the attestations.
func (s *Signer) legacyState(ref name.Digest, o []remote.Option) (signed bool, attested []string, err error) {
	se := ociremote.SignedUnknown(ref, ociremote.WithRemoteOptions(o...))
	sigs, err := se.Signatures()
	var all []oci.Signature
	if err == nil {
		all, err = sigs.Get()
	}
	for _, a := range all {
		if err == nil && !signed {
			signed, err = s.signed(ref, a)
		}
	}
	if err != nil {
		return false, nil, fmt.Errorf("read the signatures of %s in the tag scheme: %w", ref, err)
	}
	atts, err := se.Attestations()
	if err == nil {
		all, err = atts.Get()
	}
	for _, a := range all {
		if err != nil {
			break
		}
		var of string
		if of, err = s.attested(ref, a); of != "" {
			attested = append(attested, of)
		}
	}
	if err != nil {
		return false, nil, fmt.Errorf("read the attestations of %s in the tag scheme: %w", ref, err)
	}
	return signed, attested, nil
}

// signed tells whether a signature is this signer's, for the repository and
// the digest.
func (s *Signer) signed(ref name.Digest, a oci.Signature) (bool, error) {
	text, err := a.Payload()
	if err != nil {
		return false, err
	}
	encoded, err := a.Base64Signature()
	if err != nil {
		return false, nil // no signature, so none of ours
	}
	var is payload.SimpleContainerImage
	sig, derr := base64.StdEncoding.DecodeString(encoded)
	return derr == nil && s.sv.VerifySignature(bytes.NewReader(sig), bytes.NewReader(text)) == nil && json.Unmarshal(text, &is) == nil &&
		is.Critical.Image.DockerManifestDigest == ref.DigestStr() && is.Critical.Identity.DockerReference == ref.Context().Name(), nil
}

// attested is the predicate type of an attestation that is this signer's, of
// the digest; else it is empty.
func (s *Signer) attested(ref name.Digest, a oci.Signature) (string, error) {
	text, err := a.Payload()
	if err != nil {
		return "", err
	}
	var envelope struct{ Payload []byte } // DSSE
	var st Statement
	if json.Unmarshal(text, &envelope) != nil || json.Unmarshal(envelope.Payload, &st) != nil {
		return "", nil
	}
	ours := dsse.WrapVerifier(s.sv).VerifySignature(bytes.NewReader(text), nil) == nil &&
		slices.ContainsFunc(st.Subject, func(r Resource) bool { return "sha256:"+r.Digest["sha256"] == ref.DigestStr() })
	if !ours {
		return "", nil
	}
	return st.PredicateType, nil
}

func predicateOf(raw []byte) ([]byte, error) {
	s, err := statementOf(raw)
	if err != nil {
		return nil, err
	}
	return bytes.TrimSpace(s.Predicate), nil
}
