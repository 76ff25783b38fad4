package build

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"sync"

	"github.com/moby/buildkit/client/llb"
	digest "github.com/opencontainers/go-digest"
	"github.com/tonistiigi/fsutil"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

// sources places locked sources into the graph: an HTTP source with its
// checksum at the first mirror that is thought to have it, or a file of a
// local mirror. It is not safe for concurrent use while a graph is made.
type sources struct {
	mirrors *mirror.Mirrors
	mounts  map[string]fsutil.FS // local mirrors, by the name of their llb.Local
	local   map[string]llb.State

	// secrets are the Authorization headers of mirrors with credentials, which
	// stay out of the graph, by their BuildKit ids.
	secrets map[string][]byte

	known map[string]lock.Source // what the graph holds, by its URL without credentials
	moved map[lock.Source]string // where it was found instead
	err   error
}

func newSources(m *mirror.Mirrors) *sources {
	return &sources{mirrors: m, mounts: map[string]fsutil.FS{}, local: map[string]llb.State{}, secrets: map[string][]byte{},
		known: map[string]lock.Source{}, moved: map[lock.Source]string{}}
}

// fetch is images.Graph's Fetch. An error is kept for the end of the graph.
func (s *sources) fetch(src lock.Source) images.Located {
	at := s.moved[src]
	if at == "" {
		urls, err := s.mirrors.Candidates(src)
		if err != nil {
			s.err = err
			return images.Located{State: llb.Scratch(), Key: src.Path, Path: src.File()}
		}
		at = urls[0]
	}
	bare, authorization, err := mirror.Credentials(at)
	if err != nil {
		s.err = fmt.Errorf("%s: %w", src.Kind.Variable(), err)
		return images.Located{State: llb.Scratch(), Key: src.Path, Path: src.File()}
	}
	s.known[bare] = src
	name := llb.WithCustomName("fetch " + src.Name)
	if file, ok := mirror.LocalPath(at); ok {
		dir, err := s.localMirror(file, src)
		if err != nil {
			s.err = err
		}
		return images.Located{Key: at, Path: src.File(), State: llb.Scratch().
			File(llb.Copy(dir, src.Path, "/"+src.File()), name)}
	}
	opts := []llb.HTTPOption{llb.Checksum(src.Digest), llb.Filename(src.File()), llb.Chmod(0o644), name}
	if authorization != "" {
		id := "mirror-" + digest.FromString(authorization).Encoded()[:12]
		s.secrets[id] = []byte(authorization)
		opts = append(opts, llb.AuthHeaderSecret(id))
	}
	return images.Located{Key: bare, Path: src.File(), State: llb.HTTP(bare, opts...)}
}

// localMirror is the folder of a file: mirror, of which only what is locked
// is sent to the builder.
func (s *sources) localMirror(file string, src lock.Source) (llb.State, error) {
	root := file[:len(file)-len(src.Path)]
	if st, ok := s.local[root]; ok {
		return st, nil
	}
	fs, err := fsutil.NewFS(path.Clean(root))
	if err != nil {
		return llb.Scratch(), fmt.Errorf("%s: %w", src.Kind.Variable(), err)
	}
	name := "mirror-" + string(src.Kind)
	s.mounts[name] = fs
	s.local[root] = llb.Local(name, llb.WithCustomName("read "+src.Kind.Variable()))
	return s.local[root], nil
}

// relocate looks into failed downloads: it returns true when it found every
// one of them elsewhere or the mirror well again, so that another try makes
// sense, and otherwise the reason as a sentence for the operator.
func (s *sources) relocate(ctx context.Context, failed []buildkit.FailedStep) (bool, error) {
	again := false
	for _, step := range failed {
		src, ok := s.known[step.Source]
		if !ok {
			continue
		}
		at, err := s.mirrors.Diagnose(ctx, src)
		if err != nil {
			return false, err
		}
		again = true
		if bare, _, err := mirror.Credentials(at); err != nil || bare != step.Source {
			s.moved[src] = at
			if err := s.survey(ctx, src.Kind); err != nil {
				return false, err
			}
		}
	}
	return again, nil
}

// survey asks the mirrors which of them has each source of a kind, so that a
// mirror that lacks many files costs one more try and not many.
func (s *sources) survey(ctx context.Context, kind lock.Kind) error {
	var wanted []lock.Source
	for _, src := range slices.SortedFunc(maps.Values(s.known), func(a, b lock.Source) int {
		if a.Path < b.Path {
			return -1
		}
		return 1
	}) {
		if src.Kind == kind && s.moved[src] == "" {
			wanted = append(wanted, src)
		}
	}
	found := make([]string, len(wanted))
	errs := make([]error, len(wanted))
	limit := make(chan struct{}, 16)
	var wg sync.WaitGroup
	for i, src := range wanted {
		wg.Go(func() {
			limit <- struct{}{}
			found[i], errs[i] = s.mirrors.Locate(ctx, src)
			<-limit
		})
	}
	wg.Wait()
	for i, src := range wanted {
		if errs[i] != nil {
			return errs[i]
		}
		s.moved[src] = found[i]
	}
	return nil
}
