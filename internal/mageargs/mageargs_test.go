package mageargs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	for given, want := range map[string]string{
		"images:build":                       "images:build",
		"images:build loomcycle":             "images:build -name=loomcycle",
		"Images:Build nope":                  "Images:Build -name=nope",
		"images:build -name=loomcycle":       "images:build -name=loomcycle",
		"smoke nope":                         "smoke -name=nope",
		"images:build sbom Policy":           "images:build sbom Policy",
		"images:build buildkit:down":         "images:build buildkit:down",
		"images:build loomcycle smoke typo":  "images:build -name=loomcycle smoke -name=typo",
		"images:inspect loomcycle verify x":  "images:inspect loomcycle verify x",
		"lock:diff HEAD~1 HEAD images:build": "lock:diff HEAD~1 HEAD images:build",
	} {
		args := strings.Fields(given)
		Names(args)
		if got := strings.Join(args, " "); got != want {
			t.Errorf("%s: %s, want %s", given, got, want)
		}
	}
}

// Every target without a colon is known, or it would be taken for a name.
func TestTargets(t *testing.T) {
	files, err := filepath.Glob("../../magefiles/*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	var have []string
	for _, name := range files {
		if filepath.Base(name) == "mage_output_file.go" { // there while another run compiles
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.IsExported() {
				have = append(have, strings.ToLower(fn.Name.Name))
			}
		}
	}
	slices.Sort(have)
	if !slices.Equal(have, targets) {
		t.Errorf("the targets without a colon are\n%q, listed are\n%q", have, targets)
	}
}
