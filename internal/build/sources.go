package build

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/moby/buildkit/client/llb"
	digest "github.com/opencontainers/go-digest"
	"github.com/tonistiigi/fsutil"
	"github.com/tonistiigi/fsutil/types"

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
	local   map[string]*folder   // the same, by their root

	// secrets are the Authorization headers of mirrors with credentials, which
	// stay out of the graph, by their BuildKit ids.
	secrets map[string][]byte

	known map[string]lock.Source // what the graph holds, by its URL without credentials
	moved map[lock.Source]string // where it was found instead
	err   error
}

func newSources(m *mirror.Mirrors) *sources {
	s := &sources{mirrors: m, secrets: map[string][]byte{}, moved: map[lock.Source]string{}}
	s.begin()
	return s
}

// begin forgets the graph before, of which a cancelled solve may still read.
func (s *sources) begin() {
	s.mounts, s.local, s.known = map[string]fsutil.FS{}, map[string]*folder{}, map[string]lock.Source{}
}

// folder is the root of a file: mirror.
type folder struct {
	state  llb.State
	wanted map[string]bool // what the graph reads of it, and the folders above
}

// place is the URL at which a source is thought to be: the first that is no
// missing file.
func (s *sources) place(ctx context.Context, src lock.Source) (string, error) {
	if at := s.moved[src]; at != "" {
		return at, nil
	}
	urls, err := s.mirrors.Candidates(src)
	if err != nil {
		return "", err
	}
	for _, at := range urls {
		file, local := mirror.LocalPath(at)
		if !local {
			return at, nil
		}
		if _, err := os.Stat(file); err == nil {
			return at, nil
		}
	}
	return s.mirrors.Locate(ctx, src) // which says it as every missing source is said
}

// fetch is images.Graph's Fetch. An error is kept for the end of the graph.
func (s *sources) fetch(ctx context.Context, src lock.Source) images.Located {
	at, err := s.place(ctx, src)
	if err != nil {
		s.err = err
		return images.Located{State: llb.Scratch(), Key: src.Path, Path: src.File()}
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

// localMirror is the folder of a file: mirror, of which only what the graph
// reads is sent to the builder.
func (s *sources) localMirror(file string, src lock.Source) (llb.State, error) {
	root := file[:len(file)-len(src.Path)]
	f := s.local[root]
	if f == nil {
		all, err := fsutil.NewFS(path.Clean(root))
		if err != nil {
			return llb.Scratch(), fmt.Errorf("%s: %w", src.Kind.Variable(), err)
		}
		name := fmt.Sprintf("mirror-%s-%d", src.Kind, len(s.local))
		f = &folder{state: llb.Local(name, llb.WithCustomName("read "+src.Kind.Variable())), wanted: map[string]bool{}}
		if s.mounts[name], err = fsutil.NewFilterFS(all, &fsutil.FilterOpt{Map: func(name string, stat *types.Stat) fsutil.MapResult {
			switch {
			case f.wanted[name]:
				return fsutil.MapResultKeep
			case stat.IsDir():
				return fsutil.MapResultSkipDir
			}
			return fsutil.MapResultExclude
		}}); err != nil {
			return llb.Scratch(), err
		}
		s.local[root] = f
	}
	paths := []string{src.Path}
	if real, err := filepath.EvalSymlinks(file); err == nil { // a folder of the mirror may be a link to another
		if base, err := filepath.EvalSymlinks(root); err == nil {
			if inside, ok := strings.CutPrefix(real, base+"/"); ok {
				paths = append(paths, inside)
			}
		}
	}
	for _, name := range paths {
		for ; name != "."; name = path.Dir(name) {
			f.wanted[name] = true
		}
	}
	return f.state, nil
}

// relocate looks into failed downloads: it returns true when it found every
// one of them elsewhere or the mirror well again, so that another try makes
// sense, and otherwise the reason as a sentence for the operator.
func (s *sources) relocate(ctx context.Context, failed []buildkit.FailedStep) (bool, error) {
	var suspects []string
	for _, step := range failed {
		if _, ok := s.known[step.Source]; ok {
			suspects = append(suspects, step.Source)
		}
	}
	if len(suspects) == 0 {
		// No step's source is a single file of a local mirror, and a wrong one
		// fails where it is unpacked.
		for _, at := range slices.Sorted(maps.Keys(s.known)) {
			if file, local := mirror.LocalPath(at); local && !mirror.Intact(file, s.known[at]) {
				suspects = append(suspects, at)
			}
		}
	}
	again := false
	for _, was := range suspects {
		src := s.known[was]
		at, err := s.mirrors.Diagnose(ctx, src)
		if err != nil {
			return false, err
		}
		again = true
		if bare, _, err := mirror.Credentials(at); err != nil || bare != was {
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
