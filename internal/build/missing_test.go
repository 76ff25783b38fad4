package build

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Nothing is compiled on a machine that lacks a program: the error says which,
// and that a variable does instead.
func TestMissingPrograms(t *testing.T) {
	path, cached := t.TempDir(), t.TempDir()
	for _, name := range []string{"go", "git"} {
		program, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(program, filepath.Join(path, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", path) // without apt-get, too
	env := map[string]string{"NPM_CONFIG_REGISTRY": "", "npm_config_registry": "", "LOOMCYCLE_CACHE": cached, "DOCKER_HOST": "unix:///dev/null"}
	_, err := Run(t.Context(), options(t, nil, env))
	if err == nil || !strings.Contains(err.Error(), "apt-get install npm") || !strings.Contains(err.Error(), "NPM_CONFIG_REGISTRY") {
		t.Errorf("the error is %v", err)
	}
	for _, dir := range []string{"bin", "unpack"} {
		if _, err := os.Stat(filepath.Join(cached, dir)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("something was compiled into %s: %v", dir, err)
		}
	}
}
