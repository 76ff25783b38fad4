package identity

import (
	"os"
	"sync"
	"time"
)

// file is what a file holds, read again when the file has changed, so that keys
// and tokens rotate without a restart.
type file[T any] struct {
	path  string
	parse func([]byte) (T, error)

	mu   sync.Mutex
	mod  time.Time // when what is held was written; zero before the first
	size int64
	held T
}

func (f *file[T]) load() (T, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st, err := os.Stat(f.path)
	if err == nil && st.ModTime().Equal(f.mod) && st.Size() == f.size {
		return f.held, nil
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(f.path)
	}
	if err == nil {
		var v T
		if v, err = f.parse(b); err == nil {
			f.held, f.mod, f.size = v, st.ModTime(), st.Size()
			return v, nil
		}
	}
	if !f.mod.IsZero() { // half written, or away for a moment: the last that was good stays
		return f.held, nil
	}
	return f.held, err
}
