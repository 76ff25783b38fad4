package smoke

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/loomcycle/loomcycle-images/smoke/engine"
	"github.com/loomcycle/loomcycle-images/smoke/plan"
)

// failure is what a maintainer needs to see of a case that failed.
type failure struct {
	command string
	what    []string // what was expected and came out otherwise
	output  string
	slow    int // so many of them are that it took too long
}

func (f *failure) Error() string { return strings.Join(f.what, "; ") }

// late notes what took longer than a limit; 0 is none.
func (f *failure) late(took, limit time.Duration) {
	if limit > 0 && took > limit {
		f.what = append(f.what, fmt.Sprintf("it took %s, more than %s", took.Round(time.Millisecond), limit))
		f.slow++
	}
}

// errNotRun is the reason why an engine did not run a case.
type errNotRun struct{ error }

// one runs a task and makes its result.
func (r *runner) one(ctx context.Context, t *task) Result {
	res := Result{
		Case: t.name(), Title: t.c.Title, Fault: t.c.Fault,
		Image: t.target.Name, Platform: t.target.Platform, Digest: t.target.Manifest.String(), Emulated: t.emulated(),
	}
	start := time.Now()
	err := r.inTime(ctx, t.name(), func() error { return r.attempt(ctx, t) })
	res.Seconds = (time.Since(start) - t.loading).Seconds()
	var f *failure
	var skip errNotRun
	switch {
	case err == nil:
		res.Status = Passed
	case errors.As(err, &skip):
		res.Status, res.Message = NotRun, skip.Error()
	case errors.As(err, &f):
		res.Status, res.Message, res.Command, res.Output = Failed, f.Error(), f.command, f.output
	default:
		res.Status, res.Message = Failed, err.Error()
	}
	return res
}

// tries is how often a case may run that was too slow and else as it has to be: the
// machine may have had something else to do.
const tries = 3

func (r *runner) inTime(ctx context.Context, name string, attempt func() error) error {
	for n := 1; ; n++ {
		err := attempt()
		var f *failure
		if !errors.As(err, &f) || f.slow < len(f.what) || n == tries || ctx.Err() != nil {
			return err
		}
		fmt.Fprintf(r.Log, "smoke: %s was too slow and runs again: %s\n", name, f)
	}
}

func (r *runner) attempt(ctx context.Context, t *task) error {
	if t.c.Structure {
		return r.structure(t.target)
	}
	shared := &shared{r: r, dirs: map[string]string{}, volumes: map[string]string{}}
	err := r.phases(ctx, t, shared)
	return errors.Join(err, shared.remove(ctx))
}

func (r *runner) phases(ctx context.Context, t *task, sh *shared) error {
	var output strings.Builder
	for _, p := range t.c.phases() {
		spec := r.suite.Profiles[t.profile].Container.over(t.c.Container).over(p.Container)
		fixture := p.Fixture
		if fixture == "" {
			fixture = t.c.Fixture
		}
		c, err := r.container(ctx, t, spec, sh)
		if err != nil {
			return err
		}
		if p.Service == nil {
			c.Args = []string{plan.Probe, "run", plan.File}
		}
		if err := r.engine.Can(c); err != nil {
			if r.asked || spec.Runtime != "" && !r.ci() {
				return errNotRun{err}
			}
			return fmt.Errorf("%s cannot run this case: %w", r.engine.Name(), err)
		}
		if err := r.load(ctx, t); err != nil {
			return err
		}
		phase := func() error {
			ctx, cancel := context.WithTimeoutCause(ctx, t.timeout(), fmt.Errorf("the phase took more than %s", t.timeout()))
			defer cancel()
			if p.Service != nil {
				return r.service(ctx, t, c, p.Service, &output)
			}
			return r.steps(ctx, t, c, fixture, p.Steps, &output)
		}
		if err := phase(); err != nil {
			var f *failure
			if p.Name != "" && errors.As(err, &f) {
				f.what[0] = "phase " + p.Name + ": " + f.what[0]
			}
			return err
		}
	}
	if t.c.Same {
		return r.same(t, output.String())
	}
	return nil
}

// load gives the engine the task's image. All tasks of an image wait for the
// first to have done it, and the time of that counts for none.
func (r *runner) load(ctx context.Context, t *task) error {
	r.mu.Lock()
	if !r.loaded[t.target] {
		r.loaded[t.target] = true
		fmt.Fprintf(r.Log, "smoke: %s gets %s for %s\n", r.engine.Name(), t.target.Name, t.target.Platform)
	}
	r.mu.Unlock()
	start := time.Now()
	defer func() { t.loading += time.Since(start) }()
	return r.engine.Load(ctx, &t.target.Image)
}

// same compares a case's output with what the other images gave.
func (r *runner) same(t *task, output string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := t.name() + " " + t.target.Platform
	first, ok := r.facts[key]
	if !ok {
		r.facts[key] = fact{t.target.Name, output}
		return nil
	}
	if first.output != output {
		return &failure{what: []string{"the output differs from that of " + first.image},
			output: first.image + ":\n" + first.output + "\n" + t.target.Name + ":\n" + output}
	}
	return nil
}

// container makes what an engine starts of what a case says.
func (r *runner) container(ctx context.Context, t *task, spec Container, sh *shared) (*engine.Container, error) {
	is := func(b *bool) bool { return b != nil && *b }
	c := &engine.Container{
		Image: &t.target.Image, User: spec.User, Workdir: spec.Workdir, NoNetwork: spec.Network == "none",
		ReadOnly: is(spec.ReadOnly), DropCaps: is(spec.DropCaps), NoNewPrivileges: is(spec.NoNewPrivileges),
		Pids: spec.Pids, Memory: spec.Memory, Runtime: spec.Runtime, Hosts: spec.Hosts, Ports: spec.Ports,
	}
	for k, v := range spec.Env {
		c.Env = append(c.Env, k+"="+v)
	}
	slices.Sort(c.Env)
	for _, m := range spec.Mounts {
		em := engine.Mount{Path: t.expand(m.Path), Tmpfs: m.Tmpfs, ReadOnly: m.ReadOnly}
		var err error
		switch {
		case m.Bind != "":
			em.Host, err = sh.dir(ctx, m.Bind, m.Owner)
		case m.Volume != "":
			em.Volume, err = sh.volume(ctx, m.Volume)
		}
		if err != nil {
			return nil, err
		}
		c.Mounts = append(c.Mounts, em)
	}
	return c, nil
}

// expand replaces $NAME by the image's own variable.
func (t *task) expand(s string) string {
	return os.Expand(s, func(name string) string {
		v, err := t.target.def.Env(name)
		if err != nil {
			return "$" + name
		}
		return v
	})
}

// steps runs a plan in one container.
func (r *runner) steps(ctx context.Context, t *task, c *engine.Container, fixture string, steps []Step, output *strings.Builder) error {
	p := plan.Plan{}
	if fixture != "" {
		p.Fixture = "$HOME/" + fixture
		c.Mounts = append(c.Mounts, engine.Mount{Host: filepath.Join(r.Root, "smoke", "fixtures", fixture), Path: plan.Fixture, ReadOnly: true})
	}
	for i := range steps {
		p.Steps = append(p.Steps, steps[i].plan(t.timeout()))
	}
	dir, err := r.give(t, p)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	c.Mounts = append(c.Mounts,
		engine.Mount{Host: dir, Path: plan.Dir, ReadOnly: true})
	out, err := r.engine.Run(ctx, c)
	if err != nil {
		return err
	}
	var report plan.Report
	if jerr := json.Unmarshal(out.Stdout, &report); jerr != nil {
		return &failure{command: r.engine.Name() + " run", what: []string{fmt.Sprintf("the container ended with exit code %d and without a report", out.Exit)},
			output: string(out.Stdout) + string(out.Stderr)}
	}
	if report.Error != "" {
		return errors.New(report.Error)
	}
	for i, res := range report.Steps {
		if err := steps[i].check(t, res); err != nil {
			return err
		}
		output.WriteString(res.Stdout)
	}
	if len(report.Steps) < len(steps) {
		return fmt.Errorf("the container was stopped after %d of %d steps", len(report.Steps), len(steps))
	}
	return nil
}

// give makes the folder that a container sees as plan.Dir.
func (r *runner) give(t *task, p plan.Plan) (string, error) {
	dir, err := os.MkdirTemp(r.scratch, "plan-*")
	if err != nil {
		return "", err
	}
	text, err := json.Marshal(p)
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "plan"), text, 0o644),
			linkOrCopy(filepath.Join(r.probes[t.target.arch()], "probe"), filepath.Join(dir, "probe")))
	}
	if err != nil {
		os.RemoveAll(dir)
		return "", err
	}
	return dir, nil
}

func linkOrCopy(from, to string) error {
	if os.Link(from, to) == nil {
		return nil
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

func (s *Step) plan(timeout time.Duration) plan.Step {
	p := plan.Step{Argv: s.argv(), Clear: s.OnlyEnv != nil, Keep: s.OnlyEnv, Dir: s.Dir, Stdin: s.Stdin, TimeoutMS: timeout.Milliseconds()}
	for k, v := range s.Env {
		p.Env = append(p.Env, k+"="+v)
	}
	slices.Sort(p.Env)
	for _, f := range s.Files {
		p.Files = append(p.Files, f.Path)
	}
	return p
}

// check compares what came of a step with what must.
func (s *Step) check(t *task, r plan.Result) error {
	f := &failure{command: s.String()}
	bad := func(ok bool, format string, a ...any) {
		if !ok {
			f.what = append(f.what, fmt.Sprintf(format, a...))
		}
	}
	took := time.Duration(r.DurationMS) * time.Millisecond
	bad(!r.TimedOut, "it was still running after %s", took)
	switch {
	case r.TimedOut:
	case s.Fails:
		bad(r.Exit != 0, "exit code 0, and it must fail")
	default:
		bad(r.Exit == s.Exit, "exit code %d, not %d", r.Exit, s.Exit)
	}
	match := func(what, text string, list patterns, want bool) {
		for _, re := range list {
			if want {
				bad(re.MatchString(text), "%s has no match for %q", what, source(re))
			} else {
				bad(!re.MatchString(text), "%s must not match %q, and has %q", what, source(re), re.FindString(text))
			}
		}
	}
	match("stdout", r.Stdout, s.Stdout, true)
	match("stderr", r.Stderr, s.Stderr, true)
	match("the output", r.Stdout+r.Stderr, s.Output, true)
	match("the output", r.Stdout+r.Stderr, s.NoOutput, false)
	f.late(took, t.stretch(time.Duration(s.Within)))
	for i, want := range s.Files {
		got := r.Files[i]
		bad(got.Missing == want.Missing, "%s: missing is %v", want.Path, got.Missing)
		if got.Missing {
			continue
		}
		owner := fmt.Sprintf("%d:%d", got.UID, got.GID)
		bad(want.Owner == "" || owner == want.Owner, "%s belongs to %s, not to %s", want.Path, owner, want.Owner)
		bad(want.Mode == "" || got.Mode == want.Mode, "%s has mode %s, not %s", want.Path, got.Mode, want.Mode)
		bad(want.Content == "" || got.Content == want.Content, "%s holds %q", want.Path, got.Content)
	}
	if len(f.what) == 0 {
		return nil
	}
	f.output = r.Stdout + r.Stderr
	return f
}

func source(re *regexp.Regexp) string { return strings.TrimPrefix(re.String(), "(?m)") }

// service runs the image itself, asks it from inside, and stops it.
func (r *runner) service(ctx context.Context, t *task, c *engine.Container, s *Service, output *strings.Builder) (err error) {
	dir, err := r.give(t, plan.Plan{})
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	c.Mounts = append(c.Mounts, engine.Mount{Host: dir, Path: plan.Dir, ReadOnly: true})
	run, err := r.engine.Start(ctx, c)
	if err != nil {
		return err
	}
	defer func() {
		var f *failure
		if errors.As(err, &f) {
			if logs, lerr := run.Logs(context.WithoutCancel(ctx)); lerr == nil {
				f.output += "\n--- log of the container\n" + logs
			}
		}
		err = errors.Join(err, run.Remove(ctx))
	}()
	steps := s.Steps
	if len(s.Ready.argv()) > 0 && (s.Ready.Run != "" || s.Ready.Exec != nil || s.Ready.Probe != nil) {
		steps = append([]Step{s.Ready}, steps...)
	}
	for i := range steps {
		start := time.Now()
		do := run.Exec
		if steps[i].Outside {
			do = func(ctx context.Context, argv []string) (*engine.Output, error) { return r.outside(ctx, run, argv) }
		}
		out, err := do(ctx, steps[i].argv())
		if err != nil {
			return err
		}
		res := plan.Result{Exit: out.Exit, Stdout: string(out.Stdout), Stderr: string(out.Stderr), DurationMS: time.Since(start).Milliseconds()}
		if err := steps[i].check(t, res); err != nil {
			return err
		}
		if i > 0 || len(steps) == len(s.Steps) { // what ready prints is no fact
			output.Write(out.Stdout)
		}
	}
	f := &failure{command: r.engine.Name() + " stop"}
	took, exit, err := run.Stop(ctx)
	if err != nil {
		f.what = []string{err.Error()}
		return f
	}
	f.late(took, t.stretch(time.Duration(s.StopWithin)))
	if len(s.Exit) > 0 && !slices.Contains(s.Exit, exit) {
		f.what = append(f.what, fmt.Sprintf("the main process ended with %d, not with one of %v", exit, s.Exit))
	}
	if len(f.what) > 0 {
		return f
	}
	return nil
}

// outside runs a probe on this machine against the published ports.
func (r *runner) outside(ctx context.Context, run engine.Running, argv []string) (*engine.Output, error) {
	var errs []error
	args := make([]string, len(argv)-1)
	for i, a := range argv[1:] {
		args[i] = os.Expand(a, func(name string) string {
			port, err := strconv.Atoi(name)
			if err != nil {
				errs = append(errs, fmt.Errorf("${%s} in a step outside is no port", name))
				return ""
			}
			address, err := run.Published(ctx, port)
			errs = append(errs, err)
			return address
		})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(r.probes[runtime.GOARCH], "probe"), args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx) // and no exit code
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return nil, fmt.Errorf("running the probe on this machine: %w", err)
	}
	return &engine.Output{Exit: cmd.ProcessState.ExitCode(), Stdout: stdout.Bytes(), Stderr: stderr.Bytes()}, nil
}

// shared is what the phases of a task share.
type shared struct {
	r       *runner
	dirs    map[string]string
	volumes map[string]string
}

func (s *shared) dir(ctx context.Context, name, owner string) (string, error) {
	if d := s.dirs[name]; d != "" {
		return d, nil
	}
	d, err := os.MkdirTemp(s.r.scratch, "bind-*")
	if err != nil {
		return "", err
	}
	s.dirs[name] = d
	if owner == "" {
		return d, os.Chmod(d, 0o777)
	}
	return d, errors.Join(os.Chmod(d, 0o755), s.r.engine.Chown(ctx, d, owner))
}

func (s *shared) volume(ctx context.Context, name string) (string, error) {
	if v := s.volumes[name]; v != "" {
		return v, nil
	}
	v := filepath.Base(name) + "-" + fmt.Sprint(time.Now().UnixNano())
	if err := s.r.engine.Volume(ctx, v); err != nil {
		return "", err
	}
	s.volumes[name] = v
	return v, nil
}

// remove removes it all, also when the run was cancelled.
func (s *shared) remove(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	for _, v := range s.volumes {
		errs = append(errs, s.r.engine.RemoveVolume(ctx, v))
	}
	for _, d := range s.dirs {
		if err := os.RemoveAll(d); err != nil {
			// Files of the containers' uids, which root in their namespace removes.
			errs = append(errs, s.r.engine.Chown(ctx, d, "0:0"), os.RemoveAll(d))
		}
	}
	return errors.Join(errs...)
}
