package identity

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// file is what a file holds, read again when the file has changed, so that keys
// and tokens rotate without a restart.
type file[T any] struct {
	path  string
	log   *slog.Logger
	parse func([]byte) (T, error)

	mu   sync.Mutex
	mod  time.Time // when what is held was written; zero before the first
	size int64
	held T
	told string // of the file that is not taken, so that it is logged once
}

func (f *file[T]) load() (T, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st, err := os.Stat(f.path)
	if err == nil && st.ModTime().Equal(f.mod) && st.Size() == f.size {
		f.told = ""
		return f.held, nil
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(f.path)
	}
	if err == nil {
		var v T
		if v, err = f.parse(b); err == nil {
			f.held, f.mod, f.size, f.told = v, st.ModTime(), st.Size(), ""
			return v, nil
		}
	}
	if !f.mod.IsZero() { // half written, or away for a moment: the last that was good stays
		is := err.Error()
		if st != nil {
			is += fmt.Sprint(st.ModTime(), st.Size())
		}
		if is != f.told {
			f.told = is
			f.log.Error("a file has changed and cannot be used; what was read of it before stays in force", "file", f.path, "error", err)
		}
		return f.held, nil
	}
	return f.held, err
}
