package signing

import (
	"encoding/json"
	"fmt"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// The predicate types that a release carries.
const (
	Signature  = "https://sigstore.dev/cosign/sign/v1" // how cosign 2.5 and later store a plain signature
	SPDX       = "https://spdx.dev/Document"
	CycloneDX  = "https://cyclonedx.org/bom"
	Provenance = "https://slsa.dev/provenance/v1"
	// Membership says on an image index to which release it belongs and which
	// variants it has; its predicate is the image's entry in release.json.
	Membership = "https://github.com/loomcycle/loomcycle-images/release/v1"
)

// Title is a predicate type for people.
func Title(predicateType string) string {
	for t, name := range map[string]string{Signature: "signature", SPDX: "SPDX SBOM", CycloneDX: "CycloneDX SBOM", Provenance: "provenance", Membership: "release membership"} {
		if t == predicateType {
			return name
		}
	}
	return predicateType
}

// Statement is an in-toto statement v1.
type Statement struct {
	Type          string          `json:"_type"`
	Subject       []Resource      `json:"subject"`
	PredicateType string          `json:"predicateType"`
	Predicate     json.RawMessage `json:"predicate,omitempty"`
}

// Resource names a subject by digest.
type Resource struct {
	Name   string            `json:"name,omitempty"`
	Digest map[string]string `json:"digest"`
}

// NewStatement makes the statement that a predicate (JSON, nil for a plain
// signature) is true of a digest.
func NewStatement(subject v1.Hash, predicateType string, predicate []byte) ([]byte, error) {
	if predicate != nil && !json.Valid(predicate) {
		return nil, fmt.Errorf("the %s of %s is not JSON", Title(predicateType), subject)
	}
	return json.Marshal(Statement{
		Type:          "https://in-toto.io/Statement/v1",
		Subject:       []Resource{{Digest: map[string]string{subject.Algorithm: subject.Hex}}},
		PredicateType: predicateType, Predicate: predicate,
	})
}

// The media types and annotations of a bundle stored as a referrer
// (cosign's specs/BUNDLE_SPEC.md).
const (
	BundleType        types.MediaType = "application/vnd.dev.sigstore.bundle.v0.3+json"
	emptyType         types.MediaType = "application/vnd.oci.empty.v1+json"
	contentAnnotation                 = "dev.sigstore.bundle.content"
	typeAnnotation                    = "dev.sigstore.bundle.predicateType"
)

// Attachment is a bundle as a referrer: a manifest whose subject is what was
// signed, its empty configuration and its one layer.
type Attachment struct {
	PredicateType string
	Subject       v1.Hash
	Manifest      []byte
	Bundle        []byte
}

// Empty is the configuration of every attachment (image-spec 1.1, "Guidance for an Empty Descriptor").
var Empty = []byte("{}")

// NewAttachment makes the referrer of a bundle. It carries no time, so the same
// bundle always is the same manifest.
func NewAttachment(subject v1.Descriptor, predicateType string, bundle []byte) (Attachment, error) {
	m, err := Artifact(string(BundleType), map[string][]byte{string(BundleType): bundle}, nil)
	if err != nil {
		return Attachment{}, err
	}
	m.Subject = &v1.Descriptor{MediaType: subject.MediaType, Digest: subject.Digest, Size: subject.Size}
	m.Annotations = map[string]string{contentAnnotation: "dsse-envelope", typeAnnotation: predicateType}
	raw, err := json.Marshal(m)
	return Attachment{predicateType, subject.Digest, raw, bundle}, err
}
