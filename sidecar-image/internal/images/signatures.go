package images

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	protobundle "github.com/sigstore/protobuf-specs/gen/pb-go/bundle/v1"
	protocommon "github.com/sigstore/protobuf-specs/gen/pb-go/common/v1"
	protorekor "github.com/sigstore/protobuf-specs/gen/pb-go/rekor/v1"
	"github.com/sigstore/sigstore-go/pkg/bundle"
	"github.com/sigstore/sigstore-go/pkg/verify"
)

// Where signatures lie beside an image. The newer way is an OCI 1.1 referrer
// that holds a sigstore bundle (cosign's specs/BUNDLE_SPEC.md); the older is the
// image tagged sha256-HEX.sig, whose layers are simple signing payloads with
// everything else in annotations (specs/SIGNATURE_SPEC.md).
const (
	bundleType          = "application/vnd.dev.sigstore.bundle"
	predicateAnnotation = "dev.sigstore.bundle.predicateType"
	signaturePredicate  = "https://sigstore.dev/cosign/sign/v1"

	signatureType    = "cosign container image signature"
	annotationPrefix = "dev.cosignproject.cosign/"
	signatureKey     = annotationPrefix + "signature"
	certificateKey   = "dev.sigstore.cosign/certificate"
	logKey           = "dev.sigstore.cosign/bundle"
	timestampKey     = "dev.sigstore.cosign/rfc3161timestamp"

	maxSignature  = 1 << 20 // bytes of one
	maxSignatures = 64
)

// bundles reads the referrers of an image that are signatures of it.
func bundles(repo name.Repository, h v1.Hash, digest []byte, options []remote.Option) ([]candidate, error) {
	index, err := remote.Referrers(repo.Digest(h.String()), options...)
	if err != nil {
		return nil, fmt.Errorf("its referrers: %w", err)
	}
	list, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("its referrers: %w", err)
	}
	var out []candidate
	var errs []error
	for _, d := range list.Manifests {
		// What the list says of a referrer only spares the reading of others.
		if kind := d.Annotations[predicateAnnotation]; kind != "" && kind != signaturePredicate {
			continue
		}
		if len(out)+len(errs) >= maxSignatures {
			break
		}
		text, err := bundleOf(repo, d.Digest, options)
		if err == nil && text == nil {
			continue
		}
		var b bundle.Bundle
		if err == nil {
			err = b.UnmarshalJSON(text)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("the bundle %s: %w", d.Digest, err))
			continue
		}
		out = append(out, candidate{&b, func() verify.ArtifactPolicyOption { return verify.WithArtifactDigest(h.Algorithm, digest) }, func(r *verify.VerificationResult) error {
			if r.Statement != nil && r.Statement.PredicateType != signaturePredicate {
				return fmt.Errorf("the signed statement is no signature of the image but a %s", r.Statement.PredicateType)
			}
			return nil
		}})
	}
	return out, errors.Join(errs...)
}

// bundleOf returns the bundle that a referrer holds, nil for another's referrer.
func bundleOf(repo name.Repository, h v1.Hash, options []remote.Option) ([]byte, error) {
	img, err := remote.Image(repo.Digest(h.String()), options...)
	if err != nil {
		return nil, err
	}
	m, err := img.Manifest()
	if err != nil {
		return nil, err
	}
	if len(m.Layers) != 1 || !strings.HasPrefix(string(m.Layers[0].MediaType), bundleType) {
		return nil, nil
	}
	return blob(img, m.Layers[0])
}

// tagged reads the signatures of the tag scheme.
func tagged(repo name.Repository, h v1.Hash, _ []byte, options []remote.Option) ([]candidate, error) {
	img, err := remote.Image(repo.Tag(h.Algorithm+"-"+h.Hex+".sig"), options...)
	if te := (*transport.Error)(nil); errors.As(err, &te) && te.StatusCode == http.StatusNotFound {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("its signatures' tag: %w", err)
	}
	m, err := img.Manifest()
	if err != nil {
		return nil, fmt.Errorf("its signatures' tag: %w", err)
	}
	var out []candidate
	var errs []error
	for i, layer := range m.Layers {
		if i >= maxSignatures {
			break
		}
		payload, err := blob(img, layer)
		var b *bundle.Bundle
		if err == nil {
			b, err = fromAnnotations(layer.Annotations, payload)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("the signature %s: %w", layer.Digest, err))
			continue
		}
		out = append(out, candidate{b, func() verify.ArtifactPolicyOption { return verify.WithArtifact(bytes.NewReader(payload)) }, func(*verify.VerificationResult) error {
			return saysDigest(payload, h)
		}})
	}
	return out, errors.Join(errs...)
}

// saysDigest tells whether a payload, whose signature is good, is of this image.
func saysDigest(payload []byte, h v1.Hash) error {
	var p struct {
		Critical struct {
			Image struct {
				Digest string `json:"docker-manifest-digest"`
			} `json:"image"`
			Type string `json:"type"`
		} `json:"critical"`
	}
	if err := json.Unmarshal(payload, &p); err != nil || p.Critical.Type != signatureType || p.Critical.Image.Digest != h.String() {
		return errors.New("the signature is good, but it is of another image")
	}
	return nil
}

// fromAnnotations makes a bundle of a signature of the tag scheme.
func fromAnnotations(a map[string]string, payload []byte) (*bundle.Bundle, error) {
	sig, err := base64.StdEncoding.DecodeString(a[signatureKey])
	if err != nil || len(sig) == 0 {
		return nil, errors.New("it has no signature in its annotations")
	}
	sum := sha256.Sum256(payload)
	b := &protobundle.Bundle{
		MediaType: bundleType + "+json;version=0.1",
		Content: &protobundle.Bundle_MessageSignature{MessageSignature: &protocommon.MessageSignature{
			MessageDigest: &protocommon.HashOutput{Algorithm: protocommon.HashAlgorithm_SHA2_256, Digest: sum[:]}, Signature: sig}},
		VerificationMaterial: &protobundle.VerificationMaterial{Content: &protobundle.VerificationMaterial_PublicKey{PublicKey: &protocommon.PublicKeyIdentifier{}}},
	}
	if text := a[certificateKey]; text != "" {
		block, _ := pem.Decode([]byte(text))
		if block == nil {
			return nil, errors.New("its certificate is not PEM")
		}
		b.VerificationMaterial.Content = &protobundle.VerificationMaterial_X509CertificateChain{
			X509CertificateChain: &protocommon.X509CertificateChain{Certificates: []*protocommon.X509Certificate{{RawBytes: block.Bytes}}}}
	}
	if text := a[logKey]; text != "" {
		e, err := logEntry(text)
		if err != nil {
			return nil, fmt.Errorf("its entry in the transparency log: %w", err)
		}
		b.VerificationMaterial.TlogEntries = []*protorekor.TransparencyLogEntry{e}
	}
	if text := a[timestampKey]; text != "" {
		var t struct{ SignedRFC3161Timestamp []byte }
		if err := json.Unmarshal([]byte(text), &t); err != nil {
			return nil, fmt.Errorf("its timestamp: %w", err)
		}
		b.VerificationMaterial.TimestampVerificationData = &protobundle.TimestampVerificationData{
			Rfc3161Timestamps: []*protocommon.RFC3161SignedTimestamp{{SignedTimestamp: t.SignedRFC3161Timestamp}}}
	}
	return bundle.NewBundle(b)
}

// logEntry reads Rekor's promise that an entry is in its log.
func logEntry(text string) (*protorekor.TransparencyLogEntry, error) {
	var e struct {
		SignedEntryTimestamp []byte
		Payload              struct {
			Body           []byte `json:"body"`
			IntegratedTime int64  `json:"integratedTime"`
			LogIndex       int64  `json:"logIndex"`
			LogID          string `json:"logID"`
		}
	}
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return nil, err
	}
	id, err := hex.DecodeString(e.Payload.LogID)
	if err != nil {
		return nil, err
	}
	var kind struct {
		Kind       string `json:"kind"`
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(e.Payload.Body, &kind); err != nil {
		return nil, err
	}
	return &protorekor.TransparencyLogEntry{
		LogIndex: e.Payload.LogIndex, LogId: &protocommon.LogId{KeyId: id}, IntegratedTime: e.Payload.IntegratedTime, CanonicalizedBody: e.Payload.Body,
		KindVersion:      &protorekor.KindVersion{Kind: kind.Kind, Version: kind.APIVersion},
		InclusionPromise: &protorekor.InclusionPromise{SignedEntryTimestamp: e.SignedEntryTimestamp},
	}, nil
}

// blob reads a layer, whose size and digest are checked on the way.
func blob(img v1.Image, d v1.Descriptor) ([]byte, error) {
	if d.Size > maxSignature {
		return nil, fmt.Errorf("it has %d bytes, more than the %d of a signature", d.Size, maxSignature)
	}
	l, err := img.LayerByDigest(d.Digest)
	if err != nil {
		return nil, err
	}
	r, err := l.Compressed()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, maxSignature+1))
}
