// Package policies decides whether a built family may be released: Rego rules
// over one document that holds everything known of it. The rules, the lists
// they compare with and the exceptions are the data beside this file.
package policies

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/open-policy-agent/opa/v1/ast"
	"github.com/open-policy-agent/opa/v1/rego"
	"github.com/open-policy-agent/opa/v1/storage/inmem"
	"go.yaml.in/yaml/v3"
)

//go:embed rules/*.rego data.yaml exceptions.yaml
var files embed.FS

// Rule is a rule as its METADATA describes it.
type Rule struct {
	ID, Sentence, Reason string
}

// Violation is one thing that breaks a rule.
type Violation struct {
	Rule     string `json:"rule"`
	Image    string `json:"image,omitempty"`
	Platform string `json:"platform,omitempty"`
	Subject  string `json:"subject"`
	Message  string `json:"message"`
}

func (v Violation) String() string {
	where := strings.TrimSpace(v.Image + " " + v.Platform)
	if where != "" {
		where += ": "
	}
	return fmt.Sprintf("[%s] %s%s", v.Rule, where, v.Message)
}

// Decision is what the rules say of a release.
type Decision struct {
	Denied   []Violation // what stops the release
	Excepted []Violation // what an exception lets through
	Expiring []string    // exceptions that end within warnAhead, a sentence each
	Rules    map[string]Rule
}

// Err names every violation with the reason of its rule.
func (d Decision) Err() error {
	if len(d.Denied) == 0 {
		return nil
	}
	var errs []error
	for i, v := range d.Denied {
		errs = append(errs, errors.New(v.String()))
		if i+1 == len(d.Denied) || d.Denied[i+1].Rule != v.Rule {
			r := d.Rules[v.Rule]
			errs = append(errs, fmt.Errorf("  %s %s", r.Sentence, r.Reason))
		}
	}
	return fmt.Errorf("the release breaks its policy in %d places:\n%w", len(d.Denied), errors.Join(errs...))
}

// modules parses the rules, and the tests in dir when there is one.
func modules(extra fs.FS, pattern string) (map[string]*ast.Module, error) {
	out := map[string]*ast.Module{}
	parse := func(from fs.FS, pattern string) error {
		names, err := fs.Glob(from, pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			text, err := fs.ReadFile(from, name)
			if err != nil {
				return err
			}
			m, err := ast.ParseModuleWithOpts(name, string(text), ast.ParserOptions{ProcessAnnotation: true, RegoVersion: ast.RegoV1})
			if err != nil {
				return err
			}
			out[name] = m
		}
		return nil
	}
	if err := parse(files, "rules/*.rego"); err != nil {
		return nil, err
	}
	if extra != nil {
		if err := parse(extra, pattern); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// data is the lists and the exceptions as the rules see them.
func data() (map[string]any, error) {
	out := map[string]any{}
	text, err := files.ReadFile("data.yaml")
	if err != nil {
		return nil, err
	}
	if err := yaml.Unmarshal(text, &out); err != nil {
		return nil, fmt.Errorf("policies/data.yaml: %w", err)
	}
	if text, err = files.ReadFile("exceptions.yaml"); err != nil {
		return nil, err
	}
	if out["exceptions"], err = exceptions(text); err != nil {
		return nil, fmt.Errorf("policies/exceptions.yaml: %w", err)
	}
	return out, nil
}

// exceptions are the entries of such a file, with text in every field: YAML
// takes a bare date for a time.
func exceptions(text []byte) ([]any, error) {
	var typed struct {
		Exceptions []map[string]string `yaml:"exceptions"`
	}
	if err := yaml.Unmarshal(text, &typed); err != nil {
		return nil, err
	}
	list := []any{}
	for _, e := range typed.Exceptions {
		fields := map[string]any{}
		for k, v := range e {
			fields[k] = v
		}
		list = append(list, fields)
	}
	return list, nil
}

// rules gives every rule by id.
func rules(parsed map[string]*ast.Module) (map[string]Rule, error) {
	out := map[string]Rule{}
	for _, name := range slices.Sorted(maps.Keys(parsed)) {
		for _, a := range parsed[name].Annotations {
			id, ok := a.Custom["id"].(string)
			if !ok {
				continue
			}
			if _, twice := out[id]; twice {
				return nil, fmt.Errorf("%s: the rule id %s is used twice", name, id)
			}
			out[id] = Rule{id, a.Title, strings.TrimSpace(a.Description)}
		}
	}
	return out, nil
}

// Evaluate judges a release.
func Evaluate(ctx context.Context, in Input) (Decision, error) {
	if in.Release == nil || in.Lock == nil || len(in.Images) == 0 || in.Now == "" {
		return Decision{}, fmt.Errorf("there is no release, lock, image or time to judge")
	}
	parsed, err := modules(nil, "")
	if err != nil {
		return Decision{}, err
	}
	lists, err := data()
	if err != nil {
		return Decision{}, err
	}
	d := Decision{Expiring: expiring(lists["exceptions"].([]any), in.Now)}
	if d.Rules, err = rules(parsed); err != nil {
		return Decision{}, err
	}
	options := []func(*rego.Rego){
		rego.Query("deny = data.loomcycle.policy.deny; allowed = data.loomcycle.policy.allowed"),
		rego.Store(inmem.NewFromObject(lists)), rego.Input(in), rego.StrictBuiltinErrors(true), rego.Strict(true),
	}
	for _, m := range parsed {
		options = append(options, rego.ParsedModule(m))
	}
	results, err := rego.New(options...).Eval(ctx)
	if err != nil {
		return Decision{}, fmt.Errorf("evaluate the policy: %w", err)
	}
	if len(results) != 1 {
		return Decision{}, fmt.Errorf("evaluate the policy: it has no answer")
	}
	for name, into := range map[string]*[]Violation{"deny": &d.Denied, "allowed": &d.Excepted} {
		text, err := json.Marshal(results[0].Bindings[name])
		if err != nil {
			return Decision{}, err
		}
		if err := json.Unmarshal(text, into); err != nil {
			return Decision{}, err
		}
		slices.SortFunc(*into, func(a, b Violation) int { return strings.Compare(a.String(), b.String()) })
	}
	return d, nil
}

// warnAhead leaves time to fix what an exception excuses.
const warnAhead = 60 * 24 * time.Hour

// expiring are the exceptions that now still hold and soon will not. What is
// wrong with a date is for the rules to say.
func expiring(exceptions []any, now string) (out []string) {
	at, err := time.Parse(time.RFC3339, now)
	if err != nil {
		return nil
	}
	for _, e := range exceptions {
		e := e.(map[string]any)
		text, _ := e["expires"].(string)
		end, err := time.Parse(time.DateOnly, text)
		if left := end.Sub(at); err == nil && left > 0 && left <= warnAhead {
			out = append(out, fmt.Sprintf("the exception for %v of %v in policies/exceptions.yaml ends on %s: fix what it excuses or decide anew", e["rule"], e["subject"], text))
		}
	}
	return out
}
