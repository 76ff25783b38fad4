package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
)

// TestReleaseOfARealImage takes the family's smallest image out of dist and
// goes the whole way with it: SBOMs, provenance, signatures, a release to
// docker-registry with release.yaml's own smoke test of what was pushed, and the
// README's way to check it.
func TestReleaseOfARealImage(t *testing.T) {
	root, err := filepath.Abs(filepath.Join("..", "..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(root) // where a release runs its hooks
	const name = "loomcycle"
	whole, err := openBuild(filepath.Join(root, "dist"), root, filepath.Join(root, "images", "lock", "lock.json"))
	if err != nil {
		disttest.Missing(t, err)
	}
	image, err := whole.release.Image(name)
	if err != nil {
		disttest.Missing(t, err)
	}
	index, err := whole.index(image.IndexDigest)
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), "dist")
	oci, err := layout.Write(filepath.Join(folder, "oci"), empty.Index)
	if err == nil {
		err = oci.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": name}))
	}
	if err != nil {
		t.Fatal(err)
	}
	one := *whole.release
	one.Images = []dist.Image{*image}
	one.Source.Commit = strings.TrimSuffix(one.Source.Commit, "-dirty") // a developer's build is none to release
	if err := writeJSON(filepath.Join(folder, "release.json"), one); err != nil {
		t.Fatal(err)
	}
	made, err := dist.ReadMade(filepath.Join(root, "dist"))
	if err != nil {
		disttest.Missing(t, err)
	}
	if err := dist.WriteMade(folder, made); err != nil {
		t.Fatal(err)
	}
	address := registrytest.Start(t, registrytest.Distribution) + "/team"
	variables := map[string]string{"LOOMCYCLE_CACHE": t.TempDir(), "RELEASE_REGISTRY": address, "RELEASE_POLICY": "-"} // as a hook it judges the repository's dist
	t.Setenv("SMOKE_CASES", "structure")
	t.Setenv("SMOKE_DIST", folder)
	config := filepath.Join(root, "release.yaml")
	policy := []string{"policy", "-root", root, "-dist", folder, "-input", filepath.Join(folder, "input.json")}
	if one.Source.Commit != whole.release.Source.Commit { // the labels name the other one
		policy = []string{"verify", folder}
	}
	for _, args := range [][]string{
		{"sbom", "-root", root, "-dist", folder}, {"provenance", "-root", root, "-dist", folder}, {"sign", "-dist", folder},
		policy, {"verify", folder}, {"release", "-config", config, "-dist", folder}, {"verify", "-config", config, address + "/" + name + ":" + one.Version},
	} {
		var log bytes.Buffer
		if err := run(t.Context(), environment{&log, &log, func(k string) string { return variables[k] }, time.Now}, args); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, log.String())
		}
	}
	skopeo := citest.Program(t, "skopeo", "apt-get install skopeo")
	raw, err := exec.CommandContext(t.Context(), skopeo, "inspect", "--tls-verify=false", "--raw", "docker://"+address+"/"+name+":"+one.Version).Output()
	if err != nil {
		t.Fatal(err)
	}
	if h, _, err := v1.SHA256(bytes.NewReader(raw)); err != nil || h.String() != image.IndexDigest.String() {
		t.Errorf("skopeo reads %s, the build has %s (%v)", h, image.IndexDigest, err)
	}
	if left, err := filepath.Glob(filepath.Join(variables["LOOMCYCLE_CACHE"], "release", "*.json")); err != nil || len(left) > 0 {
		t.Errorf("the release left %s, %v", strings.Join(left, " "), err)
	}
	for _, file := range []string{"signatures.json", "smoke/pulled-1/report.json"} {
		if _, err := os.Stat(filepath.Join(folder, file)); err != nil {
			t.Error(err)
		}
	}
}
