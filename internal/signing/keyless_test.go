package signing_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/signing"
	"github.com/loomcycle/loomcycle-images/internal/signing/sigstoretest"
)

// TestKeyless signs with certificates of a real Fulcio and timestamps of a real
// timestamp authority, both on loopback, for tokens of an issuer on loopback.
// Entries in Rekor are left untested.
func TestKeyless(t *testing.T) {
	env := sigstoretest.Start(t)
	getenv := func(k string) string { return env[k] }
	folder := filepath.Join(t.TempDir(), "dist")
	r, err := disttest.Small("1.0.0").Write(folder)
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
	l := signing.Layout(filepath.Join(folder, "oci"))
	verify := func() error {
		c, err := signing.TrustFromEnv(getenv, t.TempDir())
		if err != nil {
			return err
		}
		trust, err := signing.NewTrust(t.Context(), c)
		if err != nil {
			return err
		}
		_, _, err = signing.VerifyImage(t.Context(), l, hash(t, r.Images[0].IndexDigest), trust)
		return err
	}
	if err := verify(); err != nil {
		t.Fatal(err)
	}
	env["COSIGN_IDENTITY"] = `^someone@example\.test$`
	if err := verify(); err == nil || !strings.Contains(err.Error(), "not signed by identity") {
		t.Errorf("another identity: %v", err)
	}
	env["COSIGN_IDENTITY"], env["COSIGN_ISSUER"] = `^release@example\.test$`, "https://other.example.test"
	if err := verify(); err == nil {
		t.Error("another issuer verifies")
	}
	index, err := os.ReadFile(filepath.Join(string(l), "index.json"))
	if err != nil || bytes.Contains(index, []byte(env["SIGSTORE_ID_TOKEN"])) {
		t.Errorf("the layout: %v", err)
	}
}
