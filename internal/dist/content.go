package dist

import (
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

// Check reads the whole layout and compares every blob with its digest.
func Check(folder string) error {
	path, err := layout.FromPath(filepath.Join(folder, "oci"))
	if err != nil {
		return err
	}
	index, err := path.ImageIndex()
	if err != nil {
		return err
	}
	return validate.Index(index)
}
