package lint

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// A fault in any file of any module is found, but in those of the images' fixtures.
func TestGo(t *testing.T) {
	const good, verb = "package main\n\nfunc main() {}\n", "package main\n\nimport \"fmt\"\n\nfunc main() { fmt.Printf(\"%d\\n\", \"x\") }\n"
	for name, tc := range map[string]struct {
		file, text string
		want       []string
	}{
		"the form":        {"tools/x/main.go", "package main\nfunc main() {}\n", []string{"tools/x/main.go", "gofmt -w"}},
		"a file of a tag": {"magefiles/x.go", "//go:build mage\n\n" + verb, []string{"go vet -tags=mage ./magefiles in ."}},
		"the root":        {"cmd/main.go", verb, []string{"./... in .: "}},
		"another module":  {"tools/x/main.go", verb, []string{"./... in tools/x"}},
	} {
		root := t.TempDir()
		for name, text := range map[string]string{
			"go.mod": "module example.test/m\n\ngo 1.24\n", "main.go": good,
			"magefiles/go.go": "//go:build mage\n\n" + good,
			"tools/x/go.mod":  "module example.test/x\n\ngo 1.24\n", "tools/x/main.go": good,
			"tools/pin/go.mod":        "module example.test/pin\n\ngo 1.24\n",
			"smoke/fixtures/y/go.mod": "module example.test/y\n\ngo 1.99\n", "smoke/fixtures/y/main.go": verb,
			tc.file: tc.text,
		} {
			file := filepath.Join(root, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		var out syncbuf.Buffer
		err := Go(t.Context(), root, &out)
		if err == nil {
			t.Errorf("%s: nothing is found", name)
			continue
		}
		for _, part := range tc.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: the error lacks %q: %v\n%s", name, part, err, &out)
			}
		}
	}
}

// Every module of this repository with a package is among them.
func TestModules(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	modules, err := linter{t.Context(), root, t.Output()}.modules()
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, m := range modules {
		rel, err := filepath.Rel(root, m.dir)
		if err != nil {
			t.Fatal(err)
		}
		have = append(have, rel)
	}
	if !slices.Contains(have, ".") || !slices.Contains(have, "tools/sigstoresigned") || slices.Contains(have, "tools/lint") {
		t.Errorf("the modules are %q", have)
	}
}
