package atomicfile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	name, link := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for _, text := range []string{"old", "new"} {
		if err := Write(name, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		if text == "old" {
			if err := os.Link(name, link); err != nil {
				t.Fatal(err)
			}
		}
	}
	for file, want := range map[string]string{name: "new", link: "old"} {
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s holds %q, %v", file, got, err)
		}
	}
	if info, err := os.Stat(name); err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := Write(filepath.Join(dir, "none", "a"), nil, 0o644); err == nil {
		t.Error("there is no such folder")
	}
	// A folder has the name: nothing is left beside it.
	if err := Write(dir, nil, 0o644); err == nil {
		t.Error("a folder was replaced")
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(dir), ".*.tmp")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}
