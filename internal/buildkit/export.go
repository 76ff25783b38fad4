package buildkit

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/exporter/containerimage/exptypes"
	ocispecs "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sirupsen/logrus"
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
	// Annotations go into the image manifest.
	Annotations map[string]string
	// Compression is "gzip" or "zstd"; empty means gzip.
	Compression string
}

// Compression reads COMPRESSION: gzip, which is the default, or zstd.
func Compression(getenv func(string) string) (string, error) {
	switch c := getenv("COMPRESSION"); c {
	case "", "gzip":
		return "gzip", nil
	case "zstd":
		return c, nil
	default:
		return "", fmt.Errorf("COMPRESSION=%s is unknown: use gzip or zstd", c)
	}
}

// OpenStore opens (and makes) the blob store of an OCI layout, the folder
// blobs/sha256. One store takes the exports of any number of concurrent jobs;
// a blob that it already has is not sent again.
func OpenStore(dir string) (content.Store, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the layout %s: %w", dir, err)
	}
	// The store warns of file systems without fs-verity, which it can do without.
	level := logrus.GetLevel()
	logrus.SetLevel(logrus.ErrorLevel)
	store, err := local.NewStore(dir)
	logrus.SetLevel(level)
	if err != nil {
		return nil, fmt.Errorf("opening the blob store of %s: %w", dir, err)
	}
	return &sharedStore{Store: store, writing: map[string]chan struct{}{}}, nil
}

// sharedStore lets concurrent exports send the same blob: the second waits for
// the first and is told that the blob is there, where the store itself would
// have it fail and try again.
type sharedStore struct {
	content.Store
	mu      sync.Mutex
	writing map[string]chan struct{}
}

func (s *sharedStore) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	var o content.WriterOpts
	for _, opt := range opts {
		if err := opt(&o); err != nil {
			return nil, err
		}
	}
	for {
		s.mu.Lock()
		busy, ok := s.writing[o.Ref]
		if !ok {
			done := make(chan struct{})
			s.writing[o.Ref] = done
			s.mu.Unlock()
			w, err := s.Store.Writer(ctx, opts...)
			if err != nil {
				s.release(o.Ref)
				return nil, err
			}
			return &sharedWriter{Writer: w, release: sync.OnceFunc(func() { s.release(o.Ref) })}, nil
		}
		s.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *sharedStore) release(ref string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.writing[ref])
	delete(s.writing, ref)
}

type sharedWriter struct {
	content.Writer
	release func()
}

func (w *sharedWriter) Close() error {
	defer w.release()
	return w.Writer.Close()
}

// To is the exporter entry that writes the variant's manifest, config and
// layers into a store. It adds no index: Descriptor gives the manifest.
//
// Digests depend on the layers' content and the compression only: no
// attestation is added, layers that came compressed from a cache are compressed
// again unless they already are as asked, and timestamps are left alone.
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
	compression := e.Compression
	if compression == "" {
		compression = "gzip"
	}
	maps.Copy(attrs, map[string]string{
		"tar":               "false",
		"compression":       compression,
		"force-compression": "true",
		"oci-mediatypes":    "true",
	})
	for k, v := range e.Annotations {
		attrs[exptypes.AnnotationManifestKey(nil, k)] = v
	}
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
