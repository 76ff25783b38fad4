package imagefs_test

import (
	"archive/tar"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
)

type entry = imagetest.Entry

func image(t *testing.T, layers ...[]entry) v1.Image {
	t.Helper()
	return imagetest.Image(t, v1.Config{}, "amd64", layers...)
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
			{Header: tar.Header{Name: "usr/bin/tool", Mode: 0o4755}, Content: "\x7fELF old"},
			{Header: tar.Header{Name: "usr/bin/tool2", Typeflag: tar.TypeLink, Linkname: "./usr/bin/tool"}},
			{Header: tar.Header{Name: "usr/bin/gone", Mode: 0o755}, Content: "gone"},
			{Header: tar.Header{Name: "opt/a/b", Mode: 0o644}, Content: "below"},
			{Header: tar.Header{Name: "opt/keep", Mode: 0o644}, Content: "keep"},
			{Header: tar.Header{Name: "var/x", Mode: 0o644}, Content: "hidden"},
			{Header: tar.Header{Name: "loop", Typeflag: tar.TypeSymlink, Linkname: "/loop"}},
		},
		[]entry{
			{Header: tar.Header{Name: "usr/bin/tool", Mode: 0o755, Uid: 7}, Content: "new"},
			{Header: tar.Header{Name: "usr/bin/.wh.gone"}},
			{Header: tar.Header{Name: "opt/.wh.a"}},
			{Header: tar.Header{Name: "var/.wh..wh..opq"}},
			{Header: tar.Header{Name: "var/y", Mode: 0o644}, Content: "seen"},
		},
	))

	want := []string{"bin", "loop", "opt/keep", "usr/bin", "usr/bin/tool", "usr/bin/tool2", "var/y"}
	var got []string
	for _, f := range fsys.All() {
		got = append(got, f.Path)
	}
	if below := fsys.Below("usr/bin/"); len(below) != 2 || below[0].Path != "usr/bin/tool" {
		t.Errorf("%d entries are below usr/bin/, want the two tools", len(below))
	}
	if !slices.Equal(got, want) {
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
	img := image(t, []entry{{Header: tar.Header{Name: "a", Mode: 0o644}, Content: "a"}})
	other := image(t, []entry{{Header: tar.Header{Name: "a", Mode: 0o644}, Content: "b"}})
	layers, err := other.Layers()
	if err != nil {
		t.Fatal(err)
	}
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if _, err := store.Open(t.Context(), lying{img, layers[0]}); err == nil {
		t.Error("a layer with another content than its diff ID was accepted")
	}
}

type lying struct {
	v1.Image
	layer v1.Layer
}

func (l lying) Layers() ([]v1.Layer, error) { return []v1.Layer{l.layer}, nil }
