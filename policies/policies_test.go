package policies

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/open-policy-agent/opa/v1/ast"
	"github.com/open-policy-agent/opa/v1/cover"
	"github.com/open-policy-agent/opa/v1/format"
	"github.com/open-policy-agent/opa/v1/storage"
	"github.com/open-policy-agent/opa/v1/storage/inmem"
	"github.com/open-policy-agent/opa/v1/tester"
)

// run runs the Rego tests with OPA's own runner and returns the coverage.
func run(t *testing.T) (map[string]*ast.Module, cover.Report, []string) {
	t.Helper()
	parsed, err := modules(os.DirFS("."), "tests/*_test.rego")
	if err != nil {
		t.Fatal(err)
	}
	lists, err := data()
	if err != nil {
		t.Fatal(err)
	}
	store := inmem.NewFromObject(lists)
	txn := storage.NewTransactionOrDie(t.Context(), store, storage.WriteParams)
	defer store.Abort(t.Context(), txn)
	coverage := cover.New()
	results, err := tester.NewRunner().
		SetStore(store).SetModules(parsed).SetCompiler(ast.NewCompiler().WithStrict(true)).
		RaiseBuiltinErrors(true).SetCoverageQueryTracer(coverage).
		RunTests(t.Context(), txn)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := range results {
		names = append(names, r.Name)
		if !r.Pass() {
			t.Errorf("%s: %s", r.Location, r)
		}
	}
	return parsed, coverage.Report(parsed), names
}

func TestRules(t *testing.T) {
	parsed, report, tests := run(t)
	for name, file := range report.Files {
		if strings.HasPrefix(name, "rules/") && len(file.NotCovered) > 0 {
			for _, r := range file.NotCovered {
				t.Errorf("%s: no test reaches lines %d to %d", name, r.Start.Row, r.End.Row)
			}
		}
	}
	for name := range parsed {
		if strings.HasPrefix(name, "rules/") && report.Files[name] == nil {
			t.Errorf("%s: no test reaches it", name)
		}
	}
	parsed, err := modules(nil, "")
	if err != nil {
		t.Fatal(err)
	}
	all, err := rules(parsed)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 15 {
		t.Errorf("%d rules were found", len(all))
	}
	for id, rule := range all {
		if rule.Sentence == "" || rule.Reason == "" {
			t.Errorf("rule %s has no sentence or no reason", id)
		}
		want := "test_" + strings.ReplaceAll(id, "-", "_")
		if !strings.Contains(" "+strings.Join(tests, " ")+" ", " "+want+" ") {
			t.Errorf("rule %s has no test called %s", id, want)
		}
	}
	// Every violation names a rule that is described.
	for name, m := range parsed {
		if !strings.HasPrefix(name, "rules/") {
			continue
		}
		ast.WalkTerms(m, func(term *ast.Term) bool {
			if call, ok := term.Value.(ast.Call); ok && call[0].String() == "violation" {
				if id, ok := call[1].Value.(ast.String); ok && all[string(id)].ID == "" {
					t.Errorf("%s: a violation has the id %s, which no METADATA has", term.Location, id)
				}
			}
			return false
		})
	}
}

func TestFormat(t *testing.T) {
	for _, pattern := range []string{"rules/*.rego", "tests/*.rego"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			want, err := format.SourceWithOpts(name, text, format.Opts{RegoVersion: ast.RegoV1})
			if err != nil {
				t.Fatal(err)
			}
			if string(want) != string(text) {
				t.Errorf("%s is not formatted as `opa fmt` does it", name)
				if os.Getenv("UPDATE") != "" {
					if err := os.WriteFile(name, want, 0o644); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}
}

func TestDecision(t *testing.T) {
	// An empty document breaks no rule; it must not pass for a release.
	d, err := Evaluate(t.Context(), Input{Now: "2030-01-01T00:00:00Z"})
	if err == nil {
		t.Errorf("a document without a release was judged: %+v", d)
	}
}

// A date without quotes is what everyone writes.
func TestExceptionsAreText(t *testing.T) {
	list, err := exceptions([]byte("exceptions:\n- {rule: r, expires: 2030-03-02}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if got := list[0].(map[string]any)["expires"]; got != "2030-03-02" {
		t.Errorf("a bare date is %#v", got)
	}
}

// The rules fail from the day of the expiry on; before that there is a warning.
func TestExpiring(t *testing.T) {
	all := []any{map[string]any{"rule": "r", "subject": "s", "expires": "2030-03-02"}, map[string]any{"rule": "r", "expires": "never"}, map[string]any{}}
	for now, want := range map[string]int{
		"2029-12-31T23:59:59Z": 0, "2030-01-01T00:00:00Z": 1, "2030-03-01T23:59:59Z": 1, "2030-03-02T00:00:00Z": 0, "nonsense": 0,
	} {
		if got := expiring(all, now); len(got) != want || want > 0 && !strings.Contains(got[0], "r of s in policies/exceptions.yaml ends on 2030-03-02") {
			t.Errorf("%s: %q", now, got)
		}
	}
}
