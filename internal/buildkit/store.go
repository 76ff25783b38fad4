package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/sirupsen/logrus"
)

// OpenStore opens (and makes) the blob store of an OCI layout, the folder
// blobs/sha256. One store takes the exports of any number of concurrent jobs: a
// blob that it already has is not sent again, one that is just coming is waited
// for. Two stores of one folder at the same time would corrupt each other's writes.
// has names more blobs, not in the folder, that need not be sent. A blob that
// lies in one of the folders of Builder.Blobs is linked, not sent: what reads it
// has to check it, since a later change of the file there would show here.
func OpenStore(dir string, has func(digest.Digest) bool, blobs ...string) (content.Store, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the layout %s: %w", dir, err)
	}
	// The store warns of file systems without fs-verity, which it can do without.
	level := logrus.GetLevel()
	logrus.SetLevel(logrus.ErrorLevel)
	store, err := local.NewStore(dir)
	logrus.SetLevel(level)
	if err != nil {
		return nil, fmt.Errorf("opening the blob store of %s: %w", dir, err)
	}
	return &waitingStore{Store: store, dir: dir, has: has, blobs: blobs, turns: map[string]chan struct{}{}}, nil
}

// waitingStore lets a second writer of a blob wait for the first one, where the
// local store refuses it and leaves it to the daemon to try again, with an error
// in the log each time.
type waitingStore struct {
	content.Store
	dir   string
	has   func(digest.Digest) bool
	blobs []string
	mu    sync.Mutex
	turns map[string]chan struct{}
}

func (s *waitingStore) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	var o content.WriterOpts
	for _, opt := range opts {
		if err := opt(&o); err != nil {
			return nil, err
		}
	}
	if s.has != nil && s.has(o.Desc.Digest) || s.link(o.Desc.Digest) {
		return nil, fmt.Errorf("%s: %w", o.Desc.Digest, errdefs.ErrAlreadyExists)
	}
	s.mu.Lock()
	turn := s.turns[o.Ref]
	if turn == nil {
		turn = make(chan struct{}, 1)
		s.turns[o.Ref] = turn
	}
	s.mu.Unlock()
	select {
	case turn <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	w, err := s.Store.Writer(ctx, opts...)
	if err != nil {
		<-turn
		return nil, err
	}
	return &turnWriter{Writer: w, done: sync.OnceFunc(func() { <-turn })}, nil
}

// link takes a blob from the daemon's own store, where that is on the same file
// system: gigabytes neither pass through a socket nor are written again.
func (s *waitingStore) link(d digest.Digest) bool {
	if len(s.blobs) == 0 || d.Validate() != nil { // it comes from a daemon, and becomes a path
		return false
	}
	at := filepath.Join(s.dir, "blobs", d.Algorithm().String())
	for _, from := range s.blobs {
		if os.MkdirAll(at, 0o755) != nil {
			return false
		}
		err := os.Link(filepath.Join(from, d.Algorithm().String(), d.Encoded()), filepath.Join(at, d.Encoded()))
		if err == nil || errors.Is(err, fs.ErrExist) {
			return true
		}
	}
	return false
}

type turnWriter struct {
	content.Writer
	done func()
}

func (w *turnWriter) Close() error {
	defer w.done()
	return w.Writer.Close()
}
