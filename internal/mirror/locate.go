package mirror

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"os"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Locate returns the URL of the first mirror that says it has a source,
// without downloading it.
func (m *Mirrors) Locate(ctx context.Context, s lock.Source) (string, error) {
	var found string
	err := m.try(ctx, s, func(u *url.URL) error {
		found = u.String()
		return m.head(ctx, u)
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
			return err
		}
		return nil
	}
	answer, err := m.request(ctx, http.MethodHead, u, "")
	if err == nil {
		return answer.Close()
	}
	if errors.Is(err, ErrNotFound) {
		return err
	}
	return &transientError{err} // also of a server that does not know HEAD
}
