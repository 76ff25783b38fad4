package dist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/mod/modfile"
	"golang.org/x/sync/errgroup"
)

// Compressor makes a layer's blob of its tar. It is ours and not BuildKit's,
// so that the digests of a commit are the same from every BuildKit and with
// every Go: a gzip stream is a matter of who wrote it.
type Compressor struct {
	Compression string // gzip or zstd
	// Version is the module that decides about the bytes, and its settings.
	Version string
}

const (
	module = "github.com/klauspost/compress"
	// gzipLevel gives the size of the standard library's level 5 in three
	// fifths of its time: 127 MB/s of the toolbox's layers on one core.
	gzipLevel = 6
)

// NewCompressor is the compressor that the go.mod of a checkout pins, for the
// value of COMPRESSION: gzip, which is the default, or zstd.
func NewCompressor(root, compression string) (Compressor, error) {
	return pinned(root, compression, linked(debug.ReadBuildInfo()))
}

func pinned(root, compression, have string) (Compressor, error) {
	switch compression {
	case "":
		compression = "gzip"
	case "gzip", "zstd":
	default:
		return Compressor{}, fmt.Errorf("COMPRESSION=%s is unknown: use gzip or zstd", compression)
	}
	name := filepath.Join(root, "go.mod")
	text, err := os.ReadFile(name)
	if err != nil {
		return Compressor{}, err
	}
	mod, err := modfile.Parse(name, text, nil)
	if err != nil {
		return Compressor{}, err
	}
	for _, r := range mod.Require {
		if r.Mod.Path != module {
			continue
		}
		if have != "" && have != r.Mod.Version {
			return Compressor{}, fmt.Errorf("%s pins %s, and this program has %s of it, which makes other bytes: run the targets of that checkout itself", name, r.Mod, have)
		}
		c := Compressor{Compression: compression, Version: r.Mod.String()}
		if compression == "gzip" {
			c.Version += fmt.Sprintf(" level %d", gzipLevel)
		}
		return c, nil
	}
	return Compressor{}, fmt.Errorf("%s does not require %s, which compresses layers", name, module)
}

// linked is the compressing module's version in a program; empty where the
// program does not say.
func linked(info *debug.BuildInfo, ok bool) string {
	if !ok {
		return ""
	}
	for _, m := range info.Deps {
		if m.Path == module && m.Replace != nil {
			return m.Replace.Path + "@" + m.Replace.Version
		}
		if m.Path == module {
			return m.Version
		}
	}
	return ""
}

func (c Compressor) writer(w io.Writer) (io.WriteCloser, string, error) {
	switch c.Compression {
	case "gzip":
		z, err := gzip.NewWriterLevel(w, gzipLevel)
		return z, ocispec.MediaTypeImageLayerGzip, err
	case "zstd":
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		return z, ocispec.MediaTypeImageLayerZstd, err
	}
	return nil, "", fmt.Errorf("there is no compression %q", c.Compression)
}

// reuse takes over the compressed layers of an old dist that this compressor
// has made.
func (s *Staging) reuse() {
	old, err := Read(s.final)
	if err != nil || old.Compression != s.compressor.Compression || old.Compressor != s.compressor.Version {
		return
	}
	_, mediaType, err := s.compressor.writer(io.Discard)
	if err != nil {
		return
	}
	for _, img := range old.Images {
		for _, v := range img.Platforms {
			for _, l := range v.Layers {
				if info, err := os.Stat(s.blob(l.Digest.Encoded())); err == nil && info.Size() == l.Size {
					s.layers[l.DiffID] = ocispec.Descriptor{MediaType: mediaType, Digest: l.Digest, Size: l.Size}
				}
			}
		}
	}
}

// Has tells whether a layer is there in its compressed form: BuildKit need
// not send it.
func (s *Staging) Has(diffID digest.Digest) bool {
	_, ok := s.layers[diffID]
	return ok
}

// Compress makes the blobs of all layers of manifests that BuildKit exported,
// and removes what it made them of. It returns how many bytes those were.
func (s *Staging) Compress(ctx context.Context, manifests []digest.Digest) (int64, error) {
	var todo []ocispec.Descriptor
	var total int64
	for _, d := range manifests {
		var m ocispec.Manifest
		if err := s.readJSON(d, &m); err != nil {
			return 0, err
		}
		for _, l := range m.Layers {
			if l.MediaType != ocispec.MediaTypeImageLayer {
				return 0, fmt.Errorf("BuildKit exported a layer as %s, not as a plain tar: is it older than v0.12?", l.MediaType)
			}
			if !s.Has(l.Digest) && !slices.ContainsFunc(todo, func(o ocispec.Descriptor) bool { return o.Digest == l.Digest }) {
				todo = append(todo, l)
				total += l.Size
			}
		}
	}
	// The longest first, so that no core waits for one at the end.
	slices.SortFunc(todo, func(a, b ocispec.Descriptor) int { return cmp.Compare(b.Size, a.Size) })
	made := make([]ocispec.Descriptor, len(todo))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, l := range todo {
		group.Go(func() (err error) {
			if made[i], err = s.compress(ctx, l.Digest); err != nil {
				return fmt.Errorf("compressing the layer %s: %w", l.Digest, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	for i, l := range todo {
		s.layers[l.Digest] = made[i]
	}
	return total, nil
}

func (s *Staging) compress(ctx context.Context, diffID digest.Digest) (desc ocispec.Descriptor, err error) {
	from := s.blob(diffID.Encoded())
	in, err := os.Open(from)
	if err != nil {
		return desc, err
	}
	defer in.Close()
	out, err := os.CreateTemp(s.dir, "layer-*")
	if err != nil {
		return desc, err
	}
	defer func() { _, err = out.Close(), errors.Join(err, os.RemoveAll(out.Name())) }()
	sum := digest.Canonical.Digester()
	z, mediaType, err := s.compressor.writer(io.MultiWriter(out, sum.Hash()))
	if err != nil {
		return desc, err
	}
	plain := digest.Canonical.Digester()
	if _, err := io.Copy(io.MultiWriter(z, plain.Hash()), &cancellable{ctx, in}); err != nil {
		return desc, err
	}
	if err := z.Close(); err != nil {
		return desc, err
	}
	if plain.Digest() != diffID { // it may be the daemon's own file
		return desc, fmt.Errorf("its bytes have the digest %s: the builder's store is damaged: `go run mage.go buildkit:down`, then remove the folder buildkit of the cache folder", plain.Digest())
	}
	info, err := out.Stat()
	if err != nil {
		return desc, err
	}
	desc = ocispec.Descriptor{MediaType: mediaType, Digest: sum.Digest(), Size: info.Size()}
	// A later build takes a blob of the right name and size for what it is, also
	// after a power cut.
	if err := errors.Join(out.Chmod(0o444), out.Sync(), out.Close()); err != nil {
		return desc, err
	}
	if err := os.Rename(out.Name(), s.blob(desc.Digest.Encoded())); err != nil {
		return desc, err
	}
	return desc, os.Remove(from)
}

// cancellable is a reader that ends with its context.
type cancellable struct {
	ctx context.Context
	r   io.Reader
}

func (c *cancellable) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}
