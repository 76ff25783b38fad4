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
// every layer's tar with its diff id.
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
	return checkLayers(index, map[v1.Hash]bool{})
}

// checkLayers checks the layers of all images of an index that are not done yet.
func checkLayers(index v1.ImageIndex, done map[v1.Hash]bool) error {
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
			if err := checkLayers(below, done); err != nil {
				return err
			}
			continue
		}
		img, err := index.Image(desc.Digest)
		if err != nil {
			return err
		}
		layers, err := img.Layers()
		if err != nil {
			return err
		}
		for _, l := range layers {
			digest, err := l.Digest()
			if err != nil {
				return err
			}
			if done[digest] {
				continue
			}
			done[digest] = true
			if err := checkLayer(l, digest); err != nil {
				return fmt.Errorf("layer %s of the manifest %s: %w", digest, desc.Digest, err)
			}
		}
	}
	return nil
}

func checkLayer(l v1.Layer, digest v1.Hash) error {
	size, err := l.Size()
	if err != nil {
		return err
	}
	diffID, err := l.DiffID()
	if err != nil {
		return err
	}
	blob, err := l.Compressed()
	if err != nil {
		return err
	}
	found, n, err := v1.SHA256(blob)
	if err := errors.Join(err, blob.Close()); err != nil {
		return err
	}
	if found != digest || n != size {
		return fmt.Errorf("the blob has %d bytes and the digest %s, not %d bytes", n, found, size)
	}
	tar, err := l.Uncompressed()
	if err != nil {
		return err
	}
	found, _, err = v1.SHA256(tar)
	if err := errors.Join(err, tar.Close()); err != nil {
		return err
	}
	if found != diffID {
		return fmt.Errorf("its tar has the digest %s, not the diff id %s", found, diffID)
	}
	return nil
}
