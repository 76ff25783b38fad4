package smoke

import (
	"archive/tar"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/smoke/engine"
)

// A size over its budget names the layer and the packages that grew.
func TestBudget(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"smoke/golden", "images"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(root, "images", "lock"), os.DirFS("../images/lock")); err != nil {
		t.Fatal(err)
	}
	l, err := lock.Load(filepath.Join(root, "images", "lock"))
	if err != nil {
		t.Fatal(err)
	}
	pkg := l.Packages("cc", "amd64")[0]
	golden := `{"layers": {"x": {"amd64": {"base": 9000, "cc": 10}}}, "packages": {"cc": {"amd64": {`
	for i, p := range l.Packages("cc", "amd64")[1:] {
		if i > 0 {
			golden += ","
		}
		golden += `"` + p.Name + `": 999999999`
	}
	if err := os.WriteFile(sizesFile(root), []byte(golden+`}}}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	content, err := random.Image(2000, 2)
	if err != nil {
		t.Fatal(err)
	}
	tg := &target{Image: engine.Image{Name: "x", Platform: "linux/amd64", Content: content}, groups: []string{"base", "cc"},
		def: &images.Image{Name: "x", Budget: map[string]string{"amd64": "1kB"}}}
	r := &runner{Options: Options{Root: root, Getenv: func(string) string { return "" }}}
	problems, detail, err := r.budget(tg)
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(problems, "\n") + "\n" + detail
	for _, want := range []string{"over the budget", "layer cc", "package " + pkg.Name} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is not in:\n%s", want, all)
		}
	}
	if strings.Contains(all, "layer base") {
		t.Errorf("base did not grow:\n%s", all)
	}
	tg.def.Budget["amd64"] = "1MB"
	if problems, _, err := r.budget(tg); err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
}

// Everything that an image must not be is named: a configuration other than
// its definition's, layers of other groups, files that distroless forbids or
// that nobody agreed to.
func TestStructure(t *testing.T) {
	root := t.TempDir()
	family, err := images.Load(os.DirFS(".."))
	if err != nil {
		t.Fatal(err)
	}
	groups, err := os.ReadFile("../images/groups.yaml")
	if err != nil {
		t.Fatal(err)
	}
	golden := "/gone f 0644 0:0\n/usr/bin/su f 4755 0:0\n"
	for name, text := range map[string][]byte{"images/groups.yaml": groups, "smoke/golden/loomcycle-amd64.txt": []byte(golden)} {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	def, err := family.Image("loomcycle")
	if err != nil {
		t.Fatal(err)
	}
	with := func(name string, mode int64, uid int) imagetest.Entry {
		return imagetest.Entry{Header: tar.Header{Name: name, Mode: mode, Uid: uid}}
	}
	content := imagetest.Image(t, v1.Config{User: "0:0", Labels: map[string]string{"org.opencontainers.image.vendor": "Other"}}, "amd64", []imagetest.Entry{
		with("usr/bin/bash", 0o755, 0), with("usr/bin/dpkg", 0o755, 0), with("usr/bin/su", 0o4755, 0), with("var/open", 0o666, 0), with("var/other", 0o644, 1000),
	})
	r := &runner{Options: Options{Root: root, Getenv: func(string) string { return "" }}, family: family}
	err = r.structure(&target{Image: engine.Image{Name: "loomcycle", Platform: "linux/amd64", Content: content}, def: def, groups: []string{"base"}})
	if err == nil {
		t.Fatal("it was accepted")
	}
	for _, want := range []string{
		`user is ["0:0"], not ["65532:65532"]`, "entrypoint is []", "env is []", "ports is []", "the label org.opencontainers.image.revision is missing",
		`vendor is "Other"`, `its layers are the groups ["base"], not ["static" "files" "programs"]`,
		"/usr/bin/bash is a shell", "/usr/bin/su can be executed, and is no program of the image", "/usr/bin/dpkg is a package manager", "/usr/bin/su has a set-id bit: 04755", "/var/open is world-writable: 0666",
		"/var/other belongs to 1000:0, neither root nor nonroot", "not in the golden list: /var/open f 0666 0:0", "only in the golden list: /gone f 0644 0:0",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in the error:\n%v", want, strings.ReplaceAll(err.Error(), "; ", "\n"))
		}
	}
	if strings.Contains(err.Error(), "golden list: /usr/bin/su") {
		t.Errorf("a file of the golden list is told: %v", err)
	}
}

// A file of a layer that is newer than the lock, or than the image, is named; of
// the same layer in another image, too.
func TestNewerFiles(t *testing.T) {
	l, err := lock.Load("../images/lock")
	if err != nil {
		t.Fatal(err)
	}
	content := imagetest.Image(t, v1.Config{}, "amd64", []imagetest.Entry{imagetest.File("old", "")}, []imagetest.Entry{imagetest.File("a", ""), imagetest.File("b", "")})
	config, err := content.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	locked, made := time.Unix(l.Epoch, 0).UTC(), time.Unix(imagetest.Epoch, 0).UTC()
	for _, tc := range []struct {
		name    string
		created time.Time
		file    time.Time // of every entry
		want    int       // layers
	}{
		{"as old as the image", made, made, 0},
		{"newer than the image", made.Add(-time.Second), made, 2},
		{"newer than the lock", locked.Add(time.Hour), locked.Add(time.Second), 2},
		{"as old as the lock", locked.Add(time.Hour), locked, 0},
	} {
		content, err := mutate.Time(content, tc.file) // also the configuration's, which is given
		if err != nil {
			t.Fatal(err)
		}
		config := config.DeepCopy()
		config.Created = v1.Time{Time: tc.created}
		r := &runner{Options: Options{Root: ".."}}
		for _, image := range []string{"x", "y"} {
			problems, err := r.newer(&target{Image: engine.Image{Name: image, Layout: "oci", Content: content}, groups: []string{"base", "files"}}, config)
			if err != nil || len(problems) != tc.want {
				t.Errorf("%s: %q, %v", tc.name, problems, err)
			}
			if tc.want > 0 && !strings.HasPrefix(strings.Join(problems, ""), `in layer 0 of ["base" "files"] old is of `+tc.file.Format(time.RFC3339)) {
				t.Errorf("%s: %q", tc.name, problems)
			}
		}
	}
}
