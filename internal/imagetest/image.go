// Package imagetest makes small images for tests, layer by layer, from what
// the test says is in them.
package imagetest

import (
	"archive/tar"
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Epoch is the time of every file and image, in seconds since 1970 UTC.
const Epoch = 1700000000

// Entry is a file of a layer. The zero Mode is 0644 and the zero Typeflag a
// regular file.
type Entry struct {
	tar.Header
	Content string
}

// File is a regular file of root's.
func File(name, content string) Entry {
	return Entry{Header: tar.Header{Name: name, Mode: 0o644}, Content: content}
}

// Program is a file that can be executed.
func Program(name, content string) Entry {
	return Entry{Header: tar.Header{Name: name, Mode: 0o755}, Content: content}
}

// Image stacks layers. The OCI media types and the configuration are those of
// a real build.
func Image(t testing.TB, config v1.Config, arch string, layers ...[]Entry) v1.Image {
	t.Helper()
	return image(t, config, arch, layers, tarball.WithMediaType(types.OCILayer))
}

// ZstdImage is Image with layers as COMPRESSION=zstd makes them.
func ZstdImage(t testing.TB, config v1.Config, arch string, layers ...[]Entry) v1.Image {
	t.Helper()
	return image(t, config, arch, layers, tarball.WithMediaType(types.OCILayerZStd), tarball.WithCompression(compression.ZStd))
}

func image(t testing.TB, config v1.Config, arch string, layers [][]Entry, options ...tarball.LayerOption) v1.Image {
	t.Helper()
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	for _, entries := range layers {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, e := range entries {
			e.Size = int64(len(e.Content))
			if e.Typeflag == 0 {
				e.Typeflag = tar.TypeReg
			}
			if e.Mode == 0 {
				e.Mode = 0o644
			}
			e.ModTime = time.Unix(Epoch, 0)
			if err := w.WriteHeader(&e.Header); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(w, e.Content); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil }, options...)
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.Config, file.OS, file.Architecture, file.Created = config, "linux", arch, v1.Time{Time: time.Unix(Epoch, 0).UTC()}
	if img, err = mutate.ConfigFile(img, file); err != nil {
		t.Fatal(err)
	}
	return img
}
