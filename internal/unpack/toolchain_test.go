package unpack

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

const (
	toolchainVersion = "v0.0.1-go1.99.linux-amd64"
	toolchainPrefix  = "golang.org/toolchain@" + toolchainVersion + "/"
)

func zipOf(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range files {
		w, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// toolchain lays a zip out in a folder.
func toolchain(t *testing.T, b []byte, out string) error {
	t.Helper()
	in := filepath.Join(t.TempDir(), "go.zip")
	if err := os.WriteFile(in, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return Go(t.Context(), plan.Go{Epoch: epoch, Version: toolchainVersion, SHA256: digest.FromBytes(b)}, in, out)
}

func TestGo(t *testing.T) {
	if os.Geteuid() != 0 {
		citest.Skip(t, "files of other owners can only be made by root")
	}
	const prefix = toolchainPrefix
	layOut := func(files map[string]string) ([]string, error) {
		out := t.TempDir()
		if err := toolchain(t, zipOf(t, files), out); err != nil {
			return nil, err
		}
		return listing(t, out), nil
	}
	l, err := layOut(map[string]string{
		prefix + "bin/go": "go", prefix + "pkg/tool/linux_amd64/compile": "c", prefix + "src/_go.mod": "module std", prefix + "src/cmd/_go.mod": "module cmd",
		prefix + "lib/wasm/go_js_wasm_exec": "js", prefix + "lib/wasm/wasm_exec.js": "js", prefix + "src/make.bash": "m",
	})
	if err != nil {
		t.Fatal(err)
	}
	want(t, l, "/usr/local/go/bin/go 100755 0:0 1700000000 ", "/compile 100755 ", `/src/go.mod 100644 0:0 1700000000 n1 "module std"`, "/src/cmd/go.mod ",
		"/go_js_wasm_exec 100755", "/wasm_exec.js 100644", "/make.bash 100644")
	wantNot(t, l, "_go.mod")
	for name, want := range map[string]string{
		prefix + "../../../../etc/x": "not canonical", "other/bin/go": "is not below golang.org/toolchain@", prefix + "/abs": "not canonical", prefix + "README": "holds no bin/go",
	} {
		if _, err := layOut(map[string]string{name: "x"}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, not %q", name, err, want)
		}
	}
}

func TestNPM(t *testing.T) {
	if os.Geteuid() != 0 {
		citest.Skip(t, "files of other owners can only be made by root")
	}
	layOut := func(node, npm []member) ([]string, error) {
		in, out := t.TempDir(), t.TempDir()
		p := plan.NPM{Epoch: epoch}
		for name, c := range map[string]struct {
			members []member
			input   *plan.Input
		}{"node.tgz": {node, &p.Node}, "npm.tgz": {npm, &p.NPM}} {
			b := compressed(t, ".gz", tarOf(t, c.members...))
			if err := os.WriteFile(filepath.Join(in, name), b, 0o644); err != nil {
				t.Fatal(err)
			}
			*c.input = plan.Input{File: name, SHA256: digest.FromBytes(b)}
		}
		err := NPM(t.Context(), p, in, out)
		if err != nil {
			return nil, err
		}
		return listing(t, out), nil
	}
	program := file("package/bin/node", "node")
	program.Mode = 0o755
	node := []member{program, file("package/include/node/node.h", "h"), file("package/LICENSE", "MIT"), file("package/share/man/man1/node.1", "m"), file("package/README.md", "r")}
	npm := []member{file("package/bin/npm-cli.js", "js"), file("package/package.json", `{"bin": {"npm": "bin/npm-cli.js", "npx": "./bin/npm-cli.js"}}`), file("package/LICENSE", "Artistic"),
		file("package/docs/x.html", "d"), file("package/man/x.1", "m"), file("package/node_modules/y/man/z", "kept")}
	l, err := layOut(node, npm)
	if err != nil {
		t.Fatal(err)
	}
	want(t, l, "/usr/local/bin/node 100755 0:0 1700000000", "/usr/local/include/node/node.h 100644", "/usr/local/share/doc/node/LICENSE", "/npm/LICENSE",
		"/usr/local/lib/node_modules/npm/bin/npm-cli.js 100755", "/usr/local/bin/npm 120777 0:0 1700000000 -> ../lib/node_modules/npm/bin/npm-cli.js", "/usr/local/bin/npx ", "/node_modules/y/man/z")
	wantNot(t, l, "README", "x.1", "x.html", "node.1")
	for want, bad := range map[string]member{
		"not canonical":                    file("package/../../x", "x"),
		"not a regular file below":         symbolic("package/bin/x", "/etc/passwd"),
		"is not a regular file":            hard("package/bin/x", "/etc/passwd"),
		"has the path already":             file("package/bin/node", "twice"),
		"not a regular file below one fol": {tar.Header{Name: "x", Typeflag: tar.TypeReg}, ""},
	} {
		if _, err := layOut(append([]member{program}, bad), npm); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, not %q", bad.Name, err, want)
		}
	}
	if _, err := layOut(node, []member{file("package/package.json", `{"bin": {"npm": "bin/none.js"}}`)}); err == nil || !strings.Contains(err.Error(), `command "npm" has no file`) {
		t.Errorf("the error is %v", err)
	}
}
