package smoke

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/smoke/engine"
)

// Options say what to test and how. The environment may say it too:
// SMOKE_REF, SMOKE_DIST, SMOKE_ENGINE, SMOKE_JOBS, SMOKE_CASES (a name or pattern) and
// SMOKE_SLOW (a factor for time budgets on a slow machine).
type Options struct {
	Root   string   // the checkout
	Dist   string   // the build to test; SMOKE_DIST or Root/dist when empty
	Images []string // names; all when empty
	Refs   []string // indexes in registries, in place of Dist; those of SMOKE_REF when empty
	// Native leaves out what only emulation could run.
	Native bool
	Getenv func(string) string
	Out    io.Writer // the table
	Log    io.Writer // notices
	// Reports is the folder for report.json and junit.xml; smoke in the
	// dist folder when empty.
	Reports string
}

// Run runs the matrix and reports it. The error is that of a run which could
// not be made, or says how many cases failed.
func Run(ctx context.Context, o Options) (*Report, error) {
	r, err := newRunner(ctx, o)
	if err != nil {
		return nil, err
	}
	report, err := r.run(ctx)
	if report != nil {
		err = errors.Join(report.write(r.Out, r.Reports, r.Getenv("GITHUB_STEP_SUMMARY")), err)
	}
	if err != nil {
		return report, err
	}
	return report, report.Err()
}

// Pulled tests images as they lie in registries: text has a line "IMAGE
// REFERENCE" for each. One of each image makes a matrix, as of a build, with
// its reports in a folder of its own; an image that is in a second registry
// goes to a second one.
func Pulled(ctx context.Context, o Options, text string) error {
	var runs []Options
	for line := range strings.Lines(text) {
		image, ref, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			return fmt.Errorf("the line %q is not IMAGE REFERENCE", line)
		}
		n := slices.IndexFunc(runs, func(run Options) bool { return !slices.Contains(run.Images, image) })
		if n < 0 {
			n, runs = len(runs), append(runs, o)
			dist := cmp.Or(o.Dist, o.Getenv("SMOKE_DIST"), filepath.Join(o.Root, "dist"))
			runs[n].Reports = filepath.Join(dist, "smoke", fmt.Sprint("pulled-", n+1))
		}
		runs[n].Images, runs[n].Refs = append(runs[n].Images, image), append(runs[n].Refs, ref)
	}
	for _, run := range runs {
		if _, err := Run(ctx, run); err != nil {
			return fmt.Errorf("%s: %w", strings.Join(run.Refs, ", "), err)
		}
	}
	return nil
}

type runner struct {
	Options
	suite   *Suite
	family  *images.Family
	engine  engine.Engine
	targets []*target
	jobs    int
	slow    float64
	cache   string
	scratch string            // folder of this run; its name marks what belongs to it
	probes  map[string]string // folder of the probe by architecture
	// asked is true when the operator chose BuildKit, which cannot run all.
	asked bool

	looked sync.Map // see newer, by layer

	mu     sync.Mutex
	facts  map[string]fact // what a case with Same saw first
	loaded map[*target]bool
}

type fact struct{ image, output string }

func newRunner(ctx context.Context, o Options) (*runner, error) {
	r := &runner{Options: o, facts: map[string]fact{}, loaded: map[*target]bool{}, probes: map[string]string{}}
	r.Dist = cmp.Or(r.Dist, r.Getenv("SMOKE_DIST"), filepath.Join(r.Root, "dist"))
	r.Reports = cmp.Or(r.Reports, filepath.Join(r.Dist, "smoke"))
	var err error
	if r.Root, err = filepath.Abs(r.Root); err != nil {
		return nil, err
	}
	if r.Dist, err = filepath.Abs(r.Dist); err != nil {
		return nil, err
	}
	if r.suite, err = Load(os.DirFS(filepath.Join(r.Root, "smoke"))); err != nil {
		return nil, err
	}
	if r.family, err = images.Load(os.DirFS(r.Root)); err != nil {
		return nil, err
	}
	if r.cache, err = cache.Dir(r.Getenv); err != nil {
		return nil, err
	}
	r.jobs = runtime.NumCPU()
	if v := r.Getenv("SMOKE_JOBS"); v != "" {
		if r.jobs, err = strconv.Atoi(v); err != nil || r.jobs < 1 {
			return nil, fmt.Errorf("SMOKE_JOBS=%q is not a number of cases to run at a time", v)
		}
	}
	if v := r.Getenv("SMOKE_CASES"); v != "" {
		if _, err := path.Match(v, ""); err != nil {
			return nil, fmt.Errorf("SMOKE_CASES=%q is no pattern: %w", v, err)
		}
	}
	r.slow = 1
	if v := r.Getenv("SMOKE_SLOW"); v != "" {
		if r.slow, err = strconv.ParseFloat(v, 64); err != nil || r.slow <= 0 {
			return nil, fmt.Errorf("SMOKE_SLOW=%q is not a factor for time budgets, such as 3", v)
		}
	}
	if err := r.suite.checkImages(r.family); err != nil {
		return nil, err
	}
	if r.targets, err = r.findTargets(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

// openEngine is the engine that SMOKE_ENGINE names, else podman, which is
// installed where that is possible, else docker, else BuildKit. CI has podman
// with every runtime that a case asks for.
func (r *runner) openEngine(ctx context.Context) (engine.Engine, error) {
	podman := func() error {
		programs := []string{"podman", "runc"}
		if r.ci() {
			programs = append(programs, "runsc")
		}
		return host.Need(ctx, r.Log, programs...)
	}
	bk := func() (engine.Engine, error) {
		return engine.BuildKit(ctx, buildkit.Options{Getenv: r.Getenv, Log: r.Log, Root: r.Root})
	}
	switch name := r.Getenv("SMOKE_ENGINE"); name {
	case "podman":
		if err := podman(); err != nil {
			return nil, err
		}
		return engine.Podman(ctx, r.cache, r.Log)
	case "docker":
		return engine.Docker(ctx)
	case "buildkit":
		r.asked = true
		return bk()
	case "":
		missing := podman()
		if missing == nil {
			return engine.Podman(ctx, r.cache, r.Log)
		}
		if e, err := engine.Docker(ctx); err == nil {
			return e, nil
		}
		fmt.Fprintf(r.Log, "smoke: no container engine (%v): cases run in BuildKit where they can\n", missing)
		return bk()
	default:
		return nil, fmt.Errorf("SMOKE_ENGINE=%q is none of podman, docker, buildkit", name)
	}
}

func (r *runner) ci() bool { return r.Getenv("CI") == "true" }

func (r *runner) run(ctx context.Context) (report *Report, err error) {
	report = &Report{Started: time.Now().UTC(), Results: []Result{}}
	tasks := r.matrix()
	if len(tasks) == 0 {
		return nil, fmt.Errorf("no case matches: images %v, SMOKE_CASES=%q", r.Images, r.Getenv("SMOKE_CASES"))
	}
	report.Cases = len(tasks)
	if slices.ContainsFunc(tasks, func(t *task) bool { return !t.c.Structure }) {
		defer func() { err = errors.Join(err, r.close(ctx)) }()
		if err := r.prepare(ctx, tasks); err != nil {
			return nil, err
		}
		report.Engine = r.engine.Name()
	}
	r.work(ctx, tasks, report)
	report.Seconds = time.Since(report.Started).Seconds()
	if r.engine != nil {
		if report.Leaks, err = r.leaks(ctx); err != nil {
			return report, err
		}
	}
	if ctx.Err() != nil {
		report.Interrupted = true
		return report, fmt.Errorf("the run was interrupted: %w", context.Cause(ctx))
	}
	return report, nil
}

// prepare makes what tasks with containers need, and close takes it away.
func (r *runner) prepare(ctx context.Context, tasks []*task) (err error) {
	tmp, err := cache.Temp(r.Getenv)
	if err != nil {
		return err
	}
	if r.scratch, err = os.MkdirTemp(tmp, "smoke-*"); err != nil {
		return err
	}
	if err := os.Chmod(r.scratch, 0o755); err != nil { // containers' uids pass through it
		return err
	}
	if r.engine, err = r.openEngine(ctx); err != nil {
		return err
	}
	for _, t := range tasks {
		if !t.emulated() {
			continue
		}
		if err := host.Emulate(ctx, r.Log, t.target.arch()); err != nil {
			return err
		}
	}
	return r.compileProbes(ctx, tasks)
}

func (r *runner) close(ctx context.Context) (err error) {
	if r.engine != nil {
		err = r.engine.Close(ctx)
	}
	return errors.Join(err, os.RemoveAll(r.scratch))
}

// leaks lists what is still there when all cases have ended: containers and
// volumes that the engine knows, and processes of either.
func (r *runner) leaks(ctx context.Context) ([]string, error) {
	ctx = context.WithoutCancel(ctx)
	left, err := r.engine.Leaks(ctx)
	return append(left, engine.Processes(ctx, filepath.Base(r.scratch))...), err
}

// work runs the tasks, jobs at a time.
func (r *runner) work(ctx context.Context, tasks []*task, report *Report) {
	queue := make(chan *task)
	results := make(chan Result)
	var wg sync.WaitGroup
	for range r.jobs {
		wg.Go(func() {
			for t := range queue {
				if ctx.Err() != nil { // the queue and the interruption came at once
					continue
				}
				res := r.one(ctx, t)
				if ctx.Err() != nil && res.Status != Passed {
					continue // the interruption failed it, not the image
				}
				results <- res
			}
		})
	}
	go func() {
		defer close(results)
		defer wg.Wait()
		defer close(queue)
		for _, t := range tasks {
			select {
			case queue <- t:
			case <-ctx.Done():
				return
			}
		}
	}()
	for res := range results {
		report.Results = append(report.Results, res)
		fmt.Fprintf(r.Log, "smoke: %d/%d %s\n", len(report.Results), len(tasks), res.line())
	}
	// Tasks end in any order; a report has the matrix's.
	place := map[string]int{}
	for i, t := range tasks {
		place[t.key()] = i
	}
	slices.SortFunc(report.Results, func(a, b Result) int { return place[a.key()] - place[b.key()] })
}

// compileProbes compiles the probe for every architecture that has a task.
func (r *runner) compileProbes(ctx context.Context, tasks []*task) error {
	arches := []string{runtime.GOARCH} // for steps outside
	for _, t := range tasks {
		arches = append(arches, t.target.arch())
	}
	for _, arch := range arches {
		if r.probes[arch] != "" {
			continue
		}
		program, err := host.Program(ctx, r.Root, filepath.Join(r.cache, "smoke", "probe"), "./smoke/probe", arch)
		if err != nil {
			return err
		}
		r.probes[arch] = filepath.Dir(program)
	}
	return nil
}
