package unpack

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

const epoch = 1700000000

// member is a tar member of a package under test.
type member struct {
	tar.Header
	content string
}

func file(name, content string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}, content}
}

func folder(name string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func symbolic(name, target string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: target}, ""}
}

func hard(name, target string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeLink, Mode: 0o644, Linkname: target}, ""}
}

func tarOf(t testing.TB, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		if err := w.WriteHeader(&m.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(m.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func arOf(members ...arMember) []byte {
	var b bytes.Buffer
	b.WriteString("!<arch>\n")
	for _, m := range members {
		fmt.Fprintf(&b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.name, 0, 0, 0, "100644", len(m.data))
		b.Write(m.data)
		if len(m.data)%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}

// pkg is a package under test.
type pkg struct {
	name    string
	fields  string // more control fields
	control []member
	data    []member
	ext     string // of both members, .xz say
}

func (p pkg) build(t testing.TB) []byte {
	t.Helper()
	text := fmt.Sprintf("Package: %s\nVersion: 1.0\nArchitecture: amd64\nMaintainer: Nobody <nobody@example.test>\n%sDescription: a package under test\n", p.name, p.fields)
	control := append([]member{folder("./"), file("./control", text)}, p.control...)
	return arOf(
		arMember{"debian-binary", []byte("2.0\n")},
		arMember{"control.tar" + p.ext, compressed(t, p.ext, tarOf(t, control...))},
		arMember{"data.tar" + p.ext, compressed(t, p.ext, tarOf(t, append([]member{folder("./")}, p.data...)...))})
}

// compressed is a tar archive as the extension of its name says.
func compressed(t testing.TB, ext string, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch ext {
	case "":
		return b
	case ".xz":
		cmd := exec.Command(citest.Program(t, "xz", "apt-get install xz-utils"), "--compress", "--stdout")
		cmd.Stdin, cmd.Stdout = bytes.NewReader(b), &out
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	case ".gz":
		w = gzip.NewWriter(&out)
	case ".zst":
		w, err = zstd.NewWriter(&out)
	default:
		t.Fatalf("no test compresses %s", ext)
	}
	if err == nil {
		_, err = w.Write(b)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func (p pkg) licensed() pkg {
	p.data = append([]member{folder("./usr/"), folder("./usr/share/"), folder("./usr/share/doc/"), folder("./usr/share/doc/" + p.name + "/"),
		file("./usr/share/doc/"+p.name+"/copyright", "MIT\n")}, p.data...)
	return p
}

// unpackAll unpacks packages as a group and returns the rootfs and the meta folder.
func unpackAll(t *testing.T, parallel int, db plan.Database, pkgs ...pkg) (out, meta string, err error) {
	t.Helper()
	if os.Geteuid() != 0 {
		citest.Skip(t, "files of other owners can only be made by root")
	}
	in, out, meta := t.TempDir(), t.TempDir(), t.TempDir()
	p := plan.Group{Epoch: epoch, Arch: "amd64", Database: db, Paths: plan.Slim}
	for _, k := range pkgs {
		b := k.build(t)
		if err := os.WriteFile(filepath.Join(in, k.name+".deb"), b, 0o644); err != nil {
			t.Fatal(err)
		}
		p.Packages = append(p.Packages, plan.Package{Input: plan.Input{File: k.name + ".deb", SHA256: digest.FromBytes(b)}, Name: k.name, Version: "1.0", Arch: "amd64"})
	}
	return out, meta, Group(t.Context(), p, in, out, meta, parallel)
}

// listing describes a rootfs in lines: path, mode, owner, time and content.
func listing(t *testing.T, root string) []string {
	t.Helper()
	var l []string
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%s %o %d:%d %d", cmp.Or(strings.TrimPrefix(p, root), "/"), st.Mode, st.Uid, st.Gid, info.ModTime().Unix())
		if info.ModTime().Nanosecond() != 0 {
			t.Errorf("%s: its time has a fraction of a second", p)
		}
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += " -> " + target
		case info.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" n%d %q", st.Nlink, b)
		}
		l = append(l, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func want(t *testing.T, lines []string, substrings ...string) {
	t.Helper()
	text := strings.Join(lines, "\n")
	for _, s := range substrings {
		if !strings.Contains(text, s) {
			t.Errorf("no %q in\n%s", s, text)
		}
	}
}

func wantNot(t *testing.T, lines []string, substrings ...string) {
	t.Helper()
	for _, s := range substrings {
		for _, l := range lines {
			if strings.Contains(l, s) {
				t.Errorf("%q is in %s", s, l)
			}
		}
	}
}

func TestGroup(t *testing.T) {
	setuid := file("./bin/su", "su")
	setuid.Mode, setuid.Gname, setuid.Gid = 0o4755, "shadow", 7 // the name decides
	young := file("./usr/bin/young", "y")
	young.ModTime = young.ModTime.AddDate(2100, 0, 0)
	p := pkg{name: "tools", fields: "Multi-Arch: same\n",
		control: []member{file("./conffiles", "/etc/tools.conf\n"), file("./md5sums", "0cc175b9c0f1b6a831c399e269772661  usr/share/doc/tools/README\n0cc175b9c0f1b6a831c399e269772661  bin/su\n")},
		data: []member{
			folder("./bin/"), setuid, hard("./bin/su2", "./bin/su"), young,
			symbolic("./usr/lib64/ld.so", "../lib/x/ld.so"), symbolic("./usr/share/doc/other", "tools"),
			folder("./etc/"), file("./etc/tools.conf", "a"),
			folder("./usr/share/doc/tools/examples/"), file("./usr/share/doc/tools/README", "x"), file("./usr/share/doc/tools/examples/e", "x"),
			file("./usr/share/locale/de/LC_MESSAGES/tools.mo", "x"), file("./usr/share/man/man1/su.1.gz", "x"),
		}}.licensed()
	out, meta, err := unpackAll(t, 1, plan.Dpkg, p)
	if err != nil {
		t.Fatal(err)
	}
	l := listing(t, out)
	want(t, l,
		`/usr/bin/su 104755 0:42 0 n2 "su"`, `/usr/bin/su2 104755 0:42`, // through the usr-merge
		"/usr/bin/young 100644 0:0 1700000000 ", // not younger than the epoch
		"/usr/lib64/ld.so 120777 0:0 0 -> ../lib/x/ld.so",
		"/usr/share/doc/other 120777 0:0 0 -> tools", // a licence may be behind it
		`/usr/share/doc/tools/copyright 100644 0:0 0 n1 "MIT\n"`,
		`/var/lib/dpkg/info/tools:amd64.list 100644 0:0 1700000000 n1 "/.\n/usr\n/usr/share\n/usr/share/doc\n/usr/share/doc/tools\n/usr/share/doc/tools/copyright\n/bin\n/bin/su\n/bin/su2\n/usr/bin/young\n/usr/lib64/ld.so\n/usr/share/doc/other\n/etc\n/etc/tools.conf\n"`,
		`/var/lib/dpkg/info/tools:amd64.md5sums 100644 0:0 0 n1 "0cc175b9c0f1b6a831c399e269772661  bin/su\n"`)
	wantNot(t, l, "README", "examples", "locale", "/usr/share/man", "/bin/bin", "info/tools:amd64.control")
	b, err := os.ReadFile(filepath.Join(meta, recordsFile))
	if err != nil {
		t.Fatal(err)
	}
	want(t, []string{string(b)}, `"Path":"/etc/tools.conf","MD5":"0cc175b9c0f1b6a831c399e269772661"`)
}

// Another package's file goes where its diversion says, the diverting package's
// own does not, and a folder never does.
func TestDiverted(t *testing.T) {
	const loader = "lib64/ld-linux-x86-64.so.2" // as libc6 diverts it in scripts.yaml
	own := pkg{name: "libc6", data: []member{folder("./lib64/"), file("./"+loader, "libc6's")}}.licensed()
	for name, tc := range map[string]struct {
		other member
		want  []string
	}{
		"a file":   {file("./"+loader, "other's"), []string{"/usr/" + loader + `.usr-is-merged 100644 0:0 0 n1 "other's"`, "/usr/" + loader + ` 100644 0:0 0 n1 "libc6's"`}},
		"a link":   {symbolic("./"+loader, "x"), []string{"/usr/" + loader + ".usr-is-merged 120777 0:0 0 -> x", "/usr/" + loader + ` 100644 0:0 0 n1 "libc6's"`}},
		"a folder": {folder("./" + loader + "/"), nil},
	} {
		other := pkg{name: "other", data: []member{folder("./lib64/"), tc.other}}.licensed()
		out, _, err := unpackAll(t, 1, plan.Dpkg, own, other)
		if (err == nil) != (tc.want != nil) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			want(t, listing(t, out), append(tc.want, `other.list 100644 0:0 1700000000 n1 "/.\n/usr\n/usr/share\n/usr/share/doc\n/usr/share/doc/other\n/usr/share/doc/other/copyright\n/lib64\n/`+loader+`\n"`)...)
		}
	}
}

// However its members are compressed, a package unpacks to the same files.
func TestCompressions(t *testing.T) {
	var plain []string
	for _, ext := range []string{"", ".gz", ".xz", ".zst"} {
		p := pkg{name: "tools", ext: ext, data: []member{folder("./opt/"), file("./opt/much", strings.Repeat("0123456789", 1<<17))}}.licensed()
		out, _, err := unpackAll(t, 1, plan.Dpkg, p)
		if err != nil {
			t.Fatalf("%q: %v", ext, err)
		}
		l := listing(t, out)
		if ext == "" {
			plain = l
			want(t, l, "/opt/much 100644 0:0 0 n1 \"0123456789", "/var/lib/dpkg/info/tools.list")
		}
		if !slices.Equal(l, plain) {
			t.Errorf("%q: another rootfs than uncompressed", ext)
		}
		// What is missing at the end is noticed.
		d, err := openDeb(p.build(t))
		if err != nil {
			t.Fatal(err)
		}
		d.data.data = d.data.data[:len(d.data.data)*2/3]
		if err := d.each(func(_ *tar.Header, r io.Reader) error { _, err := io.Copy(io.Discard, r); return err }); err == nil {
			t.Errorf("%q: truncated, it is read without an error", ext)
		}
	}
}

func TestGroupDoesNotDependOnOrder(t *testing.T) {
	var pkgs []pkg
	for i := range 20 {
		private := folder("./var/lib/shared/")
		private.Mode = int64(0o700 + i) // they disagree; the first by name decides
		name := fmt.Sprintf("p%02d", i)
		pkgs = append(pkgs, pkg{name: name, data: []member{folder("./var/"), folder("./var/lib/"), private, file("./var/lib/shared/"+name, strings.Repeat(name, i*100))}}.licensed())
	}
	first, meta, err := unpackAll(t, 1, plan.Dpkg, pkgs...)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(pkgs)
	defer syscall.Umask(syscall.Umask(0o077))
	second, meta2, err := unpackAll(t, 8, plan.Dpkg, pkgs...)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := listing(t, first), listing(t, second); !slices.Equal(a, b) {
		t.Errorf("the same packages unpacked twice differ:\n%s\n---\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
	}
	want(t, listing(t, first), "/var/lib/shared 40700 ")
	a, err := os.ReadFile(filepath.Join(meta, recordsFile))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(meta2, recordsFile)); err != nil || !bytes.Equal(a, b) {
		t.Error("the records differ", err)
	}
}

func TestStatusD(t *testing.T) {
	out, _, err := unpackAll(t, 1, plan.StatusD, pkg{name: "data", control: []member{file("./conffiles", "/etc/data\n"), file("./md5sums", "0  usr/share/doc/data/README\n1  usr/share/data\n")}, data: []member{file("./usr/share/data", "d"), file("./etc/data", "a")}}.licensed())
	if err != nil {
		t.Fatal(err)
	}
	l := listing(t, out)
	want(t, l, `/var/lib/dpkg/status.d/data 100644`, `"Package: data\n`, `/var/lib/dpkg/status.d/data.md5sums 100644 0:0 0 n1 "1  usr/share/data\n0cc175b9c0f1b6a831c399e269772661  etc/data\n"`)
	wantNot(t, l, "/var/lib/dpkg/info")
}

// What a hostile package may try, each refused by name.
func TestRefused(t *testing.T) {
	device := member{tar.Header{Name: "./dev/sda", Typeflag: tar.TypeBlock, Mode: 0o660, Devmajor: 8}, ""}
	stranger := file("./etc/x", "x")
	stranger.Uname, stranger.Uid = "mallory", 1000
	for name, c := range map[string]struct {
		members []member
		want    string
	}{
		"traversal":                 {[]member{file("./../../etc/passwd", "x")}, `member "./../../etc/passwd": its path is absolute, not canonical, or leads out`},
		"absolute":                  {[]member{file("/etc/passwd", "x")}, `member "/etc/passwd": its path is absolute`},
		"inner traversal":           {[]member{file("./usr/../etc/passwd", "x")}, "not canonical"},
		"double slash":              {[]member{file("./usr//x", "x")}, "not canonical"},
		"newline":                   {[]member{file("./usr/a\nb", "x")}, "not canonical"},
		"device":                    {[]member{device}, `member "./dev/sda": it is a device`},
		"twice":                     {[]member{file("./etc/x", "x"), file("./etc/x", "y")}, `member "./etc/x": it is there twice`},
		"twice through the merge":   {[]member{file("./bin/x", "x"), file("./usr/bin/x", "y")}, `member "./usr/bin/x": evil has the path already`},
		"through a link":            {[]member{symbolic("./etc/x", "/tmp"), file("./etc/x/y", "y")}, `member "./etc/x/y": /etc/x, through which it would be written, is not a folder`},
		"through a link up":         {[]member{symbolic("./etc/x", ".."), file("./etc/x/y", "y")}, "through which it would be written"},
		"over a link":               {[]member{symbolic("./etc/x", "/etc/shadow"), file("./etc/x", "y")}, "it is there twice"},
		"folder over a link":        {[]member{symbolic("./bin/x", "/tmp"), folder("./usr/bin/x/")}, "has the path already, not as a folder"},
		"link above the root":       {[]member{symbolic("./etc/x", "../../etc/shadow")}, `its target "../../etc/shadow" climbs above the root`},
		"link above and back":       {[]member{symbolic("./etc/x", "a/../../../b")}, "climbs above the root"},
		"empty link":                {[]member{symbolic("./etc/x", "")}, "no valid target"},
		"hard link outside":         {[]member{hard("./etc/x", "/etc/shadow")}, `its target "/etc/shadow"`},
		"hard link above":           {[]member{hard("./etc/x", "./../etc/shadow")}, `its target "./../etc/shadow"`},
		"hard link to nothing":      {[]member{hard("./etc/x", "./etc/y")}, "is not an earlier file of the same package"},
		"hard link to a link":       {[]member{symbolic("./etc/y", "/etc/shadow"), hard("./etc/x", "./etc/y")}, "is not an earlier file"},
		"unknown owner":             {[]member{stranger}, `its owner "mallory" (1000)`},
		"another package's records": {[]member{file("./var/lib/dpkg/info/evil.list", "x")}, "has the path already"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := unpackAll(t, 1, plan.Dpkg, pkg{name: "evil", data: c.members})
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "package evil 1.0 (evil.deb)") {
				t.Errorf("the error is %v, which does not name the package and %q", err, c.want)
			}
		})
	}
}

func TestRefusedControl(t *testing.T) {
	for name, c := range map[string]struct {
		pkg  pkg
		want string
	}{
		"unlisted scripts":    {pkg{name: "new", control: []member{file("./postinst", "#!/bin/sh\nrm -rf /\n")}}, `add to internal/unpack/scripts.yaml the key "new"`},
		"changed scripts":     {pkg{name: "tar", control: []member{file("./postinst", "#!/bin/sh\n")}}, `correct the key "tar"`},
		"another arch":        {pkg{name: "x", fields: "Multi-Arch: same\nArchitecture: arm64\n"}, "field Architecture is there twice"},
		"path in control":     {pkg{name: "x", control: []member{file("./../x", "x")}}, "is not a plain file at its top"},
		"list in control":     {pkg{name: "x", control: []member{file("./list", "x")}}, "dpkg's own"},
		"conffile not there":  {pkg{name: "x", control: []member{file("./conffiles", "/etc/none\n")}}, "its conffile /etc/none is not among its files"},
		"second paragraph":    {pkg{name: "x", fields: "\n"}, "more than one paragraph"},
		"control file twice":  {pkg{name: "x", control: []member{file("./md5sums", ""), file("./md5sums", "")}}, `"md5sums" is there twice`},
		"link among controls": {pkg{name: "x", control: []member{symbolic("./postinst", "/bin/sh")}}, "is not a plain file"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := unpackAll(t, 1, plan.Dpkg, c.pkg)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, not %q", err, c.want)
			}
		})
	}
}

// Every input is checked against the plan.
func TestWrongInput(t *testing.T) {
	in := t.TempDir()
	b := pkg{name: "x"}.build(t)
	if err := os.WriteFile(filepath.Join(in, "x.deb"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	right := plan.Package{Input: plan.Input{File: "x.deb", SHA256: digest.FromBytes(b)}, Name: "x", Version: "1.0", Arch: "amd64"}
	for name, c := range map[string]struct {
		change func(*plan.Package)
		want   string
	}{
		"digest":     {func(p *plan.Package) { p.SHA256 = digest.FromString("other") }, "its digest is sha256:"},
		"no digest":  {func(p *plan.Package) { p.SHA256 = "" }, "no sha256 digest"},
		"name":       {func(p *plan.Package) { p.Name = "y" }, "its control file says Package: x, the plan says y"},
		"version":    {func(p *plan.Package) { p.Version = "2.0" }, "the plan says 2.0"},
		"outside in": {func(p *plan.Package) { p.File = "../x.deb" }, "escapes"},
		"missing":    {func(p *plan.Package) { p.File = "none.deb" }, "none.deb"},
	} {
		t.Run(name, func(t *testing.T) {
			p := right
			c.change(&p)
			err := Group(context.Background(), plan.Group{Epoch: epoch, Arch: "amd64", Database: plan.Dpkg, Packages: []plan.Package{p}}, in, t.TempDir(), t.TempDir(), 1)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, not %q", err, c.want)
			}
		})
	}
}

// sparseTar is an archive of 1 KiB with one sparse file of 1 TiB, in the old
// GNU format, tar(5).
func sparseTar(t *testing.T) []byte {
	b := tarOf(t, file("./big", ""))
	h := b[:512]
	h[156] = 'S'
	copy(h[257:], "ustar  \x00")
	copy(h[386:], fmt.Sprintf("%011o\x00%011o\x00", 1<<40>>7, 0)) // a hole, then no bytes
	copy(h[483:], "\x80\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00")
	copy(h[148:], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

func TestBomb(t *testing.T) {
	zeros := tarOf(t, file("./big", strings.Repeat("\x00", minUnpacked)), file("./more", "x"))
	control := tarOf(t, file("control", "Package: x\nVersion: 1\nArchitecture: all\n"))
	deb := func(control, data arMember) []byte {
		return arOf(arMember{"debian-binary", []byte("2.0\n")}, control, data)
	}
	for name, b := range map[string][]byte{
		"gzip":           deb(arMember{"control.tar", control}, arMember{"data.tar.gz", compressed(t, ".gz", zeros)}),
		"zstd":           deb(arMember{"control.tar", control}, arMember{"data.tar.zst", compressed(t, ".zst", zeros)}),
		"xz":             deb(arMember{"control.tar.xz", compressed(t, ".xz", control)}, arMember{"data.tar.xz", compressed(t, ".xz", zeros)}),
		"sparse file":    deb(arMember{"control.tar", control}, arMember{"data.tar", sparseTar(t)}),
		"sparse control": deb(arMember{"control.tar", sparseTar(t)}, arMember{"data.tar", nil}),
	} {
		d, err := openDeb(b)
		if err == nil {
			err = d.each(func(_ *tar.Header, r io.Reader) error { _, err := io.Copy(io.Discard, r); return err })
		}
		if !errors.Is(err, errBomb) {
			t.Errorf("%s: the error is %v", name, err)
		}
	}
}

func TestScriptsAreComplete(t *testing.T) {
	table, err := loadScripts()
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range table {
		if len(s.Seen) == 0 {
			t.Errorf("%s: no fingerprint of the scripts that were read", name)
		}
		empty := s
		empty.Seen, empty.Note = nil, ""
		if b, _ := json.Marshal(empty); s.Note == "" && string(b) == emptyScript(t) {
			t.Errorf("%s: neither an effect nor a note that says why there is none", name)
		}
		for _, n := range s.Native {
			if natives[n] == nil {
				t.Errorf("%s: native step %q does not exist", name, n)
			}
		}
		for _, p := range slices.Concat(slices.Collect(maps.Keys(s.Dirs)), slices.Collect(maps.Keys(s.Files)), slices.Collect(maps.Keys(s.Links)), slices.Collect(maps.Keys(s.Copy))) {
			if _, err := clean(p); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func emptyScript(t *testing.T) string {
	b, err := json.Marshal(script{})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// SOURCE_DATE_EPOCH=0 is a time as any other; nothing lies before it.
func TestEpochOf1970(t *testing.T) {
	if os.Geteuid() != 0 {
		citest.Skip(t, "files of other owners can only be made by root")
	}
	k := pkg{name: "a", data: []member{file("./usr/a", "a")}}.licensed()
	b := k.build(t)
	in, out := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(in, "a.deb"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	p := plan.Group{Arch: "amd64", Database: plan.Dpkg, Packages: []plan.Package{{Input: plan.Input{File: "a.deb", SHA256: digest.FromBytes(b)}, Name: "a", Version: "1.0", Arch: "amd64"}}}
	if err := Group(t.Context(), p, in, out, t.TempDir(), 1); err != nil {
		t.Fatal(err)
	}
	want(t, listing(t, out), `/usr/a 100644 0:0 0 n1 "a"`)
	p.Epoch = -1
	if err := Group(t.Context(), p, in, t.TempDir(), t.TempDir(), 1); err == nil || !strings.Contains(err.Error(), "epoch -1 lies before 1970") {
		t.Errorf("error %v", err)
	}
}
