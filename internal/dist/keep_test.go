package dist

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

var source = Source{Repository: "https://example.test/images", Commit: "0123456789012345678901234567890123456789"}

// add puts an image of one layer into the staging.
func add(t *testing.T, s *Staging, name string) (Image, ocispec.Descriptor) {
	t.Helper()
	var file bytes.Buffer
	w := tar.NewWriter(&file)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatUSTAR}), w.Close()); err != nil {
		t.Fatal(err)
	}
	text := file.Bytes()
	m := exported(t, s, text, ocispec.MediaTypeImageLayer)
	if _, err := s.Compress(t.Context(), []digest.Digest{m}); err != nil {
		t.Fatal(err)
	}
	config := ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(text)}}}
	var exported ocispec.Manifest
	err := s.readJSON(m, &exported)
	exported.Versioned = specs.Versioned{SchemaVersion: 2}
	var cerr, merr error
	exported.Config, cerr = s.writeJSON(ocispec.MediaTypeImageConfig, config)
	whole, merr := s.writeJSON(ocispec.MediaTypeImageManifest, exported)
	if err := errors.Join(err, cerr, merr); err != nil {
		t.Fatal(err)
	}
	v, desc, err := s.Add(Built{Image: name, Platform: config.Platform, Manifest: whole.Digest, Groups: []string{"files"}, Config: config})
	if err != nil {
		t.Fatal(err)
	}
	index, err := s.Index(nil, []ocispec.Descriptor{desc})
	if err != nil {
		t.Fatal(err)
	}
	return Image{Name: name, IndexDigest: index.Digest, Platforms: []Variant{v}}, index
}

// finish does what a build does at its end.
func finish(s *Staging, from Source, img Image, index ocispec.Descriptor) (*Release, error) {
	r := &Release{SchemaVersion: 1, Version: "1.2.3", Source: from, LockDigest: digest.FromString("lock"),
		Compression: s.compressor.Compression, Compressor: s.compressor.Version, Images: []Image{img}}
	indexes := map[string]ocispec.Descriptor{img.Name: index}
	s.Made[img.Name] = Made{Workers: map[string]string{"linux/amd64": img.Name}}
	if err := s.Keep(r, indexes); err != nil {
		return nil, err
	}
	return r, s.Publish(r, indexes)
}

func staged(t *testing.T, final string) *Staging {
	t.Helper()
	c, err := NewCompressor("../..", "gzip")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Stage(final, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Discard() })
	return s
}

// Builds of one commit that begin before any of them has ended: each keeps
// what the others made.
func TestBuildsAtOnce(t *testing.T) {
	final := filepath.Join(t.TempDir(), "dist")
	names := []string{"one", "two", "three", "four"}
	var wg sync.WaitGroup
	for _, name := range names {
		s := staged(t, final)
		img, index := add(t, s, name)
		wg.Go(func() {
			if _, err := finish(s, source, img, index); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if err := s.Discard(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	wg.Wait()
	r, err := Read(final)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if _, err := r.Image(name); err != nil {
			t.Error(err)
		}
		if made, err := ReadMade(final); err != nil || made[name].Workers["linux/amd64"] != name {
			t.Errorf("%s was made by %+v, %v", name, made[name], err)
		}
	}
	if err := Check(final); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(filepath.Dir(final)); err != nil || len(left) != 1 {
		t.Errorf("beside the dist: %v, %v", left, err)
	}
}

// An image is kept only where the sources name the very same content.
func TestKeep(t *testing.T) {
	with := func(change func(*Source)) Source {
		s := source
		change(&s)
		return s
	}
	git := with(func(s *Source) { s.Loomcycle = "git:https://example.test/loomcycle#" + source.Commit })
	for _, tc := range []struct {
		name     string
		old, new Source
		kept     bool
	}{
		{"the same commit", source, source, true},
		{"the same commit of the runtime", git, git, true},
		{"another commit", source, with(func(s *Source) { s.Commit = "1" + s.Commit[1:] }), false},
		{"another runtime", source, git, false},
		{"other linker flags", git, with(func(s *Source) { *s = git; s.LoomcycleLDFlags = "-s" }), false},
		{"a change", with(func(s *Source) { s.Commit += "-dirty" }), with(func(s *Source) { s.Commit += "-dirty" }), false},
		{"no commit", with(func(s *Source) { s.Commit = "unknown" }), with(func(s *Source) { s.Commit = "unknown" }), false},
		{"a changed runtime", with(func(s *Source) { s.Loomcycle = "dir:a#b-dirty" }), with(func(s *Source) { s.Loomcycle = "dir:a#b-dirty" }), false},
		{"a runtime outside git", with(func(s *Source) { s.Loomcycle = "dir:a#unknown" }), with(func(s *Source) { s.Loomcycle = "dir:a#unknown" }), false},
		{"a binary", with(func(s *Source) { s.Loomcycle = "bin:a" }), with(func(s *Source) { s.Loomcycle = "bin:a" }), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			final := filepath.Join(t.TempDir(), "dist")
			first := staged(t, final)
			img, index := add(t, first, "one")
			if _, err := finish(first, tc.old, img, index); err != nil {
				t.Fatal(err)
			}
			second := staged(t, final)
			img, index = add(t, second, "two")
			r, err := finish(second, tc.new, img, index)
			if err != nil {
				t.Fatal(err)
			}
			if kept := slices.ContainsFunc(r.Images, func(i Image) bool { return i.Name == "one" }); kept != tc.kept {
				t.Errorf("kept: %v", kept)
			}
			if err := Check(final); err != nil {
				t.Error(err)
			}
		})
	}
}
