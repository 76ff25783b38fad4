package lock

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/debian"
)

// CheckSignatures checks, without a network, that each suite's committed
// InRelease file is the one that was locked, is signed by a committed
// archive key, and had not expired when the lock was made (its epoch).
func (l *Lock) CheckSignatures(dir string) error {
	_, err := l.Releases(dir)
	return err
}

// Releases is CheckSignatures, returning what the InRelease files say, by suite.
func (l *Lock) Releases(dir string) (map[string]*debian.Release, error) {
	keys, err := debian.LoadKeyring(filepath.Join(dir, KeyDir))
	if err != nil {
		return nil, err
	}
	releases := map[string]*debian.Release{}
	for _, s := range l.Suites {
		file := filepath.Join(dir, ReleaseDir, s.Name)
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("the locked InRelease file of %s is missing: run lock:update: %w", s.Name, err)
		}
		if found := digest.FromBytes(text); found != s.Release {
			return nil, fmt.Errorf("%s is not the file that was locked: it has %s, the lock says %s: run lock:update", file, found, s.Release)
		}
		r, err := debian.ReadInRelease(text, keys, s.Name, time.Unix(l.Epoch, 0))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if found := r.Date.Format(time.RFC3339); found != s.Date {
			return nil, fmt.Errorf("%s is of %s, the lock says %s: run lock:update", file, found, s.Date)
		}
		releases[s.Name] = r
	}
	return releases, nil
}
