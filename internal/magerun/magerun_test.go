package magerun

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestMain(m *testing.M) {
	if os.Getenv("MAGERUN_TEST") != "" {
		os.Exit(Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// Runs that start together in two checkouts with the same targets and
// different packages: each compiles and runs its own.
func TestOverlappingRuns(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cache := t.TempDir()
	env := append(os.Environ(), "MAGERUN_TEST=1", "MAGEFILE_CACHE="+cache, "MAGEFILE_HASHFAST=1", "GOFLAGS=-mod=mod", "GOTMPDIR=")
	checkouts := map[string]string{}
	for _, name := range []string{"one", "two"} {
		dir := t.TempDir()
		checkouts[name] = dir
		for file, text := range map[string]string{
			"go.mod":              "module example.test/m\n\ngo 1.24\n",
			"name/name.go":        "package name\n\nconst Name = \"" + name + "\"\n",
			"magefiles/target.go": "//go:build mage\n\npackage main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n\n\t\"example.test/m/name\"\n)\n\nfunc Hello() { fmt.Println(name.Name, os.Getenv(\"GOTMPDIR\")) }\n",
			"below/keep":          "",
		} {
			path := filepath.Join(dir, file)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
	}
	run := func(dir string, args ...string) (string, error) {
		cmd := exec.Command(self, args...)
		cmd.Dir, cmd.Env = filepath.Join(dir, "below"), append(env, "PWD="+filepath.Join(dir, "below"))
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return "", errors.Join(err, errors.New(stderr.String()))
		}
		return strings.TrimSpace(string(out)), nil
	}
	var all sync.WaitGroup
	for name, dir := range checkouts {
		for range 4 {
			all.Go(func() {
				if said, err := run(dir, "hello"); said != name || err != nil {
					t.Errorf("in the checkout %s it said %q, %v", name, said, err)
				}
			})
		}
	}
	static := filepath.Join(t.TempDir(), "static")
	all.Go(func() {
		if _, err := run(checkouts["one"], "-compile", static); err != nil {
			t.Error(err)
		}
	})
	all.Wait()
	if said, err := exec.Command(static, "hello").Output(); strings.TrimSpace(string(said)) != "one" || err != nil {
		t.Errorf("the program of -compile says %q, %v", said, err)
	}
	dir := checkouts["one"]
	if err := os.WriteFile(filepath.Join(dir, "name", "name.go"), []byte("package name\n\nconst Name = \"three\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if said, err := run(dir, "hello"); said != "three" {
		t.Errorf("after an edit it said %q, %v", said, err)
	}
	if _, err := run(dir, "nothing"); err == nil {
		t.Error("a target that is not there succeeds")
	}
	if left, err := filepath.Glob(filepath.Join(dir, "magefiles", "mage_output*")); err != nil || len(left) != 0 {
		t.Errorf("left beside the targets: %v, %v", left, err)
	}
	if programs, err := os.ReadDir(cache); err != nil || len(programs) != 2 {
		t.Errorf("two checkouts have the programs %v, %v", programs, err)
	}
	if _, err := run(dir, "-clean"); err != nil {
		t.Error(err)
	}
	if programs, err := os.ReadDir(cache); err != nil || len(programs) != 0 {
		t.Errorf("left by -clean: %v, %v", programs, err)
	}
}
