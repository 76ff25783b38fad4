// Package reason is for errors that a session's caller is told of, who need not know the
// sidecar's paths, nor the session's on its host.
package reason

import (
	"errors"
	"io/fs"
	"os"
)

// Of returns what a file operation failed with, without the paths that it names; of another
// error itself.
func Of(err error) error {
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	if l := (*os.LinkError)(nil); errors.As(err, &l) {
		return l.Err
	}
	return err
}
