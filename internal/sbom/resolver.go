package sbom

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"

	stereoscope "github.com/anchore/stereoscope/pkg/file"
	"github.com/anchore/syft/syft/artifact"
	"github.com/anchore/syft/syft/file"
	"github.com/anchore/syft/syft/source"
	"github.com/bmatcuk/doublestar/v4"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
)

// resolver shows an image's merged file system to syft's catalogers. Syft's
// own image source writes each layer of each image to disk and classifies
// every file; ours shares layers between the images of a family.
type resolver struct {
	fs *imagefs.FS
}

var _ file.Resolver = resolver{}

func location(f *imagefs.File, accessed string) file.Location {
	return file.NewVirtualLocation("/"+f.Path, accessed)
}

func (r resolver) file(name string) *imagefs.File {
	if f := r.fs.Stat(name); f != nil && f.Type != tar.TypeDir {
		return f
	}
	return nil
}

func (r resolver) FileContentsByLocation(l file.Location) (io.ReadCloser, error) {
	f := r.file(l.RealPath)
	if f == nil || !f.Regular() {
		return nil, &fs.PathError{Op: "read", Path: l.RealPath, Err: fs.ErrNotExist}
	}
	return content{f.Open()}, nil
}

// content has ReadAt and Seek, so that binaries are not copied into memory.
type content struct{ *io.SectionReader }

func (content) Close() error { return nil }

func (r resolver) FileMetadataByLocation(l file.Location) (file.Metadata, error) {
	f := r.fs.Lstat(l.RealPath)
	if f == nil {
		return file.Metadata{}, &fs.PathError{Op: "stat", Path: l.RealPath, Err: fs.ErrNotExist}
	}
	return metadata(f), nil
}

func metadata(f *imagefs.File) file.Metadata {
	m := file.Metadata{
		FileInfo: stereoscope.ManualInfo{
			NameValue: path.Base(f.Path), SizeValue: f.Size,
			ModeValue: fs.FileMode(f.Mode & 0o777), ModTimeValue: f.ModTime,
		},
		Path: "/" + f.Path, LinkDestination: f.Link, UserID: f.UID, GroupID: f.GID,
		Type: stereoscope.TypeFromTarType(f.Type),
	}
	if f.ELF {
		m.MIMEType = elfType
	}
	return m
}

func (r resolver) HasPath(name string) bool { return r.fs.Stat(name) != nil }

func (r resolver) FilesByPath(paths ...string) ([]file.Location, error) {
	var out []file.Location
	for _, p := range paths {
		if f := r.file(p); f != nil {
			out = append(out, location(f, p))
		}
	}
	return out, nil
}

func (r resolver) FilesByGlob(patterns ...string) ([]file.Location, error) {
	var out []file.Location
	for _, pattern := range patterns {
		pattern = strings.TrimPrefix(pattern, "/")
		if !doublestar.ValidatePattern(pattern) {
			return nil, fmt.Errorf("glob %q is not valid", pattern)
		}
		// Most globs name a file in any folder, or any file of one folder: do
		// not match 60,000 paths in full for that.
		base, _ := doublestar.SplitPattern(pattern)
		prefix := base + "/"
		if base == "." || base == "/" {
			prefix = ""
		}
		last := path.Base(pattern)
		literal := !strings.ContainsAny(last, "*?[{")
		for _, f := range r.fs.Below(prefix) {
			if f.Regular() && (!literal || strings.HasSuffix(f.Path, last)) && doublestar.MatchUnvalidated(pattern, f.Path) {
				out = append(out, location(f, "/"+f.Path))
			}
		}
	}
	return out, nil
}

const elfType = "application/x-executable"

func (r resolver) FilesByMIMEType(types ...string) ([]file.Location, error) {
	var out []file.Location
	for _, t := range types {
		if t != elfType {
			continue
		}
		for _, f := range r.fs.All() {
			if f.ELF {
				out = append(out, location(f, "/"+f.Path))
			}
		}
		break
	}
	return out, nil
}

func (r resolver) RelativeFileByPath(_ file.Location, name string) *file.Location {
	f := r.file(name)
	if f == nil {
		return nil
	}
	l := location(f, name)
	return &l
}

func (r resolver) AllLocations(ctx context.Context) <-chan file.Location {
	out := make(chan file.Location)
	go func() {
		defer close(out)
		for _, f := range r.fs.All() {
			select {
			case out <- location(f, "/"+f.Path):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// imageSource is the variant as a syft source.
type imageSource struct {
	resolver
	description source.Description
}

var _ source.Source = imageSource{}

func (s imageSource) ID() artifact.ID                                  { return artifact.ID(s.description.ID) }
func (s imageSource) FileResolver(source.Scope) (file.Resolver, error) { return s.resolver, nil }
func (s imageSource) Describe() source.Description                     { return s.description }
func (s imageSource) Close() error                                     { return nil }
