// Package workflows holds no code: its tests keep .github/workflows honest.
package workflows

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/magefile/mage/parse"
	"go.yaml.in/yaml/v3"
)

const root = "../.."

type workflow struct {
	file        string
	text        string
	Permissions map[string]string `yaml:"permissions"`
	Concurrency map[string]string `yaml:"concurrency"`
	Jobs        map[string]*job   `yaml:"jobs"`
}

type job struct {
	Timeout     int               `yaml:"timeout-minutes"`
	Permissions map[string]string `yaml:"permissions"`
	If          string            `yaml:"if"`
	Container   any               `yaml:"container"`
	Env         map[string]string `yaml:"env"`
	Steps       []step            `yaml:"steps"`
}

type step struct{ Run, Uses string }

func load(t *testing.T) []workflow {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*.yml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no workflows: %v", err)
	}
	var all []workflow
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		w := workflow{file: filepath.Base(f), text: string(text)}
		if err := yaml.Unmarshal(text, &w); err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		all = append(all, w)
	}
	return all
}

// functions asks mage for the targets that it would accept.
func functions(t *testing.T) map[string]*parse.Function {
	t.Helper()
	folder := filepath.Join(root, "magefiles")
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".go") && !strings.HasSuffix(e.Name(), "_test.go") && e.Name() != "mage_output_file.go" { // there while another run compiles
			files = append(files, e.Name())
		}
	}
	info, err := parse.PrimaryPackage("go", folder, files, false)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*parse.Function{}
	for _, f := range info.Funcs {
		all[strings.ToLower(f.TargetName())] = f
	}
	return all
}

// targets are their names.
func targets(t *testing.T) []string {
	t.Helper()
	return slices.Collect(maps.Keys(functions(t)))
}

var command = regexp.MustCompile("go run mage\\.go ([a-z][a-z:]*)([^`|#&)\\n]*)")

// A document's commands are targets that exist, with the arguments that they take.
func TestDocumentsNameTargets(t *testing.T) {
	all := functions(t)
	found := 0
	for _, pattern := range []string{"*.md", "*/*.md", "*/*/*.md"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range command.FindAllStringSubmatch(string(text), -1) {
				found++
				f, ok := all[m[1]]
				if !ok {
					t.Errorf("%s names the target %s, which is none", file, m[1])
					continue
				}
				need := 0
				for _, arg := range f.Args {
					if !arg.Optional {
						need++
					}
				}
				if have := len(strings.Fields(m[2])); have < need || have > len(f.Args) {
					t.Errorf("%s: %q gives %d arguments, %s takes %d to %d", file, strings.TrimSpace(m[0]), have, m[1], need, len(f.Args))
				}
			}
		}
	}
	if found < 30 {
		t.Errorf("only %d commands were found in the documents", found)
	}
}

// The commands that a release runs on what was pushed are targets, too.
func TestHooksNameTargets(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "release.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var c struct{ Hooks map[string][]string }
	if err := yaml.Unmarshal(text, &c); err != nil || len(c.Hooks) != 2 {
		t.Fatalf("%v, %v", c, err)
	}
	all := functions(t)
	for name, argv := range c.Hooks {
		target, args, found := strings.Cut(strings.TrimPrefix(strings.Join(argv, " "), "go run mage.go "), " ")
		f, ok := all[target]
		if !ok || len(strings.Fields(args)) != len(f.Args) || found && args != "{refs}" {
			t.Errorf("the hook %s runs %q, which is no target or has other arguments", name, argv)
		}
	}
}

// documented reads the first column of every table of docs/CI.md.
func documented(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs", "CI.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		names[m[1]] = true
	}
	return names
}

func TestEveryNameExistsAndIsDocumented(t *testing.T) {
	known, table := targets(t), documented(t)
	used := map[string]bool{}
	for _, w := range load(t) {
		for _, m := range regexp.MustCompile(`go run mage\.go ([a-z:]+)`).FindAllStringSubmatch(w.text, -1) {
			used[m[1]] = true
			if !slices.Contains(known, m[1]) {
				t.Errorf("%s runs the target %s, which does not exist", w.file, m[1])
			}
		}
		for _, m := range regexp.MustCompile(`\b(?:vars|secrets)\.([A-Z0-9_]+)`).FindAllStringSubmatch(w.text, -1) {
			used[m[1]] = true
		}
	}
	for name := range used {
		if !table[name] {
			t.Errorf("docs/CI.md does not document %s", name)
		}
	}
	for name := range table {
		if !used[name] {
			t.Errorf("docs/CI.md documents %s, which no workflow uses", name)
		}
	}
	if len(used) < 10 {
		t.Errorf("only %v were found: the test reads the workflows wrongly", slices.Sorted(maps.Keys(used)))
	}
}

func TestWorkflowsAreHard(t *testing.T) {
	pinned := regexp.MustCompile(`^[\w./-]+@[0-9a-f]{40}$`)
	for _, w := range load(t) {
		if w.Permissions == nil || w.Concurrency == nil {
			t.Errorf("%s: permissions and concurrency are not both set", w.file)
		}
		for name, j := range w.Jobs {
			if j.Timeout == 0 {
				t.Errorf("%s: job %s has no timeout", w.file, name)
			}
			if len(w.Permissions) == 0 && j.Permissions == nil {
				t.Errorf("%s: job %s says nothing of its permissions", w.file, name)
			}
			// git and the go command refuse a checkout of another user's.
			if j.Container != nil && !slices.ContainsFunc(j.Steps, func(s step) bool { return strings.Contains(s.Run, "safe.directory") }) {
				t.Errorf("%s: job %s, root in a container, does not call the checkout safe", w.file, name)
			}
			for _, s := range j.Steps {
				if s.Uses != "" && !pinned.MatchString(s.Uses) {
					t.Errorf("%s: job %s uses %s, which is not pinned by commit", w.file, name, s.Uses)
				}
				if strings.Contains(s.Run, "${{") {
					t.Errorf("%s: job %s puts an expression into a shell; pass it by env: %s", w.file, name, s.Run)
				}
			}
		}
	}
}

// TestPublishingIsOff checks that nothing writes anywhere before PUBLISH is set.
func TestPublishingIsOff(t *testing.T) {
	for _, w := range load(t) {
		for name, j := range w.Jobs {
			publishes := slices.Contains(slices.Collect(maps.Values(j.Permissions)), "write") ||
				slices.ContainsFunc(j.Steps, func(s step) bool { return strings.Contains(s.Run, "mage.go release") })
			if publishes && j.If != "vars.PUBLISH == 'true'" {
				t.Errorf("%s: job %s publishes without asking PUBLISH", w.file, name)
			}
		}
	}
}

// The identity that the release is checked against is the one that consumers
// are told to check, and only a version's tag has it.
func TestReleaseIdentity(t *testing.T) {
	for _, w := range load(t) {
		if w.file != "release.yml" {
			continue
		}
		// GitHub cancels the waiting run of a group when another comes.
		if g := w.Concurrency["group"]; !strings.Contains(g, "${{ github.ref_name }}") || w.Concurrency["cancel-in-progress"] != "false" {
			t.Errorf("one tag's release can cancel another's: %v", w.Concurrency)
		}
		identity := strings.NewReplacer("${{ github.server_url }}", "https://github.com", "${{ github.repository }}", "OWNER/REPOSITORY").Replace(w.Jobs["publish"].Env["COSIGN_IDENTITY"])
		text, err := os.ReadFile(filepath.Join(root, "docs", "VERIFYING.md"))
		if err != nil {
			t.Fatal(err)
		}
		if want := "export COSIGN_IDENTITY='" + identity + "'\n"; !strings.Contains(string(text), want) {
			t.Errorf("docs/VERIFYING.md does not say %s", want)
		}
		expression, err := regexp.Compile(identity)
		if err != nil {
			t.Fatal(err)
		}
		const file = "https://github.com/OWNER/REPOSITORY/.github/workflows/release.yml@"
		for subject, want := range map[string]bool{
			file + "refs/tags/v1.2.3":                                      true,
			file + "refs/heads/main":                                       false,
			file + "refs/heads/refs/tags/v1":                               false,
			file + "refs/tags/nightly":                                     false,
			strings.Replace(file, "release", "ci", 1) + "refs/tags/v1.2.3": false,
			"https://example.test/?" + file + "refs/tags/v1.2.3":           false,
		} {
			if expression.MatchString(subject) != want {
				t.Errorf("%s matches %s: %v", expression, subject, !want)
			}
		}
		return
	}
	t.Fatal("there is no release.yml")
}
