package fuzz

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// module has a fuzz test that holds, in the package, and one that does not, beside it.
func module(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "a module")
	for name, text := range map[string]string{
		"go.mod":      "module example.test/m\n\ngo 1.26\n",
		"a_test.go":   "package m\n\nimport \"testing\"\n\nfunc FuzzHolds(f *testing.F) { f.Fuzz(func(*testing.T, []byte) {}) }\n\nfunc FuzzyHelper() {}\n",
		"b/x_test.go": "package b_test\n\nimport \"testing\"\n\nfunc FuzzBreaks(f *testing.F) {\n\tf.Add(7)\n\tf.Fuzz(func(t *testing.T, i int) {\n\t\tif i == 7 {\n\t\t\tt.Error(\"seven\")\n\t\t}\n\t})\n}\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRun(t *testing.T) {
	var out bytes.Buffer
	err := Run(t.Context(), module(t), "10x", &out)
	if err == nil || !strings.Contains(err.Error(), "FuzzBreaks of example.test/m/b") || strings.Contains(err.Error(), "FuzzHolds") {
		t.Errorf("the error is %v", err)
	}
	for _, want := range []string{"example.test/m FuzzHolds\n", "execs: 10", "example.test/m/b FuzzBreaks\n", "seven"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("there is no %q in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "FuzzyHelper") {
		t.Errorf("it ran what is no fuzz test:\n%s", &out)
	}
}

// The repository's own are found, be they in the package or beside it.
func TestTargets(t *testing.T) {
	all, err := Targets(t.Context(), "../..")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, target := range all {
		names[target.Name] = true
	}
	for _, want := range []string{"FuzzAr", "FuzzDeb", "FuzzReadInRelease", "FuzzGuest", "FuzzHost", "FuzzBothEnds", "FuzzLift"} {
		if !names[want] {
			t.Errorf("%s is not among %v", want, all)
		}
	}
}
