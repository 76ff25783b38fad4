package signing

import (
	"bytes"
	"context"
	"encoding/json"
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

	"github.com/loomcycle/loomcycle-images/internal/registry"
)

// Legacy also signs a digest in cosign's older tag scheme (sha256-HEX.sig and
// .att), for clients that know no bundles: podman, CRI-O, skopeo, older cosign.
// These signatures name the repository, so they are made per registry, by
// cosign's own commands. What a repository has already is left as it is, type by
// type: a run that was killed between two attestations is finished by the next.
func (s *Signer) Legacy(ctx context.Context, c *registry.Client, repository string, subject v1.Hash, bundles []Attachment) error {
	repo, err := c.Repository(repository)
	if err != nil {
		return err
	}
	ref := repo.Digest(subject.String())
	signed, attested, err := legacyState(ref, c.Remote(ctx))
	if err != nil {
		return err
	}
	ko := options.KeyOpts{KeyRef: s.file, PassFunc: func(bool) ([]byte, error) { return s.password, nil }, SkipConfirmation: true, IDToken: s.config.IDToken}
	log := s.sigs != nil && len(s.sigs.RekorLogURLs()) > 0
	if s.sigs != nil {
		if all := s.sigs.FulcioCertificateAuthorityURLs(); len(all) > 0 {
			ko.FulcioURL = all[0].URL
		}
		if log {
			ko.RekorURL = s.sigs.RekorLogURLs()[0].URL
		}
	}
	reg := options.RegistryOptions{RegistryClientOpts: c.Remote(ctx)}
	if !signed {
		err := sign.SignCmd(&options.RootOptions{Timeout: 5 * time.Minute}, ko, options.SignOptions{Upload: true, TlogUpload: log, Registry: reg}, []string{ref.String()})
		if err != nil {
			return fmt.Errorf("sign %s in the tag scheme: %w", ref, err)
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
		a := attest.AttestCommand{KeyOpts: ko, RegistryOptions: reg, PredicatePath: f.Name(), PredicateType: b.PredicateType, TlogUpload: log, RekorEntryType: "dsse", Replace: true, Timeout: 5 * time.Minute}
		if err := a.Exec(ctx, ref.String()); err != nil {
			return fmt.Errorf("attest the %s of %s in the tag scheme: %w", Title(b.PredicateType), ref, err)
		}
	}
	return nil
}

// legacyState tells what the tag scheme holds of a digest: whether there is a
// signature, and the predicate types of the attestations.
func legacyState(ref name.Digest, o []remote.Option) (signed bool, attested []string, err error) {
	se := ociremote.SignedUnknown(ref, ociremote.WithRemoteOptions(o...))
	get := func(list oci.Signatures, err error) ([]oci.Signature, error) {
		if err != nil {
			return nil, err
		}
		return list.Get()
	}
	sigs, err := get(se.Signatures())
	if err != nil {
		return false, nil, fmt.Errorf("read the signatures of %s in the tag scheme: %w", ref, err)
	}
	atts, err := get(se.Attestations())
	if err != nil {
		return false, nil, fmt.Errorf("read the attestations of %s in the tag scheme: %w", ref, err)
	}
	for _, a := range atts {
		text, err := a.Payload()
		var envelope struct{ Payload []byte } // DSSE
		var st Statement
		if err == nil {
			err = json.Unmarshal(text, &envelope)
		}
		if err == nil {
			err = json.Unmarshal(envelope.Payload, &st)
		}
		if err != nil {
			return false, nil, fmt.Errorf("read the attestations of %s in the tag scheme: %w", ref, err)
		}
		attested = append(attested, st.PredicateType)
	}
	return len(sigs) > 0, attested, nil
}

func predicateOf(raw []byte) ([]byte, error) {
	s, err := statementOf(raw)
	if err != nil {
		return nil, err
	}
	return bytes.TrimSpace(s.Predicate), nil
}
