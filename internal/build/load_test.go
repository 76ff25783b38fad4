package build

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
)

// A build begins with a checkout whose lock is signed and has what its groups
// ask for, or not at all.
func TestLoadChecksTheLock(t *testing.T) {
	change := func(name string, edit func([]byte) []byte) func(t *testing.T, root string) {
		return func(t *testing.T, root string) {
			file := filepath.Join(root, "images", name)
			text, err := os.ReadFile(file)
			if err == nil {
				changed := edit(bytes.Clone(text))
				if bytes.Equal(changed, text) {
					t.Fatalf("%s is unchanged", name)
				}
				err = os.WriteFile(file, changed, 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	replace := func(old, new string) func([]byte) []byte {
		return func(text []byte) []byte { return bytes.Replace(text, []byte(old), []byte(new), 1) }
	}
	for name, tc := range map[string]struct {
		spoil func(t *testing.T, root string)
		want  []string
	}{
		"as it is": {func(*testing.T, string) {}, nil},
		"an InRelease with another hash": {change("lock/inrelease/trixie-security", func(text []byte) []byte {
			i := bytes.Index(text, []byte("SHA256:")) + 20
			text[i] ^= 1
			return text
		}), []string{"trixie-security"}},
		"an InRelease that nobody signed": {func(t *testing.T, root string) { // locked as it is
			const name = "lock/inrelease/trixie-updates"
			was, err := os.ReadFile(filepath.Join(root, "images", name))
			if err != nil {
				t.Fatal(err)
			}
			forged := bytes.Replace(was, []byte("Suite: "), []byte("Suite: x"), 1)
			change(name, func([]byte) []byte { return forged })(t, root)
			change("lock/lock.json", replace(digest.FromBytes(was).Encoded(), digest.FromBytes(forged).Encoded()))(t, root)
		}, []string{"trixie-updates", "sign"}},
		"a package that is not locked": {change("groups.yaml", replace("- zip\n", "- zip\n      - cowsay\n")), []string{"shell", "cowsay", "lock:update"}},
		"a group that is not locked":   {change("groups.yaml", replace("- name: shell\n", "- name: tools\n    title: more\n    debian: [cowsay]\n\n  - name: shell\n")), []string{"tools", "lock:update"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, dir := range []string{"images", "toolbox", "session-image", "sidecar-image"} {
				if err := os.CopyFS(filepath.Join(root, dir), os.DirFS(filepath.Join(repo, dir))); err != nil {
					t.Fatal(err)
				}
			}
			gomod, err := os.ReadFile(filepath.Join(repo, "go.mod"))
			if err == nil {
				err = os.WriteFile(filepath.Join(root, "go.mod"), gomod, 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
			tc.spoil(t, root)
			_, err = load(t.Context(), Options{Root: root, Getenv: getenv(map[string]string{"LOOMCYCLE_CACHE": t.TempDir()}), Log: t.Output()})
			if (err == nil) != (tc.want == nil) {
				t.Fatal(err)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the error lacks %q: %v", part, err)
				}
			}
			t.Log(err)
		})
	}
}

func TestLoadImages(t *testing.T) {
	for names, want := range map[string]string{
		"loomcycle,loomcycle-toolbox":           "",
		"loomcycle,loomcycle-toolbox,loomcycle": `image "loomcycle" is asked for twice`,
		"toolbox":                               `"toolbox"`,
	} {
		_, err := load(t.Context(), Options{Root: repo, Getenv: os.Getenv, Log: t.Output(), Images: strings.Split(names, ",")})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", names, err)
		}
	}
}

// The proxy of the modules is that of the environment passed in, not of the process.
func TestLoadTakesGOPROXY(t *testing.T) {
	t.Setenv("GOPROXY", "https://process.example.test")
	b, err := load(t.Context(), options(t, nil, map[string]string{"GOPROXY": "https://passed.example.test"}))
	if err != nil {
		t.Fatal(err)
	}
	if b.goproxy != "https://passed.example.test" {
		t.Errorf("GOPROXY is %q", b.goproxy)
	}
}
