package dist

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// layer is a tar as long as a small package: text, and bytes that don't shrink.
func layer(t *testing.T) []byte {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	var text bytes.Buffer
	for text.Len() < 3<<20 {
		fmt.Fprintf(&text, "line %d of the file: %x\n", r.IntN(1000), r.Uint32())
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	err := errors.Join(w.WriteHeader(&tar.Header{Name: "usr/share/text", Mode: 0o644, Size: int64(text.Len()), Format: tar.FormatUSTAR}))
	_, werr := w.Write(text.Bytes())
	if err := errors.Join(err, werr, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// exported puts a manifest with the layer into the staging's layout, as
// BuildKit's export does.
func exported(t *testing.T, s *Staging, layer []byte, mediaType string) digest.Digest {
	t.Helper()
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, Layers: []ocispec.Descriptor{
		{MediaType: mediaType, Digest: digest.FromBytes(layer), Size: int64(len(layer))},
	}}
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{layer, text} {
		if err := os.WriteFile(s.blob(digest.FromBytes(b).Encoded()), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return digest.FromBytes(text)
}

// The bytes of a compressed layer are the pinned module's: a digest here that
// changes is one that changes for every layer of the family, in a release of
// the same sources. It may only with the module or its settings, which
// NewCompressor names.
func TestCompressedBytes(t *testing.T) {
	in := layer(t)
	for _, tc := range []struct {
		compression, version, mediaType string
		digest                          digest.Digest
		open                            func(io.Reader) (io.Reader, error)
	}{
		{"gzip", "github.com/klauspost/compress@v1.20.3 level 6", ocispec.MediaTypeImageLayerGzip, "sha256:77671e278f40d939d17a47eebffdc7e5a6f537f927c0b0bdacc9e4b58616b48a",
			func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
		{"zstd", "github.com/klauspost/compress@v1.20.3", ocispec.MediaTypeImageLayerZstd, "sha256:d34ccff1e825625566e8254d71be5792af3c7768993aac1897c3a787c2792f12",
			func(r io.Reader) (io.Reader, error) { return zstd.NewReader(r) }},
	} {
		t.Run(tc.compression, func(t *testing.T) {
			c, err := NewCompressor("../..", tc.compression)
			if err != nil {
				t.Fatal(err)
			}
			if c.Version != tc.version {
				t.Errorf("the compressor is %q, the digest below was made by %q", c.Version, tc.version)
			}
			s, err := Stage(filepath.Join(t.TempDir(), "dist"), c)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Discard()
			m := exported(t, s, in, ocispec.MediaTypeImageLayer)
			diffID := digest.FromBytes(in)
			if s.Has(diffID) {
				t.Error("the layer is there before it was compressed")
			}
			size, err := s.Compress(t.Context(), []digest.Digest{m, m})
			if err != nil || size != int64(len(in)) {
				t.Fatalf("%d bytes compressed, %v", size, err)
			}
			got := s.layers[diffID]
			if got.Digest != tc.digest || got.MediaType != tc.mediaType {
				t.Errorf("%d bytes became %s %s, not %s %s", len(in), got.MediaType, got.Digest, tc.mediaType, tc.digest)
			}
			blob, err := os.ReadFile(s.blob(got.Digest.Encoded()))
			if err != nil || digest.FromBytes(blob) != got.Digest || int64(len(blob)) != got.Size {
				t.Fatalf("the blob is not what its descriptor says: %v", err)
			}
			r, err := tc.open(bytes.NewReader(blob))
			if err != nil {
				t.Fatal(err)
			}
			if out, err := io.ReadAll(r); err != nil || !bytes.Equal(out, in) {
				t.Errorf("the layer comes back as %d bytes, %v", len(out), err)
			}
			if _, err := os.Stat(s.blob(diffID.Encoded())); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the plain tar is still there: %v", err)
			}
		})
	}
}

// A program with another version of the module than the checkout pins would
// make other bytes than it says.
func TestCompressorOfAnotherCheckout(t *testing.T) {
	for have, ok := range map[string]bool{"v1.0.0": true, "": true, "v1.0.1": false} {
		root := t.TempDir()
		if err := os.WriteFile(filepath.Join(root, "go.mod"), []byte("module example.test/m\n\nrequire "+module+" v1.0.0\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if c, err := pinned(root, "gzip", have); (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "v1.0.0, and this program has "+have) {
			t.Errorf("%q: %+v, %v", have, c, err)
		}
	}
	m := &debug.Module{Path: module, Version: "v1.0.0"}
	info := &debug.BuildInfo{Deps: []*debug.Module{{Path: "example.test/m", Version: "v2.0.0"}, m}}
	if got := linked(info, true); got != "v1.0.0" {
		t.Errorf("the module is %q", got)
	}
	m.Replace = &debug.Module{Path: "example.test/fork", Version: "v1.0.0"}
	if got := linked(info, true); got != "example.test/fork@v1.0.0" {
		t.Errorf("a replaced module is %q", got)
	}
}

// A layer that BuildKit compressed has bytes that are not ours.
func TestCompressRefuses(t *testing.T) {
	s, err := Stage(filepath.Join(t.TempDir(), "dist"), Compressor{Compression: "gzip"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Discard()
	if _, err := s.Compress(t.Context(), []digest.Digest{exported(t, s, layer(t), ocispec.MediaTypeImageLayerGzip)}); err == nil {
		t.Error("a compressed layer was taken")
	}
	m := exported(t, s, layer(t), ocispec.MediaTypeImageLayer)
	at := s.blob(digest.FromBytes(layer(t)).Encoded())
	if err := errors.Join(os.Chmod(at, 0o644), os.WriteFile(at, []byte("rotten"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Compress(t.Context(), []digest.Digest{m}); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged layer of the builder's: %v", err)
	}
	if err := os.Remove(at); err != nil {
		t.Fatal(err)
	}
	cancelled, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("ctrl-c"))
	if _, err := s.Compress(cancelled, []digest.Digest{exported(t, s, layer(t), ocispec.MediaTypeImageLayer)}); err == nil {
		t.Error("a cancelled build went on compressing")
	}
	if left, _ := filepath.Glob(filepath.Join(s.dir, "layer-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := NewCompressor("../..", "xz"); err == nil {
		t.Error("COMPRESSION=xz was taken")
	}
	if c, err := NewCompressor("../..", ""); err != nil || c.Compression != "gzip" {
		t.Errorf("the default is %+v, %v", c, err)
	}
}
