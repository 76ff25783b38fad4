package provenance_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"go.yaml.in/yaml/v3"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/provenance"
)

func input(t *testing.T) provenance.Input {
	t.Helper()
	text, err := os.ReadFile("../../images/lock/lock.json")
	if err != nil {
		t.Fatal(err)
	}
	var l lock.Lock
	if err := json.Unmarshal(text, &l); err != nil {
		t.Fatal(err)
	}
	return provenance.Input{
		Image: "loomcycle-toolbox", Platform: "linux/arm64", Digest: digest.FromString("manifest"), Version: "1.2.3",
		Repository: "https://git.example/loomcycle-images", Commit: strings.Repeat("a", 40),
		Epoch: 1700000000, Compression: "gzip", Groups: []string{"base", "go", "node", "files", "programs"},
		Lock: &l, LockDigest: digest.FromBytes(text), Worker: "amd64", Compiled: true,
		Modules: []provenance.Module{{Path: "example.test/m", Version: "v1.0.0", H1: "h1:8Tl0rBb7KdISSdPkZBjlpZxsUBb+004GI/SM2XbmSqI="}},
		Run:     provenance.FromEnvironment(func(string) string { return "" }, "https://git.example/loomcycle-images", "urn:uuid:1"),
	}
}

type statement struct {
	PredicateType string `json:"predicateType"`
	Subject       []struct {
		Name   string            `json:"name"`
		Digest map[string]string `json:"digest"`
	} `json:"subject"`
	Predicate struct {
		BuildDefinition struct {
			BuildType            string         `json:"buildType"`
			ExternalParameters   map[string]any `json:"externalParameters"`
			InternalParameters   map[string]any `json:"internalParameters"`
			ResolvedDependencies []dependency   `json:"resolvedDependencies"`
		} `json:"buildDefinition"`
		RunDetails struct {
			Builder  struct{ ID string }
			Metadata map[string]string `json:"metadata"`
		} `json:"runDetails"`
	} `json:"predicate"`
}

type dependency struct {
	URI         string            `json:"uri"`
	Name        string            `json:"name"`
	Digest      map[string]string `json:"digest"`
	Annotations map[string]any    `json:"annotations"`
}

func parse(t *testing.T, in provenance.Input) (statement, []byte) {
	t.Helper()
	data, err := provenance.Statement(in)
	if err != nil {
		t.Fatal(err)
	}
	var s statement
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	return s, data
}

func TestEveryLockedSourceOfTheGroupsIsThere(t *testing.T) {
	in := input(t)
	in.Tools = []string{"base", "cross"}
	s, data := parse(t, in)
	if s.Subject[0].Digest["sha256"] != in.Digest.Encoded() || s.PredicateType != provenance.PredicateType {
		t.Errorf("the subject is %+v of type %s", s.Subject, s.PredicateType)
	}
	have := map[string]dependency{}
	for _, d := range s.Predicate.BuildDefinition.ResolvedDependencies {
		if sum := d.Digest["sha256"]; have[sum].URI != "" && sum != "" {
			t.Errorf("%s is listed twice", d.URI)
		}
		have[d.Digest["sha256"]] = d
	}
	// The image's groups, and those of the tools for the node that ran them.
	for arch, groups := range map[string][]string{"arm64": in.Groups, "amd64": in.Tools} {
		found := 0
		for _, p := range in.Lock.Debian[arch] {
			_, ok := have[p.SHA256.Encoded()]
			// static's packages are base's too, and one for all architectures is the same for each.
			if want := slices.Contains(groups, p.Group); ok != want && p.Group != "static" && p.Arch != "all" || want && !ok {
				t.Errorf("%s of group %s for %s: in the provenance %v, want %v", p.Name, p.Group, arch, ok, want)
			} else if want && p.Group == "cross" {
				found++
			}
		}
		if arch == in.Worker && found == 0 {
			t.Error("the lock has no package of the group cross")
		}
	}
	for _, sum := range []digest.Digest{in.Lock.Go["arm64"].SHA256, in.Lock.Go["amd64"].SHA256, in.Lock.NPM["arm64"][0].SHA256, in.Lock.NPM["arm64"][1].SHA256} {
		if d := have[sum.Encoded()]; !strings.HasPrefix(d.URI, "pkg:") {
			t.Errorf("%s is not in the provenance", sum)
		}
	}
	if bytes.Contains(data, []byte("pool/")) || bytes.Contains(data, []byte("@v/")) {
		t.Error("a mirror's path is in the provenance")
	}
	_, again := parse(t, in)
	if !bytes.Equal(data, again) {
		t.Error("two statements of one input differ")
	}
}

func TestLevelIsWhatIsTrue(t *testing.T) {
	github := map[string]string{
		"GITHUB_ACTIONS": "true", "GITHUB_WORKFLOW_REF": "o/r/.github/workflows/release.yml@refs/tags/v1.2.3",
		"GITHUB_REPOSITORY": "o/r", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "2", "GITHUB_REF": "refs/tags/v1.2.3", "GITHUB_TOKEN": "s3cret",
		"RUNNER_ENVIRONMENT": "github-hosted",
	}
	with := func(name, value string) map[string]string {
		env := maps.Clone(github)
		env[name] = value
		return env
	}
	const (
		builder    = "https://github.com/o/r/.github/workflows/release.yml@refs/tags/v1.2.3"
		invocation = "https://github.com/o/r/actions/runs/7/attempts/2"
	)
	var data struct {
		Policy struct {
			HostedBuilder string `yaml:"hosted_builder"`
		}
	}
	text, err := os.ReadFile("../../policies/data.yaml")
	if err == nil {
		err = yaml.Unmarshal(text, &data)
	}
	if err != nil {
		t.Fatal(err)
	}
	believed := regexp.MustCompile(data.Policy.HostedBuilder)
	for _, c := range []struct {
		name       string
		env        map[string]string
		builder    string
		invocation string
		level      float64
	}{
		{"a laptop", nil, "https://git.example/loomcycle-images/builders/local", "urn:uuid:1", 1},
		{"GitHub Actions", github, builder, invocation, 2},
		{"a runner of one's own", with("RUNNER_ENVIRONMENT", "self-hosted"), builder, invocation, 1},
		{"a key in the workflow's hands", with("COSIGN_KEY", "cosign.key"), builder, invocation, 1},
		{"a pull request", with("GITHUB_WORKFLOW_REF", "o/r/.github/workflows/ci.yml@refs/pull/7/merge"), "https://github.com/o/r/.github/workflows/ci.yml@refs/pull/7/merge", invocation, 1},
		{"a branch, whose builds nobody signs", with("GITHUB_WORKFLOW_REF", "o/r/.github/workflows/ci.yml@refs/heads/main"), "https://github.com/o/r/.github/workflows/ci.yml@refs/heads/main", invocation, 1},
		{"another GitHub", with("GITHUB_SERVER_URL", "https://github.example"), strings.Replace(builder, "github.com", "github.example", 1), strings.Replace(invocation, "github.com", "github.example", 1), 1},
	} {
		in := input(t)
		in.Run = provenance.FromEnvironment(func(n string) string { return c.env[n] }, in.Repository, "urn:uuid:1")
		in.Run.Finished = time.Unix(1700000100, 0)
		s, data := parse(t, in)
		d := s.Predicate.RunDetails
		if d.Builder.ID != c.builder || d.Metadata["invocationId"] != c.invocation || s.Predicate.BuildDefinition.InternalParameters["slsaBuildLevel"] != c.level {
			t.Errorf("%s: builder %s, invocation %s, level %v", c.name, d.Builder.ID, d.Metadata["invocationId"], s.Predicate.BuildDefinition.InternalParameters["slsaBuildLevel"])
		}
		if c.level == 2 && !believed.MatchString(d.Builder.ID) {
			t.Errorf("%s: the policy does not believe level 2 of %s", c.name, d.Builder.ID)
		}
		if d.Metadata["finishedOn"] != "2023-11-14T22:15:00Z" || d.Metadata["startedOn"] != "" {
			t.Errorf("%s: times are %v", c.name, d.Metadata)
		}
		if bytes.Contains(data, []byte("s3cret")) {
			t.Errorf("%s: a token is in the provenance", c.name)
		}
	}
}

func TestSourceOfTheRuntime(t *testing.T) {
	commit := strings.Repeat("b", 40)
	for _, c := range []struct {
		label, uri, digest string
		modified           bool
	}{
		{"", "", "", false},
		{"git:https://git.example/loomcycle.git#" + commit, "git+https://git.example/loomcycle.git", commit, false},
		{"dir:loomcycle#" + commit + "-dirty", "dir:loomcycle", commit, true},
		{"bin:prebuilt", "bin:prebuilt", "", false},
	} {
		in := input(t)
		in.Loomcycle, in.Groups = c.label, []string{"static", "programs"}
		s, _ := parse(t, in)
		var found *dependency
		for _, d := range s.Predicate.BuildDefinition.ResolvedDependencies {
			if d.Name == "loomcycle" {
				found = &d
			}
		}
		if c.label == "" {
			if found != nil {
				t.Errorf("%q: %+v is a source", c.label, found)
			}
			continue
		}
		if found == nil || found.URI != c.uri || found.Digest["gitCommit"] != c.digest || (found.Annotations["modified"] == true) != c.modified {
			t.Errorf("%q: the source is %+v", c.label, found)
		}
	}
}

// The compiler is the toolchain of the node that built, of whatever
// architecture, and none where nothing was compiled.
func TestCompiler(t *testing.T) {
	for _, c := range []struct {
		worker   string
		compiled bool
		want     string // architecture of the toolchain
	}{{"amd64", true, "amd64"}, {"arm64", true, "arm64"}, {"amd64", false, ""}} {
		in := input(t)
		in.Groups, in.Worker, in.Compiled = []string{"static", "programs"}, c.worker, c.compiled
		s, _ := parse(t, in)
		var got []string
		for _, d := range s.Predicate.BuildDefinition.ResolvedDependencies {
			if strings.HasPrefix(d.URI, "pkg:golang/golang.org/toolchain@") {
				got = append(got, d.Digest["sha256"])
			}
		}
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || got[0] != in.Lock.Go[c.want].SHA256.Encoded()) {
			t.Errorf("on %s, compiled %v: toolchains %v, want that of %q", c.worker, c.compiled, got, c.want)
		}
	}
	for _, change := range []func(*provenance.Input){func(*provenance.Input) {}, func(in *provenance.Input) { in.Compiled, in.Tools = false, []string{"python"} }} {
		in := input(t)
		in.Worker = ""
		change(&in)
		if _, err := provenance.Statement(in); err == nil || !strings.Contains(err.Error(), "worker") {
			t.Errorf("an unknown worker: %v", err)
		}
	}
}

func TestOptionsOfTheRuntime(t *testing.T) {
	in := input(t)
	if text, err := provenance.Statement(in); err != nil || bytes.Contains(text, []byte("LOOMCYCLE_PACKAGE")) {
		t.Errorf("a package that nobody asked for is an option: %v\n%s", err, text)
	}
	in.Package, in.LDFlags = "./cmd/other", "-X main.a=b"
	text, err := provenance.Statement(in)
	if err != nil || !bytes.Contains(text, []byte(`"./cmd/other"`)) || !bytes.Contains(text, []byte(`"-X main.a=b"`)) {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestBadInputIsNamed(t *testing.T) {
	in := input(t)
	in.Modules[0].H1 = "h1:short"
	if _, err := provenance.Statement(in); err == nil || !strings.Contains(err.Error(), "example.test/m") {
		t.Errorf("error is %v, want one that names the module", err)
	}
	in = input(t)
	in.Lock.Debian["arm64"][0] = lock.Package{Group: "base", Name: "broken", Version: "1", Arch: "arm64"}
	if _, err := provenance.Statement(in); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("error is %v, want one that names the package", err)
	}
}
