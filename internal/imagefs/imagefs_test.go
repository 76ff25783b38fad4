package imagefs_test

import (
	"archive/tar"
	"bytes"
	"io"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
)

type entry struct {
	tar.Header
	content string
}

func image(t *testing.T, layers ...[]entry) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	for _, entries := range layers {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, e := range entries {
			e.Size = int64(len(e.content))
			if e.Typeflag == 0 {
				e.Typeflag = tar.TypeReg
			}
			if err := w.WriteHeader(&e.Header); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(w, e.content); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	return img
}

func open(t *testing.T, img v1.Image) *imagefs.FS {
	t.Helper()
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	fsys, err := store.Open(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	return fsys
}

func TestLayersAddUp(t *testing.T) {
	fsys := open(t, image(t,
		[]entry{
			{Header: tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}},
			{Header: tar.Header{Name: "bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"}},
			{Header: tar.Header{Name: "usr/bin/", Typeflag: tar.TypeDir, Mode: 0o755}},
			{Header: tar.Header{Name: "usr/bin/tool", Mode: 0o4755}, content: "\x7fELF old"},
			{Header: tar.Header{Name: "usr/bin/tool2", Typeflag: tar.TypeLink, Linkname: "./usr/bin/tool"}},
			{Header: tar.Header{Name: "usr/bin/gone", Mode: 0o755}, content: "gone"},
			{Header: tar.Header{Name: "opt/a/b", Mode: 0o644}, content: "below"},
			{Header: tar.Header{Name: "opt/keep", Mode: 0o644}, content: "keep"},
			{Header: tar.Header{Name: "var/x", Mode: 0o644}, content: "hidden"},
			{Header: tar.Header{Name: "loop", Typeflag: tar.TypeSymlink, Linkname: "/loop"}},
		},
		[]entry{
			{Header: tar.Header{Name: "usr/bin/tool", Mode: 0o755, Uid: 7}, content: "new"},
			{Header: tar.Header{Name: "usr/bin/.wh.gone"}},
			{Header: tar.Header{Name: "opt/.wh.a"}},
			{Header: tar.Header{Name: "var/.wh..wh..opq"}},
			{Header: tar.Header{Name: "var/y", Mode: 0o644}, content: "seen"},
		},
	))

	want := []string{"bin", "loop", "opt/keep", "usr/bin", "usr/bin/tool", "usr/bin/tool2", "var/y"}
	if got := fsys.All(); !slices.Equal(got, want) {
		t.Errorf("paths are %q, want %q", got, want)
	}
	tool := fsys.Stat("/bin/tool")
	if tool == nil || tool.Path != "usr/bin/tool" || tool.UID != 7 || tool.Mode != 0o755 || tool.ELF || tool.Layer != 1 {
		t.Errorf("/bin/tool is %+v, want the second layer's usr/bin/tool", tool)
	}
	if content, err := fsys.ReadFile("bin/tool2"); err != nil || string(content) != "\x7fELF old" {
		t.Errorf("the hard link reads %q, %v; want the first layer's content", content, err)
	}
	if two := fsys.Lstat("usr/bin/tool2"); !two.Regular() || !two.ELF || two.Mode != 0o4755 {
		t.Errorf("the hard link is %+v, want a regular setuid ELF file", two)
	}
	if fsys.Stat("loop") != nil {
		t.Error("a link to itself was resolved")
	}
	if _, err := fsys.ReadFile("opt/a/b"); err == nil {
		t.Error("a file below a whiteout can still be read")
	}
}

func TestChangedLayerIsRefused(t *testing.T) {
	img := image(t, []entry{{Header: tar.Header{Name: "a", Mode: 0o644}, content: "a"}})
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	other := image(t, []entry{{Header: tar.Header{Name: "a", Mode: 0o644}, content: "b"}})
	layers, err := other.Layers()
	if err != nil {
		t.Fatal(err)
	}
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if _, err := store.Open(t.Context(), lying{other, lyingLayer{layers[0], config.RootFS.DiffIDs[0]}}); err == nil {
		t.Error("a layer with another content than its diff ID was accepted")
	}
}

type lying struct {
	v1.Image
	layer v1.Layer
}

func (l lying) Layers() ([]v1.Layer, error) { return []v1.Layer{l.layer}, nil }

type lyingLayer struct {
	v1.Layer
	id v1.Hash
}

func (l lyingLayer) DiffID() (v1.Hash, error) { return l.id, nil }
