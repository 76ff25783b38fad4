package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // as dpkg does
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// family is a small build of two images for two platforms, with everything
// that the supply chain reads.
type family struct {
	t    *testing.T
	root string
	// extra are entries for the files layer of the toolbox.
	extra []imagetest.Entry
	// version of the Debian package
	version string
	zstd    bool // layers as COMPRESSION=zstd makes them
}

const definition = `name: %s
title: %[1]s
description: a test
documentation: README.md
groups: [base]
programs: [loomcycle]
home: /home/nonroot
config: {user: "65532:65532", workdir: /, entrypoint: [/usr/local/bin/loomcycle]}
budget: {amd64: 100MB, arm64: 100MB}
`

// write makes ROOT and ROOT/NAME, the dist folder.
func (f family) write(name string) string {
	f.t.Helper()
	must := func(err error) {
		f.t.Helper()
		if err != nil {
			f.t.Fatal(err)
		}
	}
	put := func(name, text string) {
		f.t.Helper()
		must(writeFile(filepath.Join(f.root, name), []byte(text)))
	}
	put("images/family.yaml", "vendor: loomcycle\nlicenses: Apache-2.0\nsource: https://git.example/images\nurl: https://git.example/images\nimages: [one, two]\nprograms: [{name: loomcycle, package: ./x, include: [go.mod]}]\n")
	sums, err := os.ReadFile("../../../go.sum") // the program that compile makes is of this module
	must(err)
	put("go.sum", string(sums))
	put("images/groups.yaml", "groups: [{name: base, debian: [hello]}]\n")
	put("one/image.yaml", fmt.Sprintf(definition, "loomcycle"))
	put("two/image.yaml", fmt.Sprintf(definition, "loomcycle-toolbox"))

	version := f.version
	if version == "" {
		version = "1.0-1"
	}
	suite := lock.Suite{Name: "trixie", Archive: lock.Main, Components: []string{"main"}, Date: time.Unix(imagetest.Epoch, 0).UTC().Format(time.RFC3339), Release: digest.FromString("InRelease")}
	locked := lock.Lock{Epoch: imagetest.Epoch, Suites: []lock.Suite{suite}, Debian: map[string][]lock.Package{}, Go: map[string]lock.Module{}, NPM: map[string][]lock.NPMPackage{}}
	release := dist.Release{
		SchemaVersion: 1, Version: "0.0.0-gabc", Source: dist.Source{Repository: "https://git.example/images", Commit: strings.Repeat("a", 40)},
		Epoch: imagetest.Epoch, Compression: "gzip", Compressor: "test",
	}
	makeImage := imagetest.Image
	if f.zstd {
		release.Compression, makeImage = "zstd", imagetest.ZstdImage
	}
	path, err := layout.Write(filepath.Join(f.root, name, "oci"), empty.Index)
	must(err)
	for _, image := range []string{"loomcycle", "loomcycle-toolbox"} {
		labels := map[string]string{}
		for _, key := range []string{"base.name", "created", "description", "documentation", "licenses", "source", "url", "vendor"} {
			labels["org.opencontainers.image."+key] = "something"
		}
		labels["org.opencontainers.image.title"] = image
		labels["org.opencontainers.image.version"] = release.Version
		labels["org.opencontainers.image.revision"] = release.Source.Commit
		out := dist.Image{Name: image}
		index := v1.ImageIndex(empty.Index)
		for _, arch := range []string{"amd64", "arm64"} {
			locked.Debian[arch] = []lock.Package{{Group: "base", Name: "hello", Version: version, Arch: arch, Suite: "trixie", Path: "pool/main/h/hello/hello_" + arch + ".deb", Size: 1, SHA256: digest.FromString("hello" + arch)}}
			locked.Go[arch] = lock.Module{Version: "go1.27.4", Path: lock.ToolchainPath("go1.27.4", arch), Size: 1, SHA256: digest.FromString("go" + arch), H1: "h1:x"}
			locked.NPM[arch] = nil
			for _, name := range []string{lock.NodePackage(arch), lock.NPM} {
				locked.NPM[arch] = append(locked.NPM[arch], lock.NPMPackage{Name: name, Version: "1.0.0", Path: lock.NPMPath(name, "1.0.0"), Size: 1, SHA256: digest.FromString(name), Integrity: "sha512-x"})
			}
			files := []imagetest.Entry{
				imagetest.File("var/lib/dpkg/status", "Package: hello\nStatus: install ok installed\nArchitecture: "+arch+"\nVersion: "+version+"\nDescription: x\n\n"),
				{Header: tar.Header{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o1777}},
				{Header: tar.Header{Name: "home/nonroot", Typeflag: tar.TypeDir, Mode: 0o775, Uid: 65532}},
			}
			if image == "loomcycle-toolbox" {
				files = append(files, f.extra...)
			}
			hello, copyright := "hello "+arch, "License: MIT\n"
			img := makeImage(f.t, v1.Config{User: "65532:65532", Labels: labels}, arch,
				[]imagetest.Entry{
					imagetest.File("usr/lib/os-release", "ID=debian\nVERSION_ID=13\n"), imagetest.Program("usr/bin/hello", hello),
					imagetest.File("usr/share/doc/hello/copyright", copyright),
					imagetest.File("var/lib/dpkg/info/hello.md5sums", fmt.Sprintf("%x  usr/bin/hello\n%x  usr/share/doc/hello/copyright\n%x  usr/lib/os-release\n", md5.Sum([]byte(hello)), md5.Sum([]byte(copyright)), md5.Sum([]byte("ID=debian\nVERSION_ID=13\n")))), //nolint:gosec // as dpkg does
				},
				files,
				[]imagetest.Entry{imagetest.Program("usr/local/bin/loomcycle", compile(f.t, arch))},
			)
			img = mutate.Annotations(img, labels).(v1.Image)
			must(path.AppendImage(img))
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
			manifest, err := img.Manifest()
			must(err)
			config, err := img.ConfigFile()
			must(err)
			sum, err := img.Digest()
			must(err)
			v := dist.Variant{Platform: "linux/" + arch, Digest: digest.Digest(sum.String()), Config: digest.Digest(manifest.Config.Digest.String())}
			for i, l := range manifest.Layers {
				v.Layers = append(v.Layers, dist.Layer{
					Group: []string{"base", "files", "programs"}[i], Digest: digest.Digest(l.Digest.String()),
					DiffID: digest.Digest(config.RootFS.DiffIDs[i].String()), Size: l.Size,
				})
				v.Size += l.Size
			}
			out.Platforms = append(out.Platforms, v)
		}
		must(path.AppendIndex(index))
		sum, err := index.Digest()
		must(err)
		out.IndexDigest = digest.Digest(sum.String())
		release.Images = append(release.Images, out)
	}
	text, err := json.Marshal(locked)
	must(err)
	put("images/lock/lock.json", string(text))
	release.LockDigest = digest.FromBytes(text)
	must(writeJSON(filepath.Join(f.root, name, "release.json"), release))
	made := map[string]dist.Made{}
	for _, image := range release.Images { // on one node per platform
		made[image.Name] = dist.Made{Started: time.Unix(imagetest.Epoch, 0), Finished: time.Unix(imagetest.Epoch+60, 0), Workers: map[string]string{"linux/amd64": "amd64", "linux/arm64": "arm64"}}
	}
	must(dist.WriteMade(filepath.Join(f.root, name), made))
	return filepath.Join(f.root, name)
}

var compiled = map[string]string{}

// compile makes a real program of this module for an architecture, once.
func compile(t *testing.T, arch string) string {
	t.Helper()
	if text, ok := compiled[arch]; ok {
		return text
	}
	out := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, "../../unpack/cmd/unpack")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	compiled[arch] = string(text)
	return compiled[arch]
}

// supply runs a subcommand as main does.
func supply(t *testing.T, f family, name string, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	if name != "sbom-diff" {
		args = append([]string{"-root", f.root}, args...)
	}
	cache := t.TempDir()
	getenv := func(name string) string { return map[string]string{"LOOMCYCLE_CACHE": cache}[name] }
	// Before every expiry in policies/exceptions.yaml: those are not the test's matter.
	now := func() time.Time { return time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC) }
	err := run(context.WithoutCancel(t.Context()), environment{&out, &out, getenv, now}, append([]string{name}, args...))
	return out.String(), err
}

// chain runs what comes before policy.
func chain(t *testing.T, f family, folder string) {
	t.Helper()
	for _, step := range []string{"sbom", "provenance"} {
		if out, err := supply(t, f, step, "-dist", folder); err != nil {
			t.Fatalf("%s: %v\n%s", step, err, out)
		}
	}
}

func TestSupplyChain(t *testing.T) {
	f := family{t: t, root: t.TempDir()}
	folder := f.write("dist")
	if out, err := supply(t, f, "policy", "-dist", folder); err == nil || !strings.Contains(err.Error(), "run `sbom` first") {
		t.Errorf("policy before sbom: %v\n%s", err, out)
	}
	chain(t, f, folder)
	out, err := supply(t, f, "policy", "-dist", folder)
	if err != nil || !strings.Contains(out, "2 images keep") || !strings.Contains(out, "signatures were not judged") {
		t.Errorf("policy: %v\n%s", err, out)
	}
	for _, kind := range []string{"sbom/loomcycle/linux-amd64.spdx.json", "sbom/loomcycle-toolbox/linux-arm64.cdx.json", "provenance/loomcycle-toolbox/linux-arm64.json"} {
		if _, err := os.Stat(filepath.Join(folder, kind)); err != nil {
			t.Error(err)
		}
	}
	statement, err := os.ReadFile(filepath.Join(folder, "provenance/loomcycle/linux-arm64.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{digest.FromString("helloarm64").Encoded(), digest.FromString("goarm64").Encoded(), `"startedOn"`, `"finishedOn"`, `"dirHash"`, "pkg:golang/github.com/klauspost/compress@"} {
		if !bytes.Contains(statement, []byte(want)) {
			t.Errorf("the provenance has no %s", want)
		}
	}

	if bytes.Contains(statement, []byte(digest.FromString("goamd64").Encoded())) {
		t.Error("the provenance names the toolchain of another node")
	}

	// Signed by halves.
	signatures := filepath.Join(t.TempDir(), "signatures.json")
	if err := writeFile(signatures, []byte("[]")); err != nil {
		t.Fatal(err)
	}
	if out, err := supply(t, f, "policy", "-dist", folder, "-signatures", signatures); err == nil || !strings.Contains(err.Error(), "[signed]") {
		t.Errorf("policy without signatures: %v\n%s", err, out)
	}

	// Another build of the same images.
	g := family{t: t, root: f.root, version: "1.0-2"}
	other := g.write("other")
	if _, err := supply(t, f, "sbom", "-dist", folder); err == nil || !strings.Contains(err.Error(), "is not the lock that") {
		t.Errorf("sbom with another lock: %v", err)
	}
	chain(t, g, other)
	if out, err = supply(t, f, "sbom-diff", folder, other); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "~ deb hello 1.0-1 -> 1.0-2\n") {
		t.Errorf("the difference is\n%s", out)
	}
}

// The compression of the layers is no matter to what describes and judges them.
func TestSupplyChainOfZstd(t *testing.T) {
	var documents []string
	for _, zstd := range []bool{false, true} {
		f := family{t: t, root: t.TempDir(), zstd: zstd}
		folder := f.write("dist")
		chain(t, f, folder)
		if out, err := supply(t, f, "policy", "-dist", folder); err != nil || !strings.Contains(out, "2 images keep") {
			t.Errorf("policy: %v\n%s", err, out)
		}
		text, err := os.ReadFile(filepath.Join(folder, "sbom/loomcycle-toolbox/linux-arm64.spdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		r, err := dist.Read(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, img := range r.Images { // the SBOM names the manifest
			for _, v := range img.Platforms {
				text = bytes.ReplaceAll(text, []byte(v.Digest.Encoded()), []byte("DIGEST"))
			}
		}
		documents = append(documents, string(text))
	}
	if documents[0] != documents[1] {
		t.Error("the SBOMs differ")
	}
}

func TestBadBuilds(t *testing.T) {
	for _, c := range []struct {
		name string
		file imagetest.Entry
		step string
		want string
	}{
		{"a stray file", imagetest.File("opt/x", "x"), "sbom", "/opt/x: no package lists it"},
		{"a set-id program", imagetest.Entry{Header: tar.Header{Name: "etc/motd", Mode: 0o4755}}, "policy", "[setuid-allowed] loomcycle-toolbox linux/arm64: /etc/motd is setuid"},
		{"a world-writable file", imagetest.Entry{Header: tar.Header{Name: "etc/motd", Mode: 0o666}}, "policy", "[world-writable]"},
		{"a key", imagetest.File("etc/motd", "-----BEGIN "+"PRIVATE KEY-----\n"+strings.Repeat("A", 64)), "policy", "[no-secrets]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := family{t: t, root: t.TempDir(), extra: []imagetest.Entry{c.file}}
			folder := f.write("dist")
			old := filepath.Join(folder, "sbom", "loomcycle", "old")
			if err := writeFile(old, nil); err != nil {
				t.Fatal(err)
			}
			if c.step == "policy" {
				chain(t, f, folder)
			}
			_, err := supply(t, f, c.step, "-dist", folder)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want %q in it", err, c.want)
			}
			if _, err := os.Stat(old); (err == nil) != (c.step == "sbom") {
				t.Errorf("the documents of before are there: %v", err == nil)
			}
			if left, err := filepath.Glob(filepath.Join(folder, ".*")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

func TestCompiles(t *testing.T) {
	for _, c := range []struct {
		programs, groups []string
		loomcycle        string
		want             bool
	}{
		{[]string{"loomcycle"}, nil, "", true},
		{[]string{"loomcycle"}, nil, "git:https://git.example/loomcycle#1", true},
		{[]string{"loomcycle"}, []string{"static", "files", "programs"}, "bin:folder", false},
		{[]string{"loomcycle"}, []string{"gocache"}, "bin:folder", true},
		{[]string{"loomcycle-builder", "session-agent"}, nil, "bin:folder", true},
		{nil, []string{"go", "gocache"}, "", true},
		{nil, []string{"base"}, "", false},
	} {
		if got := compiles(&images.Image{Programs: c.programs}, c.groups, c.loomcycle); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

func TestTools(t *testing.T) {
	groups, err := lock.LoadGroups("../../../images/groups.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for layers, want := range map[string]string{
		"static files programs":   "",
		"base shell python go":    "",
		"base pycache files":      "base shell python",
		"base go gocache":         "base shell python cc cross",
		"pycache gocache nothing": "base shell python cc cross",
	} {
		var list []dist.Layer
		for _, l := range strings.Fields(layers) {
			list = append(list, dist.Layer{Group: l})
		}
		if got := strings.Join(tools(groups, list), " "); got != want {
			t.Errorf("%s: %q, want %q", layers, got, want)
		}
	}
}

func TestSameRepository(t *testing.T) {
	for _, c := range []struct {
		actions, server, repository string
		want                        bool
	}{
		{"", "", "", true},
		{"true", "https://git.example", "o/images", true},
		{"true", "https://git.example", "O/Images", true},
		{"true", "https://git.example", "fork/images", false},
		{"true", "", "o/images", false},
	} {
		env := map[string]string{"GITHUB_ACTIONS": c.actions, "GITHUB_SERVER_URL": c.server, "GITHUB_REPOSITORY": c.repository}
		err := sameRepository(func(k string) string { return env[k] }, "https://git.example/o/images.git")
		if (err == nil) != c.want || err != nil && !strings.Contains(err.Error(), "images/family.yaml") {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestUnknownCommand(t *testing.T) {
	out, err := supply(t, family{root: "."}, "nonsense")
	if err == nil || !strings.Contains(out, "policy") {
		t.Errorf("error is %v, with the help\n%s", err, out)
	}
}
