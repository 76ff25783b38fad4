package dist

import (
	"fmt"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
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
