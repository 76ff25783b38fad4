package mirror

import (
	"context"
	"errors"
	"fmt"
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
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, u.String(), nil)
	if err != nil {
		return errors.New("the request cannot be made: the URL is malformed")
	}
	resp, err := m.client.Do(req)
	if err != nil {
		var outer *url.Error
		if errors.As(err, &outer) {
			err = outer.Err
		}
		return &transientError{err}
	}
	resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusOK:
		return nil
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusGone:
		return ErrNotFound
	}
	return &transientError{fmt.Errorf("the server answers %s", resp.Status)}
}
