package pins

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

var (
	digestA = "sha256:" + strings.Repeat("a", 64)
	digestB = "sha256:" + strings.Repeat("b", 64)
	release = []Pin{
		{"loomcycle", "registry.example/team/loomcycle", "1.2.3", digestA},
		{"loomcycle-builder", "registry.example/team/loomcycle-builder", "1.2.3", digestB},
	}
)

func TestUpdateChangesOnlyTheValues(t *testing.T) {
	for name, c := range map[string]struct{ file, old, want string }{
		"compose": {"compose.yaml", `# our stack
services:
  app:   # the runtime
    image: "mirror.example:5000/x/loomcycle:1.2.2"   # pinned by hand

    environment: {A: b}
  other:
    image: postgres:18
  sidecar: {image: registry.example/team/loomcycle-builder, restart: always}
`, `# our stack
services:
  app:   # the runtime
    image: "mirror.example:5000/x/loomcycle:1.2.3@` + digestA + `"   # pinned by hand

    environment: {A: b}
  other:
    image: postgres:18
  sidecar: {image: registry.example/team/loomcycle-builder:1.2.3@` + digestB + `, restart: always}
`},
		"kustomize": {"kustomization.yaml", `images:
- name: loomcycle
  newName: mirror.example/loomcycle
  newTag: "1.0.0" # moves
- name: loomcycle-builder
  digest: sha256:` + strings.Repeat("0", 64) + `
`, `images:
- name: loomcycle
  newName: mirror.example/loomcycle
  newTag: "1.2.3@` + digestA + `" # moves
- name: loomcycle-builder
  digest: ` + digestB + `
`},
		"helm values, two documents": {"values.yml", `app:
  image: &image
    repository: registry.example/team/loomcycle
    tag: '1.0.0'
---
builder:
    image: {repository: x/loomcycle-builder, tag: 1.0.0, digest: ""}
`, `app:
  image: &image
    repository: registry.example/team/loomcycle
    tag: '1.2.3@` + digestA + `'
---
builder:
    image: {repository: x/loomcycle-builder, tag: 1.2.3, digest: "` + digestB + `"}
`},
		"anchors and tags": {"values.yaml", "a: {repository: x/loomcycle, tag: &v18 18}\nb: {repository: x/loomcycle-builder, tag: !!str 1.0.0 }\nc: {repository: x/loomcycle, tag: &v1 !!str '1'}\nd: *v1\n",
			"a: {repository: x/loomcycle, tag: &v18 1.2.3@" + digestA + "}\nb: {repository: x/loomcycle-builder, tag: !!str 1.2.3@" + digestB + " }\nc: {repository: x/loomcycle, tag: &v1 !!str '1.2.3@" + digestA + "'}\nd: *v1\n"},
		"kubernetes": {"pod.yaml", "spec:\n  containers:\n  - name: loomcycle\n    image: r.example/loomcycle:latest\n", "spec:\n  containers:\n  - name: loomcycle\n    image: r.example/loomcycle:1.2.3@" + digestA + "\n"},
		"text":       {"images.env", "# r.example/loomcycle:1.0.0\nIMAGE=r.example/loomcycle:1.0.0\n", "# r.example/loomcycle:1.0.0\nIMAGE=r.example/loomcycle:1.2.3@" + digestA + "\n"},
		"paths, hosts and bare names in text": {"app.env", "CONFIG_DIR=/srv/loomcycle\nDATA=./loomcycle:rw\nSRC=/srv/loomcycle:1.0.0\nSANDBOX=loomcycle-builder:9000\nURL=http://loomcycle:8787/x\nDOCS=docs.example/loomcycle\nTEAM=team/loomcycle:1.0.0\n",
			"CONFIG_DIR=/srv/loomcycle\nDATA=./loomcycle:rw\nSRC=/srv/loomcycle:1.0.0\nSANDBOX=loomcycle-builder:9000\nURL=http://loomcycle:8787/x\nDOCS=docs.example/loomcycle\nTEAM=team/loomcycle:1.0.0\n"},
		"text, twice on a line": {"pins.txt", "see x/r.example/loomcycle:1.0.0 r.example/loomcycle:1.0.0 localhost:5000/loomcycle:8\n",
			"see x/r.example/loomcycle:1.0.0 r.example/loomcycle:1.2.3@" + digestA + " localhost:5000/loomcycle:1.2.3@" + digestA + "\n"},
		"a path, not an image": {"compose.yaml", "services:\n  a:\n    image: /srv/loomcycle:1\n  b:\n    image: loomcycle:8\n", "services:\n  a:\n    image: /srv/loomcycle:1\n  b:\n    image: loomcycle:1.2.3@" + digestA + "\n"},
		"nothing of ours": {"compose.yaml", "services:\n  loomcycle:\n    image: r.example/loomcycle-docs:1\n    build: loomcycle\n",
			"services:\n  loomcycle:\n    image: r.example/loomcycle-docs:1\n    build: loomcycle\n"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			file := filepath.Join(folder, c.file)
			if err := os.WriteFile(file, []byte(c.old), 0o640); err != nil {
				t.Fatal(err)
			}
			changes, err := Update(folder, release, noneLeft(t))
			if err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(file)
			if err != nil || string(got) != c.want {
				t.Errorf("got %v\n%s\nwant\n%s", err, got, c.want)
			}
			if (len(changes) > 0) != (c.old != c.want) {
				t.Errorf("changes: %+v", changes)
			}
			if again, err := Update(folder, release, noneLeft(t)); err != nil || len(again) != 0 {
				t.Errorf("a second time it changed %+v, %v", again, err)
			}
		})
	}
}

func noneLeft(t *testing.T) func(string, string) {
	return func(where, why string) { t.Errorf("%s was left: %s", where, why) }
}

// TestUpdateTellsImagesApart has two images whose repositories end alike.
func TestUpdateTellsImagesApart(t *testing.T) {
	alike := []Pin{{"loomcycle", "registry.example/team/runtime/core", "1.2.3", digestA}, {"loomcycle-toolbox", "registry.example/team/toolbox/core", "1.2.3", digestB}}
	for old, c := range map[string]struct{ want, left string }{
		"image: registry.example/team/runtime/core:1": {"image: registry.example/team/runtime/core:1.2.3@" + digestA, ""},
		"image: registry.example/team/toolbox/core:1": {"image: registry.example/team/toolbox/core:1.2.3@" + digestB, ""},
		"image: mirror.example/toolbox/core:1":        {"image: mirror.example/toolbox/core:1.2.3@" + digestB, ""},
		"a: {repository: x/toolbox/core, tag: 1.0.0}": {"a: {repository: x/toolbox/core, tag: 1.2.3@" + digestB + "}", ""},
		"image: mirror.example/core:1":                {"image: mirror.example/core:1", "deploy.yaml:1: mirror.example/core may be registry.example/team/runtime/core or registry.example/team/toolbox/core"},
		"image: ${REGISTRY:-x}/toolbox/core:1.0.0":    {"image: ${REGISTRY:-x}/toolbox/core:1.0.0", "deploy.yaml:1: ${REGISTRY:-x}/toolbox/core:1.0.0 has a variable"},
		"image: ${IMAGE:-r.example/core}":             {"image: ${IMAGE:-r.example/core}", "deploy.yaml:1: ${IMAGE:-r.example/core} has a variable"},
		"image: $REGISTRY/postgres:18":                {"image: $REGISTRY/postgres:18", ""},
	} {
		file := filepath.Join(t.TempDir(), "deploy.yaml")
		if err := os.WriteFile(file, []byte(old), 0o644); err != nil {
			t.Fatal(err)
		}
		left := ""
		_, err := Update(filepath.Dir(file), alike, func(where, why string) { left += filepath.Base(where) + ": " + why })
		got, rerr := os.ReadFile(file)
		if err := errors.Join(err, rerr); err != nil || string(got) != c.want || !strings.HasPrefix(left, c.left) || (left == "") != (c.left == "") {
			t.Errorf("%s: %v\n%s, want\n%s\nleft %q, want %q", old, err, got, c.want, left, c.left)
		}
	}
}

// TestUpdateGoesOn has a chart's template and a broken file before the others:
// one is passed over, one is said, and the rest is updated.
func TestUpdateGoesOn(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"templates/deployment.yaml": "a: {{ .Values.x }}\n b: [\n",
		"broken.yaml":               "b: [\n",
		"values.yaml":               "image: {repository: r.example/loomcycle, tag: 1.0.0}\n",
	} {
		file := filepath.Join(folder, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	var skipped []string
	changes, err := Update(folder, release, func(where, why string) { skipped = append(skipped, where+": "+why) })
	if err == nil || !strings.Contains(err.Error(), "broken.yaml") || strings.Contains(err.Error(), "templates") {
		t.Errorf("got %v", err)
	}
	if len(skipped) != 1 || filepath.Base(skipped[0]) != "deployment.yaml: it is a template" {
		t.Errorf("skipped %v", skipped)
	}
	if len(changes) != 1 || filepath.Base(changes[0].File) != "values.yaml" {
		t.Errorf("changed %+v", changes)
	}
}

// TestFiles reads the forms back as their tools would and updates them to themselves.
func TestFiles(t *testing.T) {
	files, err := Files(release)
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct{ Image string }
	}
	var kustomize struct {
		Kind   string
		Images []struct{ Name, NewName, NewTag string }
	}
	var helm map[string]struct {
		Image struct{ Repository, Tag string }
	}
	for name, into := range map[string]any{"compose.pins.yaml": &compose, "kustomization.yaml": &kustomize, "pins-values.yaml": &helm} {
		if err := yaml.Unmarshal(files[name], into); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := compose.Services["loomcycle-builder"].Image; got != release[1].reference() {
		t.Errorf("compose has %q", got)
	}
	if got := helm["loomcycleBuilder"].Image; got.Repository != release[1].Repository || got.Tag != "1.2.3@"+digestB {
		t.Errorf("helm has %+v", got)
	}
	if !strings.Contains(string(files["kustomization.yaml"]), "newTag: 1.2.3@"+digestA) || !strings.Contains(string(files["pins.txt"]), release[0].reference()) {
		t.Errorf("kustomize:\n%s\ntext:\n%s", files["kustomization.yaml"], files["pins.txt"])
	}
	folder := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if changes, err := Update(folder, release, noneLeft(t)); err != nil || len(changes) != 0 {
		t.Errorf("what was just written changes: %+v, %v", changes, err)
	}
}

// TestBotsFindTheFiles holds the file names against the patterns by which
// Renovate's managers and Dependabot's fetchers choose files; docs/RELEASING.md
// gives the one that Renovate has to be told.
func TestBotsFindTheFiles(t *testing.T) {
	files, err := Files(release)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "RELEASING.md"))
	if err != nil {
		t.Fatal(err)
	}
	const told = `(^|/)[^/]*values\.ya?ml$`
	if !strings.Contains(string(doc), strings.ReplaceAll("/"+told+"/", `\`, `\\`)) {
		t.Errorf("docs/RELEASING.md does not give Renovate the pattern %s", told)
	}
	for name, patterns := range map[string][]string{
		"compose.pins.yaml":  {`(^|/)(?:docker-)?compose[^/]*\.ya?ml$`, `(docker-)?compose(-[\w]+)?(?:\.[\w-]+)?\.ya?ml`},
		"kustomization.yaml": {`(^|/)kustomization\.ya?ml$`},
		"pins-values.yaml":   {told, `^[^.]+\.ya?ml`, `values[\-a-zA-Z_0-9]*\.ya?ml$`},
	} {
		if files[name] == nil {
			t.Errorf("there is no file %s", name)
		}
		for _, p := range patterns {
			if !regexp.MustCompile(p).MatchString(name) {
				t.Errorf("%s does not match %s", name, p)
			}
		}
	}
}
