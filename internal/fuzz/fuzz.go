// Package fuzz runs all of a module's fuzz tests, which go test does one at a time.
package fuzz

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

// Target is a fuzz test.
type Target struct{ Package, Name string }

var declared = regexp.MustCompile(`(?m)^func (Fuzz\w*)\(\w+ \*testing\.F\)`)

// Targets finds the fuzz tests of the module in dir.
func Targets(ctx context.Context, dir string) ([]Target, error) {
	const files = `{{range .TestGoFiles}}{{$.ImportPath}} {{$.Dir}}/{{.}}
{{end}}{{range .XTestGoFiles}}{{$.ImportPath}} {{$.Dir}}/{{.}}
{{end}}`
	list := host.Command(ctx, "go", "list", "-f", files, "./...")
	list.Dir, list.Stderr = dir, os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("looking for the module's test files: go list: %w", err)
	}
	var all []Target
	for line := range strings.Lines(string(out)) {
		pkg, file, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range declared.FindAllStringSubmatch(string(text), -1) {
			all = append(all, Target{pkg, m[1]})
		}
	}
	return all, nil
}

// Run fuzzes each target of the module in dir for as long as go test's -fuzztime
// says ("30s", "1000x"). An error names those that failed; the input that did it is
// in the package's testdata, as go test says on w, and is part of its tests from then on.
func Run(ctx context.Context, dir, each string, w io.Writer) error {
	all, err := Targets(ctx, dir)
	if err != nil {
		return err
	}
	var failed []error
	for _, t := range all {
		fmt.Fprintf(w, "%s %s\n", t.Package, t.Name)
		test := host.Command(ctx, "go", "test", "-run=^$", "-fuzz=^"+t.Name+"$", "-fuzztime="+each, t.Package)
		test.Dir, test.Stdout, test.Stderr = dir, w, w
		if err := test.Run(); err != nil {
			failed = append(failed, fmt.Errorf("fuzzing %s of %s: %w", t.Name, t.Package, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(failed...)
}
