package smoke

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/smoke/engine"
	"github.com/loomcycle/loomcycle-images/smoke/plan"
)

// direct is an engine for tests of the runner: it runs the real probe on this
// machine in place of a container, and keeps count of what it was asked to
// make. A leaky one forgets to remove volumes.
type direct struct {
	leaky   bool
	cannot  error
	volumes map[string]bool
}

func (d *direct) Name() string                                { return "direct" }
func (d *direct) Can(*engine.Container) error                 { return d.cannot }
func (d *direct) Load(context.Context, *engine.Image) error   { return nil }
func (d *direct) Chown(context.Context, string, string) error { return nil }
func (d *direct) Close(context.Context) error                 { return nil }
func (d *direct) Start(context.Context, *engine.Container) (engine.Running, error) {
	return nil, errors.New("no services here")
}

func (d *direct) Volume(_ context.Context, name string) error {
	d.volumes[name] = true
	return nil
}

func (d *direct) RemoveVolume(_ context.Context, name string) error {
	if !d.leaky {
		delete(d.volumes, name)
	}
	return nil
}

func (d *direct) Leaks(context.Context) (out []string, _ error) {
	for v := range d.volumes {
		out = append(out, "volume "+v)
	}
	return out, nil
}

func (d *direct) Run(ctx context.Context, c *engine.Container) (*engine.Output, error) {
	host := ""
	for _, m := range c.Mounts {
		if m.Path == plan.Dir {
			host = m.Host
		}
	}
	var out, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(host, "probe"), "run", filepath.Join(host, "plan"))
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return nil, errors.Join(context.Cause(ctx), err)
	}
	return &engine.Output{Stdout: out.Bytes(), Stderr: stderr.Bytes()}, nil
}

const (
	testDigest  = digest.Digest("sha256:0123456789012345678901234567890123456789012345678901234567890123")
	otherDigest = digest.Digest("sha256:9999999999999999999999999999999999999999999999999999999999999999")
)

// newTestRunner runs cases given as YAML, on one image or two.
func newTestRunner(t *testing.T, e engine.Engine, cases string) *runner {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"cases/x.yaml": cases, "fixtures/.keep": ""} {
		os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s, err := Load(os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	scratch, err := os.MkdirTemp(t.TempDir(), "smoke-*")
	if err != nil {
		t.Fatal(err)
	}
	// The probe is linked once for all tests.
	cache, err := cache.Dir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	r := &runner{
		Options: Options{Root: root, Getenv: func(string) string { return "" }, Log: t.Output(), Reports: dir},
		suite:   s, engine: e, jobs: 2, slow: 1, cache: cache, scratch: scratch, probes: map[string]string{}, facts: map[string]fact{}, loaded: map[*target]bool{},
	}
	for _, v := range []struct {
		name string
		d    digest.Digest
	}{{"loomcycle", testDigest}, {"loomcycle-toolbox", otherDigest}} {
		r.targets = append(r.targets, &target{def: &images.Image{Name: v.name}, Image: engine.Image{
			Name: v.name, Platform: "linux/" + runtime.GOARCH, Manifest: v.d, Content: empty.Image,
		}})
	}
	return r
}

func report(t *testing.T, r *runner) (*Report, string) {
	t.Helper()
	tasks := r.matrix()
	if err := r.compileProbes(t.Context(), tasks); err != nil {
		t.Fatal(err)
	}
	rep := &Report{Engine: "direct"}
	r.work(t.Context(), tasks, rep)
	var err error
	if rep.Leaks, err = r.leaks(t.Context()); err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := rep.write(&text, r.Reports, filepath.Join(r.Reports, "summary.md")); err != nil {
		t.Fatal(err)
	}
	return rep, text.String()
}

// slowly is an engine that takes its time to load an image, once.
type slowly struct {
	*direct
	load func()
}

func (s *slowly) Load(context.Context, *engine.Image) error {
	s.load()
	return nil
}

// To load an image is said, and is no case's time.
func TestLoadingIsSaid(t *testing.T) {
	const takes = 300 * time.Millisecond
	r := newTestRunner(t, &slowly{newDirect(), sync.OnceFunc(func() { time.Sleep(takes) })},
		"cases:\n  - {name: x, title: The first case, images: [loomcycle], steps: [{run: 'true'}]}\n  - {name: y, title: Another case, images: [loomcycle], steps: [{run: 'true'}]}\n")
	var log bytes.Buffer
	r.Log = &log
	tasks := r.matrix()
	if err := r.compileProbes(t.Context(), tasks); err != nil {
		t.Fatal(err)
	}
	for i, task := range tasks {
		start := time.Now()
		res := r.one(t.Context(), task)
		if took := time.Since(start).Seconds(); res.Status != Passed || i == 0 && res.Seconds > took-takes.Seconds() {
			t.Errorf("%s took %.1f s in all, and %.1f s are its own: %+v", task.name(), took, res.Seconds, res)
		}
	}
	if got, want := log.String(), "smoke: direct gets loomcycle for linux/"+runtime.GOARCH+"\n"; got != want {
		t.Errorf("the log is %q, want %q", got, want)
	}
}

// A run that was interrupted at once has a report of no results.
func TestInterruptedAtOnce(t *testing.T) {
	r := newTestRunner(t, newDirect(), "cases:\n  - {name: structure, title: It needs no engine, images: [loomcycle], structure: true}\n")
	r.engine = nil
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rep, err := r.run(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := rep.write(t.Output(), r.Reports, ""); err != nil {
		t.Fatal(err)
	}
	read(t, filepath.Join(r.Reports, "report.json"), func(text []byte) error {
		if !bytes.Contains(text, []byte(`"results": []`)) {
			t.Errorf("%s", text)
		}
		return nil
	})
}

// A filter that is no pattern is called that.
func TestBadFilter(t *testing.T) {
	_, err := newRunner(t.Context(), Options{Root: "..", Getenv: environment(map[string]string{"SMOKE_CASES": "[", "LOOMCYCLE_CACHE": t.TempDir()})})
	if err == nil || !strings.Contains(err.Error(), `SMOKE_CASES="[" is no pattern`) {
		t.Error(err)
	}
}

func newDirect() *direct { return &direct{volumes: map[string]bool{}} }

// A case that must fail fails, and shows its command, output and image digest
// in every form of the report.
func TestFailingCase(t *testing.T) {
	r := newTestRunner(t, newDirect(), `
cases:
  - name: good
    title: A case that passes
    images: [loomcycle]
    steps: [{run: echo fine, stdout: ['^fine$']}]
  - name: bad
    title: A case that must fail
    images: [loomcycle]
    steps: [{run: echo the reason >&2; exit 3}]
`)
	rep, text := report(t, r)
	if err := rep.Err(); err == nil || err.Error() != "1 of 2 smoke cases failed" {
		t.Errorf("the error is %v", err)
	}
	for _, want := range []string{"FAILED bad: A case that must fail", "echo the reason >&2; exit 3", "exit code 3, not 0", "the reason", string(testDigest), "1 passed, 1 failed"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in the report:\n%s", want, text)
		}
	}
	var junit junitSuites
	read(t, filepath.Join(r.Reports, "junit.xml"), func(b []byte) error { return xml.Unmarshal(b, &junit) })
	if s := junit.Suites[0]; s.Tests != 2 || s.Failures != 1 || !strings.Contains(s.Cases[1].Failure.Text, string(testDigest)) {
		t.Errorf("JUnit: %+v", s)
	}
	var back Report
	read(t, filepath.Join(r.Reports, "report.json"), func(b []byte) error { return json.Unmarshal(b, &back) })
	if back.Results[1].Status != Failed || back.Results[1].Command == "" || back.Results[1].Digest != string(testDigest) {
		t.Errorf("JSON: %+v", back.Results[1])
	}
	read(t, filepath.Join(r.Reports, "summary.md"), func(b []byte) error {
		if !strings.Contains(string(b), "| bad | ❌") || !strings.Contains(string(b), "$ echo the reason") {
			t.Errorf("the summary:\n%s", b)
		}
		return nil
	})
}

func read(t *testing.T, file string, parse func([]byte) error) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = parse(text)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Each kind of expectation can fail.
func TestExpectations(t *testing.T) {
	for step, want := range map[string]string{
		`{run: 'true', exit: 1}`:                                         "exit code 0, not 1",
		`{run: 'true', fails: true}`:                                     "it must fail",
		`{run: echo a, stdout: [b]}`:                                     `stdout has no match for "b"`,
		`{run: echo a >&2, stderr: [b]}`:                                 `stderr has no match for "b"`,
		`{run: echo a, no_output: [a]}`:                                  `the output must not match "a", and has "a"`,
		`{run: sleep 0.2, within: 100ms}`:                                "more than 100ms",
		`{run: 'true', files: [{path: /nowhere}]}`:                       "/nowhere: missing is true",
		`{run: 'true', files: [{path: /, owner: "7:7"}]}`:                "not to 7:7",
		`{run: 'true', files: [{path: /, mode: "0000"}]}`:                "not 0000",
		`{exec: [no-such-program]}`:                                      "exit code 127",
		`{run: 'test -z "$SMOKE_TEST_HOME"', env: {SMOKE_TEST_HOME: x}}`: "exit code 1",
		`{run: 'test -n "$HOME"', only_env: [PATH]}`:                     "exit code 1",
	} {
		r := newTestRunner(t, newDirect(), "cases:\n  - {name: x, title: An expectation, images: [loomcycle], steps: ["+step+"]}\n")
		rep, _ := report(t, r)
		if res := rep.Results[0]; res.Status != Failed || !strings.Contains(res.Message, want) {
			t.Errorf("%s: %s, %q", step, res.Status, res.Message)
		}
	}
}

// A case that was only too slow runs again, and one that is too slow each time fails.
func TestSlowCase(t *testing.T) {
	for _, tc := range []struct {
		step   string // $MARK has a line for each run before
		status Status
		runs   int
	}{
		{`{run: 'echo >>$MARK; test $(wc -l <$MARK) -gt 1 || sleep 5', within: 4s}`, Passed, 2},
		{`{run: 'echo >>$MARK; sleep 0.3', within: 200ms}`, Failed, 3},
		{`{run: 'echo >>$MARK; sleep 0.3', within: 200ms, stdout: [x]}`, Failed, 1},
	} {
		mark := filepath.Join(t.TempDir(), "mark")
		r := newTestRunner(t, newDirect(), "cases:\n  - {name: x, title: It takes its time, images: [loomcycle], steps: ["+strings.ReplaceAll(tc.step, "$MARK", mark)+"]}\n")
		rep, _ := report(t, r)
		runs, err := os.ReadFile(mark)
		if res := rep.Results[0]; err != nil || res.Status != tc.status || len(runs) != tc.runs {
			t.Errorf("%s: %s after %d runs: %q %v", tc.step, res.Status, len(runs), res.Message, err)
		}
	}
}

func TestTimeout(t *testing.T) {
	r := newTestRunner(t, newDirect(), "cases:\n  - {name: x, title: It never ends, images: [loomcycle], timeout: 300ms, steps: [{run: sleep 60 & sleep 60}]}\n")
	start := time.Now()
	rep, _ := report(t, r)
	if rep.Results[0].Status != Failed || time.Since(start) > 30*time.Second {
		t.Errorf("%+v after %s", rep.Results[0], time.Since(start))
	}
}

// What a case leaves behind fails the run and is named.
func TestLeak(t *testing.T) {
	cases := `
cases:
  - name: volume
    title: A case with a volume
    images: [loomcycle]
    container: {mounts: [{path: /v, volume: data}]}
    steps: [{run: 'true'}]
`
	e := newDirect()
	if rep, _ := report(t, newTestRunner(t, e, cases)); rep.Err() != nil {
		t.Errorf("nothing leaked, and the run failed: %v", rep.Err())
	}
	e.leaky = true
	rep, text := report(t, newTestRunner(t, e, cases))
	if err := rep.Err(); err == nil || !strings.Contains(err.Error(), "left behind: volume data") || !strings.Contains(text, "LEAKED volume data") {
		t.Errorf("the leak was not reported: %v\n%s", err, text)
	}
}

// Same compares what two images print.
func TestSame(t *testing.T) {
	r := newTestRunner(t, newDirect(), "cases:\n  - {name: x, title: The same everywhere, images: ['*'], same: true, steps: [{run: echo same}]}\n")
	if rep, _ := report(t, r); rep.Err() != nil {
		t.Error(rep.Err())
	}
	r = newTestRunner(t, newDirect(), "cases:\n  - {name: x, title: The same everywhere, images: ['*'], same: true, steps: [{run: echo $$}]}\n")
	if rep, _ := report(t, r); rep.Err() == nil || !strings.Contains(rep.Results[0].Message+rep.Results[1].Message, "the output differs from that of") {
		t.Errorf("%+v", rep.Results)
	}
}

// A case that the engine cannot run fails and says what to install, unless
// the operator asked for that engine.
func TestEngineThatCannot(t *testing.T) {
	e := newDirect()
	e.cannot = errors.New("install podman")
	cases := "cases:\n  - {name: x, title: It needs an engine, images: [loomcycle], steps: [{run: 'true'}]}\n"
	r := newTestRunner(t, e, cases)
	if rep, text := report(t, r); rep.Err() == nil || !strings.Contains(text, "install podman") {
		t.Errorf("%v\n%s", rep.Err(), text)
	}
	r = newTestRunner(t, e, cases)
	r.asked = true
	if rep, text := report(t, r); rep.Err() != nil || !strings.Contains(text, "not run, 1: install podman") {
		t.Errorf("%v\n%s", rep.Err(), text)
	}
}

// Only BuildKit, asked for by name, may leave cases out; podman or docker may
// not, and CI not even for a runtime that is not there.
func TestWhoMayLeaveOut(t *testing.T) {
	cases := "cases:\n  - {name: x, title: It needs gVisor, images: [loomcycle], container: {runtime: runsc}, steps: [{run: 'true'}]}\n"
	for _, tc := range []struct {
		asked bool
		ci    string
		want  Status
	}{{false, "", NotRun}, {false, "true", Failed}, {true, "true", NotRun}} {
		e := newDirect()
		e.cannot = errors.New("the runtime runsc is not installed")
		r := newTestRunner(t, e, cases)
		r.asked, r.Getenv = tc.asked, func(name string) string { return map[string]string{"CI": tc.ci}[name] }
		if rep, _ := report(t, r); rep.Results[0].Status != tc.want {
			t.Errorf("BuildKit asked for %v, CI=%q: %+v", tc.asked, tc.ci, rep.Results[0])
		}
	}
}

// Without the engine that was asked for nothing passes: there is no run.
func TestMissingEngine(t *testing.T) {
	for engine, want := range map[string]string{
		"docker": "docker does not answer",
		"podman": "apt-get install podman runc",
		"crio":   `SMOKE_ENGINE="crio" is none of podman, docker, buildkit`,
	} {
		t.Run(engine, func(t *testing.T) {
			dir := tinyDist(t, "missing")
			t.Setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
			if engine == "podman" {
				t.Setenv("PATH", t.TempDir()) // nor apt-get
			}
			rep, err := Run(t.Context(), Options{Root: "..", Dist: dir, Out: t.Output(), Log: t.Output(), Reports: t.TempDir(),
				Getenv: environment(map[string]string{"SMOKE_ENGINE": engine, "SMOKE_CASES": "no-shell", "LOOMCYCLE_CACHE": t.TempDir(), "CI": ""})})
			if rep != nil || err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%+v, %v", rep, err)
			}
		})
	}
}

// The table of the whole family fits into 100 columns, and is the matrix's.
func TestTable(t *testing.T) {
	rep := &Report{Engine: "podman", Cases: 11}
	add := func(name, image, platform string, seconds float64, status Status) {
		rep.Results = append(rep.Results, Result{Case: name, Image: image, Platform: platform, Seconds: seconds, Status: status, Emulated: strings.HasSuffix(platform, "arm64") && name != "structure"})
	}
	for _, image := range []string{"loomcycle", "loomcycle-toolbox", "loomcycle-sandbox-session", "loomcycle-builder", "loomcycle-builder-docker"} {
		for _, p := range []string{"linux/amd64", "linux/arm64"} {
			add("structure", image, p, 0.24, Passed)
			add("python-compiled/hardened", image, p, 123.4, Passed)
		}
	}
	add("stop", "loomcycle", "linux/amd64", 9.96, Failed)
	add("every-tool/gvisor", "loomcycle-sandbox-session", "linux/amd64", 0, NotRun)
	var out bytes.Buffer
	if err := rep.table(&out); err != nil {
		t.Fatal(err)
	}
	want := `                          loomcycle      toolbox        session        builder        builder-docker
CASE                      amd64  arm64*  amd64  arm64*  amd64  arm64*  amd64  arm64*  amd64  arm64*
structure                 ok 0.2 ok 0.2  ok 0.2 ok 0.2  ok 0.2 ok 0.2  ok 0.2 ok 0.2  ok 0.2 ok 0.2
python-compiled/hardened  ok 123 ok 123  ok 123 ok 123  ok 123 ok 123  ok 123 ok 123  ok 123 ok 123
stop                      FAILED -       -      -       -      -       -      -       -      -
every-tool/gvisor         -      -       -      -       no run -       -      -       -      -
ok: passed, in so many seconds; -: no case of this image, platform or profile
`
	if out.String() != want {
		t.Errorf("the table is\n%s\nand not\n%s", &out, want)
	}
	for line := range strings.Lines(want) {
		if n := len(line) - 1; n > 100 {
			t.Errorf("%d characters: %s", n, line)
		}
	}
}

// What is left behind, and an interruption, are failures for a CI system too.
func TestJUnitOfTheRun(t *testing.T) {
	for want, rep := range map[string]*Report{
		"container smoke-1":       {Leaks: []string{"container smoke-1"}},
		"the run was interrupted": {Interrupted: true},
	} {
		text, err := rep.junit()
		if err != nil {
			t.Fatal(err)
		}
		var back junitSuites
		if err := xml.Unmarshal(text, &back); err != nil {
			t.Fatal(err)
		}
		if len(back.Suites) != 1 || back.Suites[0].Failures != 1 || !strings.Contains(string(text), want) {
			t.Errorf("%s", text)
		}
		var summary bytes.Buffer
		if err := rep.markdown(&summary); err != nil || !strings.Contains(summary.String(), strings.TrimPrefix(want, "the run was ")) {
			t.Errorf("%v\n%s", err, &summary)
		}
	}
}
