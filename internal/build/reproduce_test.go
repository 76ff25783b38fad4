package build

import (
	"strings"
	"testing"

	digest "github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/dist"
)

func TestCompare(t *testing.T) {
	release := func(images ...string) *dist.Release {
		r := &dist.Release{}
		for _, name := range images {
			of := func(what string) digest.Digest { return digest.FromString(name + what) }
			r.Images = append(r.Images, dist.Image{Name: name, IndexDigest: of("index"), Platforms: []dist.Variant{{
				Platform: "linux/arm64", Digest: of("manifest"), Config: of("config"),
				Layers: []dist.Layer{{Group: "base", Digest: of("base")}, {Group: "cc", Digest: of("cc")}},
			}}})
		}
		return r
	}
	other := digest.FromString("other")
	for _, tc := range []struct {
		name      string
		change    func(*dist.Release)
		want      string // the error has it
		different int    // lines
	}{
		{"nothing", func(*dist.Release) {}, "", 0},
		{"a layer", func(r *dist.Release) {
			v := &r.Images[1].Platforms[0]
			v.Layers[1].Digest, v.Digest, r.Images[1].IndexDigest = other, other, other
		}, "first in two linux/arm64 layer cc: " + digest.FromString("twocc").String() + " and " + other.String(), 3},
		{"a config", func(r *dist.Release) { r.Images[0].Platforms[0].Config = other }, "first in one linux/arm64 config", 1},
		{"an index", func(r *dist.Release) { r.Images[0].IndexDigest = other }, "first in one index", 1},
		{"a layer more", func(r *dist.Release) {
			v := &r.Images[1].Platforms[0]
			v.Layers = append(v.Layers, v.Layers[0])
		}, "one build of two for linux/arm64 has 2 layers, the other 3", 0},
		{"a platform", func(r *dist.Release) { r.Images[0].Platforms = nil }, "one build of one has 1 platforms, the other 0", 0},
		{"an image", func(r *dist.Release) { r.Images = r.Images[:1] }, "one build has 2 images, the other 1", 0},
	} {
		var out strings.Builder
		b := release("one", "two")
		tc.change(b)
		err := compare(&out, release("one", "two"), b)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: the error is %v, not %q", tc.name, err, tc.want)
		}
		if n := strings.Count(out.String(), "DIFFERENT"); n != tc.different {
			t.Errorf("%s: %d lines differ, want %d:\n%s", tc.name, n, tc.different, out.String())
		}
		if tc.want == "" && strings.Count(out.String(), "same") != 10 {
			t.Errorf("not all digests are compared:\n%s", out.String())
		}
	}
}
