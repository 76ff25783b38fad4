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
			changes, err := Update(folder, release, noTemplate(t))
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
			if again, err := Update(folder, release, noTemplate(t)); err != nil || len(again) != 0 {
				t.Errorf("a second time it changed %+v, %v", again, err)
			}
		})
	}
}

func noTemplate(t *testing.T) func(string) {
	return func(file string) { t.Errorf("%s was taken for a template", file) }
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
	changes, err := Update(folder, release, func(file string) { skipped = append(skipped, file) })
	if err == nil || !strings.Contains(err.Error(), "broken.yaml") || strings.Contains(err.Error(), "templates") {
		t.Errorf("got %v", err)
	}
	if len(skipped) != 1 || filepath.Base(skipped[0]) != "deployment.yaml" {
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
	if changes, err := Update(folder, release, noTemplate(t)); err != nil || len(changes) != 0 {
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
