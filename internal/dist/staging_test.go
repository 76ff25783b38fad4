package dist

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A build that was killed leaves its folder; the next one removes it, and
// leaves alone what another build has in hand.
func TestStageSweepsUp(t *testing.T) {
	final := filepath.Join(t.TempDir(), "dist")
	working, err := Stage(final, Compressor{})
	if err != nil {
		t.Fatal(err)
	}
	killed, err := Stage(final, Compressor{})
	if err != nil {
		t.Fatal(err)
	}
	if err := killed.hold.Close(); err != nil { // as the kernel does
		t.Fatal(err)
	}
	fresh := filepath.Join(filepath.Dir(final), ".dist-1.tmp") // not locked yet
	other := filepath.Join(filepath.Dir(final), ".other-1.tmp")
	for _, dir := range []string{fresh, other} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-time.Hour)
	for _, dir := range []string{working.dir, killed.dir, other} {
		if err := os.Chtimes(dir, old, old); err != nil {
			t.Fatal(err)
		}
	}
	last, err := Stage(final, Compressor{})
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{working.dir, fresh, other, last.dir} {
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("it is gone: %v", err)
		}
	}
	if _, err := os.Stat(killed.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the killed build's folder is still there: %v", err)
	}
	for _, s := range []*Staging{working, last} {
		if err := errors.Join(s.Discard(), s.Discard()); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(s.dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a discarded folder is still there: %v", err)
		}
	}
}
