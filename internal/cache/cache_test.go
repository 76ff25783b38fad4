package cache

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func env(kv map[string]string) func(string) string {
	return func(name string) string { return kv[name] }
}

func TestDir(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"LOOMCYCLE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"},
		{map[string]string{"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/loomcycle-images"},
		{map[string]string{"HOME": "/h"}, "/h/.cache/loomcycle-images"},
		{nil, ""},
	} {
		if got, _ := Dir(env(c.env)); got != c.want {
			t.Errorf("%v: %q, want %q", c.env, got, c.want)
		}
	}
}

func TestTemp(t *testing.T) {
	home := t.TempDir()
	old, young, daemon := filepath.Join(home, "tmp", "old"), filepath.Join(home, "tmp", "young"), filepath.Join(home, "tmp", "daemon")
	checkout := filepath.Join(old, "checkout", "internal", "buildkit", "testdata")
	for _, dir := range []string{checkout, filepath.Join(young, "layer"), filepath.Join(daemon, "cache", "buildkit", "bench", "lock")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	day := time.Now().Add(-25 * time.Hour)
	for _, dir := range []string{old, daemon} {
		if err := os.Chtimes(dir, day, day); err != nil {
			t.Fatal(err)
		}
	}
	root, err := Temp(env(map[string]string{"LOOMCYCLE_CACHE": home}))
	if err != nil || root != filepath.Join(home, "tmp") {
		t.Fatalf("%s, %v", root, err)
	}
	if _, err := os.Stat(old); err == nil {
		t.Error("what a killed process left is still there")
	}
	for _, dir := range []string{young, daemon} {
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("a folder in use is gone: %v", err)
		}
	}
}
