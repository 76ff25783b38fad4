package dist

import (
	"errors"
	"fmt"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// Content is a variant as it lies in a dist folder. The layout's own list
// holds the indexes, and each of them its variants.
func Content(folder string, img *Image, v *Variant) (v1.Image, error) {
	fail := func(err error) (v1.Image, error) {
		return nil, fmt.Errorf("%s for %s in %s: %w", img.Name, v.Platform, folder, err)
	}
	top, err := layout.ImageIndexFromPath(filepath.Join(folder, "oci"))
	if err != nil {
		return fail(err)
	}
	hash, err := v1.NewHash(img.IndexDigest.String())
	if err != nil {
		return fail(err)
	}
	index, err := top.ImageIndex(hash)
	if err != nil {
		return fail(err)
	}
	if hash, err = v1.NewHash(v.Digest.String()); err != nil {
		return fail(err)
	}
	content, err := index.Image(hash)
	if err != nil {
		return fail(err)
	}
	return content, nil
}

// Check reads the whole layout and compares every blob with its digest, and
// the tars of every image's layers with its diff ids.
func Check(folder string) error {
	path, err := layout.FromPath(filepath.Join(folder, "oci"))
	if err != nil {
		return err
	}
	index, err := path.ImageIndex()
	if err != nil {
		return err
	}
	// Not its check of layers, which takes each for gzip.
	if err := validate.Index(index, validate.Fast); err != nil {
		return err
	}
	return checkLayers(index, map[v1.Hash]v1.Hash{})
}

// checkLayers checks the layers of all images of an index. tars are the digests
// of the tars in the blobs that are read already: images share layers.
func checkLayers(index v1.ImageIndex, tars map[v1.Hash]v1.Hash) error {
	m, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, desc := range m.Manifests {
		if desc.MediaType.IsIndex() {
			below, err := index.ImageIndex(desc.Digest)
			if err != nil {
				return err
			}
			if err := checkLayers(below, tars); err != nil {
				return err
			}
			continue
		}
		img, err := index.Image(desc.Digest)
		if err != nil {
			return err
		}
		if err := checkImage(img, tars); err != nil {
			return fmt.Errorf("the manifest %s: %w", desc.Digest, err)
		}
	}
	return nil
}

func checkImage(img v1.Image, tars map[v1.Hash]v1.Hash) error {
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return err
	}
	diffIDs := config.RootFS.DiffIDs // a layer's own DiffID is what its tar has
	if len(diffIDs) != len(layers) {
		return fmt.Errorf("it has %d layers, but its configuration lists %d diff ids", len(layers), len(diffIDs))
	}
	for i, l := range layers {
		digest, err := l.Digest()
		if err != nil {
			return err
		}
		if _, ok := tars[digest]; !ok {
			if tars[digest], err = readLayer(l, digest); err != nil {
				return fmt.Errorf("layer %s: %w", digest, err)
			}
		}
		if tars[digest] != diffIDs[i] {
			return fmt.Errorf("layer %s: its tar has the digest %s, not the diff id %s", digest, tars[digest], diffIDs[i])
		}
	}
	return nil
}

// readLayer compares a layer's blob with its digest and returns that of its tar.
func readLayer(l v1.Layer, digest v1.Hash) (tar v1.Hash, err error) {
	size, err := l.Size()
	if err != nil {
		return tar, err
	}
	blob, err := l.Compressed()
	if err != nil {
		return tar, err
	}
	found, n, err := v1.SHA256(blob)
	if err := errors.Join(err, blob.Close()); err != nil {
		return tar, err
	}
	if found != digest || n != size {
		return tar, fmt.Errorf("the blob has %d bytes and the digest %s, not %d bytes", n, found, size)
	}
	content, err := l.Uncompressed()
	if err != nil {
		return tar, err
	}
	tar, _, err = v1.SHA256(content)
	return tar, errors.Join(err, content.Close())
}
