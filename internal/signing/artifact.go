package signing

import (
	"bytes"
	"maps"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Artifact is the manifest of an OCI 1.1 artifact whose layers are the contents
// by media type, in the order of the types.
func Artifact(artifactType string, contents map[string][]byte, annotations map[string]string) (*v1.Manifest, error) {
	describe := func(t types.MediaType, b []byte) (v1.Descriptor, error) {
		h, size, err := v1.SHA256(bytes.NewReader(b))
		return v1.Descriptor{MediaType: t, Digest: h, Size: size}, err
	}
	config, err := describe(emptyType, Empty)
	if err != nil {
		return nil, err
	}
	m := &v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, ArtifactType: artifactType, Config: config, Annotations: annotations}
	for _, t := range slices.Sorted(maps.Keys(contents)) {
		d, err := describe(types.MediaType(t), contents[t])
		if err != nil {
			return nil, err
		}
		m.Layers = append(m.Layers, d)
	}
	return m, nil
}
