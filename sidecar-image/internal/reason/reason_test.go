package reason

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Whatever fails, its path is not told, and errors.Is still finds why.
func TestOf(t *testing.T) {
	dir := t.TempDir()
	none := filepath.Join(dir, "none")
	_, open := os.Open(none)
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for what, err := range map[string]error{
		"open": open, "rename": os.Rename(none, none+"2"), "in a root": root.Rename("none", "none2"), "wrapped": fmt.Errorf("it fails: %w", os.Remove(none)),
	} {
		if got := Of(err); !errors.Is(got, fs.ErrNotExist) || strings.Contains(got.Error(), "none") {
			t.Errorf("%s: %v of %v", what, got, err)
		}
	}
	if other := errors.New("x"); Of(other) != other || Of(nil) != nil {
		t.Error("another error is not itself")
	}
}
