package buildkit

import (
	"context"
	"fmt"
	"os"
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
// has names more blobs, not in the folder, that need not be sent.
func OpenStore(dir string, has func(digest.Digest) bool) (content.Store, error) {
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
	return &waitingStore{Store: store, has: has, turns: map[string]chan struct{}{}}, nil
}

// waitingStore lets a second writer of a blob wait for the first one, where the
// local store refuses it and leaves it to the daemon to try again, with an error
// in the log each time.
type waitingStore struct {
	content.Store
	has   func(digest.Digest) bool
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
	if s.has != nil && s.has(o.Desc.Digest) {
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

type turnWriter struct {
	content.Writer
	done func()
}

func (w *turnWriter) Close() error {
	defer w.done()
	return w.Writer.Close()
}
