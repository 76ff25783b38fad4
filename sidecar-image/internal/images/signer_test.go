package images_test

import (
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
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	ourregistry "github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/signing"
	"github.com/loomcycle/loomcycle-images/internal/signing/sigstoretest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/images"
)

// signed is an image of a small family that our own signer has signed, in a
// registry, by default with its bundles as referrers.
type signed struct {
	ref    string
	digest string
}

func release(t *testing.T, getenv func(string) string, legacy bool) (signed, *signing.Signer) {
	t.Helper()
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithReferrersSupport(true)))
	t.Cleanup(reg.Close)
	host := strings.TrimPrefix(reg.URL, "http://")
	folder := filepath.Join(t.TempDir(), "dist")
	r, err := disttest.Small("1.2.3").Write(folder)
	if err != nil {
		t.Fatal(err)
	}
	s, err := signing.Open(t.Context(), signing.FromEnv(getenv, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := signing.SignFamily(t.Context(), folder, r, s); err != nil {
		t.Fatal(err)
	}
	img := r.Images[0]
	push(t, filepath.Join(folder, "oci"), host+"/"+img.Name, img, !legacy)
	index, err := v1.NewHash(img.IndexDigest.String())
	if err != nil {
		t.Fatal(err)
	}
	if legacy {
		c, err := ourregistry.Open(t.Context(), host, []string{img.Name}, ourregistry.Options{})
		if err == nil {
			err = s.Legacy(t.Context(), c, img.Name, index, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return signed{host + "/" + img.Name + "@" + index.String(), index.String()}, s
}

func push(t *testing.T, oci, repo string, img dist.Image, bundles bool) {
	t.Helper()
	l, err := layout.FromPath(oci)
	if err != nil {
		t.Fatal(err)
	}
	all, err := l.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	h, err := v1.NewHash(img.IndexDigest.String())
	if err != nil {
		t.Fatal(err)
	}
	index, err := all.ImageIndex(h)
	if err != nil {
		t.Fatal(err)
	}
	to, err := name.NewRepository(repo)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(to.Digest(h.String()), index); err != nil {
		t.Fatal(err)
	}
	if !bundles {
		return
	}
	attached, err := signing.Layout(oci).Referrers(t.Context(), h)
	if err != nil || len(attached) < 2 {
		t.Fatalf("%d referrers, %v", len(attached), err)
	}
	for _, d := range attached {
		b, err := l.Image(d.Digest)
		if err == nil {
			err = remote.Write(to.Digest(d.Digest.String()), b)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func load(t *testing.T, content string) images.Verifier {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	v, err := images.LoadPolicy(path)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func none(string) string { return "" }

// What our releases carry, signed with a key: bundles as referrers, and the tag
// scheme.
func TestPolicyOfOurKey(t *testing.T) {
	for scheme, legacy := range map[string]bool{"bundles": false, "tags": true} {
		t.Run(scheme, func(t *testing.T) {
			image, signer := release(t, none, legacy)
			pub, err := signer.PublicKeyPEM()
			if err != nil {
				t.Fatal(err)
			}
			if err := load(t, pub)(t.Context(), image.ref, image.digest); err != nil {
				t.Error(err)
			}
			_, stranger := release(t, none, legacy)
			if pub, err = stranger.PublicKeyPEM(); err != nil {
				t.Fatal(err)
			}
			if err := load(t, pub)(t.Context(), image.ref, image.digest); err == nil || !strings.Contains(err.Error(), "not signed by key 1") {
				t.Errorf("another key's signature: %v", err)
			}
		})
	}
}

// The same signed without a key, by an identity, as CI does.
func TestPolicyOfOurIdentity(t *testing.T) {
	env := sigstoretest.Start(t).Plain.Vars
	image, _ := release(t, func(k string) string { return env[k] }, false)
	policy := func(issuer, subject string) images.Verifier {
		return load(t, fmt.Sprintf("identities:\n- {issuer: %q, subject: %q}\ntrusted_root: %q\n", issuer, subject, env["SIGSTORE_TRUSTED_ROOT"]))
	}
	if err := policy(env["COSIGN_ISSUER"], sigstoretest.Subject)(t.Context(), image.ref, image.digest); err != nil {
		t.Error(err)
	}
	for whom, v := range map[string]images.Verifier{
		"identity someone@example.test of": policy(env["COSIGN_ISSUER"], "someone@example.test"),
		"of https://other.example.test":    policy("https://other.example.test", sigstoretest.Subject),
	} {
		if err := v(t.Context(), image.ref, image.digest); err == nil || !strings.Contains(err.Error(), "not signed by") || !strings.Contains(err.Error(), whom) {
			t.Errorf("%s: %v", whom, err)
		}
	}
}
