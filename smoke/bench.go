package smoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/loomcycle/loomcycle-images/smoke/engine"
	"github.com/loomcycle/loomcycle-images/smoke/plan"
)

// goCacheDir is where the images keep the compiled standard library of Go
// (images/toolchain/files.yaml). A bench covers it to measure without.
const goCacheDir = "/usr/local/lib/go-cache"

// noPycache makes Python look for compiled modules where there are none and
// none can be written: the root is read-only.
var noPycache = []string{"PYTHONPYCACHEPREFIX=/nonexistent"}

// compiled are the layers that make the first commands of a session fast.
var compiled = []string{"gocache", "pycache"}

// benches are first commands of a fresh session, with what makes them ready.
var benches = []struct {
	name, setup, run string
	std              bool // compiles the Go standard library when it is not there
}{
	{"go build of a net/http hello-world",
		`mkdir go && cd go && printf 'module hello\n\ngo 1.26\n' > go.mod && printf 'package main\n\nimport "net/http"\n\nfunc main() { println(http.StatusText(200)) }\n' > main.go`,
		"cd go && go build -o hello .", true},
	{"the same with CGO_ENABLED=0", `cp -r go go0`, "cd go0 && CGO_ENABLED=0 go build -o hello .", true},
	{"go test of it", `cp -r go gotest && printf 'package main\n\nimport "testing"\n\nfunc TestIt(t *testing.T) {}\n' > gotest/main_test.go`, "cd gotest && go test .", true},
	{"cargo build of a hello-world", "cargo init -q --vcs none rust", "cd rust && cargo build -q", false},
	{"npm init -y && npm test", "mkdir js", `cd js && npm init -y && npm pkg set scripts.test=true && npm test`, false},
	{"python3 -m venv", "true", "python3 -m venv venv", false},
}

// Bench measures the first commands of fresh hardened sessions, each in a
// container of its own: as the image is, and with what it has compiled covered.
func Bench(ctx context.Context, o Options) (err error) {
	o.Images = []string{"loomcycle-sandbox-session"}
	r, err := newRunner(ctx, o)
	if err != nil {
		return err
	}
	var tasks []*task
	for _, tg := range r.targets {
		t := &task{c: &Case{Timeout: duration(10 * time.Minute)}, profile: "hardened", target: tg, slow: r.slow}
		if !t.emulated() || !r.Native {
			tasks = append(tasks, t)
		}
	}
	// This machine's own platform first.
	slices.SortStableFunc(tasks, func(a, b *task) int { return bit(a.emulated()) - bit(b.emulated()) })
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	if err := r.prepare(ctx, tasks); err != nil {
		return err
	}
	w := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FIRST IN A FRESH SESSION\tPLATFORM\tAS IT IS\tWITHOUT\tTIMES")
	for _, t := range tasks {
		if err := r.engine.Load(ctx, &t.target.Image); err != nil {
			return err
		}
		for i := range benches {
			row, err := r.bench(ctx, t, i)
			if err != nil {
				return fmt.Errorf("%s on %s: %w", benches[i].name, t.target.Platform, err)
			}
			fmt.Fprintln(w, row)
			fmt.Fprintf(r.Log, "bench: %s\n", strings.ReplaceAll(row, "\t", "  "))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, t := range tasks {
		layers, err := t.target.Content.Layers()
		if err != nil {
			return err
		}
		for i, l := range layers {
			if i >= len(t.target.groups) || !slices.Contains(compiled, t.target.groups[i]) {
				continue
			}
			n, err := l.Size()
			if err != nil {
				return err
			}
			fmt.Fprintf(o.Out, "layer %s, %s: %.1f MB compressed\n", t.target.groups[i], t.target.Platform, mb(n))
		}
	}
	return nil
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// bench is a row of the table.
func (r *runner) bench(ctx context.Context, t *task, i int) (string, error) {
	b, where := benches[i], t.target.Platform
	with, err := r.median(ctx, t, i, false)
	if err != nil {
		return "", err
	}
	if t.emulated() {
		where += " (emulated)"
		// Without it an emulated Go build takes ten minutes and more, and the
		// other figures tell of QEMU.
		return fmt.Sprintf("%s\t%s\t%.2f s\t-\t-", b.name, where, with.Seconds()), nil
	}
	without, err := r.median(ctx, t, i, true)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s\t%s\t%.2f s\t%.2f s\t%.1f", b.name, where, with.Seconds(), without.Seconds(), without.Seconds()/with.Seconds()), nil
}

// median is of three measurements, where they take a few seconds only.
func (r *runner) median(ctx context.Context, t *task, i int, without bool) (time.Duration, error) {
	const short = 5 * time.Second
	var all []time.Duration
	for len(all) < 3 {
		d, err := r.measure(ctx, t, i, without)
		if err != nil || d > short || t.emulated() {
			return d, err
		}
		all = append(all, d)
	}
	slices.Sort(all)
	return all[1], nil
}

// measure is the time of one command in a session of its own.
func (r *runner) measure(ctx context.Context, t *task, i int, without bool) (time.Duration, error) {
	// A row of Go builds on what the first one prepares; the others on nothing.
	setups := []string{"(" + benches[i].setup + ")"}
	if benches[i].std && i > 0 {
		setups = append([]string{"(" + benches[0].setup + ")"}, setups...)
	}
	c, err := r.container(ctx, t, r.suite.Profiles[t.profile].Container, &shared{r: r})
	if err != nil {
		return 0, err
	}
	if without {
		c.Mounts = append(slices.Clone(c.Mounts), engine.Mount{Path: goCacheDir, Tmpfs: "0755"})
		c.Env = append(slices.Clone(c.Env), noPycache...)
	}
	steps := []Step{{Run: strings.Join(setups, "\n")}, {Run: benches[i].run}}
	p := plan.Plan{Steps: []plan.Step{steps[0].plan(t.timeout()), steps[1].plan(t.timeout())}}
	for i := range p.Steps {
		p.Steps[i].Dir = "$HOME"
	}
	dir, err := r.give(t, p)
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	c.Mounts = append(c.Mounts, engine.Mount{Host: dir, Path: plan.Dir, ReadOnly: true})
	c.Args = []string{plan.Probe, "run", plan.File}
	out, err := r.engine.Run(ctx, c)
	if err != nil {
		return 0, err
	}
	var report plan.Report
	if err := json.Unmarshal(out.Stdout, &report); err != nil {
		return 0, fmt.Errorf("the container gave no report: %w\n%s", err, out.Stderr)
	}
	for i, res := range report.Steps {
		if err := steps[i].check(t, res); err != nil {
			var f *failure
			errors.As(err, &f)
			return 0, fmt.Errorf("%s: %w\n%s", f.command, err, f.output)
		}
	}
	return time.Duration(report.Steps[1].DurationMS) * time.Millisecond, nil
}
