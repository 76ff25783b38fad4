package unpack

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

func seeds(t testing.TB) [][]byte {
	plain := pkg{name: "x", control: []member{file("./conffiles", "/etc/x\n")}, data: []member{file("./etc/x", "x"), symbolic("./etc/l", "x"), hard("./etc/h", "./etc/x")}}.build(t)
	return [][]byte{
		plain, plain[:len(plain)/2], plain[:70], []byte("!<arch>\n"), {},
		arOf(arMember{"debian-binary", []byte("2.0\n")}, arMember{"control.tar.xz", []byte("\xfd7zXZ\x00")}, arMember{"data.tar.zst", []byte("\x28\xb5\x2f\xfd")}),
		arOf(arMember{"a/", nil}, arMember{"b", []byte("odd")}),
	}
}

// FuzzAr: whatever the bytes, members lie inside the input.
func FuzzAr(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		members, err := readAr(b)
		if err != nil {
			return
		}
		total := 8
		for _, m := range members {
			total += arHeaderSize + len(m.data)
		}
		if total > len(b) {
			t.Errorf("members have %d bytes, the archive %d", total, len(b))
		}
	})
}

// FuzzControl: a stanza that is read can be written to dpkg's status file as
// one paragraph and read again.
func FuzzControl(f *testing.F) {
	for _, s := range []string{
		"Package: x\nVersion: 1\nArchitecture: all\nDescription: short\n long\n .\n more\n",
		"Package: x\nVersion: 1\nArchitecture: all\nConffiles:\n /etc/x 0\n", "a: b\n c", ": x", "\n\n", "# c\nPackage: x\n", "A:\n B", "",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseStanza(text)
		if err != nil {
			return
		}
		again, err := parseStanza(installed(s, nil))
		if err != nil {
			t.Fatalf("written and read again: %v", err)
		}
		if again.get("Package") != s.get("Package") || again.get("Version") != s.get("Version") {
			t.Errorf("%q became %q", s, again)
		}
	})
}

// FuzzDeb: a package is read or refused, in bounded memory, without a panic.
func FuzzDeb(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := openDeb(b)
		if err != nil {
			return
		}
		d.fingerprint()
		_ = d.each(func(_ *tar.Header, r io.Reader) error { _, err := io.Copy(io.Discard, r); return err })
	})
}

// FuzzTarball: of an npm package only plain files below one folder are seen, and
// no more bytes than the limit.
func FuzzTarball(f *testing.F) {
	whole := compressed(f, ".gz", tarOf(f, folder("package/"), file("package/bin/node", "node"), file("package/package.json", "{}")))
	for _, b := range [][]byte{
		whole, whole[:len(whole)/2], whole[:10], {}, append(bytes.Clone(whole), whole...),
		compressed(f, ".gz", tarOf(f, file("package/../../x", "x"))), compressed(f, ".gz", tarOf(f, symbolic("package/x", "/etc"))),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = tarball(b, func(name string, h *tar.Header, content io.Reader) error {
			n, err := io.Copy(io.Discard, content)
			if name == "" || strings.HasPrefix(name, "/") || path.Clean("/"+name) != "/"+name || h.Typeflag != tar.TypeReg || n > maxFile {
				t.Errorf("%q (type %q, %d bytes) passes as %q", h.Name, h.Typeflag, n, name)
			}
			return err
		})
	})
}

// FuzzGo: a toolchain's zip is refused, or all of it is below usr/local/go.
func FuzzGo(f *testing.F) {
	if os.Geteuid() != 0 {
		citest.Skip(f, "files of other owners can only be made by root")
	}
	whole := zipOf(f, map[string]string{toolchainPrefix + "bin/go": "go", toolchainPrefix + "src/_go.mod": "module std"})
	for _, b := range [][]byte{
		whole, whole[:len(whole)/2], {}, bytes.ReplaceAll(whole, []byte("src/_go.mod"), []byte("../../../xx")),
		bytes.ReplaceAll(whole, []byte("src/_go.mod"), []byte("bin/go/x.go")), bytes.ReplaceAll(whole, []byte("src/_go.mod"), []byte("x\\..\\.\\y.z")),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		out := filepath.Join(dir, "out")
		if err := os.Mkdir(out, 0o755); err != nil {
			t.Fatal(err)
		}
		err := toolchain(t, b, out)
		if err := filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
			name := strings.TrimPrefix(p, dir) + "/"
			if !strings.HasPrefix("/out/usr/local/go/", name) && !strings.HasPrefix(name, "/out/usr/local/go/") {
				t.Errorf("it made %s", name)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if _, found := os.Stat(filepath.Join(out, "usr/local/go/bin/go")); err == nil && found != nil {
			t.Errorf("it passes without a bin/go: %v", found)
		}
	})
}

// FuzzMemberPath: a name that is accepted stays below the root.
func FuzzMemberPath(f *testing.F) {
	for _, s := range []string{"./", ".", "./usr/bin/x", "./../x", "/x", "x/..", "./a//b", "././x", "..", "./..", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		p, err := memberPath(name)
		if err != nil {
			return
		}
		for _, q := range []string{p, merged(p, true), merged(p, false)} {
			if strings.HasPrefix(q, "/") || q != "" && path.Clean("/"+q) != "/"+q || strings.HasPrefix(path.Join("/root", q), "/root") == false {
				t.Errorf("%q became %q", name, q)
			}
		}
	})
}

// FuzzName: OpenSSL's canonical form of any bytes is made or refused.
func FuzzName(f *testing.F) {
	f.Add([]byte("0\x0d1\x0b0\x09\x06\x03U\x04\x06\x13\x02DE"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, der []byte) {
		a, err := canonicalName(der)
		if b, err2 := canonicalName(der); (err == nil) != (err2 == nil) || !bytes.Equal(a, b) {
			t.Error("the same name in two forms")
		}
	})
}
