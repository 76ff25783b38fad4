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

	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/smoke/engine"
	"github.com/loomcycle/loomcycle-images/smoke/plan"
)

// goCacheDir is where the images keep the compiled standard library
// (images/toolchain/files.yaml). A bench covers it to measure without.
const goCacheDir = "/usr/local/lib/go-cache"

// benches are first commands of a fresh session, with what makes them ready.
var benches = []struct {
	name, setup, run string
	std              bool // compiles the Go standard library when it is not cached
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

// Bench measures the first commands of fresh hardened sessions, with the
// compiled standard library and without it, each in a container of its own.
func Bench(ctx context.Context, o Options) (err error) {
	o.Images = []string{"loomcycle-sandbox-session"}
	r, err := newRunner(ctx, o)
	if err != nil {
		return err
	}
	if r.engine, err = r.openEngine(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.engine.Close(ctx)) }()
	w := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FIRST IN A FRESH SESSION\tPLATFORM\tWITH THE CACHE\tWITHOUT\tTIMES")
	for _, tg := range r.targets {
		t := &task{c: &Case{Timeout: duration(10 * time.Minute)}, profile: "hardened", target: tg, slow: r.slow}
		if t.emulated() {
			if r.Native {
				continue
			}
			if err := host.Emulate(ctx, r.Log, t.target.arch()); err != nil {
				return err
			}
		}
		if err := r.compileProbes(ctx, []*task{t}); err != nil {
			return err
		}
		if err := r.engine.Load(ctx, &tg.Image); err != nil {
			return err
		}
		for _, b := range benches {
			with, err := r.measure(ctx, t, b.setup, b.run, false)
			if err != nil {
				return fmt.Errorf("%s on %s: %w", b.name, tg.Platform, err)
			}
			where := tg.Platform
			if t.emulated() {
				where += " (emulated)"
			}
			row := fmt.Sprintf("%s\t%s\t%.2f s", b.name, where, with.Seconds())
			// Without it an emulated build takes ten minutes and more.
			if b.std && !t.emulated() {
				without, err := r.measure(ctx, t, b.setup, b.run, true)
				if err != nil {
					return fmt.Errorf("%s on %s: %w", b.name, tg.Platform, err)
				}
				row += fmt.Sprintf("\t%.2f s\t%.0f", without.Seconds(), without.Seconds()/with.Seconds())
			}
			fmt.Fprintln(w, row)
		}
	}
	return w.Flush()
}

// measure is the time of one command in a session of its own.
func (r *runner) measure(ctx context.Context, t *task, setup, run string, without bool) (time.Duration, error) {
	// What an earlier command of the table prepared is prepared again.
	var setups []string
	for _, b := range benches {
		setups = append(setups, "("+b.setup+")")
		if b.run == run {
			break
		}
	}
	c, err := r.container(ctx, t, r.suite.Profiles[t.profile].Container, &shared{r: r})
	if err != nil {
		return 0, err
	}
	if without {
		c.Mounts = append(slices.Clone(c.Mounts), engine.Mount{Path: goCacheDir, Tmpfs: "0755"})
	}
	steps := []Step{{Run: strings.Join(setups, "\n")}, {Run: run}}
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
