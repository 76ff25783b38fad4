package signing

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
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
// cosign's own commands; what a repository has already is left as it is.
func (s *Signer) Legacy(ctx context.Context, c *registry.Client, repository string, subject v1.Hash, bundles []Attachment) error {
	repo, err := c.Repository(repository)
	if err != nil {
		return err
	}
	ref := repo.Digest(subject.String())
	sigs, atts, err := s.legacyState(ctx, c, repository, subject)
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
	if sigs == 0 {
		err := sign.SignCmd(&options.RootOptions{Timeout: 5 * time.Minute}, ko, options.SignOptions{Upload: true, TlogUpload: log, Registry: reg}, []string{ref.String()})
		if err != nil {
			return fmt.Errorf("sign %s in the tag scheme: %w", ref, err)
		}
	}
	if atts > 0 {
		return nil
	}
	for _, b := range bundles {
		if b.PredicateType == Signature {
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

// legacyState counts what the tag scheme holds of a digest.
func (s *Signer) legacyState(ctx context.Context, c *registry.Client, repository string, subject v1.Hash) (sigs, atts int, err error) {
	repo, err := c.Repository(repository)
	if err != nil {
		return 0, 0, err
	}
	se := ociremote.SignedUnknown(repo.Digest(subject.String()), ociremote.WithRemoteOptions(c.Remote(ctx)...))
	count := func(get func() (oci.Signatures, error)) int {
		list, gerr := get()
		if gerr != nil {
			err = gerr
			return 0
		}
		all, gerr := list.Get()
		if gerr != nil {
			err = gerr
		}
		return len(all)
	}
	return count(se.Signatures), count(se.Attestations), err
}

func predicateOf(raw []byte) ([]byte, error) {
	s, err := statementOf(raw)
	if err != nil {
		return nil, err
	}
	return bytes.TrimSpace(s.Predicate), nil
}
