// Package disttest makes small dist folders that are real in every way but
// their contents, for tests of what comes after the build.
package disttest

import (
	"archive/tar"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
)

// Missing skips a test of the family's own dist where that was not built. In
// CI, which builds it first, the test fails.
func Missing(t testing.TB, why any) {
	t.Helper()
	citest.Skip(t, "there is no dist; go run mage.go dist makes one: %v", why)
}

// Family says what to make. The same family always has the same digests.
type Family struct {
	Version string
	// Layers are the layers of each image by name; layers of one name are
	// the same bytes in every image, different on every platform.
	Images map[string][]Layer
	// Compression of the layers, gzip or zstd; empty leaves them plain tars.
	Compression string
}

// Layer is made of Size random bytes that depend on Name and the platform.
type Layer struct {
	Name string
	Size int
}

// Small is a family of two images that share a layer, in about 300 kB.
func Small(version string) Family {
	return Family{Version: version, Images: map[string][]Layer{
		"loomcycle": {{"runtime-" + version, 20_000}},
		"toolbox":   {{"base", 80_000}, {"runtime-" + version, 20_000}},
	}}
}

// Write makes the dist folder: oci, release.json, sbom and provenance.
func (f Family) Write(folder string) (*dist.Release, error) {
	if err := os.RemoveAll(folder); err != nil {
		return nil, err
	}
	p, err := layout.Write(filepath.Join(folder, "oci"), empty.Index)
	if err != nil {
		return nil, err
	}
	r := &dist.Release{SchemaVersion: 1, Version: f.Version, Epoch: 1767225600, LockDigest: digest.FromString("lock"), Compression: cmp.Or(f.Compression, "gzip"), Compressor: "disttest",
		Source: dist.Source{Repository: "https://git.example.test/loomcycle-images", Commit: strings.Repeat("c0ffee00", 5)}}
	for _, name := range slices.Sorted(maps.Keys(f.Images)) {
		image := dist.Image{Name: name}
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for _, platform := range []string{"linux/amd64", "linux/arm64"} {
			img, v, err := f.variant(name, platform)
			if err != nil {
				return nil, err
			}
			if err := f.documents(folder, name, v); err != nil {
				return nil, err
			}
			parsed, err := v1.ParsePlatform(platform)
			if err != nil {
				return nil, err
			}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{MediaType: types.OCIManifestSchema1, Platform: parsed}})
			image.Platforms = append(image.Platforms, *v)
		}
		h, err := index.Digest()
		if err != nil {
			return nil, err
		}
		image.IndexDigest = digest.Digest(h.String())
		if err := p.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": name})); err != nil {
			return nil, err
		}
		r.Images = append(r.Images, image)
	}
	return r, write(filepath.Join(folder, "release.json"), r)
}

func (f Family) variant(name, platform string) (v1.Image, *dist.Variant, error) {
	v := &dist.Variant{Platform: platform}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, l := range f.Images[name] {
		content, err := l.tar(platform)
		if err != nil {
			return nil, nil, err
		}
		layer, err := f.compressed(content)
		if err != nil {
			return nil, nil, err
		}
		if img, err = mutate.AppendLayers(img, layer); err != nil {
			return nil, nil, err
		}
		d, err := layer.Digest()
		if err != nil {
			return nil, nil, err
		}
		size, err := layer.Size()
		if err != nil {
			return nil, nil, err
		}
		v.Layers = append(v.Layers, dist.Layer{Group: l.Name, Digest: digest.Digest(d.String()), DiffID: digest.FromBytes(content), Size: size})
		v.Size += size
	}
	parsed, err := v1.ParsePlatform(platform)
	if err != nil {
		return nil, nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = parsed.OS, parsed.Architecture
	config.Config.Labels = map[string]string{"org.opencontainers.image.version": f.Version, "org.opencontainers.image.title": name}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return nil, nil, err
	}
	h, err := img.Digest()
	if err != nil {
		return nil, nil, err
	}
	ch, err := img.ConfigName()
	v.Digest, v.Config = digest.Digest(h.String()), digest.Digest(ch.String())
	return img, v, err
}

func (f Family) compressed(content []byte) (v1.Layer, error) {
	plain := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
	switch f.Compression {
	case "":
		return static.NewLayer(content, types.OCIUncompressedLayer), nil
	case "gzip":
		return tarball.LayerFromOpener(plain, tarball.WithMediaType(types.OCILayer))
	}
	return tarball.LayerFromOpener(plain, tarball.WithCompression(compression.Compression(f.Compression)), tarball.WithMediaType(types.OCILayerZStd))
}

// tar is an archive of one file, so that engines can unpack the layer.
func (l Layer) tar(platform string) ([]byte, error) {
	file := make([]byte, l.Size)
	seed := digest.FromString(l.Name + platform)
	if _, err := io.ReadFull(rand.NewChaCha8([32]byte([]byte(seed.Encoded())[:32])), file); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: l.Name, Mode: 0o644, Size: int64(l.Size)}); err != nil {
		return nil, err
	}
	if _, err := w.Write(file); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// documents writes an SBOM in both formats and a provenance predicate.
func (f Family) documents(folder, image string, v *dist.Variant) error {
	at := func(kind, suffix string) string {
		return filepath.Join(folder, kind, image, strings.ReplaceAll(v.Platform, "/", "-")+suffix)
	}
	type object = map[string]any
	if err := write(at("sbom", ".spdx.json"), object{"spdxVersion": "SPDX-2.3", "SPDXID": "SPDXRef-DOCUMENT", "dataLicense": "CC0-1.0", "name": image,
		"documentNamespace": "https://example.test/" + image, "creationInfo": object{"created": "2026-01-01T00:00:00Z", "creators": []string{"Tool: disttest"}},
		"packages": []object{{"name": image, "SPDXID": "SPDXRef-1", "downloadLocation": "NOASSERTION"}}}); err != nil {
		return err
	}
	if err := write(at("sbom", ".cdx.json"), object{"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
		"components": []object{{"type": "application", "name": image, "version": f.Version}}}); err != nil {
		return err
	}
	return write(at("provenance", ".json"), object{
		"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://slsa.dev/provenance/v1",
		"subject": []object{{"digest": object{"sha256": v.Digest.Encoded()}}},
		"predicate": object{
			"buildDefinition": object{"buildType": "https://example.test/build/v1", "externalParameters": object{"version": f.Version},
				"resolvedDependencies": []object{{"uri": "git+https://git.example.test/loomcycle-images", "digest": object{"gitCommit": strings.Repeat("c0ffee00", 5)}}}},
			"runDetails": object{"builder": object{"id": "https://example.test/builder"}}}})
}

func write(name string, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, b.Bytes(), 0o644)
}
