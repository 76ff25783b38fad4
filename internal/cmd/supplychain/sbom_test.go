package main

import (
	"archive/zip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/sbom"
)

// A program's module has the licence of its content, also where another
// module replaces it, whatever else the machine's module cache holds.
func TestLicencesOfModules(t *testing.T) {
	const mod = "module example.test/orig\n\ngo 1.25\n"
	proxy, dir := t.TempDir(), t.TempDir()
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range [][3]string{{"orig", "v1.0.0", filepath.Join("..", "..", "..", "LICENSE")}, {"fork", "v1.1.0", filepath.Join(strings.TrimSpace(string(goroot)), "LICENSE")}} {
		name, version := m[0], m[1]
		licence, err := os.ReadFile(m[2])
		if err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(proxy, "example.test", name, "@v", version)
		if err := writeFile(at+".info", []byte(`{"Version":"`+version+`"}`)); err != nil {
			t.Fatal(err)
		}
		if err := writeFile(at+".mod", []byte(mod)); err != nil {
			t.Fatal(err)
		}
		f, err := os.Create(at + ".zip")
		if err != nil {
			t.Fatal(err)
		}
		z := zip.NewWriter(f)
		for file, text := range map[string]string{"go.mod": mod, "LICENSE": string(licence), "orig.go": "package orig\n\nconst X = 1\n"} {
			w, err := z.Create("example.test/" + name + "@" + version + "/" + file)
			if err == nil {
				_, err = w.Write([]byte(text))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for name, value := range map[string]string{
		"GOPROXY": "file://" + proxy, "GOMODCACHE": filepath.Join(dir, "cache"), "GONOSUMDB": "example.test", "GOFLAGS": "-mod=mod", "GOWORK": "off", "CGO_ENABLED": "0", "GOOS": "linux", "GOARCH": "arm64",
	} {
		t.Setenv(name, value)
	}
	t.Cleanup(func() { // the directories of a module cache are read-only
		_ = exec.Command("chmod", "-R", "u+w", dir).Run()
	})
	ctx, err := sbom.WithLicences(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	components, err := sbom.DefaultComponents()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{{"", "example.test/orig Apache-2.0"}, {"replace example.test/orig => example.test/fork v1.1.0\n", "example.test/fork BSD-3-Clause"}} {
		source := t.TempDir()
		for file, text := range map[string]string{
			"go.mod":  "module example.test/runtime\n\ngo 1.25\n\nrequire example.test/orig v1.0.0\n\n" + c[0],
			"main.go": "package main\n\nimport \"example.test/orig\"\n\nfunc main() { println(orig.X) }\n",
		} {
			if err := writeFile(filepath.Join(source, file), []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", "program", ".")
		cmd.Dir = source
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		program, err := os.ReadFile(filepath.Join(source, "program"))
		if err != nil {
			t.Fatal(err)
		}
		store, err := imagefs.NewStore(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer store.Close()
		fsys, err := store.Open(ctx, imagetest.Image(t, v1.Config{}, "arm64", []imagetest.Entry{imagetest.Program("usr/local/bin/loomcycle", string(program))}))
		if err != nil {
			t.Fatal(err)
		}
		modules, err := sbom.Modules(fsys, components)
		if err != nil {
			t.Fatal(err)
		}
		cache := t.TempDir()
		if err := moduleCache(ctx, cache, modules); err != nil {
			t.Fatal(err)
		}
		if have, err := filepath.Glob(filepath.Join(cache, "example.test", "*")); err != nil || len(have) != 1 {
			t.Errorf("the folder holds %v, want what is linked and no more", have)
		}
		catalog, err := sbom.Inspect(ctx, sbom.Variant{Image: "loomcycle", Platform: "linux/arm64", FS: fsys, Lock: &lock.Lock{}, Groups: []string{"programs"}, ModuleCache: cache}, components)
		if err != nil {
			t.Fatal(err)
		}
		facts, err := catalog.Facts(nil)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range facts.Packages {
			if strings.HasPrefix(p.Name, "example.test/") && p.Within != "" {
				got = append(got, p.Name+" "+strings.Join(p.Licences, " "))
			}
		}
		if strings.Join(got, ", ") != c[1] {
			t.Errorf("%q: the modules are %q, want %q", c[0], got, c[1])
		}
	}
}
