package images

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
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
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
)

func TestPolicy(t *testing.T) {
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer reg.Close()
	host := strings.TrimPrefix(reg.URL, "http://")
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	other, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	policy := filepath.Join(t.TempDir(), "cosign.pub")
	b, err := cryptoutils.MarshalPublicKeyToPEM(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(policy, b, 0o644); err != nil {
		t.Fatal(err)
	}
	verify, err := LoadPolicy(policy)
	if err != nil {
		t.Fatal(err)
	}
	push := func(repo string) v1.Hash {
		img, err := random.Image(100, 1)
		if err != nil {
			t.Fatal(err)
		}
		ref, _ := name.ParseReference(host + "/" + repo + ":1")
		if err := remote.Write(ref, img); err != nil {
			t.Fatal(err)
		}
		h, _ := img.Digest()
		return h
	}
	sign := func(repo string, under, says v1.Hash, k *ecdsa.PrivateKey, change func(sig []byte) []byte) {
		payload := fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"x"},"image":{"docker-manifest-digest":%q},"type":%q},"optional":null}`, says, signatureType)
		s, err := signature.LoadSigner(k, crypto.SHA256)
		if err != nil {
			t.Fatal(err)
		}
		sig, err := s.SignMessage(bytes.NewReader(payload))
		if err != nil {
			t.Fatal(err)
		}
		if change != nil {
			sig = change(sig)
		}
		img, err := mutate.Append(empty.Image, mutate.Addendum{Layer: static.NewLayer(payload, "application/vnd.dev.cosign.simplesigning.v1+json"),
			Annotations: map[string]string{signatureAnnotation: base64.StdEncoding.EncodeToString(sig)}})
		if err != nil {
			t.Fatal(err)
		}
		ref, _ := name.ParseReference(host + "/" + repo + ":" + strings.Replace(under.String(), ":", "-", 1) + ".sig")
		if err := remote.Write(ref, img); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		prepare func(repo string, h v1.Hash)
		want    string
	}{
		"signed":            {func(r string, h v1.Hash) { sign(r, h, h, key, nil) }, ""},
		"unsigned":          {func(string, v1.Hash) {}, "no signature"},
		"another key":       {func(r string, h v1.Hash) { sign(r, h, h, other, nil) }, "none of its signatures"},
		"another image":     {func(r string, h v1.Hash) { sign(r, h, push(r+"-b"), key, nil) }, "signed another image"},
		"damaged signature": {func(r string, h v1.Hash) { sign(r, h, h, key, func(s []byte) []byte { s[10] ^= 1; return s }) }, "none of its signatures"},
		"empty signature":   {func(r string, h v1.Hash) { sign(r, h, h, key, func([]byte) []byte { return nil }) }, "none of its signatures"},
	} {
		t.Run(name, func(t *testing.T) {
			repo := strings.ReplaceAll(name, " ", "-")
			h := push(repo)
			tc.prepare(repo, h)
			ref := host + "/" + repo + ":1"
			err := verify(t.Context(), ref, h.String())
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v; want %q", err, tc.want)
			}
		})
	}
	for _, content := range []string{"", "no key", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"} {
		if err := os.WriteFile(policy, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadPolicy(policy); err == nil {
			t.Errorf("%q was taken for a policy", content)
		}
	}
}

type fakeStore struct{ digest string }

func (f *fakeStore) ResolveImage(context.Context, string, bool) (engine.Image, error) {
	return engine.Image{ID: "sha256:id-of-" + f.digest, Digest: f.digest}, nil
}
func (*fakeStore) UseImage(context.Context, string) error { return nil }

// A name is checked before its first use and stands for the same image after,
// whatever its tag does.
func TestResolve(t *testing.T) {
	store, checked := &fakeStore{digest: "one"}, 0
	i := &Images{Engine: store, Verify: func(_ context.Context, _, digest string) error {
		checked++
		if digest == "bad" {
			return fmt.Errorf("unsigned")
		}
		return nil
	}}
	first, err := i.Resolve(t.Context(), "ref")
	if err != nil {
		t.Fatal(err)
	}
	store.digest = "two"
	if again, err := i.Resolve(t.Context(), "ref"); err != nil || again != first || checked != 1 {
		t.Errorf("%v, %v, checked %d times", again, err, checked)
	}
	store.digest = "bad"
	if _, err := i.Resolve(t.Context(), "other"); err == nil || !strings.Contains(err.Error(), "SANDBOX_IMAGE_POLICY") {
		t.Errorf("an unsigned image: %v", err)
	}
	store.digest = ""
	if _, err := i.Resolve(t.Context(), "loaded"); err == nil || !strings.Contains(err.Error(), "no manifest digest") {
		t.Errorf("an image without a digest: %v", err)
	}
}
