// Package differential compares what the unpacker makes with what Debian's own
// tools (mmdebstrap, apt, dpkg and the maintainer scripts) make of the same
// packages. Every difference must be listed with its reason.
package differential

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Entry is what is compared of a path. Times are not: one side has the
// build's, the other the clock's.
type Entry struct {
	Type   byte // f, d, l, or another
	Mode   int64
	UID    int
	GID    int
	Target string // of a link
	Hash   string // sha256 of a file's content
	text   []byte // the content, when small enough to compare lines
}

// maxText is the size up to which contents are kept, bytes.
const maxText = 4 << 20

// Tree maps paths, absolute in the image, to entries.
type Tree map[string]Entry

// Dirs reads folders that lie over each other, the later over the earlier.
func Dirs(layers ...string) (Tree, error) {
	t := Tree{}
	for _, layer := range layers {
		err := filepath.WalkDir(layer, func(p string, d fs.DirEntry, err error) error {
			if err != nil || p == layer {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			st := info.Sys().(*syscall.Stat_t)
			e := Entry{Type: '?', Mode: int64(st.Mode & 0o7777), UID: int(st.Uid), GID: int(st.Gid)}
			switch {
			case info.IsDir():
				e.Type = 'd'
			case info.Mode()&fs.ModeSymlink != 0:
				e.Type, e.Mode = 'l', 0
				if e.Target, err = os.Readlink(p); err != nil {
					return err
				}
			case info.Mode().IsRegular():
				f, err := os.Open(p)
				if err != nil {
					return err
				}
				defer f.Close()
				if err := e.read(f, info.Size()); err != nil {
					return err
				}
			}
			t[strings.TrimPrefix(p, layer)] = e
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Tar reads a rootfs from an archive. A hard link counts as the file it is.
func Tar(r io.Reader) (Tree, error) {
	t := Tree{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		p := filepath.Join("/", h.Name)
		if p == "/" {
			continue
		}
		e := Entry{Type: '?', Mode: h.Mode & 0o7777, UID: h.Uid, GID: h.Gid}
		switch h.Typeflag {
		case tar.TypeDir:
			e.Type = 'd'
		case tar.TypeSymlink:
			e.Type, e.Mode, e.Target = 'l', 0, h.Linkname
		case tar.TypeReg:
			if err := e.read(tr, h.Size); err != nil {
				return nil, err
			}
		case tar.TypeLink:
			var ok bool
			if e, ok = t[filepath.Join("/", h.Linkname)]; !ok {
				return nil, fmt.Errorf("%s is a hard link to %s, which does not come before it", p, h.Linkname)
			}
		}
		t[p] = e
	}
}

func (e *Entry) read(r io.Reader, size int64) error {
	h := sha256.New()
	e.Type = 'f'
	if size <= maxText {
		b, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		e.text = b
		h.Write(b)
	} else if _, err := io.Copy(h, r); err != nil {
		return err
	}
	e.Hash = hex.EncodeToString(h.Sum(nil))
	return nil
}

// String is the entry in one line, for a difference's report.
func (e Entry) String() string {
	switch e.Type {
	case 'l':
		return fmt.Sprintf("link %d:%d to %s", e.UID, e.GID, e.Target)
	case 'f':
		return fmt.Sprintf("file %04o %d:%d sha256 %.12s", e.Mode, e.UID, e.GID, e.Hash)
	case 'd':
		return fmt.Sprintf("folder %04o %d:%d", e.Mode, e.UID, e.GID)
	}
	return fmt.Sprintf("special file %04o %d:%d", e.Mode, e.UID, e.GID)
}
