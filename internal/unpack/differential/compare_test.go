package differential

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func text(s string) Entry {
	var e Entry
	if err := e.read(strings.NewReader(s), int64(len(s))); err != nil {
		panic(err)
	}
	e.Mode = 0o644
	return e
}

func TestCompare(t *testing.T) {
	folder, private := Entry{Type: 'd', Mode: 0o755}, Entry{Type: 'd', Mode: 0o700}
	list := []Difference{
		{Paths: []string{"/doc/*"}, As: Missing, Reason: "left out"},
		{Paths: []string{"/list*"}, As: Subset, Reason: "true"},
		{Paths: []string{"/order"}, As: Order, Reason: "sorted"},
		{Paths: []string{"/conf"}, As: Comment, Reason: "head"},
		{Paths: []string{"/priv"}, As: Meta, Reason: "mode"},
	}
	all := func() (Tree, Tree) {
		return Tree{"/list": text("/a\n/e\n"), "/a": text("a"), "/e": folder, "/order": text("b\na\n"), "/conf": text("# x\na\n"), "/priv": private},
			Tree{"/list": text("/a\n/b\n/e\n"), "/a": text("a"), "/e": folder, "/order": text("a\nb\n"), "/conf": text("#\n#\na\n"), "/priv": folder, "/doc/x": folder}
	}
	ours, ref := all()
	if r := Compare(ours, ref, list); r.Err() != nil || r.Paths != 7 || r.Equal != 2 || r.Listed["left out"] != 1 {
		t.Errorf("%+v", r)
	}
	for want, change := range map[string]func(ours, ref Tree){
		"extra /new: ours is a file 0644":                       func(o, _ Tree) { o["/new"] = text("") },
		"missing /gone: the reference has a folder 0755 0:0":    func(_, r Tree) { r["/gone"] = folder },
		"content /a: ours is file 0644 0:0 sha256 3e23e8160039": func(o, _ Tree) { o["/a"] = text("b") },
		"meta /e: ours is folder 0700":                          func(o, _ Tree) { o["/e"] = private },
		"content /list":                                         func(o, _ Tree) { o["/list"] = text("/e\n") }, // /a is there
		"content /order":                                        func(o, _ Tree) { o["/order"] = text("b\n") },
		"content /conf":                                         func(o, _ Tree) { o["/conf"] = text("b\n") },
		"listed, but it no longer occurs: missing /doc/*":       func(_, r Tree) { delete(r, "/doc/x") },
		"link 0:0 to /b":                                        func(o, _ Tree) { o["/a"] = Entry{Type: 'l', Target: "/b"} },
	} {
		ours, ref := all()
		change(ours, ref)
		if err := Compare(ours, ref, list).Err(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, not %q", err, want)
		}
	}
}

func TestListed(t *testing.T) {
	list, err := Listed()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		switch d.As {
		case Missing, Extra, Content, Order, Subset, Comment, Meta:
		default:
			t.Errorf("%v: unknown kind %q", d.Paths, d.As)
		}
	}
}

func TestTreesAgree(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a", filepath.Join(dir, "l")); err != nil {
		t.Fatal(err)
	}
	ours, err := Dirs(dir)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir}, {Name: "./a", Typeflag: tar.TypeReg, Size: 1, Mode: 0o600}, {Name: "./b", Typeflag: tar.TypeLink, Linkname: "./a"}, {Name: "./l", Typeflag: tar.TypeSymlink, Linkname: "a", Mode: 0o777},
	} {
		h.Uid, h.Gid = os.Getuid(), os.Getgid()
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	ref, err := Tar(&b)
	if err != nil {
		t.Fatal(err)
	}
	if r := Compare(ours, ref, nil); r.Err() != nil || r.Equal != 3 {
		t.Errorf("%+v", r)
	}
}

func TestRecord(t *testing.T) {
	p := filepath.Join(t.TempDir(), "d.md")
	if err := os.WriteFile(p, []byte("# T\n\nintro\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, s := range [][2]string{{"amd64", "1"}, {"arm64", "2"}, {"amd64", "3"}} {
		if err := Record(p, s[0], "## linux/"+s[0]+"\n\n"+s[1]+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	if want := "# T\n\nintro\n\n## linux/amd64\n\n3\n\n## linux/arm64\n\n2\n"; string(b) != want {
		t.Errorf("%q is not %q", b, want)
	}
}

// dpkg --verify succeeds with files that differ, and prints them.
func TestComplaint(t *testing.T) {
	for _, c := range []struct {
		args []string
		out  string
		err  error
		want string
	}{
		{[]string{"dpkg", "--verify"}, "", nil, ""},
		{[]string{"dpkg", "--verify"}, "??5??????   /usr/bin/x\n", nil, "dpkg --verify in the unpacked system complains:\n??5??????   /usr/bin/x\n"},
		{[]string{"dpkg", "--audit"}, "broken\n", errors.New("exit status 1"), "dpkg --audit in the unpacked system: exit status 1\nbroken\n"},
		{[]string{"openssl", "verify"}, "OK\n", nil, ""},
	} {
		got := ""
		if err := complaint(c.args, []byte(c.out), c.err); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%q, not %q", got, c.want)
		}
	}
	if got := alternatives([]byte("awk                            auto     /usr/bin/mawk\ncc  auto  /usr/bin/gcc\n")); !slices.Equal(got, []string{"awk", "cc"}) {
		t.Errorf("the alternatives are %q", got)
	}
}
