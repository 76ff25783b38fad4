package images

import (
	"bytes"
	"context"
	"crypto"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
)

// What cosign's signatures are: layers of the image tagged sha256-HEX.sig, each
// a simple signing payload with its signature in an annotation
// (github.com/sigstore/cosign, specs/SIGNATURE_SPEC.md).
const (
	signatureAnnotation = "dev.cosignproject.cosign/signature"
	signatureType       = "cosign container image signature"
	maxPayload          = 64 << 10
	maxSignatures       = 64
)

// LoadPolicy reads a file of public keys in PEM; an image is accepted when one
// of them has signed its digest, as `cosign sign --key` does.
func LoadPolicy(path string) (Verifier, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("SANDBOX_IMAGE_POLICY: %w", err)
	}
	var keys []signature.Verifier
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		pub, err := cryptoutils.UnmarshalPEMToPublicKey(pem.EncodeToMemory(block))
		if err != nil {
			return nil, fmt.Errorf("SANDBOX_IMAGE_POLICY: a key of %s: %w", path, err)
		}
		v, err := signature.LoadVerifier(pub, crypto.SHA256)
		if err != nil {
			return nil, fmt.Errorf("SANDBOX_IMAGE_POLICY: a key of %s: %w", path, err)
		}
		keys = append(keys, v)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("SANDBOX_IMAGE_POLICY: %s holds no public key in PEM", path)
	}
	return func(ctx context.Context, ref, digest string) error { return verify(ctx, keys, ref, digest) }, nil
}

func verify(ctx context.Context, keys []signature.Verifier, ref, digest string) error {
	r, err := name.ParseReference(ref)
	if err != nil {
		return fmt.Errorf("the reference: %w", err)
	}
	if _, err := v1.NewHash(digest); err != nil {
		return fmt.Errorf("the digest: %w", err)
	}
	tag := r.Context().Tag(strings.Replace(digest, ":", "-", 1) + ".sig")
	img, err := remote.Image(tag, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return fmt.Errorf("it has no signature that can be read: %w", err)
	}
	m, err := img.Manifest()
	if err != nil {
		return fmt.Errorf("reading its signatures: %w", err)
	}
	reason := errors.New("none of its signatures is by a key of the policy")
	for i, layer := range m.Layers {
		if i >= maxSignatures || layer.Size > maxPayload {
			break
		}
		sig, err := base64.StdEncoding.DecodeString(layer.Annotations[signatureAnnotation])
		if err != nil || len(sig) == 0 {
			continue
		}
		payload, err := blob(img, layer.Digest)
		if err != nil {
			return fmt.Errorf("reading its signatures: %w", err)
		}
		for _, key := range keys {
			if key.VerifySignature(bytes.NewReader(sig), bytes.NewReader(payload)) != nil {
				continue
			}
			// The signature is good; what it says has to be of this image.
			var p struct {
				Critical struct {
					Image struct {
						Digest string `json:"docker-manifest-digest"`
					} `json:"image"`
					Type string `json:"type"`
				} `json:"critical"`
			}
			if err := json.Unmarshal(payload, &p); err != nil || p.Critical.Type != signatureType || p.Critical.Image.Digest != digest {
				reason = errors.New("a key of the policy has signed another image under its name")
				continue
			}
			return nil
		}
	}
	return reason
}

func blob(img v1.Image, h v1.Hash) ([]byte, error) {
	l, err := img.LayerByDigest(h)
	if err != nil {
		return nil, err
	}
	r, err := l.Compressed() // checks the digest as it is read
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, maxPayload+1))
}
