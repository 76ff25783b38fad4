package debian

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"

	"github.com/loomcycle/loomcycle-images/internal/unpack/xz"
	"github.com/opencontainers/go-digest"
	"pault.ag/go/debian/control"
)

// Entry is what a Packages index says of one binary package.
type Entry struct {
	Name, Version, Arch string
	Path                string // below the archive's root
	Size                int64  // bytes
	SHA256              digest.Digest
}

// PackagesIndex names the xz-compressed Packages index of a component and
// architecture: its path below dists/SUITE/, the same by hash (the path that
// outlives the index's replacement, empty when the archive has none), and
// what the InRelease file says of it.
func (r *Release) PackagesIndex(component, arch string) (name, byHash string, file File, err error) {
	name = path.Join(component, "binary-"+arch, "Packages.xz")
	file, ok := r.Files[name]
	if !ok {
		return "", "", File{}, fmt.Errorf("the InRelease file of %s lists no %s", r.Suite, name)
	}
	if r.ByHash {
		byHash = path.Join(path.Dir(name), "by-hash", "SHA256", file.SHA256.Encoded())
	}
	return name, byHash, file, nil
}

// ReadPackages calls visit for each package of an xz-compressed Packages
// index, holding one at a time in memory.
func ReadPackages(r io.Reader, visit func(Entry) error) error {
	paragraphs, err := control.NewParagraphReader(xz.NewReader(bufio.NewReaderSize(r, 1<<20), 64<<20), nil)
	if err != nil {
		return fmt.Errorf("reading a Packages index: %w", err)
	}
	for {
		p, err := paragraphs.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading a Packages index: %w", err)
		}
		v := p.Values
		size, err := strconv.ParseInt(v["Size"], 10, 64)
		if err != nil {
			return fmt.Errorf("package %s %s in a Packages index: its size is no number: %q", v["Package"], v["Version"], v["Size"])
		}
		e := Entry{
			Name: v["Package"], Version: v["Version"], Arch: v["Architecture"], Path: v["Filename"],
			Size: size, SHA256: digest.NewDigestFromEncoded(digest.SHA256, v["SHA256"]),
		}
		if err := e.SHA256.Validate(); err != nil {
			return fmt.Errorf("package %s %s in a Packages index: its SHA256 is malformed: %q", e.Name, e.Version, v["SHA256"])
		}
		if err := visit(e); err != nil {
			return err
		}
	}
}
