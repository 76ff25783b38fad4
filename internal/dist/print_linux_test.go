package dist_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// compressions runs a test with a dist of each compression of layers.
func compressions(t *testing.T, version string, test func(t *testing.T, folder string, r *dist.Release)) {
	for _, compression := range []string{"gzip", "zstd"} {
		t.Run(compression, func(t *testing.T) {
			family := disttest.Small(version)
			family.Compression = compression
			folder, err := os.MkdirTemp("", "dist-") // podman takes no capital letter in a layout's path
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(folder) })
			r, err := family.Write(folder)
			if err != nil {
				t.Fatal(err)
			}
			test(t, folder, r)
		})
	}
}

func TestCheck(t *testing.T) {
	compressions(t, "1.2.3", func(t *testing.T, folder string, r *dist.Release) {
		if err := dist.Check(folder); err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(folder, "oci/blobs/sha256", r.Images[0].Platforms[0].Layers[0].Digest.Encoded())
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text[len(text)/2] ^= 1
		if err := os.WriteFile(name, text, 0o644); err != nil {
			t.Fatal(err)
		}
		if dist.Check(folder) == nil {
			t.Error("a layer with a wrong byte goes through")
		}
	})
}

// The diff ids of every image are compared, also where another image has the
// layers already. Each blob here is what its digest says.
func TestCheckDiffIDs(t *testing.T) {
	compressions(t, "1.2.3", func(t *testing.T, folder string, r *dist.Release) {
		good, err := dist.Content(folder, &r.Images[1], &r.Images[1].Platforms[0])
		if err != nil {
			t.Fatal(err)
		}
		oci := layout.Path(filepath.Join(folder, "oci"))
		top, err := os.ReadFile(filepath.Join(string(oci), "index.json"))
		if err != nil {
			t.Fatal(err)
		}
		for name, tc := range map[string]struct {
			diffIDs func(right []v1.Hash) []v1.Hash
			alone   bool // no other image has the layers
			want    string
		}{
			"right":       {func(right []v1.Hash) []v1.Hash { return right }, false, ""},
			"exchanged":   {func(right []v1.Hash) []v1.Hash { return []v1.Hash{right[1], right[0]} }, false, "not the diff id"},
			"alone":       {func(right []v1.Hash) []v1.Hash { return []v1.Hash{right[1], right[0]} }, true, "not the diff id"},
			"one missing": {func(right []v1.Hash) []v1.Hash { return right[:1] }, false, "2 layers, but its configuration lists 1 diff ids"},
			"one more":    {func(right []v1.Hash) []v1.Hash { return append(right, right[0]) }, false, "2 layers, but its configuration lists 3 diff ids"},
		} {
			index := top
			if tc.alone {
				index = []byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}`)
			}
			if err := os.WriteFile(filepath.Join(string(oci), "index.json"), index, 0o644); err != nil {
				t.Fatal(err)
			}
			appendSpoilt(t, oci, good, tc.diffIDs)
			if err := dist.Check(folder); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: error %v, want %q", name, err, tc.want)
			}
		}
	})
}

// appendSpoilt adds to a layout an image like another, with other diff ids.
func appendSpoilt(t *testing.T, oci layout.Path, img v1.Image, diffIDs func([]v1.Hash) []v1.Hash) {
	t.Helper()
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	config, manifest = config.DeepCopy(), manifest.DeepCopy()
	config.RootFS.DiffIDs = diffIDs(config.RootFS.DiffIDs)
	blob := func(v any) (v1.Hash, int64) {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		sum, size, err := v1.SHA256(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := oci.WriteBlob(sum, io.NopCloser(bytes.NewReader(text))); err != nil {
			t.Fatal(err)
		}
		return sum, size
	}
	manifest.Config.Digest, manifest.Config.Size = blob(config)
	desc := v1.Descriptor{MediaType: manifest.MediaType}
	desc.Digest, desc.Size = blob(manifest)
	if err := oci.AppendDescriptor(desc); err != nil {
		t.Fatal(err)
	}
}

// Podman knows a loaded image by its name and version, with the configuration
// that release.json names; it pulls the same from the folder.
func TestLoad(t *testing.T) {
	compressions(t, "1.2.3+build.7", testLoad)
}

func testLoad(t *testing.T, folder string, release *dist.Release) {
	podman := citest.Program(t, "podman", "apt-get install podman")
	own := t.TempDir()
	// A storage of its own, and no docker before it.
	storage := fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = %q\nrunroot = %q\n", filepath.Join(own, "graph"), filepath.Join(own, "run"))
	for name, text := range map[string]string{"storage.conf": storage, "docker": "#!/bin/sh\nexit 1\n"} {
		if err := os.WriteFile(filepath.Join(own, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(own, "storage.conf"))
	t.Setenv("PATH", own+":"+os.Getenv("PATH"))
	ref, engine, err := dist.Load(t.Context(), os.Getenv, folder, "toolbox")
	if err != nil {
		t.Fatal(err)
	}
	if ref != "localhost/toolbox:1.2.3_build.7" || engine != "podman" {
		t.Errorf("loaded as %s into %s", ref, engine)
	}
	img, err := release.Image("toolbox")
	if err != nil {
		t.Fatal(err)
	}
	v, err := img.Variant("linux/" + runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(podman, "image", "inspect", "--format", "{{.Id}} {{.Architecture}} {{len .RootFS.Layers}}", ref).Output()
	if want := fmt.Sprintf("%s %s 2", v.Config.Encoded(), runtime.GOARCH); err != nil || strings.TrimSpace(string(out)) != want {
		t.Errorf("podman has %s, %v, want %s", out, err, want)
	}
	out, err = exec.Command(podman, "pull", "-q", "oci:"+filepath.Join(folder, "oci")+":toolbox").Output()
	if err != nil || strings.TrimSpace(string(out)) != v.Config.Encoded() {
		t.Errorf("podman pulled %s, %v, not %s", out, err, v.Config.Encoded())
	}
	if _, _, err := dist.Load(t.Context(), os.Getenv, folder, "other"); err == nil || !strings.Contains(err.Error(), "other") {
		t.Errorf("an image that is not there: %v", err)
	}
}

// Docker, which DOCKER_HOST puts before podman, has the same image by the same name.
func TestLoadDocker(t *testing.T) {
	host := dockertest.Start(t)
	// On the machine's engine other checkouts' tests load theirs.
	compressions(t, fmt.Sprintf("1.2.3+build.%d", time.Now().UnixNano()), func(t *testing.T, folder string, release *dist.Release) {
		testLoadDocker(t, host, folder, release)
	})
}

func testLoadDocker(t *testing.T, host, folder string, release *dist.Release) {
	t.Setenv("DOCKER_HOST", "unix:///dev/null") // not this process's, but the one passed in
	getenv := func(name string) string { return map[string]string{"DOCKER_HOST": host}[name] }
	ref, engine, err := dist.Load(t.Context(), getenv, folder, "toolbox")
	if err != nil {
		t.Fatal(err)
	}
	if want := "localhost/toolbox:" + strings.ReplaceAll(release.Version, "+", "_"); ref != want || engine != "docker" {
		t.Errorf("loaded as %s into %s", ref, engine)
	}
	t.Setenv("DOCKER_HOST", host)
	defer exec.Command("docker", "rmi", ref).Run() // of the machine's engine, perhaps
	img, err := release.Image("toolbox")
	if err != nil {
		t.Fatal(err)
	}
	v, err := img.Variant("linux/" + runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	// Not the id: it is the configuration's digest or, in containerd's image store, a manifest's.
	want := runtime.GOARCH
	for _, l := range v.Layers {
		want += " " + l.DiffID.String()
	}
	out, err := exec.Command("docker", "image", "inspect", "--format", `{{.Architecture}}{{range .RootFS.Layers}} {{.}}{{end}}`, ref).Output()
	if err != nil || strings.TrimSpace(string(out)) != want {
		t.Errorf("docker has %s, %v, want %s", out, err, want)
	}
}

// What people ask of a dist folder, our way and with skopeo.
func TestInspect(t *testing.T) {
	compressions(t, "1.2.3", testInspect)
}

func testInspect(t *testing.T, folder string, release *dist.Release) {
	img, err := release.Image("toolbox")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := dist.Inspect(&text, folder, "toolbox"); err != nil {
		t.Fatal(err)
	}
	wanted := []string{"toolbox 1.2.3\nindex " + img.IndexDigest.String() + "\ncommit " + release.Source.Commit + "\n"}
	for _, v := range img.Platforms {
		wanted = append(wanted, "\n"+v.Platform+" "+v.Digest.String()+", ", "layer "+v.Layers[0].Group+" ", v.Layers[0].Digest.String())
	}
	for _, want := range wanted {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	out, err := exec.Command(citest.Program(t, "skopeo", "apt-get install skopeo"), "inspect", "oci:"+filepath.Join(folder, "oci")+":toolbox").Output()
	if err != nil {
		t.Fatal(err)
	}
	var seen struct {
		Digest string
		Labels map[string]string
		Layers []string
	}
	if err := json.Unmarshal(out, &seen); err != nil {
		t.Fatal(err)
	}
	v, err := img.Variant("linux/" + runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	if seen.Digest != img.IndexDigest.String() || seen.Labels["org.opencontainers.image.title"] != "toolbox" || len(seen.Layers) != 2 || seen.Layers[0] != v.Layers[0].Digest.String() {
		t.Errorf("skopeo sees %s", out)
	}
}
