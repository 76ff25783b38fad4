package unpack

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// image is the merged rootfs and the records that a test finishes.
type image struct {
	files   map[string]string // "-> x" makes a link; a package has a licence but where its file is absent
	records []record
	table   map[string]script
	plan    plan.Finish
	at1970  bool // with the epoch 0
}

const absent = "absent"

func rec(name string, scripts bool) record {
	return record{Name: name, Arch: "amd64", Scripts: scripts, Control: "Package: " + name + "\nVersion: 1\nArchitecture: amd64\nDescription: d\n"}
}

func (im image) finish(t *testing.T) ([]string, error) {
	t.Helper()
	if os.Geteuid() != 0 {
		citest.Skip(t, "files of other owners can only be made by root")
	}
	root, meta, out := t.TempDir(), t.TempDir(), t.TempDir()
	for _, r := range im.records {
		if p := "usr/share/doc/" + r.Name + "/copyright"; im.files[p] == "" {
			im.files[p] = "MIT"
		}
	}
	for p, content := range im.files {
		if content == absent {
			continue
		}
		p = filepath.Join(root, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "-> "); ok {
			err = os.Symlink(target, p)
		} else {
			err = os.WriteFile(p, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	b, err := json.Marshal(im.records)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(meta, recordsFile), b, 0o644); err != nil {
		t.Fatal(err)
	}
	im.plan.Arch = "amd64"
	if im.plan.Epoch = epoch; im.at1970 {
		im.plan.Epoch = 0
	}
	if im.plan.Database == "" {
		im.plan.Database = plan.Dpkg
	}
	err = runFinish(t.Context(), im.plan, im.table, root, out, []string{meta})
	if err != nil {
		return nil, err
	}
	return listing(t, out), nil
}

func TestDatabase(t *testing.T) {
	r := rec("libx", false)
	r.Control = "Package: libx\nSource: x\nVersion: 1\nArchitecture: amd64\nMulti-Arch: same\nHomepage: https://example.test\nDepends: libc6\nDescription: short\n long\n"
	r.Conffiles = []conffile{{"/etc/x", "0cc1", ""}, {"/etc/y", "newconffile", "remove-on-upgrade"}}
	r.Triggers = "# comment\ninterest-noawait /usr/lib/x\ninterest x-named\nactivate-noawait ldconfig\n"
	d := rec("diverter", true)
	l, err := image{files: map[string]string{}, records: []record{r, d}, table: map[string]script{"diverter": {Divert: map[string]map[string]string{"amd64": {"/a": "/b"}, "arm64": {"/c": "/d"}}}}}.finish(t)
	if err != nil {
		t.Fatal(err)
	}
	want(t, l,
		`"Package: diverter\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\nDescription: d\n\nPackage: libx\nStatus: install ok installed\nArchitecture: amd64\nMulti-Arch: same\nSource: x\nVersion: 1\nDepends: libc6\nConffiles:\n /etc/x 0cc1\n /etc/y newconffile remove-on-upgrade\nDescription: short\n long\nHomepage: https://example.test\n\n"`,
		`/triggers/File 100644 0:0 1700000000 n1 "/usr/lib/x libx:amd64/noawait\n"`, `/triggers/x-named 100644 0:0 1700000000 n1 "libx:amd64\n"`,
		`/diversions 100644 0:0 1700000000 n1 "/a\n/b\ndiverter\n"`, `/arch-native 100644 0:0 1700000000 n1 "amd64\n"`,
		"/etc/machine-id 100444 0:0 1700000000 n1 \"\"")
}

func TestAlternatives(t *testing.T) {
	table := map[string]script{
		"gcc":   {Alternatives: []string{"/usr/bin/cc cc /usr/bin/gcc 20 --slave /usr/share/man/cc.1 cc.1 /usr/share/man/gcc.1 --slave /usr/bin/c2 c2 /usr/bin/gcc"}},
		"clang": {Alternatives: []string{"/usr/bin/cc cc /usr/bin/clang 10"}},
		"bash":  {Alternatives: []string{"/usr/share/man/b.7 b.7 /usr/share/man/bash.7 10"}}, // left out of the image
	}
	im := image{files: map[string]string{"usr/bin/gcc": "g", "usr/bin/clang": "c"}, table: table,
		records: []record{rec("gcc", true), rec("clang", true), rec("bash", true)}, plan: plan.Finish{Paths: plan.Slim}}
	l, err := im.finish(t)
	if err != nil {
		t.Fatal(err)
	}
	want(t, l, "/usr/bin/cc 120777 0:0 1700000000 -> /etc/alternatives/cc", "/etc/alternatives/cc 120777 0:0 1700000000 -> /usr/bin/gcc", "/etc/alternatives/c2 ",
		`/alternatives/cc 100644 0:0 1700000000 n1 "auto\n/usr/bin/cc\nc2\n/usr/bin/c2\ncc.1\n/usr/share/man/cc.1\n\n/usr/bin/clang\n10\n\n\n/usr/bin/gcc\n20\n/usr/bin/gcc\n/usr/share/man/gcc.1\n\n"`)
	wantNot(t, l, "/etc/alternatives/cc.1", "b.7")
	delete(im.files, "usr/bin/clang")
	if _, err := im.finish(t); err == nil || !strings.Contains(err.Error(), "the image has no /usr/bin/clang") {
		t.Errorf("without clang the error is %v", err)
	}
}

func TestAccounts(t *testing.T) {
	im := image{
		files:   map[string]string{"usr/share/base-passwd/passwd.master": "root:*:0:0:root:/root:/bin/bash\n", "usr/share/base-passwd/group.master": "root:*:0:\nshadow:*:42:\n"},
		records: []record{rec("base-passwd", true), rec("passwd", true), rec("ssh", true)},
		table:   map[string]script{"base-passwd": {Native: []string{"accounts"}}, "ssh": {Groups: map[string]int{"_ssh": 101}}},
		plan: plan.Finish{Users: []plan.User{{Name: "nonroot", UID: 65532, GID: 65532, Home: "/home/nonroot", Shell: "/bin/bash"}},
			Groups: []plan.AccountGroup{{Name: "nonroot", GID: 65532}}, SubIDs: []plan.SubID{{User: "nonroot", First: 100000, Count: 65536}}},
	}
	l, err := im.finish(t)
	if err != nil {
		t.Fatal(err)
	}
	want(t, l,
		`/etc/passwd 100644 0:0 1700000000 n1 "root:x:0:0:root:/root:/bin/bash\nnonroot:x:65532:65532::/home/nonroot:/bin/bash\n"`,
		`/etc/group 100644 0:0 1700000000 n1 "root:x:0:\nshadow:x:42:\n_ssh:x:101:\nnonroot:x:65532:\n"`,
		`/etc/shadow 100640 0:42 1700000000 n1 "root:*:19675:0:99999:7:::\nnonroot:!:19675:0:99999:7:::\n"`,
		`/etc/gshadow 100640 0:42 1700000000 n1 "root:*::\nshadow:*::\n_ssh:!::\nnonroot:!::\n"`,
		`/etc/subuid 100644 0:0 1700000000 n1 "nonroot:100000:65536\n"`)
	im.at1970 = true // SOURCE_DATE_EPOCH=0; 0 days would mean that the password is to be changed
	if l, err = im.finish(t); err != nil {
		t.Fatal(err)
	}
	want(t, l, `/etc/shadow 100640 0:42 0 n1 "root:*:1:0:99999:7:::\nnonroot:!:1:0:99999:7:::\n"`)
	im.at1970 = false
	for name, u := range map[string]plan.User{
		`"root" is there twice`:    {Name: "root", UID: 5, Home: "/", Shell: "/bin/sh"},
		`both have the id 65532`:   {Name: "other", UID: 65532, Home: "/", Shell: "/bin/sh"},
		`is there twice or not va`: {Name: "a:b", UID: 5, Home: "/", Shell: "/bin/sh"},
	} {
		bad := im
		bad.plan.Users = append([]plan.User{u}, im.plan.Users...)
		if _, err := bad.finish(t); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v: the error is %v", u, err)
		}
	}
}

func TestPlanned(t *testing.T) {
	im := image{
		files:   map[string]string{"usr/local/go/go.env": "GOPROXY=x\n", "usr/share/profile": "old\n", "etc/x": "x", "bin": "-> usr/bin"},
		records: []record{rec("base-files", true)},
		table:   map[string]script{"base-files": {Copy: map[string]string{"/etc/profile": "/usr/share/profile", "/etc/motd": "/usr/share/profile"}}},
		plan: plan.Finish{
			Dirs: []plan.Dir{{Path: "/home/u/.cache", Mode: "0775", UID: 7}},
			Files: []plan.File{{Path: "/usr/local/go/go.env", Content: "GOPATH=y\n", Prepend: true}, {Path: "/etc/profile", Content: "new\n", Prepend: true},
				{Path: "/etc/motd", Content: "ours"}, {Path: "/bin/tool", Content: "t", Mode: "0755"}},
			Links: []plan.Link{{Path: "/usr/local/cargo", Target: "../lib/cargo"}},
		},
	}
	l, err := im.finish(t)
	if err != nil {
		t.Fatal(err)
	}
	want(t, l, `/usr/local/go/go.env 100644 0:0 1700000000 n1 "GOPATH=y\nGOPROXY=x\n"`, `/etc/profile 100644 0:0 1700000000 n1 "new\nold\n"`, `/etc/motd 100644 0:0 1700000000 n1 "ours"`,
		"/home/u/.cache 40775 7:0 1700000000", "/home/u 40755 0:0 1700000000", "/usr/bin/tool 100755", "/usr/local/cargo 120777 0:0 1700000000 -> ../lib/cargo")
	for want, change := range map[string]func(*plan.Finish){
		"is not an absolute canonical path": func(p *plan.Finish) { p.Dirs = []plan.Dir{{Path: "home/../x"}} },
		"is not octal":                      func(p *plan.Finish) { p.Dirs = []plan.Dir{{Path: "/x", Mode: "9"}} },
		"which no package has":              func(p *plan.Finish) { p.Files = []plan.File{{Path: "/none", Prepend: true}} },
		"climbs above the root":             func(p *plan.Finish) { p.Links = []plan.Link{{Path: "/x", Target: "../x"}} },
		"has the path already":              func(p *plan.Finish) { p.Files = append(p.Files, plan.File{Path: "/usr/bin/tool"}) },
	} {
		bad := im
		change(&bad.plan)
		if _, err := bad.finish(t); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, not %q", err, want)
		}
	}
}

// The image's sources of apt are apt's own example, with backports when asked for.
func TestAptSources(t *testing.T) {
	const example = `# Modernized
Types: deb
URIs: http://mirror.example.test/debian
# Suites: none
Suites: trixie trixie-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example.test/debian-security
Suites: trixie-security
Components: main
`
	const backports = `
Types: deb
URIs: http://mirror.example.test/debian
Suites: trixie-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
`
	for _, tc := range []struct {
		example   string // "" without the file
		backports bool
		want, err string
	}{
		{example, false, example, ""},
		{example, true, example + backports, ""},
		{strings.TrimRight(example, "\n"), true, example + backports, ""},
		{"", false, "", "apt's example of its sources"},
		{"# nothing\n", true, "", "has no stanza"},
	} {
		im := image{files: map[string]string{}, records: []record{rec("apt", false)}, plan: plan.Finish{AptSources: true, Backports: tc.backports}}
		if tc.example != "" {
			im.files["usr/share/doc/apt/examples/debian.sources"] = tc.example
		}
		l, err := im.finish(t)
		if tc.err != "" {
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("%q: the error is %v, not %q", tc.example, err, tc.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", tc.example, err)
			continue
		}
		want(t, l, fmt.Sprintf("/etc/apt/sources.list.d/debian.sources 100644 0:0 1700000000 n1 %q", tc.want))
	}
}

// What no single group sees: a file of two packages, a diversion of another
// group's file, a package without a licence.
func TestCheck(t *testing.T) {
	with := func(name string, list ...string) record {
		r := rec(name, name == "diverter")
		r.List = list
		return r
	}
	diverter := map[string]script{"diverter": {Divert: map[string]map[string]string{"any": {"/bin/x": "/bin/x.real"}, "arm64": {"/bin/y": "/bin/y.real"}}}}
	for name, tc := range map[string]struct {
		image
		want string
	}{
		"two owners": {image{files: map[string]string{"etc/x": ""}, records: []record{with("a", "/etc", "/etc/x"), with("b", "/etc/x")}},
			"packages a and b both have the file /etc/x"},
		"two owners through the merge": {image{files: map[string]string{"usr/bin/x": ""}, records: []record{with("a", "/bin/x"), with("b", "/usr/bin/x")}},
			"packages a and b both have the file /usr/bin/x"},
		"diverted across groups": {image{files: map[string]string{"usr/bin/x": ""}, records: []record{with("a", "/bin/x"), with("diverter")}, table: diverter},
			"package diverter diverts /bin/x of package a in another group: put both into one group"},
		"diverted on another architecture": {image{files: map[string]string{"usr/bin/y": ""}, records: []record{with("a", "/bin/y"), with("diverter")}, table: diverter}, ""},
		"diverted in its group":            {image{files: map[string]string{"usr/bin/x.real": "", "usr/bin/x": ""}, records: []record{with("a", "/bin/x.real"), with("diverter", "/bin/x")}, table: diverter}, ""},
		"no licence": {image{files: map[string]string{"usr/share/doc/a/copyright": absent}, records: []record{with("a")}},
			"package a: its licence /usr/share/doc/a/copyright is missing or a dangling link"},
		"a dangling licence": {image{files: map[string]string{"usr/share/doc/a/copyright": "-> ../b/copyright"}, records: []record{with("a")}},
			"package a: its licence /usr/share/doc/a/copyright is missing or a dangling link"},
		"a dangling folder": {image{files: map[string]string{"usr/share/doc/a/copyright": absent, "usr/share/doc/a": "-> b"}, records: []record{with("a")}}, "package a: its licence"},
		"another's licence": {image{files: map[string]string{"usr/share/doc/a/copyright": absent, "usr/share/doc/a": "-> b"}, records: []record{with("a"), with("b")}}, ""},
		"a link to nothing": {image{files: map[string]string{"usr/share/doc/c": "-> d"}, records: []record{}}, ""},
	} {
		if _, err := tc.finish(t); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: the error is %v, not %q", name, err, tc.want)
		}
	}
}

func TestSubjectThatIsNoName(t *testing.T) {
	for der, want := range map[string]string{"": "the subject is not a name: asn1", "\x30\x00\x00": "the subject is not a name: 1 bytes follow it"} {
		if _, err := canonicalName([]byte(der)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%x: error %v, want %q", der, err, want)
		}
	}
}

// The hash is OpenSSL's, whatever the subject looks like.
func TestSubjectHash(t *testing.T) {
	openssl := citest.Program(t, "openssl", "apt-get install openssl")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cn, o := asn1.ObjectIdentifier{2, 5, 4, 3}, asn1.ObjectIdentifier{2, 5, 4, 10}
	for _, subject := range []pkix.RDNSequence{
		{{{Type: cn, Value: "Plain"}}},
		{{{Type: o, Value: "  Two  Blanks\tand MORE "}}, {{Type: cn, Value: "Ünïcode ÀÉ CA"}}},
		{{{Type: cn, Value: "many"}, {Type: o, Value: "in one"}}},
		{{{Type: cn, Value: asn1.RawValue{Tag: asn1.TagT61String, Bytes: []byte("T61 \xe9")}}}},
		{{{Type: cn, Value: asn1.RawValue{Tag: asn1.TagBMPString, Bytes: []byte("\x00B\x00 \x00 \x00M\x01\x00")}}}},
		{},
	} {
		raw, err := asn1.Marshal(subject)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{SerialNumber: big.NewInt(1), RawSubject: raw, NotBefore: time.Unix(epoch, 0), NotAfter: time.Unix(epoch+1, 0)}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		p := filepath.Join(t.TempDir(), "c.pem")
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		if err := os.WriteFile(p, text, 0o644); err != nil {
			t.Fatal(err)
		}
		want, err := exec.Command(openssl, "x509", "-noout", "-subject_hash", "-in", p).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, want)
		}
		if got, err := subjectHash(text); err != nil || got != strings.TrimSpace(string(want)) {
			t.Errorf("%v: the hash is %s, OpenSSL's %s (%v)", subject, got, want, err)
		}
	}
}

func TestCompareLibraries(t *testing.T) {
	sorted := []string{"ld.so", "liba.so", "liba.so.2", "liba.so.10", "libab.so", "lib1.so"}
	for i, a := range sorted {
		for j, b := range sorted {
			if got := compareLibraries(a, b); (got < 0) != (i < j) || (got > 0) != (i > j) {
				t.Errorf("%s against %s: %d", a, b, got)
			}
		}
	}
}
