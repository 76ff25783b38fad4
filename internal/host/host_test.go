package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A folder goes at once, or soon after when the work was interrupted.
func TestDiscard(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		ctx  context.Context
		wait time.Duration
	}{"done": {t.Context(), 0}, "interrupted": {cancelled, time.Minute}} {
		dir := filepath.Join(t.TempDir(), "-odd name")
		if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := Discard(tc.ctx, dir); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		gone := func() bool { _, err := os.Stat(dir); return errors.Is(err, fs.ErrNotExist) }
		for end := time.Now().Add(tc.wait); !gone() && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond) // polling another process
		}
		if !gone() {
			t.Errorf("%s: the folder is still there", name)
		}
	}
}
