package dist

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// Staging is a dist folder in the making. It becomes the dist folder in one
// rename when Publish is called, or leaves no trace.
type Staging struct {
	final, dir string
	hold       *os.File // tells a later build that this one is at work
	turn       *os.File // held while the final folder is read and replaced
	compressor Compressor
	layers     map[digest.Digest]ocispec.Descriptor // the compressed ones, by diff id
	// Made has the images of this build; Keep adds those that it carries over.
	Made map[string]Made
}

// Stage starts a dist folder beside the final one, with links to the blobs
// that the final one has: what did not change is not exported again.
// Folders of builds that were killed are removed.
func Stage(final string, c Compressor) (*Staging, error) {
	pattern := "." + filepath.Base(final) + "-*.tmp"
	if err := sweep(filepath.Join(filepath.Dir(final), pattern)); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(final), pattern)
	if err != nil {
		return nil, err
	}
	s := &Staging{final: final, dir: dir, compressor: c, layers: map[digest.Digest]ocispec.Descriptor{}, Made: map[string]Made{}}
	if s.hold, err = hold(dir); err != nil {
		return nil, errors.Join(err, s.Discard())
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, errors.Join(err, s.Discard())
	}
	if err := os.MkdirAll(s.blob(""), 0o755); err != nil {
		return nil, errors.Join(err, s.Discard())
	}
	if err := s.adopt(); err != nil {
		return nil, errors.Join(err, s.Discard())
	}
	s.reuse()
	return s, nil
}

// adopt links the blobs that the final dist has and this one has not. Another
// build may put its own in the place of that dist meanwhile.
func (s *Staging) adopt() error {
	old := filepath.Join(s.final, "oci", "blobs", "sha256")
	entries, err := os.ReadDir(old)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		err := os.Link(filepath.Join(old, e.Name()), s.blob(e.Name()))
		switch {
		case err == nil, errors.Is(err, fs.ErrExist), errors.Is(err, fs.ErrNotExist):
		case errors.Is(err, fs.ErrPermission) && !s.owns(e):
			return fmt.Errorf("%s was built by another user (with sudo?), whose files can't be linked: build as that user, chown -R the folder or remove it: %w", s.final, err)
		default:
			return err
		}
	}
	return nil
}

// owns tells whether a file is of the user who made this staging folder, and who
// may link it wherever there are links.
func (s *Staging) owns(e fs.DirEntry) bool {
	theirs, err := e.Info()
	ours, oerr := os.Stat(s.dir)
	return err == nil && oerr == nil && theirs.Sys().(*syscall.Stat_t).Uid == ours.Sys().(*syscall.Stat_t).Uid
}

// take waits until no other build is between Keep and Publish of the same
// dist. The lock is a file beside it, which whoever holds it removes.
func (s *Staging) take() error {
	if s.turn != nil {
		return nil
	}
	name := filepath.Join(filepath.Dir(s.final), "."+filepath.Base(s.final)+".lock.tmp")
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			return err
		}
		for err = unix.EINTR; err == unix.EINTR; {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("locking %s: %w", name, err), f.Close())
		}
		// The one before removed the file that this process waited for?
		mine, err := f.Stat()
		there, terr := os.Stat(name)
		if err == nil && terr == nil && os.SameFile(mine, there) {
			s.turn = f
			return nil
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}

func (s *Staging) yield() error {
	if s.turn == nil {
		return nil
	}
	err := errors.Join(os.Remove(s.turn.Name()), s.turn.Close())
	s.turn = nil
	return err
}

// hold locks a folder for as long as this process has it open.
func hold(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("locking %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// young is how long a folder may exist before its maker has locked it.
const young = time.Minute

// sweep removes the folders that nobody holds any more.
func sweep(pattern string) error {
	left, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	for _, dir := range left {
		if info, err := os.Stat(dir); err != nil || time.Since(info.ModTime()) < young {
			continue
		}
		f, err := hold(dir)
		if err != nil {
			continue // a build is at work in it
		}
		if err := errors.Join(os.RemoveAll(dir), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// Layout is the folder of the OCI layout.
func (s *Staging) Layout() string { return filepath.Join(s.dir, "oci") }

func (s *Staging) blob(hex string) string { return filepath.Join(s.dir, "oci", "blobs", "sha256", hex) }

// Discard removes the staging folder; after Publish it does nothing.
func (s *Staging) Discard() error {
	err := os.RemoveAll(s.dir)
	if err != nil { // a solve that was cancelled may still have written into it
		err = os.RemoveAll(s.dir)
	}
	err = errors.Join(err, s.yield())
	if s.hold != nil {
		err = errors.Join(err, s.hold.Close())
		s.hold = nil
	}
	return err
}

// Built is one variant as BuildKit exported it into the layout.
type Built struct {
	Image    string
	Platform ocispec.Platform
	Manifest digest.Digest // of BuildKit's export
	Groups   []string      // names of the layers, the lowest first
	Config   ocispec.Image // without rootfs and history
	// Annotations are those of the manifest and of the index.
	Annotations map[string]string
}

// Add writes the variant's own manifest and configuration over its compressed
// layers, so that a digest depends on the layers and on our data and on no
// version of BuildKit's exporter.
func (s *Staging) Add(b Built) (Variant, ocispec.Descriptor, error) {
	fail := func(err error) (Variant, ocispec.Descriptor, error) {
		return Variant{}, ocispec.Descriptor{}, fmt.Errorf("%s for %s: %w", b.Image, platformString(b.Platform), err)
	}
	var exported ocispec.Manifest
	if err := s.readJSON(b.Manifest, &exported); err != nil {
		return fail(err)
	}
	var config ocispec.Image
	if err := s.readJSON(exported.Config.Digest, &config); err != nil {
		return fail(err)
	}
	if len(exported.Layers) != len(b.Groups) || len(config.RootFS.DiffIDs) != len(b.Groups) {
		return fail(fmt.Errorf("%d groups became %d layers (%d diff ids)", len(b.Groups), len(exported.Layers), len(config.RootFS.DiffIDs)))
	}
	v := Variant{Platform: platformString(b.Platform)}
	image := b.Config
	image.RootFS = config.RootFS
	manifest := ocispec.Manifest{
		Versioned:   specs.Versioned{SchemaVersion: 2},
		MediaType:   ocispec.MediaTypeImageManifest,
		Annotations: b.Annotations,
	}
	for i, l := range exported.Layers {
		image.History = append(image.History, ocispec.History{
			Created:   image.Created,
			CreatedBy: "layer " + b.Groups[i],
		})
		desc, ok := s.layers[l.Digest]
		if !ok || l.Digest != config.RootFS.DiffIDs[i] {
			return fail(fmt.Errorf("layer %s with the diff id %s is not compressed", l.Digest, config.RootFS.DiffIDs[i]))
		}
		manifest.Layers = append(manifest.Layers, desc)
		v.Layers = append(v.Layers, Layer{Group: b.Groups[i], Digest: desc.Digest, DiffID: l.Digest, Size: desc.Size})
		v.Size += desc.Size
	}
	var err error
	if manifest.Config, err = s.writeJSON(ocispec.MediaTypeImageConfig, image); err != nil {
		return fail(err)
	}
	desc, err := s.writeJSON(ocispec.MediaTypeImageManifest, manifest)
	if err != nil {
		return fail(err)
	}
	p := b.Platform
	desc.Platform = &p
	v.Digest, v.Config = desc.Digest, manifest.Config.Digest
	return v, desc, nil
}

// Index writes an image's index over its variants.
func (s *Staging) Index(annotations map[string]string, variants []ocispec.Descriptor) (ocispec.Descriptor, error) {
	return s.writeJSON(ocispec.MediaTypeImageIndex, ocispec.Index{
		Versioned:   specs.Versioned{SchemaVersion: 2},
		MediaType:   ocispec.MediaTypeImageIndex,
		Manifests:   variants,
		Annotations: annotations,
	})
}

// Keep carries over the images of the old dist that this build did not make,
// when they were built from the very same sources. From here to Publish or
// Discard other builds into the same dist wait.
func (s *Staging) Keep(r *Release, indexes map[string]ocispec.Descriptor) error {
	if err := s.take(); err != nil {
		return err
	}
	if err := s.adopt(); err != nil {
		return err
	}
	old, err := Read(s.final)
	if err != nil {
		return nil // there is no old dist, or none that can be read
	}
	made, err := ReadMade(s.final)
	if err != nil {
		return nil // nor is it known how its images were made
	}
	if !r.Source.exact() || old.Source != r.Source || old.Version != r.Version ||
		old.Epoch != r.Epoch || old.LockDigest != r.LockDigest || old.Compression != r.Compression || old.Compressor != r.Compressor {
		return nil
	}
	for _, img := range old.Images {
		if _, err := r.Image(img.Name); err == nil {
			continue
		}
		info, err := os.Stat(s.blob(img.IndexDigest.Encoded()))
		if err == nil {
			err = s.reach(img.IndexDigest, map[string]bool{})
		}
		if err != nil {
			return fmt.Errorf("%s has no whole %s, which its release.json names: remove the folder and build the family: %w", s.final, img.Name, err)
		}
		r.Images = append(r.Images, img)
		s.Made[img.Name] = made[img.Name]
		indexes[img.Name] = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageIndex, Digest: img.IndexDigest, Size: info.Size()}
	}
	return nil
}

// Publish writes the layout's index.json, release.json and build.json, drops the blobs
// that nothing refers to, and puts the folder in the place of the old one in
// one step.
func (s *Staging) Publish(r *Release, indexes map[string]ocispec.Descriptor) error {
	top := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	for _, img := range r.Images {
		d := indexes[img.Name]
		d.Annotations = map[string]string{ocispec.AnnotationRefName: img.Name}
		top.Manifests = append(top.Manifests, d)
	}
	for name, v := range map[string]any{"index.json": top, ocispec.ImageLayoutFile: ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion}} {
		text, err := json.Marshal(v)
		if err != nil {
			return err
		}
		if err := atomicfile.Write(filepath.Join(s.Layout(), name), append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	if err := s.prune(top); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := Validate(text); err != nil {
		return err
	}
	if err := atomicfile.Write(filepath.Join(s.dir, "release.json"), append(text, '\n'), 0o644); err != nil {
		return err
	}
	if err := WriteMade(s.dir, s.Made); err != nil {
		return err
	}
	return errors.Join(exchange(s.dir, s.final), s.yield())
}

// exchange puts a folder in the place of another in one step; what was there
// is removed afterwards.
func exchange(dir, final string) error {
	err := unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, final, unix.RENAME_EXCHANGE)
	switch {
	case errors.Is(err, unix.ENOENT):
		return os.Rename(dir, final)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS): // NFS, 9p and some of FUSE
		return replace(dir, final)
	case err != nil:
		return fmt.Errorf("cannot put the build in the place of %s: %w", final, err)
	}
	return os.RemoveAll(dir)
}

// replace does it where the file system exchanges nothing: for a moment there
// is no final one.
func replace(dir, final string) error {
	old := strings.TrimSuffix(dir, ".tmp") + "-old.tmp" // which sweep knows
	if err := os.Rename(final, old); err != nil {
		return err
	}
	if err := os.Rename(dir, final); err != nil {
		return errors.Join(err, os.Rename(old, final))
	}
	return os.RemoveAll(old)
}

// Watch returns a function that fails once another build has put its own dist
// in the place of the one that is there now.
func Watch(folder string) (check func() error, err error) {
	mine, err := os.Stat(folder)
	return func() error {
		now, err := os.Stat(folder)
		if err == nil && !os.SameFile(mine, now) {
			err = fmt.Errorf("another build has put its own in the place of %s meanwhile: run one at a time, or each in a checkout of its own", folder)
		}
		return err
	}, err
}

// prune removes the blobs that top does not reach.
func (s *Staging) prune(top ocispec.Index) error {
	live := map[string]bool{}
	for _, index := range top.Manifests {
		if err := s.reach(index.Digest, live); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(s.blob(""))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if live[e.Name()] {
			delete(live, e.Name())
		} else if err := os.Remove(s.blob(e.Name())); err != nil {
			return err
		}
	}
	for hex := range live {
		return fmt.Errorf("the layout lacks the blob sha256:%s", hex)
	}
	// The exporter's scratch folders.
	return errors.Join(os.RemoveAll(filepath.Join(s.Layout(), "ingest")), os.RemoveAll(filepath.Join(s.Layout(), "index.json.lock")))
}

// reach notes the blobs of an index, and reads those that are JSON.
func (s *Staging) reach(index digest.Digest, live map[string]bool) error {
	live[index.Encoded()] = true
	var idx ocispec.Index
	if err := s.readJSON(index, &idx); err != nil {
		return err
	}
	for _, m := range idx.Manifests {
		live[m.Digest.Encoded()] = true
		var manifest ocispec.Manifest
		if err := s.readJSON(m.Digest, &manifest); err != nil {
			return err
		}
		if err := s.readJSON(manifest.Config.Digest, new(ocispec.Image)); err != nil {
			return err
		}
		for _, d := range append(slices.Clone(manifest.Layers), manifest.Config) {
			live[d.Digest.Encoded()] = true
		}
	}
	return nil
}

func (s *Staging) readJSON(d digest.Digest, into any) error {
	b, err := os.ReadFile(s.blob(d.Encoded()))
	if err != nil {
		return err
	}
	if found := digest.FromBytes(b); found != d {
		return fmt.Errorf("the blob %s is damaged: its %d bytes are %s", d, len(b), found)
	}
	return json.Unmarshal(b, into)
}

func (s *Staging) writeJSON(mediaType string, v any) (ocispec.Descriptor, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	d := digest.FromBytes(b)
	desc := ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(b))}
	name := s.blob(d.Encoded())
	if have, err := os.ReadFile(name); err == nil && bytes.Equal(have, b) {
		return desc, nil
	}
	return desc, atomicfile.Write(name, b, 0o644)
}

func platformString(p ocispec.Platform) string { return p.OS + "/" + p.Architecture }
