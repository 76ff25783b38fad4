package mirror

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Locate returns the URL of the first mirror that says it has a source,
// without downloading it. A mirror that gave no answer to any try is not asked
// for another source: hundreds of them would each wait as long.
func (m *Mirrors) Locate(ctx context.Context, s lock.Source) (string, error) {
	var found string
	asked := map[string]int{}
	err := m.try(ctx, s, func(u *url.URL) error {
		found = u.String()
		base := strings.TrimSuffix(found, s.Path)
		if err, away := m.away.Load(base); away {
			return err.(error)
		}
		err := m.head(ctx, u)
		var fault *mirrorError
		if asked[base]++; errors.As(err, &fault) && asked[base] == tries {
			err = &mirrorError{err: fault.err, final: true}
			m.away.Store(base, err)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	return found, nil
}

func (m *Mirrors) head(ctx context.Context, u *url.URL) error {
	if file, ok := LocalPath(u.String()); ok {
		if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
			return ErrNotFound
		} else if err != nil {
			return &mirrorError{err: err, final: true}
		}
		return nil
	}
	answer, err := m.request(ctx, http.MethodHead, u, "")
	if err != nil {
		return err
	}
	return answer.Close()
}
