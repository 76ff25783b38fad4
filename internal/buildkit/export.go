package buildkit

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/exporter/containerimage/exptypes"
	ocispecs "github.com/opencontainers/image-spec/specs-go/v1"
)

// Export is how a variant leaves BuildKit.
type Export struct {
	// Config is the image config, as in the OCI image specification, but for
	// the diff ids and the history, which come from the layers. Created is
	// required. A zero Config leaves all of it to a frontend.
	Config ocispecs.Image
	// Layers describes every layer of the state, the lowest one first: the
	// "created by" of its history entry. An entry that is missing would be
	// BuildKit's own, with the time of the build in it.
	Layers []string
}

// To is the exporter entry that writes the variant's manifest, config and
// layers into a store. It adds no index: Descriptor gives the manifest.
//
// Digests depend on the layers' content only: no attestation is added, layers
// are plain tars, also those that came compressed from a cache, and timestamps
// are left alone.
func (e Export) To(store content.Store) (client.ExportEntry, error) {
	attrs := map[string]string{}
	if e.Config.OS != "" || len(e.Layers) > 0 {
		if e.Config.Created == nil || len(e.Layers) == 0 {
			return client.ExportEntry{}, errors.New("an export needs the image's creation time and a description of every layer, or its digest would depend on the clock")
		}
		e.Config.History = nil
		for _, l := range e.Layers {
			e.Config.History = append(e.Config.History, ocispecs.History{Created: e.Config.Created, CreatedBy: l})
		}
		cfg, err := json.Marshal(e.Config)
		if err != nil {
			return client.ExportEntry{}, fmt.Errorf("encoding the image config: %w", err)
		}
		attrs[exptypes.ExporterImageConfigKey] = string(cfg)
	}
	maps.Copy(attrs, map[string]string{
		"tar":               "false",
		"compression":       "uncompressed",
		"force-compression": "true",
		"oci-mediatypes":    "true",
	})
	return client.ExportEntry{Type: client.ExporterOCI, Attrs: attrs, OutputStore: store}, nil
}

// Descriptor is the manifest that an export wrote.
func Descriptor(res *client.SolveResponse) (ocispecs.Descriptor, error) {
	var desc ocispecs.Descriptor
	raw, err := base64.StdEncoding.DecodeString(res.ExporterResponse[exptypes.ExporterImageDescriptorKey])
	if err == nil {
		err = json.Unmarshal(raw, &desc)
	}
	if err != nil {
		return desc, fmt.Errorf("BuildKit's answer holds no manifest descriptor (is the daemon older than v0.12?): %w", err)
	}
	// BuildKit stamps the descriptor (not the manifest) with the time of the export.
	desc.Annotations = nil
	return desc, nil
}
