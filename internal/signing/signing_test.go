package signing_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/sigstore/sigstore/pkg/signature/kms/fake"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

// family makes and signs a small family with a key of its own.
func family(t *testing.T) (folder, cache string, r *dist.Release, s *signing.Signer, trust *signing.Trust) {
	t.Helper()
	folder, cache = filepath.Join(t.TempDir(), "dist"), t.TempDir()
	r, err := disttest.Small("1.2.3").Write(folder)
	if err != nil {
		t.Fatal(err)
	}
	none := func(string) string { return "" }
	if s, err = signing.Open(t.Context(), signing.FromEnv(none, cache)); err != nil {
		t.Fatal(err)
	}
	if _, err := signing.SignFamily(t.Context(), folder, r, s); err != nil {
		t.Fatal(err)
	}
	config, err := signing.TrustFromEnv(none, cache)
	if err != nil {
		t.Fatal(err)
	}
	if trust, err = signing.NewTrust(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	return folder, cache, r, s, trust
}

func hash(t *testing.T, d fmt.Stringer) v1.Hash {
	t.Helper()
	h, err := v1.NewHash(d.String())
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestSignedLayoutVerifies(t *testing.T) {
	folder, _, r, s, trust := family(t)
	l := signing.Layout(filepath.Join(folder, "oci"))
	for _, image := range r.Images {
		_, checked, err := signing.VerifyImage(t.Context(), l, hash(t, image.IndexDigest), trust)
		if err != nil {
			t.Fatal(err)
		}
		if want := len(signing.OnIndex) + 2*len(signing.OnVariant); len(checked) != want {
			t.Errorf("%s: %d things were checked, want %d", image.Name, len(checked), want)
		}
	}
	bundles, err := signing.Bundles(t.Context(), l, hash(t, r.Images[0].IndexDigest))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bundles {
		if st, err := trust.Verify(t.Context(), b.Subject, b.Bundle); err != nil {
			t.Error(err)
		} else if st.PredicateType == signing.Provenance {
			for _, v := range r.Images[0].Platforms {
				if !bytes.Contains(st.Predicate, []byte(v.Digest.Encoded())) {
					t.Errorf("the index's provenance does not name its variant %s: %s", v.Platform, st.Predicate)
				}
			}
		}
	}
	first, err := l.Release()
	if err != nil {
		t.Fatal(err)
	}
	index, err := os.ReadFile(filepath.Join(folder, "oci", "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := signing.SignFamily(t.Context(), folder, r, s)
	if err != nil || second != first {
		t.Errorf("signed again, the release artifact is %s, was %s (%v)", second, first, err)
	}
	again, err := os.ReadFile(filepath.Join(folder, "oci", "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	if count(index) != count(again) {
		t.Errorf("index.json has %d manifests after signing again, had %d", count(again), count(index))
	}
}

func count(index []byte) int {
	var m v1.IndexManifest
	_ = json.Unmarshal(index, &m)
	return len(m.Manifests)
}

func TestVerifyNamesTheFirstWrongThing(t *testing.T) {
	folder, _, r, _, trust := family(t)
	image := r.Images[1]
	arm := image.Platforms[1]
	// Another signer, whose signatures are as good but not trusted.
	stranger, err := signing.Open(t.Context(), signing.FromEnv(func(string) string { return "" }, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	resign := func(subject v1.Descriptor, predicateType string, predicate []byte) func(t *testing.T, l signing.Layout) {
		return func(t *testing.T, l signing.Layout) {
			st, err := signing.NewStatement(subject.Digest, predicateType, predicate)
			if err != nil {
				t.Fatal(err)
			}
			b, err := stranger.Sign(t.Context(), st)
			if err != nil {
				t.Fatal(err)
			}
			a, err := signing.NewAttachment(subject, predicateType, b)
			if err == nil {
				err = l.Attach([]signing.Attachment{a})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	descriptor := v1.Descriptor{MediaType: "application/vnd.oci.image.manifest.v1+json", Digest: hash(t, arm.Digest), Size: 1}
	remove := func(predicateType string) func(t *testing.T, l signing.Layout) {
		return func(t *testing.T, l signing.Layout) {
			editIndex(t, l, func(d v1.Descriptor) bool {
				m, err := l.Manifest(t.Context(), d.Digest)
				return err == nil && bytes.Contains(m.Raw, []byte(arm.Digest.String())) && bytes.Contains(m.Raw, []byte(`"`+predicateType+`"`))
			})
		}
	}
	for _, c := range []struct {
		name string
		harm func(t *testing.T, l signing.Layout)
		want []string
	}{
		{"an SBOM is missing", remove(signing.SPDX), []string{"linux/arm64", "SPDX SBOM: none is attached", "CycloneDX SBOM"}},
		{"the signature is missing", remove(signing.Signature), []string{"linux/arm64", "signature: none is attached"}},
		{"a stranger's provenance", resign(descriptor, signing.Provenance, []byte(`{"buildDefinition":{},"runDetails":{"builder":{"id":"x"}}}`)), []string{"linux/arm64", "provenance: not signed by key"}},
		{"a changed manifest", func(t *testing.T, l signing.Layout) {
			file := filepath.Join(string(l), "blobs", "sha256", arm.Digest.Encoded())
			text, err := os.ReadFile(file)
			if err == nil {
				err = os.WriteFile(file, append(text, ' '), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
		}, []string{"linux/arm64", arm.Digest.String(), "has the digest"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := signing.Layout(filepath.Join(t.TempDir(), "oci"))
			if err := os.CopyFS(string(l), os.DirFS(filepath.Join(folder, "oci"))); err != nil {
				t.Fatal(err)
			}
			c.harm(t, l)
			_, _, err := signing.VerifyImage(t.Context(), l, hash(t, image.IndexDigest), trust)
			if err == nil {
				t.Fatal("it verified")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("the error lacks %q: %v", w, err)
				}
			}
		})
	}
}

func editIndex(t *testing.T, l signing.Layout, remove func(v1.Descriptor) bool) {
	t.Helper()
	file := filepath.Join(string(l), "index.json")
	text, err := os.ReadFile(file)
	var m v1.IndexManifest
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	var kept []v1.Descriptor
	for _, d := range m.Manifests {
		if !remove(d) {
			kept = append(kept, d)
		}
	}
	if len(kept) == len(m.Manifests) {
		t.Fatal("nothing was removed")
	}
	m.Manifests = kept
	if err == nil {
		text, err = json.Marshal(m)
	}
	if err == nil {
		err = os.WriteFile(file, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestThrowAwayKey(t *testing.T) {
	cache := t.TempDir()
	var notices []string
	c := signing.FromEnv(func(string) string { return "" }, cache)
	c.Notice = func(format string, args ...any) { notices = append(notices, fmt.Sprintf(format, args...)) }
	var keys []string
	public := filepath.Join(cache, "signing", "throw-away.pub")
	for range 2 {
		s, err := signing.Open(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		pem, err := s.PublicKeyPEM()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, pem)
		if text, err := os.ReadFile(public); err != nil || string(text) != pem {
			t.Errorf("the public half is %q, %v, want %q", text, err, pem)
		}
		// As if the run had been killed before it was written.
		if err := os.Remove(public); err != nil {
			t.Fatal(err)
		}
	}
	if keys[0] != keys[1] {
		t.Error("the second run made another key")
	}
	if len(notices) != 2 || !strings.Contains(notices[0], "throw-away") || !strings.Contains(notices[1], "COSIGN_KEY") {
		t.Errorf("the user was told %q", notices)
	}
	err := filepath.WalkDir(cache, func(name string, d fs.DirEntry, err error) error {
		if info, _ := d.Info(); err == nil && strings.HasSuffix(name, ".key") && info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// A key is the word of whoever holds it, whatever the job that built wrote.
func TestKeySignsNoHigherLevel(t *testing.T) {
	for level, want := range map[int]string{1: "", 2: "claims SLSA build level 2"} {
		folder := filepath.Join(t.TempDir(), "dist")
		r, err := disttest.Small("1.2.3").Write(folder)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(folder, "provenance", "toolbox", "linux-arm64.json")
		text := fmt.Appendf(nil, `{"buildDefinition":{"internalParameters":{"slsaBuildLevel":%d}},"runDetails":{"builder":{"id":"x"}}}`, level)
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		s, err := signing.Open(t.Context(), signing.FromEnv(func(string) string { return "" }, t.TempDir()))
		if err != nil {
			t.Fatal(err)
		}
		_, err = signing.SignFamily(t.Context(), folder, r, s)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "COSIGN_KEY")) {
			t.Errorf("level %d: %v", level, err)
		}
	}
}

func TestKeyErrorsSayWhichVariable(t *testing.T) {
	_, err := signing.Open(t.Context(), signing.Config{Key: filepath.Join(t.TempDir(), "none.key")})
	if err == nil || !strings.Contains(err.Error(), "COSIGN_KEY") {
		t.Errorf("got %v", err)
	}
}

// TestKMS signs and verifies by a KMS URI, with sigstore's provider that keeps
// its key in memory: what is tested is the way of a URI, not a cloud.
func TestKMS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.WithValue(t.Context(), fake.KmsCtxKey{}, crypto.PrivateKey(key))
	getenv := func(k string) string { return map[string]string{"COSIGN_KEY": "fakekms://key"}[k] }
	s, err := signing.Open(ctx, signing.FromEnv(getenv, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), "dist")
	r, err := disttest.Small("1.0.0").Write(folder)
	if err == nil {
		_, err = signing.SignFamily(ctx, folder, r, s)
	}
	if err != nil {
		t.Fatal(err)
	}
	config, err := signing.TrustFromEnv(getenv, t.TempDir())
	if err != nil || config.Key != "fakekms://key" {
		t.Fatalf("trusted is %+v, %v", config, err)
	}
	verify := func(ctx context.Context) error {
		trust, err := signing.NewTrust(ctx, config)
		if err == nil {
			_, _, err = signing.VerifyImage(ctx, signing.Layout(filepath.Join(folder, "oci")), hash(t, r.Images[0].IndexDigest), trust)
		}
		return err
	}
	if err := verify(ctx); err != nil {
		t.Error(err)
	}
	if other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Error(err)
	} else if err := verify(context.WithValue(t.Context(), fake.KmsCtxKey{}, crypto.PrivateKey(other))); err == nil {
		t.Error("another key of the KMS verifies")
	}
}

// cosign builds the real command line tool of a major version.
func cosign(t *testing.T, major string) string {
	return citest.Tool(t, "cosign"+major, "cosign"+major, "", "github.com/sigstore/cosign/v"+major+"/cmd/cosign")
}

func run(t *testing.T, env []string, name string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// released is the repository of the release manifests, as release.yaml has it.
const released = "loomcycle-release"

// push copies a layout to a registry with what is attached.
func push(t *testing.T, folder string, r *dist.Release, address string, legacy *signing.Signer) map[string]string {
	t.Helper()
	var names []string
	for _, i := range r.Images {
		names = append(names, i.Name)
	}
	c, err := registry.Open(t.Context(), address, append(names, released), registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := signing.Layout(filepath.Join(folder, "oci"))
	attach := func(repo string, h v1.Hash) {
		bundles, err := signing.Bundles(t.Context(), l, h)
		if err != nil {
			t.Fatal(err)
		}
		if legacy != nil {
			if err := legacy.Legacy(t.Context(), c, repo, h, bundles); err != nil {
				t.Fatal(err)
			}
			return
		}
		for _, b := range bundles {
			mh, _, _ := v1.SHA256(bytes.NewReader(b.Manifest))
			put(t, c, l, repo, mh)
		}
	}
	artifact, err := l.Release()
	if err != nil {
		t.Fatal(err)
	}
	put(t, c, l, released, artifact)
	attach(released, artifact)
	m, err := l.Manifest(t.Context(), artifact)
	if err == nil {
		err = c.PutManifest(t.Context(), released, r.Version, m)
	}
	if err != nil {
		t.Fatal(err)
	}
	refs := map[string]string{released: address + "/" + released + ":" + r.Version}
	for _, i := range r.Images {
		index := hash(t, i.IndexDigest)
		refs[i.Name] = address + "/" + i.Name + "@" + i.IndexDigest.String()
		all := []v1.Hash{}
		for _, v := range i.Platforms {
			all = append(all, hash(t, v.Digest))
		}
		for _, h := range append(all, index) {
			put(t, c, l, i.Name, h)
		}
		for _, h := range append(all, index) {
			attach(i.Name, h)
		}
	}
	return refs
}

func put(t *testing.T, c *registry.Client, l signing.Layout, repo string, h v1.Hash) {
	t.Helper()
	m, err := l.Manifest(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if !m.Type.IsIndex() {
		parsed, err := v1.ParseManifest(bytes.NewReader(m.Raw))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range append(parsed.Layers, parsed.Config) {
			b, err := l.Blob(t.Context(), d.Digest)
			if err == nil {
				err = c.PushBlob(t.Context(), repo, registry.Bytes(b))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.PutManifest(t.Context(), repo, h.String(), m); err != nil {
		t.Fatal(err)
	}
}

// TestStockCosignVerifies runs what docs/VERIFYING.md tells consumers to run.
func TestStockCosignVerifies(t *testing.T) {
	folder, cache, r, signer, _ := family(t)
	key := filepath.Join(cache, "signing", "throw-away.pub")
	other := filepath.Join(t.TempDir(), "signing")
	if _, err := signing.Open(t.Context(), signing.FromEnv(func(string) string { return "" }, filepath.Dir(other))); err != nil {
		t.Fatal(err)
	}
	// An empty root of trust: cosign 2 fetches sigstore's without it, also for a key.
	trusted := filepath.Join(t.TempDir(), "trusted_root.json")
	if err := os.WriteFile(trusted, []byte(`{"mediaType":"application/vnd.dev.sigstore.trustedroot+json;version=0.1"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, major := range []string{"2", "3"} {
		program := cosign(t, major)
		for _, k := range []registrytest.Kind{registrytest.Distribution, registrytest.Referrers} {
			for _, scheme := range []string{"bundles", "tags"} {
				t.Run("cosign "+major+"/"+string(k)+"/"+scheme, func(t *testing.T) {
					var legacy *signing.Signer
					if scheme == "tags" {
						legacy = signer
					}
					refs := push(t, folder, r, registrytest.Start(t, k), legacy)
					env := []string{"HOME=" + t.TempDir(), "TUF_ROOT=" + t.TempDir()}
					offline := []string{"--insecure-ignore-tlog=true"}
					if scheme == "bundles" {
						offline = append(offline, "--trusted-root", trusted)
					}
					for _, image := range r.Images[1:] { // one says it all: a run of cosign takes a second
						repo := refs[image.Name][:strings.Index(refs[image.Name], "@")]
						subjects := []string{refs[image.Name]}
						for _, v := range image.Platforms {
							subjects = append(subjects, repo+"@"+v.Digest.String())
						}
						for _, ref := range append(subjects, refs[released]) {
							if out, err := run(t, env, program, append(append([]string{"verify", "--key", key}, offline...), ref)...); err != nil {
								t.Fatalf("%v\n%s", err, out)
							}
							if out, err := run(t, env, program, append(append([]string{"verify", "--key", filepath.Join(other, "throw-away.pub")}, offline...), ref)...); err == nil {
								t.Fatalf("another key verifies:\n%s", out)
							}
						}
						for i, ref := range subjects {
							kinds := []string{"spdxjson", "cyclonedx", "slsaprovenance1"}
							if i == 0 { // what the admission policies ask for
								kinds = []string{signing.Membership, "slsaprovenance1"}
							}
							for _, kind := range kinds {
								if out, err := run(t, env, program, append(append([]string{"verify-attestation", "--type", kind, "--key", key}, offline...), ref)...); err != nil {
									t.Fatalf("%s: %v\n%s", kind, err, out)
								}
							}
						}
					}
				})
			}
		}
	}
}

// TestTagSchemeIsFinished is a run that was killed after the first of three
// attestations, the run that finishes it, and one that finds nothing to do.
func TestTagSchemeIsFinished(t *testing.T) {
	folder, _, r, s, _ := family(t)
	c, err := registry.Open(t.Context(), registrytest.Start(t, registrytest.Distribution), []string{"toolbox"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	image, err := r.Image("toolbox")
	if err != nil {
		t.Fatal(err)
	}
	l, subject := signing.Layout(filepath.Join(folder, "oci")), hash(t, image.Platforms[0].Digest)
	put(t, c, l, "toolbox", subject)
	bundles, err := signing.Bundles(t.Context(), l, subject)
	if err != nil || len(bundles) != len(signing.OnVariant) {
		t.Fatalf("%d bundles, %v", len(bundles), err)
	}
	slices.SortFunc(bundles, func(a, b signing.Attachment) int {
		return slices.Index(signing.OnVariant, a.PredicateType) - slices.Index(signing.OnVariant, b.PredicateType)
	})
	// A stranger was here first, whose signature and attestation are not taken
	// for ours and stay.
	stranger, err := signing.Open(t.Context(), signing.FromEnv(func(string) string { return "" }, t.TempDir()))
	if err == nil {
		err = stranger.Legacy(t.Context(), c, "toolbox", subject, bundles[:2])
	}
	if err != nil {
		t.Fatal(err)
	}
	var digests []v1.Hash
	for _, run := range []struct{ bundles, attested int }{{2, 1 + 1}, {4, 1 + 3}, {4, 1 + 3}} {
		if err := s.Legacy(t.Context(), c, "toolbox", subject, bundles[:run.bundles]); err != nil {
			t.Fatal(err)
		}
		m, h, err := c.Fetch(t.Context(), "toolbox", subject.Algorithm+"-"+subject.Hex+".att")
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := v1.ParseManifest(bytes.NewReader(m.Raw))
		if err != nil || len(parsed.Layers) != run.attested {
			t.Errorf("%d bundles gave %d attestations, want %d (%v)", run.bundles, len(parsed.Layers), run.attested, err)
		}
		digests = append(digests, h)
		if m, _, err = c.Fetch(t.Context(), "toolbox", subject.Algorithm+"-"+subject.Hex+".sig"); err != nil {
			t.Fatal(err)
		}
		if parsed, err = v1.ParseManifest(bytes.NewReader(m.Raw)); err != nil || len(parsed.Layers) != 2 {
			t.Errorf("%d signatures, want the stranger's and ours (%v)", len(parsed.Layers), err)
		}
	}
	if digests[1] != digests[2] {
		t.Error("a finished set of attestations was written again")
	}
}

// TestContainersPolicyVerifies pulls under a policy.json of sigstoreSigned, which
// knows the tag scheme only: with the library of podman, CRI-O and skopeo at its
// current version, and with the programs that are installed.
func TestContainersPolicyVerifies(t *testing.T) {
	folder, cache, r, signer, _ := family(t)
	address := registrytest.Start(t, registrytest.Distribution)
	ref := push(t, folder, r, address, signer)["toolbox"]
	policy := func(key string) string {
		name := filepath.Join(t.TempDir(), "policy.json")
		text := fmt.Sprintf(`{"default":[{"type":"reject"}],"transports":{"docker":{%q:[{"type":"sigstoreSigned","keyPath":%q,"signedIdentity":{"type":"matchRepository"}}]}}}`, address, key)
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	home := t.TempDir()
	d := filepath.Join(home, ".config", "containers", "registries.d")
	if err := os.MkdirAll(d, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d, "default.yaml"), []byte("docker:\n  "+address+":\n    use-sigstore-attachments: true\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	stranger := t.TempDir()
	if _, err := signing.Open(t.Context(), signing.FromEnv(func(string) string { return "" }, stranger)); err != nil {
		t.Fatal(err)
	}
	good, bad := policy(filepath.Join(cache, "signing", "throw-away.pub")), policy(filepath.Join(stranger, "signing", "throw-away.pub"))
	for _, c := range []struct {
		name string
		args func(t *testing.T, policy string) []string
	}{
		{"library", func(t *testing.T, p string) []string {
			return []string{citest.Tool(t, "sigstoresigned", "sigstoresigned", "containers_image_openpgp", "."), p, d, "docker://" + ref, "dir:" + t.TempDir()}
		}},
		{"skopeo", func(t *testing.T, p string) []string {
			return []string{citest.Program(t, "skopeo", "apt-get install skopeo"), "--policy", p, "--registries.d", d,
				"copy", "--src-tls-verify=false", "--override-arch", "amd64", "docker://" + ref, "dir:" + t.TempDir()}
		}},
		{"podman", func(t *testing.T, p string) []string {
			store, err := os.MkdirTemp("", "p") // podman wants a run root of 50 characters at most
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(store) })
			return []string{citest.Program(t, "podman", "apt-get install podman"), "--root", filepath.Join(store, "root"), "--runroot", filepath.Join(store, "run"),
				"--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "pull", "--signature-policy", p, "--tls-verify=false", ref}
		}},
		{"podman of loomcycle-builder", func(t *testing.T, p string) []string {
			store, err := os.MkdirTemp("", "p")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(store) })
			return append(builderPodman(t), "--root", filepath.Join(store, "root"), "--runroot", filepath.Join(store, "run"),
				"--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "pull", "--signature-policy", p, "--tls-verify=false", ref)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := []string{"HOME=" + home}
			args := c.args(t, good)
			out, err := run(t, env, args[0], args[1:]...)
			if strings.Contains(out, "sigstore disabled") {
				skip(t, bookworm(), "this distribution compiled sigstore out of "+c.name+"; the library and Debian 13's podman are tested instead")
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			args = c.args(t, bad)
			if out, err := run(t, env, args[0], args[1:]...); err == nil || !strings.Contains(strings.ToLower(out), "signature") {
				t.Fatalf("with another key: %v\n%s", err, out)
			}
		})
	}
}

// skip skips a test, in CI only where that is allowed.
func skip(t *testing.T, allowed bool, why string) {
	t.Helper()
	if allowed {
		t.Skip(why)
	}
	citest.Skip(t, "%s", why)
}

// bookworm tells whether this is Debian 12, which has no sigstore.
func bookworm() bool {
	text, err := os.ReadFile("/etc/os-release")
	return err == nil && bytes.Contains(text, []byte("\nVERSION_CODENAME=bookworm\n"))
}

// builderPodman unpacks the loomcycle-builder image of dist and gives the command
// that runs its podman, Debian 13's, in it.
func builderPodman(t *testing.T) []string {
	t.Helper()
	if os.Getuid() != 0 {
		skip(t, false, "a root folder for podman needs root")
	}
	folder := filepath.Join("..", "..", "dist")
	r, err := dist.Read(folder)
	if err != nil {
		disttest.Missing(t, err)
	}
	image, err := r.Image("loomcycle-builder")
	if err != nil {
		disttest.Missing(t, err)
	}
	v, err := image.Variant("linux/" + runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	index, err := layout.ImageIndexFromPath(filepath.Join(folder, "oci"))
	if err == nil {
		index, err = index.ImageIndex(hash(t, image.IndexDigest))
	}
	if err != nil {
		t.Fatal(err)
	}
	img, err := index.Image(hash(t, v.Digest))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	all := mutate.Extract(img)
	defer all.Close()
	for files := tar.NewReader(all); ; {
		h, err := files.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(root, path.Clean("/"+h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(at, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, at)
		case tar.TypeLink:
			err = os.Link(filepath.Join(root, path.Clean("/"+h.Linkname)), at)
		case tar.TypeReg:
			var f *os.File
			if f, err = os.OpenFile(at, os.O_CREATE|os.O_WRONLY, h.FileInfo().Mode().Perm()); err == nil {
				_, err = io.Copy(f, files)
				err = errors.Join(err, f.Close())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// A root folder of its own, with this test's folders and the host's loopback.
	tmp := os.TempDir()
	if err := os.MkdirAll(filepath.Join(root, tmp), 0o755); err != nil {
		t.Fatal(err)
	}
	return []string{"unshare", "--mount", "sh", "-ec", `root=$1 tmp=$2; shift 2
		mount --bind "$root" "$root"; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind "$tmp" "$root$tmp"; exec chroot "$root" podman "$@"`, "sh", root, tmp}
}
