package gocache

import (
	"bytes"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// build runs the real go command with this program as its cache, and returns
// what it compiled.
func build(t *testing.T, prog, cache, module string) (compiled []string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-x", "-o", filepath.Join(t.TempDir(), "out"), ".")
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "GOCACHE="+cache, "GOCACHEPROG="+prog, "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "/compile ") {
			_, rest, _ := strings.Cut(line, " -p ")
			name, _, _ := strings.Cut(rest, " ")
			compiled = append(compiled, name)
		}
	}
	return compiled
}

func command(t *testing.T) string {
	t.Helper()
	prog := filepath.Join(t.TempDir(), "go-cache")
	if out, err := exec.Command("go", "build", "-o", prog, "./cmd/go-cache").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return prog
}

func module(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module example.test/hello\n\ngo 1.26\n",
		"main.go": "package main\n\nimport \"errors\"\n\nfunc main() { println(errors.New(\"hello\").Error()) }\n",
	} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		// Old enough for go to index the package, which it keeps by these times.
		if err := os.Chtimes(file, time.Unix(1700000000, 0), time.Unix(1700000000, 0)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The whole point, with a real go command: a packed cache serves a build whose
// own cache is empty, and nothing but the user's package is compiled or kept.
func TestLowerServesABuild(t *testing.T) {
	prog, mod := command(t), module(t)
	first := t.TempDir()
	if compiled := build(t, prog+" /nonexistent", first, mod); len(compiled) < 2 {
		t.Fatalf("with nothing cached, %q were compiled", compiled)
	}
	if compiled := build(t, prog+" /nonexistent", first, mod); len(compiled) != 0 {
		t.Fatalf("the upper cache alone did not serve %q", compiled)
	}
	if compiled := build(t, "", first, mod); len(compiled) != 0 {
		t.Fatalf("the go command's own cache does not understand the upper one: it compiled %q", compiled)
	}
	lower := t.TempDir()
	if err := Pack(first, lower, time.Unix(1700000000, 0)); err != nil {
		t.Fatal(err)
	}
	second := t.TempDir()
	os.WriteFile(filepath.Join(mod, "main.go"), []byte("package main\n\nimport \"errors\"\n\nfunc main() { println(errors.New(\"other\").Error()) }\n"), 0o644)
	if compiled := build(t, prog+" "+lower, second, mod); len(compiled) != 1 || compiled[0] != "main" {
		t.Errorf("with the lower cache, %q were compiled", compiled)
	}
	outputs, err := filepath.Glob(filepath.Join(second, "??", "*-d"))
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range outputs {
		if info, err := os.Stat(o); err != nil || info.Size() > 1<<20 {
			t.Errorf("%s was copied into the upper cache (%v)", o, err)
		}
	}
}

// Packing twice, from caches filled at other times, gives the same bytes.
func TestPackIsReproducible(t *testing.T) {
	prog, mod := command(t), module(t)
	var sums [2][32]byte
	for i := range sums {
		cache, out := t.TempDir(), t.TempDir()
		build(t, prog+" /nonexistent", cache, mod)
		if err := Pack(cache, out, time.Unix(1700000000, 0)); err != nil {
			t.Fatal(err)
		}
		index, err := os.ReadFile(filepath.Join(out, indexFile))
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = sha256.Sum256(index)
	}
	if sums[0] != sums[1] {
		t.Error("the indexes differ")
	}
}

func TestOpenLower(t *testing.T) {
	if l, err := OpenLower(t.TempDir()); l != nil || err != nil {
		t.Errorf("a folder without a cache: %v, %v", l, err)
	}
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, indexFile), []byte("short"), 0o644)
	if _, err := OpenLower(dir); err == nil || !strings.Contains(err.Error(), "5 bytes") {
		t.Errorf("a torn index: %v", err)
	}
}

// A put that ends in the middle leaves no entry behind.
func TestTornPut(t *testing.T) {
	dir := t.TempDir()
	os.Mkdir(filepath.Join(dir, "00"), 0o755)
	id := "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	in := `{"ID":1,"Command":"put","ActionID":"` + id + `","OutputID":"` + id + `","BodySize":100}` + "\n\n" + `"aGVsbG8=`
	var out bytes.Buffer
	if err := Serve(strings.NewReader(in), &out, nil, Upper{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), `"Err":"`) {
		t.Errorf("the answer is %s", out.String())
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "00")); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

func TestTrim(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	os.Mkdir(filepath.Join(dir, "ab"), 0o755)
	for name, age := range map[string]time.Duration{"old-d": keepAge + 2*noteAge, "new-d": keepAge - noteAge} {
		file := filepath.Join(dir, "ab", name)
		os.WriteFile(file, nil, 0o644)
		os.Chtimes(file, now.Add(-age), now.Add(-age))
	}
	u := Upper{Dir: dir}
	u.trim(now)
	if _, err := os.Stat(filepath.Join(dir, "ab", "old-d")); err == nil {
		t.Error("what was not used for long is still there")
	}
	if _, err := os.Stat(filepath.Join(dir, "ab", "new-d")); err != nil {
		t.Error(err)
	}
	os.Chtimes(filepath.Join(dir, "ab", "new-d"), now.Add(-2*keepAge), now.Add(-2*keepAge))
	u.trim(now.Add(trimAge / 2))
	if _, err := os.Stat(filepath.Join(dir, "ab", "new-d")); err != nil {
		t.Error("it looked twice in a day")
	}
}
