package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"time"

	"github.com/docker/cli/cli/config"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/session"
	"github.com/moby/buildkit/session/auth/authprovider"
	"github.com/moby/buildkit/solver/pb"
	digest "github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// Job is one solve of a Builder.Solve.
type Job struct {
	// Name tells the job from the others in the display, in errors and in
	// remote cache references, e.g. "loomcycle-toolbox-arm64".
	Name string
	// Platform is the image's, which chooses the node. Empty means the default.
	Platform   string
	Definition *llb.Definition
	// Opt goes to the client as it is. Registry credentials from the docker
	// configuration and the caches of CACHE_FROM and CACHE_TO are added.
	Opt client.SolveOpt
}

// Error is a failed solve.
type Error struct {
	Job string
	// Failed are the steps that failed, not those cancelled because of it.
	Failed []FailedStep
	Err    error
}

// FailedStep is one vertex of the graph that failed.
type FailedStep struct {
	Digest digest.Digest
	// Name is the custom name of the vertex, else BuildKit's.
	Name string
	// Source is the identifier of a source vertex ("https://...", "local://...").
	Source string
	// Message is BuildKit's error, Log the end of what the step printed.
	Message, Log string
}

func (e *Error) Error() string {
	if len(e.Failed) == 0 {
		return fmt.Sprintf("building %s: %v", e.Job, e.Err)
	}
	var s strings.Builder
	fmt.Fprintf(&s, "building %s:", e.Job)
	for i, f := range e.Failed {
		if i > 0 {
			s.WriteString(";")
		}
		fmt.Fprintf(&s, " step %q failed: %s", f.Name, f.reason())
	}
	return s.String()
}

// reason is what the step said last, which tells more than its exit code.
func (f FailedStep) reason() string {
	said := strings.TrimSpace(f.Log)
	if said == "" {
		return f.Message
	}
	return said[strings.LastIndexByte(said, '\n')+1:]
}

func (e *Error) Unwrap() error { return e.Err }

// cancelGrace is how long a cancelled solve may take to say goodbye. BuildKit's
// client waits up to five seconds for the last status; the daemon has killed the
// containers long before. What is left of two seconds is for the rest of the
// program, on a machine that does other things too.
const cancelGrace = time.Second

// Solve runs the jobs at the same time under one progress display and returns
// their responses in order. The first failure cancels the others; the error then
// holds an *Error for every job that failed by itself. A cancelled context ends it
// within two seconds.
func (b *Builder) Solve(ctx context.Context, jobs ...Job) ([]*client.SolveResponse, error) {
	view, err := newView(b.opts.Getenv("BUILDKIT_PROGRESS"), b.opts.Log, len(b.Nodes()) > 1)
	if err != nil {
		return nil, err
	}
	caches := make([]cacheEntries, len(jobs))
	for i, j := range jobs {
		if caches[i], err = remoteCaches(b.opts.Getenv, j.Name); err != nil {
			return nil, err
		}
	}
	responses := make([]*client.SolveResponse, len(jobs))
	errs := make([]error, len(jobs))
	eg, egCtx := errgroup.WithContext(ctx)
	for i, j := range jobs {
		eg.Go(func() error {
			node := b.ForPlatform(j.Platform)
			opt := j.Opt
			opt.FrontendAttrs = maps.Clone(opt.FrontendAttrs)
			opt.CacheImports = append(append([]client.CacheOptionsEntry(nil), opt.CacheImports...), caches[i].from...)
			opt.CacheExports = append(append([]client.CacheOptionsEntry(nil), opt.CacheExports...), caches[i].to...)
			opt.Session = append(append([]session.Attachable(nil), opt.Session...), b.auth(b.opts.Log))
			track := view.track(j, node)
			status := make(chan *client.SolveStatus)
			type result struct {
				res *client.SolveResponse
				err error
			}
			done, drained := make(chan result, 1), make(chan struct{})
			go func() {
				defer close(drained)
				for s := range status {
					track.update(s)
				}
			}()
			go func() {
				res, err := node.Client.Solve(egCtx, j.Definition, opt, status)
				<-drained
				done <- result{res, err}
			}()
			var r result
			select {
			case r = <-done:
			case <-egCtx.Done():
				select {
				case r = <-done:
				case <-time.After(cancelGrace):
					r.err = context.Cause(egCtx)
				}
			}
			if r.err == nil {
				responses[i] = r.res
				return nil
			}
			failed := track.failures(j.Definition)
			// A job that only fell with another one's failure says nothing new.
			if len(failed) > 0 || egCtx.Err() == nil {
				errs[i] = &Error{Job: j.Name, Failed: failed, Err: r.err}
				return errs[i]
			}
			return r.err
		})
	}
	err = eg.Wait()
	view.close()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("the build was cancelled: %w", context.Cause(ctx))
	}
	if err != nil {
		if all := errors.Join(errs...); all != nil {
			return nil, all
		}
		return nil, err
	}
	return responses, nil
}

// source is the identifier of the definition's source op with that digest.
func source(def *llb.Definition, dgst digest.Digest) string {
	if def == nil {
		return ""
	}
	for _, dt := range def.Def {
		if digest.FromBytes(dt) != dgst {
			continue
		}
		var op pb.Op
		if op.UnmarshalVT(dt) == nil && op.GetSource() != nil {
			return op.GetSource().GetIdentifier()
		}
	}
	return ""
}

type authFunc func(log io.Writer) session.Attachable

// dockerAuth answers the daemon's questions for registry credentials from
// ~/.docker/config.json and its credential helpers, on demand.
func dockerAuth(log io.Writer) session.Attachable {
	if log == nil {
		log = os.Stderr
	}
	return authprovider.NewDockerAuthProvider(authprovider.DockerAuthProviderConfig{
		AuthConfigProvider: authprovider.LoadAuthConfig(config.LoadDefaultConfigFile(log)),
	})
}
