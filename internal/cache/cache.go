// Package cache knows the project's folder on this machine, so that programs
// that build nothing find it without BuildKit's client.
package cache

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Dir is the project's cache folder: $LOOMCYCLE_CACHE, else
// $XDG_CACHE_HOME/loomcycle-images, else ~/.cache/loomcycle-images.
func Dir(getenv func(string) string) (string, error) {
	if d := getenv("LOOMCYCLE_CACHE"); d != "" {
		return d, nil
	}
	if d := getenv("XDG_CACHE_HOME"); d != "" {
		return filepath.Join(d, "loomcycle-images"), nil
	}
	if d := getenv("HOME"); d != "" {
		return filepath.Join(d, ".cache", "loomcycle-images"), nil
	}
	return "", errors.New("there is no cache folder: set LOOMCYCLE_CACHE (or HOME)")
}

// stale is the age from which a folder in Temp was left by a killed process.
const stale = 24 * time.Hour

// Temp is where temporary folders of gigabytes are made, below the cache
// folder: the system's own is memory on Debian 13. What killed processes left
// there a day ago is removed, but for the homes of daemons, which
// buildkit.TempRoot removes.
func Temp(getenv func(string) string) (string, error) {
	dir, err := Dir(getenv)
	if err != nil {
		return "", err
	}
	root, err := filepath.Abs(filepath.Join(dir, "tmp"))
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return "", fmt.Errorf("making the folder for temporary files: %w", err)
	}
	old, err := Stale(root)
	for _, dir := range old {
		if len(Daemons(dir)) == 0 {
			_ = os.RemoveAll(dir) // what stays is tried again the next time
		}
	}
	return root, err
}

// Stale are the folders in Temp that killed processes left a day ago.
func Stale(root string) (dirs []string, err error) {
	entries, err := os.ReadDir(root)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > stale {
			dirs = append(dirs, filepath.Join(root, e.Name()))
		}
	}
	return dirs, err
}

// Daemons are the homes of BuildKit daemons in a temporary folder that is a
// cache folder or holds one.
func Daemons(dir string) (homes []string) {
	for _, cache := range []string{"*", "*/*"} {
		found, _ := filepath.Glob(filepath.Join(dir, cache, "buildkit", "*", "lock")) // a checkout has a folder buildkit too
		for _, lock := range found {
			homes = append(homes, filepath.Dir(lock))
		}
	}
	return homes
}
