package smoke

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/random"

	"github.com/loomcycle/loomcycle-images/images"
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
