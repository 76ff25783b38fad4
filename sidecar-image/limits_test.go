package sidecarimage

import (
	"fmt"
	"go/ast"
	"go/build"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// limits are those that no variable sets, by the constants that hold them, as
// docs/SANDBOX.md tells them.
var limits = []struct{ constant, unit, text string }{
	{"agent/guest.maxExecs", "", "commands that run at once in one session; another is refused"},
	{"agent/wire.MaxArgument", "bytes", "a command, or one variable of its environment with its name (Linux's limit); what is longer goes into a file"},
	{"tools.maxEnv", "", "variables of one command's environment"},
	{"tools.maxEnvBytes", "bytes", "all of them, with their names"},
	{"tools.maxPath", "bytes", "a path (Linux's limit)"},
	{"agent/guest.maxLingerings", "", "pipes of a session's ended commands that background processes still hold and that are emptied; who writes to a further one meets a closed pipe"},
	{"agent/guest.termGrace", "", "between SIGTERM and SIGKILL for a session's processes when the engine stops its container"},
	{"agent/host.fileTimeout", "", "time of one `sandbox_read` or `sandbox_write`"},
	{"session.measureTimeout", "", "until a `sandbox_write` has to be repeated whose workspace is still measured for the first time"},
	{"agent/wire.MaxStreams", "", "commands, reads and writes under way at once in one session"},
	{"agent/wire.MaxLive", "bytes", "output in one progress notification: the last that was written"},
	{"agent/wire.LiveEvery", "", "between two of them"},

	{"session.OpenTimeout", "", "time of `sandbox_open`, with the look-up of the image"},
	{"service.openAtOnce", "", "sessions that are opened at once; the next ones wait"},
	{"session.maxEpitaphs", "", "closed sessions whose callers are still told why"},
	{"session.epitaphTTL", "", "for how long"},
	{"session.reconcileEvery", "", "until a session is noticed whose container is gone and that nobody uses"},
	{"session.reconcileAtLeast", "", "the same where the engine takes long to list its containers: a hundredth of the time is spent on it"},
	{"session.asked", "", "runs that the runtime is asked about at once"},
	{"session.forgotten", "", "404 answers in a row after which a run counts as ended"},

	{"server.maxConnections", "", "HTTP connections open at once; half of the files that the process may have open, if that is less. Above it the one is closed that has been longest without a request whose token is good. A sixteenth of them never has such a request; the others are shared as below"},
	{"server.maxHeader", "bytes", "headers of a request"},
	{"server.headerTimeout", "", "time for them to arrive"},
	{"server.transferTimeout", "", "time for a request's body to arrive, for a piece of an answer to be taken, and to wait for room as below"},
	{"server.idleTimeout", "", "an HTTP connection without a request"},
	{"server.drainTimeout", "", "a body that is not wanted is still taken, so that its sender reads the answer"},
	{"server.maxBatch", "", "messages of one batch"},
	{"server.maxRefusals", "", "refused requests that are logged in a second, of each reason, after the first 100; the next that is logged says how many were not (`unlogged`)"},
	{"server.maxLean", "bytes", "a request without its long strings (those of 16 KiB and more)"},
	{"server.maxValues", "", "values and names in its JSON"},
	{"server.maxSafeInteger", "", "largest number as a request's id"},
	{"tools.LiftMin", "bytes", "a string as a request's id or progress token, with its quotes"},
	{"server.smallBody", "bytes", "a request body counts as small up to it"},
	{"server.smallInFlight", "bytes", "small request bodies held at once; of this and the next ones half for one tenant with a signed identity, a quarter for each of its principals, and half for any other principal"},
	{"server.largeInFlight", "bytes", "the other ones; four times the largest body, if that is more"},
	{"server.smallAnswer", "bytes", "an answer counts as small up to it"},
	{"server.smallAnswers", "bytes", "small answers held at once, and as much again of what commands write"},
	{"server.largeAnswers", "bytes", "the other ones; four times the largest answer, if that is more"},
	{"server.largeOutputs", "bytes", "`max_output_bytes` of the other commands that run, together; four times the largest answer, if that is more"},

	{"identity.maxToken", "bytes", "a signed identity"},
	{"identity.maxTag", "bytes", "a tenant, a principal, a run"},
	{"identity.MaxEnv", "", "variables that headers set in a session"},
	{"identity.MaxEnvValue", "bytes", "one of their values"},
	{"identity.MaxEnvBytes", "bytes", "all of them, with their names"},
	{"identity.fetchTimeout", "", "time for a key set to be fetched"},

	{"images.resolveTimeout", "", "time to pull a session image and to check its signature"},
	{"images.fresh", "", "until a tag that moved in the engine's store is noticed"},
	{"images.maxSignatures", "", "signatures of an image that are looked at"},
	{"images.maxSignature", "bytes", "one of them"},

	{"workspace.MaxDepth", "", "depth of directories to which a workspace is measured"},
	{"workspace.MinEntry", "bytes", "what a file, directory or link counts at least"},
	{"session.guardEvery", "", "between two measurements while a command runs"},
	{"session.patrolEvery", "", "between two while none does"},
	{"session.patrolAtLeast", "", "the same while the file system of the workspaces does not fill by a sixteenth of the quota"},

	{"service.engineTimeout", "", "time for the engine to answer at boot"},
	{"service.trialTimeout", "", "time for the trial session at boot"},
	{"service.drainTimeout", "", "time for the calls under way when the sidecar is told to end; they are ended then, and answered so"},
}

// inner are those that neither clients nor operators meet.
var inner = strings.Fields(`
	agent/guest.helloTimeout agent/guest.maxLinks agent/guest.maxFollow agent/guest.maxPending agent/guest.killLimit agent/guest.reapLimit agent/guest.quietMax agent/guest.startLimit agent/host.writeTimeout agent/host.maxRun agent/host.maxUnlinked agent/wire.MaxPayload agent/wire.MaxData
	engine.maxAgentLines engine.placeTimeout engine.runtimeTimeout images.maxReasons service.answerTimeout service.poolTimeout service.flushTimeout
	server.readyTTL session.helloTimeout session.connTimeout session.warmTimeout session.shutdownTimeout session.removeTimeout session.closeTimeout session.discardsAtOnce session.patrolsAtOnce
	identity.maxTime tools.progressMax tools.shownMax
`)

// aLimit matches the names of constants that have to be in one of the two.
var aLimit = regexp.MustCompile(`(?i)^max|max$|limit$|timeout$|ttl$|atonce$|inflight$`)

// value is a constant's: nanoseconds, where it is a time.
type value struct {
	n    int64
	time bool
}

// constants evaluates the integers and durations of the sidecar's packages, by
// PACKAGE.NAME below internal.
func constants(t *testing.T) map[string]value {
	t.Helper()
	const module = "github.com/loomcycle/loomcycle-images/sidecar-image/internal/"
	linux := build.Default
	linux.GOOS, linux.CgoEnabled = "linux", false
	out, checked := map[string]value{}, map[string]*types.Package{"time": fakeTime(t)}
	var check func(rel string) *types.Package
	check = func(rel string) *types.Package {
		if checked[module+rel] != nil {
			return checked[module+rel]
		}
		dir := filepath.Join("internal", rel)
		files, err := linux.ImportDir(dir, 0)
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		var parsed []*ast.File
		for _, name := range files.GoFiles {
			f, err := parser.ParseFile(set, filepath.Join(dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			parsed = append(parsed, f)
		}
		// Only constants matter: what hangs on other modules may fail.
		config := types.Config{Error: func(error) {}, Importer: importer(func(path string) *types.Package {
			if p, ok := strings.CutPrefix(path, module); ok {
				return check(p)
			}
			if checked[path] == nil {
				checked[path] = types.NewPackage(path, filepath.Base(path))
				checked[path].MarkComplete()
			}
			return checked[path]
		})}
		pkg, _ := config.Check(module+rel, set, parsed, nil)
		checked[module+rel] = pkg
		for _, name := range pkg.Scope().Names() {
			if c, ok := pkg.Scope().Lookup(name).(*types.Const); ok && c.Val().Kind() == constant.Int {
				n, _ := constant.Int64Val(c.Val())
				out[rel+"."+name] = value{n, c.Type().String() == "time.Duration"}
			}
		}
		return pkg
	}
	if err := filepath.WalkDir("internal", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if rel, err := filepath.Rel("internal", path); err == nil && rel != "enginetest" {
			if files, err := filepath.Glob(filepath.Join(path, "*.go")); err == nil && len(files) > 0 {
				check(rel)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

type importer func(path string) *types.Package

func (i importer) Import(path string) (*types.Package, error) { return i(path), nil }

// fakeTime is as much of package time as constants need.
func fakeTime(t *testing.T) *types.Package {
	t.Helper()
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, "time.go", "package time\ntype Duration int64\nconst (Nanosecond Duration = 1; Microsecond = 1000*Nanosecond; Millisecond = 1000*Microsecond; Second = 1000*Millisecond; Minute = 60*Second; Hour = 60*Minute)", 0)
	if err != nil {
		t.Fatal(err)
	}
	pkg, err := (&types.Config{}).Check("time", set, []*ast.File{f}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return pkg
}

func human(d time.Duration) string {
	switch {
	case d >= time.Minute && d%time.Minute == 0:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d%time.Second == 0:
		return fmt.Sprintf("%d s", d/time.Second)
	}
	return d.String()
}

func size(n int64) string {
	for _, unit := range []struct {
		bytes int64
		name  string
	}{{1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= unit.bytes && n%unit.bytes == 0 {
			return fmt.Sprintf("%d %s", n/unit.bytes, unit.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// docs/SANDBOX.md has the built-in limits as the code has them, and the code has no
// others.
func TestLimitsAreDocumented(t *testing.T) {
	have := constants(t)
	var table strings.Builder
	table.WriteString("| limit | value |\n| --- | --- |\n")
	told := slices.Clone(inner)
	for _, l := range limits {
		v, ok := have[l.constant]
		if !ok {
			t.Errorf("the sidecar has no constant %s", l.constant)
			continue
		}
		told = append(told, l.constant)
		text := strconv.FormatInt(v.n, 10)
		switch {
		case v.time:
			text = human(time.Duration(v.n))
		case l.unit == "bytes":
			text = size(v.n)
		}
		fmt.Fprintf(&table, "| %s | %s |\n", l.text, text)
	}
	for name := range have {
		_, short, _ := strings.Cut(name, ".")
		if aLimit.MatchString(short) && !slices.Contains(told, name) {
			t.Errorf("the limit %s is neither in the table of limits nor among the inner ones", name)
		}
	}
	for _, name := range inner {
		if _, ok := have[name]; !ok {
			t.Errorf("the sidecar has no constant %s", name)
		}
	}
	documented(t, "limits", table.String())
}

// documented holds a part of docs/SANDBOX.md, between two comments, against what it
// should be, or writes it there.
func documented(t *testing.T, name, want string) {
	t.Helper()
	const guide, end = repo + "/docs/SANDBOX.md", "<!-- end -->\n"
	begin := "<!-- " + name + ": go test ./sidecar-image -update -->\n"
	text, err := os.ReadFile(guide)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	table, after, ok2 := strings.Cut(rest, end)
	switch {
	case !ok || !ok2:
		t.Fatalf("%s has no place for the table of %s", guide, name)
	case table == want:
	case !*update:
		t.Errorf("the table of %s in %s is not the sidecar's; run `go test ./sidecar-image -update`", name, guide)
	default:
		if err := os.WriteFile(guide, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
