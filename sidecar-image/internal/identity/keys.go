package identity

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
)

// fileKeys is a key set in a file, read again when the file has changed, so
// that keys rotate without a restart.
type fileKeys struct {
	path string
	mu   sync.Mutex
	mod  time.Time
	keys keyfunc.Keyfunc
}

func (f *fileKeys) load() (keyfunc.Keyfunc, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st, err := os.Stat(f.path)
	if err == nil && f.keys != nil && st.ModTime().Equal(f.mod) {
		return f.keys, nil
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(f.path)
	}
	if err == nil {
		var k keyfunc.Keyfunc
		if k, err = keyfunc.NewJWKSetJSON(b); err == nil {
			f.keys, f.mod = k, st.ModTime()
			return k, nil
		}
	}
	if f.keys != nil { // half written, or away for a moment: the last good set stays
		return f.keys, nil
	}
	return nil, fmt.Errorf("SANDBOX_IDENTITY_JWKS: reading the key set %s: %w", f.path, err)
}

func (f *fileKeys) keyfunc(t *jwt.Token) (any, error) {
	k, err := f.load()
	if err != nil {
		return nil, err
	}
	return k.Keyfunc(t)
}
