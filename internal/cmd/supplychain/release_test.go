package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/registry/registrytest"
)

// TestReleaseByCommands walks the road of docs/RELEASING.md: sign, release,
// verify, show, pin, mirror, roll back.
func TestReleaseByCommands(t *testing.T) {
	address, mirror := registrytest.Start(t, registrytest.Distribution)+"/team", registrytest.Start(t, registrytest.Referrers)
	variables := map[string]string{"LOOMCYCLE_CACHE": t.TempDir(), "RELEASE_REGISTRY": address, "RELEASE_SMOKE": "grep -q toolbox@sha256: {refs}", "RELEASE_POLICY": "-"}
	config := filepath.Join("..", "..", "..", "release.yaml")
	supplychain := func(args ...string) (string, string, error) {
		var out, log bytes.Buffer
		err := run(t.Context(), environment{&out, &log, func(k string) string { return variables[k] }, time.Now}, args)
		return out.String(), log.String(), err
	}
	must := func(args ...string) string {
		t.Helper()
		out, log, err := supplychain(args...)
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, log)
		}
		return out
	}
	var newest string
	for _, v := range []string{"1.0.0", "1.0.1"} {
		folder := filepath.Join(t.TempDir(), "dist")
		if _, err := disttest.Small(v).Write(folder); err != nil {
			t.Fatal(err)
		}
		if _, _, err := supplychain("release", "-config", config, "-dist", folder); err == nil {
			t.Fatal("an unsigned build was released")
		}
		must("sign", "-dist", folder)
		if out := must("verify", folder); !strings.Contains(out, "linux/arm64: signature, SPDX SBOM, CycloneDX SBOM, provenance, good\n") || !strings.HasSuffix(out, "verified\n") {
			t.Errorf("verify of the folder printed\n%s", out)
		}
		must("release", "-config", config, "-dist", folder)
		newest = folder
	}
	if out := must("release-list", "-config", config); !strings.HasPrefix(out, "1.0.1") || !strings.Contains(strings.Split(out, "\n")[0], "1 1.0 latest") {
		t.Errorf("release-list printed\n%s", out)
	}
	shown := must("release-show", "-config", config, "latest")
	if !strings.Contains(shown, "linux/arm64") || !strings.Contains(shown, "SPDX SBOM") {
		t.Errorf("release-show printed\n%s", shown)
	}
	if out := must("verify", "-config", config, address+"/toolbox:1.0"); !strings.HasPrefix(out, "toolbox 1.0.1\n") || !strings.HasSuffix(out, "verified\n") {
		t.Errorf("verify printed\n%s", out)
	}
	// Somebody who has no key points tags at what is signed, but not as that.
	c, err := registry.Open(t.Context(), address, []string{"toolbox"}, registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	old, _, err := c.Fetch(t.Context(), "toolbox", "1.0.0")
	if err != nil {
		t.Fatal(err)
	}
	for tag, want := range map[string]string{"v1.0.7": "signed as 1.0.0", "1.1": "signed as 1.0.0", "stable": "ask by digest"} {
		if err := c.PutManifest(t.Context(), "toolbox", tag, old); err != nil {
			t.Fatal(err)
		}
		if out, _, err := supplychain("verify", "-config", config, address+"/toolbox:"+tag); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("verify of 1.0.0 as %s gave %v\n%s", tag, err, out)
		}
	}
	// Or copies all that belongs to one image to the place of another.
	swapped := filepath.Join(t.TempDir(), "release.yaml")
	text, err := os.ReadFile(config)
	if err == nil {
		err = os.WriteFile(swapped, bytes.Replace(text, []byte("repositories: {}"), []byte("repositories: {toolbox: tools/loomcycle, loomcycle: toolbox}"), 1), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	variables["RELEASE_REGISTRY"], variables["RELEASE_SMOKE"] = mirror+"/swapped", "-"
	must("release", "-config", swapped, "-dist", newest)
	must("verify", "-config", swapped, mirror+"/swapped/tools/loomcycle")
	if _, _, err := supplychain("verify", "-config", config, mirror+"/swapped/toolbox:1.0.1"); err == nil || !strings.Contains(err.Error(), "as the image loomcycle") {
		t.Errorf("verify of the runtime in the toolbox's place gave %v", err)
	}
	variables["RELEASE_REGISTRY"] = address
	folder := t.TempDir()
	must("pins", "-config", config, "-out", folder, "1.0.0")
	compose, err := os.ReadFile(filepath.Join(folder, "compose.pins.yaml"))
	if err != nil || !strings.Contains(string(compose), address+"/toolbox:1.0.0@sha256:") {
		t.Errorf("compose.pins.yaml: %v\n%s", err, compose)
	}
	if out := must("pins", "-config", config, "-update", folder, "latest"); !strings.Contains(out, "1.0.1@sha256:") {
		t.Errorf("pins -update printed\n%s", out)
	}
	if _, _, err := supplychain("release-pack", "-dist", newest); err == nil || !strings.Contains(err.Error(), "the target pins") {
		t.Errorf("release-pack without pins gave %v", err)
	}
	must("pins", "-config", config, "-out", filepath.Join(newest, "pins"), "1.0.1")
	var packed []string
	for range 2 {
		must("release-pack", "-dist", newest)
		check := exec.CommandContext(t.Context(), "sh", "-c", "sha256sum -c checksums-v1.0.1.txt && tar -tvzf sboms-v1.0.1.tar.gz && tar -tzf pins-v1.0.1.tar.gz && cmp release-v1.0.1.json ../release.json && cat checksums-*")
		check.Dir = filepath.Join(newest, "pack")
		out, err := check.CombinedOutput()
		if err != nil || !strings.Contains(string(out), " sbom/toolbox/linux-arm64.spdx.json\n") || !strings.Contains(string(out), "pins/compose.pins.yaml\n") {
			t.Fatalf("%v\n%s", err, out)
		}
		packed = append(packed, string(out))
		now := time.Now() // as downloaded on another day
		if err := os.Chtimes(filepath.Join(newest, "sbom", "toolbox", "linux-arm64.spdx.json"), now, now); err != nil {
			t.Fatal(err)
		}
	}
	if packed[0] != packed[1] {
		t.Errorf("packed again it became\n%s, not\n%s", packed[1], packed[0])
	}
	must("release-mirror", "-config", config, "1.0.1", mirror+"/airgap")
	must("verify", "-config", config, mirror+"/airgap/loomcycle:v1.0.1")
	must("release-rollback", "-config", config, "latest", "1.0.0")
	if out := must("release-show", "-config", config, "latest"); !strings.Contains(out, "1.0.0") {
		t.Errorf("after the rollback latest is\n%s", out)
	}
	// A disk that rots changes no manifest.
	r, err := dist.Read(newest)
	if err == nil {
		err = os.Truncate(filepath.Join(newest, "oci", "blobs", "sha256", r.Images[1].Platforms[1].Layers[0].Digest.Encoded()), 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	// What a reader gets wrong, and what they are told.
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"verify", newest}, "it was cut or changed"},
		{[]string{"verify", "-config", config, address + "/toolbox@" + r.Images[1].Platforms[0].Digest.String()}, "is no index (application/vnd.oci.image.manifest.v1+json)"},
		{[]string{"verify", "-config", config, "toolbox"}, "neither a folder nor an image"},
		{[]string{"verify", "-config", config, address + "/toolbox:9.9.9"}, "no tag 9.9.9"},
		{[]string{"release-show", "-config", config, "9.9.9"}, "has no release 9.9.9"},
		{[]string{"release-rollback", "-config", config, "stable", "1.0.0"}, "not a channel"},
		{[]string{"release", "-config", config, "-dist", t.TempDir()}, "holds no build"},
	} {
		if _, _, err := supplychain(c.args...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v gave %v, want %q", c.args, err, c.want)
		}
	}
	legacy := filepath.Join(t.TempDir(), "release.yaml")
	if err := os.WriteFile(legacy, bytes.Replace(text, []byte("RELEASE_REGISTRY\n"), []byte("RELEASE_REGISTRY\n    legacySignatures: true\n"), 1), 0o644); err != nil {
		t.Fatal(err)
	}
	variables["SIGSTORE_ID_TOKEN"] = "token"
	if _, _, err := supplychain("release", "-config", legacy, "-dist", newest); err == nil || !strings.Contains(err.Error(), "set COSIGN_KEY") {
		t.Errorf("the tag scheme without a key: %v", err)
	}
	variables["SIGSTORE_ID_TOKEN"], variables["RELEASE_REGISTRY"] = "", ""
	if _, _, err := supplychain("release-list", "-config", config); err == nil || !strings.Contains(err.Error(), "RELEASE_REGISTRY") {
		t.Errorf("without a registry: %v", err)
	}
}

// A hook's program starts another and forwards nothing, as `go run` does. Both
// hear that the release ends, and what does not listen is killed.
func TestHookEndsWithTheRelease(t *testing.T) {
	for _, x := range []struct {
		name, inner string
		grace       time.Duration
		tidy        bool
	}{
		{"it tidies up", `trap "sleep 0.1; touch tidy; exit" INT; echo ready; while :; do sleep 0.1; done`, time.Minute, true},
		{"it does not listen", `trap "" INT; echo ready; while :; do sleep 0.1; done`, 100 * time.Millisecond, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			read, write, err := os.Pipe() // it ends when no process has it any more
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() {
				done <- group(ctx, write, x.grace, []string{"sh", "-c", `trap : INT; sh -c '` + x.inner + `'; wait`})
			}()
			out := bufio.NewReader(read)
			if line, err := out.ReadString('\n'); err != nil {
				t.Fatal(line, err)
			}
			cancel()
			if err := <-done; err == nil {
				t.Error("it ended well")
			}
			write.Close()
			if err := read.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(out); err != nil {
				t.Errorf("what it started runs on: %v", err)
			}
			if _, err := os.Stat("tidy"); (err == nil) != x.tidy {
				t.Errorf("tidied up: %v", err)
			}
		})
	}
}
