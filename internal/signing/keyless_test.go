package signing_test

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
	"github.com/loomcycle/loomcycle-images/internal/signing"
	"github.com/loomcycle/loomcycle-images/internal/signing/sigstoretest"
)

// TestKeyless signs with certificates of a real Fulcio, logged in a real
// certificate transparency log, with timestamps of a real timestamp authority
// and entries in a real Rekor 2, all on loopback, for tokens of an issuer on
// loopback; and in a private sigstore that has neither log. The release is
// verified by this package and by stock cosign.
func TestKeyless(t *testing.T) {
	programs := map[string]string{"2": cosign(t, "2"), "3": cosign(t, "3")} // compiled before others have to wait
	sigstore := sigstoretest.Start(t)
	for name, c := range map[string]sigstoretest.Environment{"with both logs": sigstore.Logged, "without logs": sigstore.Plain} {
		t.Run(name, func(t *testing.T) {
			env := maps.Clone(c.Vars)
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
			// Whose a certificate's signature is could not be told from a stranger's.
			if err := s.Legacy(t.Context(), nil, "toolbox", hash(t, r.Images[0].IndexDigest), nil); err == nil || !strings.Contains(err.Error(), "COSIGN_KEY") {
				t.Errorf("keyless in the tag scheme: %v", err)
			}
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
			for name, file := range c.Strangers {
				env["SIGSTORE_TRUSTED_ROOT"] = file
				if err := verify(); err == nil || !strings.Contains(err.Error(), "not signed by identity") {
					t.Errorf("%s: %v", name, err)
				}
			}
			env["SIGSTORE_TRUSTED_ROOT"] = c.Vars["SIGSTORE_TRUSTED_ROOT"]
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
			if name == "without logs" {
				return // cosign's commands want a switch for each
			}
			ref := push(t, folder, r, registrytest.Start(t, registrytest.Referrers), nil)["toolbox"]
			image, err := r.Image("toolbox")
			if err != nil {
				t.Fatal(err)
			}
			platform := ref[:strings.Index(ref, "@")+1] + image.Platforms[0].Digest.String()
			for _, major := range []string{"2", "3"} {
				for _, args := range [][]string{{"verify", ref}, {"verify", platform}, {"verify-attestation", "--type", "spdxjson", platform}, {"verify-attestation", "--type", "slsaprovenance1", platform}} {
					last := len(args) - 1
					ref := args[last]
					args := args[:last:last]
					if major == "2" { // a Rekor 2 entry has no time of its own
						args = append(args, "--use-signed-timestamps")
					}
					cosigned := func(identity string) (string, error) {
						return run(t, []string{"HOME=" + t.TempDir(), "TUF_ROOT=" + t.TempDir()}, programs[major],
							append(args, "--certificate-identity-regexp", identity, "--certificate-oidc-issuer", c.Vars["COSIGN_ISSUER"], "--trusted-root", c.Vars["SIGSTORE_TRUSTED_ROOT"], ref)...)
					}
					if out, err := cosigned(`^release@example\.test$`); err != nil {
						t.Errorf("cosign %s %v: %v\n%s", major, args, err, out)
					}
					if out, err := cosigned(`^someone@example\.test$`); err == nil {
						t.Errorf("cosign %s %v: another identity verifies\n%s", major, args, out)
					}
				}
			}
		})
	}
}
