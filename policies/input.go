package policies

import (
	"encoding/json"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Input is the document that the rules judge.
type Input struct {
	Now     string        `json:"now"` // RFC 3339, for the exceptions
	Release *dist.Release `json:"release"`
	Lock    *lock.Lock    `json:"lock"`
	Modules []string      `json:"modules"` // lines of go.sum: path, version and h1
	Images  []Image       `json:"images"`
	// Signatures are what was verified; null before signing.
	Signatures []Signature `json:"signatures"`
}

// Image is one image of the release with its contract.
type Image struct {
	Name        string          `json:"name"`
	IndexDigest digest.Digest   `json:"indexDigest"`
	Index       []digest.Digest `json:"index"` // the manifests that the index names
	Contract    Contract        `json:"contract"`
	Variants    []Variant       `json:"variants"`
}

// Contract is what the image's definition promises.
type Contract struct {
	Title      string           `json:"title"`
	User       string           `json:"user"`
	Distroless bool             `json:"distroless"`
	Programs   []string         `json:"programs"`
	Budget     map[string]int64 `json:"budget"` // bytes, by architecture
}

// Variant is the image for one platform. The documents are as they are
// stored, so that a rule can look at all of them.
type Variant struct {
	Platform     string        `json:"platform"`
	Digest       digest.Digest `json:"digest"`
	ConfigDigest digest.Digest `json:"configDigest"`
	Size         int64         `json:"size"`
	Layers       []dist.Layer  `json:"layers"`
	// Tools are groups of the lock that the node which built ran to make layers.
	Tools       []string          `json:"tools"`
	Annotations map[string]string `json:"annotations"`
	Config      json.RawMessage   `json:"config"`     // OCI image configuration
	Facts       json.RawMessage   `json:"facts"`      // internal/sbom, Facts
	Provenance  json.RawMessage   `json:"provenance"` // in-toto statement
}

// Signature is a signature or an attestation that was verified.
type Signature struct {
	Digest   digest.Digest `json:"digest"` // of what it is about
	Kind     string        `json:"kind"`   // signature, or the predicate type
	By       string        `json:"by"`     // key or identity
	Verified bool          `json:"verified"`
}
