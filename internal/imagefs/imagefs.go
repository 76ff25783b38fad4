// Package imagefs reads the file system that an image's layers add up to,
// without unpacking it: an index of every path with its owner and mode, and
// contents on demand. Layers that several images share are read once.
package imagefs

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// File is one path of an image.
type File struct {
	Path       string // from the root, without a leading slash
	Type       byte   // a tar type flag; a hard link has the type of its target
	Mode       int64  // permission bits with setuid (04000), setgid (02000), sticky (01000)
	UID, GID   int
	Size       int64
	Link       string // the target of a symbolic link
	ModTime    time.Time
	Capability bool // it carries file capabilities (security.capability)
	ELF        bool
	Layer      int // index in the manifest

	content io.ReaderAt
	offset  int64
}

// Regular says whether the path is a regular file.
func (f *File) Regular() bool { return f.Type == tar.TypeReg }

// Open reads the content. The reader also implements io.ReaderAt and io.Seeker.
func (f *File) Open() *io.SectionReader { return io.NewSectionReader(f.content, f.offset, f.Size) }

// Sum writes the content to each hash.
func (f *File) Sum(into ...hash.Hash) error {
	w := make([]io.Writer, len(into))
	for i, h := range into {
		w[i] = h
	}
	if _, err := io.Copy(io.MultiWriter(w...), f.Open()); err != nil {
		return fmt.Errorf("read /%s: %w", f.Path, err)
	}
	return nil
}

// FS is the merged file system of an image.
type FS struct {
	files  map[string]*File
	sorted []*File // by path
}

// All gives every entry in the order of paths; the slice must not be changed.
func (f *FS) All() []*File { return f.sorted }

// Below gives the entries whose path begins with prefix, in order.
func (f *FS) Below(prefix string) []*File {
	from, _ := slices.BinarySearchFunc(f.sorted, prefix, func(e *File, p string) int { return strings.Compare(e.Path, p) })
	to := from
	for to < len(f.sorted) && strings.HasPrefix(f.sorted[to].Path, prefix) {
		to++
	}
	return f.sorted[from:to]
}

// Lstat gives the entry at a path, a symbolic link as itself; nil if there is none.
func (f *FS) Lstat(name string) *File { return f.files[clean(name)] }

// Stat follows symbolic links, also those in the middle of the path; nil if
// there is no such file or the links go in a circle.
func (f *FS) Stat(name string) *File {
	name, ok := f.resolve(clean(name), 0)
	if !ok {
		return nil
	}
	return f.files[name]
}

// ReadFile gives the content of a file, following links.
func (f *FS) ReadFile(name string) ([]byte, error) {
	file := f.Stat(name)
	if file == nil || !file.Regular() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: fs.ErrNotExist}
	}
	return io.ReadAll(file.Open())
}

func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

// maxLinks is the kernel's own limit (path_resolution(7)).
const maxLinks = 40

func (f *FS) resolve(name string, depth int) (string, bool) {
	if depth > maxLinks {
		return "", false
	}
	done := ""
	for rest := name; rest != ""; {
		var part string
		part, rest, _ = strings.Cut(rest, "/")
		done = path.Join(done, part)
		file := f.files[done]
		if file == nil || file.Type != tar.TypeSymlink {
			continue
		}
		target := file.Link
		if !path.IsAbs(target) {
			target = path.Join(path.Dir("/"+done), target)
		}
		return f.resolve(clean(path.Join(target, rest)), depth+1)
	}
	return done, true
}

// Store keeps decompressed layers in a folder for as long as images that use
// them are read.
type Store struct {
	dir    string
	mu     sync.Mutex
	layers map[v1.Hash]*layer
}

// NewStore makes a store in a new folder below dir (the system's temporary
// folder when empty). Close removes it.
func NewStore(dir string) (*Store, error) {
	dir, err := os.MkdirTemp(dir, "layers-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for decompressed layers: %w", err)
	}
	return &Store{dir: dir, layers: map[v1.Hash]*layer{}}, nil
}

// Close removes the decompressed layers; file systems made from them can't be
// read any more.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, l := range s.layers {
		if l.tar != nil {
			errs = append(errs, l.tar.Close())
		}
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

type layer struct {
	once  sync.Once
	err   error
	tar   *os.File
	files []*File
}

// Open indexes an image. Each layer is checked against its diff ID.
func (s *Store) Open(ctx context.Context, img v1.Image) (*FS, error) {
	layers, err := img.Layers()
	if err != nil {
		return nil, fmt.Errorf("list the layers: %w", err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	if len(config.RootFS.DiffIDs) != len(layers) {
		return nil, fmt.Errorf("the configuration names %d layers and the manifest %d", len(config.RootFS.DiffIDs), len(layers))
	}
	read := make([]*layer, len(layers))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for i, l := range layers {
		id := config.RootFS.DiffIDs[i]
		s.mu.Lock()
		if s.layers[id] == nil {
			s.layers[id] = &layer{}
		}
		read[i] = s.layers[id]
		s.mu.Unlock()
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			read[i].once.Do(func() { read[i].err = read[i].load(l, id, s.dir) })
			if err := read[i].err; err != nil {
				return fmt.Errorf("layer %d (%s): %w", i, id, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return merge(read)
}

func (l *layer) load(from v1.Layer, id v1.Hash, dir string) error {
	compressed, err := from.Compressed()
	if err != nil {
		return err
	}
	defer compressed.Close()
	in, err := Decompress(compressed)
	if err != nil {
		return err
	}
	defer in.Close()
	if l.tar, err = os.CreateTemp(dir, id.Hex[:12]+"-*.tar"); err != nil {
		return err
	}
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(l.tar, sum), in); err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	if got := fmt.Sprintf("%x", sum.Sum(nil)); got != id.Hex {
		return fmt.Errorf("the content's digest is sha256:%s; the layer was changed after the config was written, build it again", got)
	}
	if _, err := l.tar.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return l.index()
}

// Decompress reads a layer's archive. It tells gzip and zstd by their first
// bytes (RFC 1952, RFC 8878); anything else is a plain archive.
func Decompress(r io.Reader) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(r, 1<<20)
	switch magic, _ := b.Peek(4); {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzip.NewReader(b)
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(b)
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return io.NopCloser(b), nil
}

func (l *layer) index() error {
	byPath := map[string]*File{}
	for r := tar.NewReader(l.tar); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("not a tar archive: %w", err)
		}
		f := &File{
			Path: clean(h.Name), Type: h.Typeflag, Mode: h.Mode & 0o7777,
			UID: h.Uid, GID: h.Gid, Link: h.Linkname, ModTime: h.ModTime, content: l.tar,
		}
		_, f.Capability = h.PAXRecords["SCHILY.xattr.security.capability"]
		switch h.Typeflag {
		case tar.TypeReg:
			// The reader takes whole blocks, so the file's own position is where the content begins.
			if f.offset, err = l.tar.Seek(0, io.SeekCurrent); err != nil {
				return err
			}
			f.Size = h.Size
			var magic [4]byte
			n, _ := f.Open().ReadAt(magic[:], 0)
			f.ELF = string(magic[:n]) == "\x7fELF"
		case tar.TypeLink:
			target := byPath[clean(h.Linkname)]
			if target == nil {
				return fmt.Errorf("/%s is a hard link to /%s, which is not in the layer", f.Path, h.Linkname)
			}
			linked := *target
			linked.Path, linked.Link = f.Path, ""
			f = &linked
		}
		byPath[f.Path] = f
		l.files = append(l.files, f)
	}
}

// Whiteouts are OCI image-spec's: layer.md, "Whiteouts".
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

func merge(layers []*layer) (*FS, error) {
	out := &FS{files: map[string]*File{}}
	remove := func(dir string) {
		for p := range out.files {
			if strings.HasPrefix(p, dir+"/") {
				delete(out.files, p)
			}
		}
	}
	for i, l := range layers {
		for _, f := range l.files {
			switch base := path.Base(f.Path); {
			case base == opaque:
				remove(path.Dir(f.Path))
			case strings.HasPrefix(base, whiteout):
				gone := path.Join(path.Dir(f.Path), base[len(whiteout):])
				delete(out.files, gone)
				remove(gone)
			}
		}
		for _, f := range l.files {
			if f.Path == "" || strings.HasPrefix(path.Base(f.Path), whiteout) {
				continue
			}
			if old := out.files[f.Path]; old != nil && old.Type == tar.TypeDir && f.Type != tar.TypeDir {
				remove(f.Path)
			}
			seen := *f
			seen.Layer = i
			out.files[f.Path] = &seen
		}
	}
	for _, f := range out.files {
		out.sorted = append(out.sorted, f)
	}
	slices.SortFunc(out.sorted, func(a, b *File) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}
