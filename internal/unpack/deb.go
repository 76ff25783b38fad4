package unpack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/loomcycle/loomcycle-images/internal/unpack/xz"
)

// Limits for what one package may make of its compressed bytes. Real packages
// stay below a ratio of 20, and no control file is larger than a few MiB.
const (
	maxRatio    = 100
	minUnpacked = 64 << 20 // bytes that any package may have
	maxControl  = 64 << 20
	maxMembers  = 500_000
	maxWindow   = 128 << 20 // of zstd's decoder, bytes
	maxDict     = 64 << 20  // of xz's, bytes: that of its largest preset
)

var errBomb = errors.New("it unpacks to more than is allowed for its size: a decompression bomb")

// deb is a binary package in memory.
type deb struct {
	stanza  stanza
	control map[string]controlFile
	names   []string // of control, in the order of the archive
	data    arMember
}

type controlFile struct {
	data  []byte
	mode  int64
	mtime int64
}

// openDeb reads a package's control member, deb(5).
func openDeb(b []byte) (*deb, error) {
	all, err := readAr(b)
	if err != nil {
		return nil, err
	}
	var members []arMember
	for _, m := range all {
		if !strings.HasPrefix(m.name, "_") { // reserved for local use
			members = append(members, m)
		}
	}
	if len(members) < 3 || members[0].name != "debian-binary" || !bytes.HasPrefix(members[0].data, []byte("2.")) {
		return nil, errors.New("it is not a Debian package of format 2")
	}
	if len(members) > 3 || !strings.HasPrefix(members[1].name, "control.tar") || !strings.HasPrefix(members[2].name, "data.tar") {
		return nil, errors.New("its members are not debian-binary, control.tar and data.tar")
	}
	d := &deb{control: map[string]controlFile{}, data: members[2]}
	r, err := decompress(members[1], maxControl)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	left := int64(maxControl)
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("control archive: %w", err)
		}
		if left -= h.Size; h.Size < 0 || left < 0 { // a sparse file has more bytes than the archive
			return nil, fmt.Errorf("control archive: member %q: %w", h.Name, errBomb)
		}
		name := path.Clean(h.Name)
		if h.Typeflag == tar.TypeDir && name == "." {
			continue
		}
		if h.Typeflag != tar.TypeReg || strings.ContainsAny(name, "/\n") || name == ".." {
			return nil, fmt.Errorf("control archive: member %q is not a plain file at its top", h.Name)
		}
		if _, twice := d.control[name]; twice {
			return nil, fmt.Errorf("control archive: member %q is there twice", name)
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			return nil, fmt.Errorf("control archive: member %q: %w", name, err)
		}
		d.control[name] = controlFile{data, h.Mode, h.ModTime.Unix()}
		d.names = append(d.names, name)
	}
	c, ok := d.control["control"]
	if !ok {
		return nil, errors.New("control archive: it has no file named control")
	}
	if d.stanza, err = parseStanza(string(c.data)); err != nil {
		return nil, fmt.Errorf("control archive: control: %w", err)
	}
	return d, nil
}

// each calls do for every member of the package's data archive as it streams.
func (d *deb) each(do func(*tar.Header, io.Reader) error) error {
	limit := max(minUnpacked, int64(len(d.data.data))*maxRatio)
	r, err := decompress(d.data, limit)
	if err != nil {
		return err
	}
	defer r.Close()
	tr := tar.NewReader(r)
	for n := 1; ; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("data archive, member %d: %w", n, err)
		}
		if n > maxMembers {
			return fmt.Errorf("it has more than %d members", maxMembers)
		}
		// A sparse file has more bytes than the archive.
		if limit -= h.Size; h.Size < 0 || limit < 0 {
			return fmt.Errorf("member %q: %w", h.Name, errBomb)
		}
		if err := do(h, tr); err != nil {
			return fmt.Errorf("member %q: %w", h.Name, err)
		}
	}
}

// decompress opens a tar member by the extension of its name and fails when
// it yields more than limit bytes.
func decompress(m arMember, limit int64) (io.ReadCloser, error) {
	var r io.ReadCloser
	var err error
	src := bytes.NewReader(m.data)
	switch ext := strings.TrimLeft(path.Ext(m.name), "."); ext {
	case "tar":
		r = io.NopCloser(src)
	case "gz":
		r, err = gzip.NewReader(src)
	case "xz":
		r = io.NopCloser(xz.NewReader(src, maxDict))
	case "zst":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxWindow), zstd.WithDecoderMaxWindow(maxWindow)); err == nil {
			r = z.IOReadCloser()
		}
	default:
		return nil, fmt.Errorf("member %q: its compression is none of xz, zst, gz or none", m.name)
	}
	if err != nil {
		return nil, fmt.Errorf("member %q: %w", m.name, err)
	}
	return &limited{r, limit, m.name}, nil
}

// limited stops a decompression bomb.
type limited struct {
	io.ReadCloser
	left int64
	name string
}

func (l *limited) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, fmt.Errorf("member %q: %w", l.name, errBomb)
	}
	return n, err
}

// Control returns a package's control file.
func Control(b []byte) (string, error) {
	d, err := openDeb(b)
	if err != nil {
		return "", err
	}
	return string(d.control["control"].data), nil
}
