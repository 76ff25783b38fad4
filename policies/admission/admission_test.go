package admission_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/open-policy-agent/opa/v1/ast"
	"github.com/open-policy-agent/opa/v1/rego"
	"github.com/opencontainers/go-digest"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/provenance"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

func load(t *testing.T, file string) any {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var v any
	if err := yaml.Unmarshal(text, &v); err != nil { // JSON is YAML
		t.Fatal(err)
	}
	// The schema library wants what encoding/json makes.
	text, err = json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if v, err = jsonschema.UnmarshalJSON(bytes.NewReader(text)); err != nil {
		t.Fatal(err)
	}
	return v
}

func schema(t *testing.T, file string) *jsonschema.Schema {
	t.Helper()
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	s, err := c.Compile(filepath.Join("schemas", file))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// crds are the custom resource definitions of the two controllers, in their
// own modules' archives: module, checksum, file and the version of the resource.
var crds = map[string][4]string{
	"cluster-image-policy.yaml": {"github.com/sigstore/policy-controller@v0.13.1", "h1:Woy+6bQ7pT/0m3/PSO2RtDxSHKBZ/8iHpCZFcZJThM8=", "config/300-clusterimagepolicy.yaml", "v1beta1"},
	"kyverno.yaml":              {"github.com/kyverno/kyverno@v1.19.1", "h1:/MkgFii3/VlQfKR1JpC9tVwNNVNQTt2S4U6qCsafsTU=", "config/crds/kyverno/kyverno.io_clusterpolicies.yaml", "v1"},
}

// crd gives the schema with which an API server checks a resource. A field that
// the schema does not have is refused, as by kubectl's strict validation.
func crd(t *testing.T, file string) *jsonschema.Schema {
	t.Helper()
	c := crds[file]
	var module struct{ Dir, Sum, Error string }
	if err := citest.Retry(t, func() error {
		cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", c[0])
		cmd.Dir, cmd.Env = t.TempDir(), append(os.Environ(), "GOFLAGS=", "GOWORK=off")
		out, err := cmd.Output()
		if jerr := json.Unmarshal(out, &module); jerr != nil || module.Dir == "" {
			return fmt.Errorf("download %s: %v, %v, %s", c[0], err, jerr, module.Error)
		}
		return nil
	}); err != nil {
		citest.Skip(t, "%v", err)
	}
	if module.Sum != c[1] {
		t.Fatalf("%s has the checksum %s, want %s", c[0], module.Sum, c[1])
	}
	def := load(t, filepath.Join(module.Dir, c[2])).(map[string]any)["spec"].(map[string]any)
	for _, v := range def["versions"].([]any) {
		if v := v.(map[string]any); v["name"] == c[3] {
			s := v["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)
			fields := s["properties"].(map[string]any)
			fields["apiVersion"] = map[string]any{"const": def["group"].(string) + "/" + c[3]}
			fields["kind"] = map[string]any{"const": def["names"].(map[string]any)["kind"]}
			fields["metadata"] = map[string]any{"type": "object", "required": []any{"name"}}
			s["required"] = []any{"apiVersion", "kind", "metadata", "spec"}
			strict(s)
			compiler := jsonschema.NewCompiler()
			if err := compiler.AddResource("crd.json", s); err != nil {
				t.Fatal(err)
			}
			compiled, err := compiler.Compile("crd.json")
			if err != nil {
				t.Fatal(err)
			}
			return compiled
		}
	}
	t.Fatalf("%s has no version %s", c[2], c[3])
	return nil
}

// strict closes every object whose fields are listed.
func strict(v any) {
	switch v := v.(type) {
	case map[string]any:
		_, fields := v["properties"].(map[string]any)
		_, open := v["x-kubernetes-preserve-unknown-fields"]
		if _, said := v["additionalProperties"]; fields && !open && !said && v["type"] == "object" {
			v["additionalProperties"] = false
		}
		for _, e := range v {
			strict(e)
		}
	case []any:
		for _, e := range v {
			strict(e)
		}
	}
}

func TestSchemas(t *testing.T) {
	for _, c := range []struct {
		file, schema string // no schema: the controller's own
		// broken is a change that the schema must refuse.
		from, to string
	}{
		{"cluster-image-policy.yaml", "", "subjectRegExp:", "subjectRegex:"},
		{"cluster-image-policy.yaml", "", "signatureFormat: bundle", "signatureForm: bundle"},
		{"kyverno.yaml", "", "kind: ClusterPolicy", "kind: ClusterPolice"},
		{"kyverno.yaml", "", "type: SigstoreBundle", "type: Bundle"},
		{"kyverno.yaml", "", "required: true", "require: true"},
		{"policy.json", "policy.schema.json", `"keyPath"`, `"keypath"`},
		{"policy.json", "policy.schema.json", `"matchRepository"`, `"matchAnything"`},
		{"registries.yaml", "registries.schema.json", "use-sigstore-attachments", "use-sigstore"},
	} {
		var s *jsonschema.Schema
		if c.schema == "" {
			s = crd(t, c.file)
		} else {
			s = schema(t, c.schema)
		}
		if err := s.Validate(load(t, c.file)); err != nil {
			t.Errorf("%s: %v", c.file, err)
		}
		text, err := os.ReadFile(c.file)
		if err != nil {
			t.Fatal(err)
		}
		broken := filepath.Join(t.TempDir(), c.file)
		if err := os.WriteFile(broken, bytes.ReplaceAll(text, []byte(c.from), []byte(c.to)), 0o600); err != nil {
			t.Fatal(err)
		}
		if s.Validate(load(t, broken)) == nil {
			t.Errorf("%s is still valid with %q in place of %q", c.file, c.to, c.from)
		}
	}
}

// find gives every string under a key, anywhere in the document.
func find(v any, key string) []string {
	var out []string
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if s, ok := e.(string); ok && k == key {
				out = append(out, s)
			}
			out = append(out, find(e, key)...)
		}
	case []any:
		for _, e := range v {
			out = append(out, find(e, key)...)
		}
	}
	return out
}

func TestIdentityAndPredicates(t *testing.T) {
	for file, key := range map[string]string{"cluster-image-policy.yaml": "predicateType", "kyverno.yaml": "type"} {
		doc := load(t, file)
		have := find(doc, key)
		// Tags and pins lead to the index: what is asked for must be attached there.
		have = slices.DeleteFunc(have, func(s string) bool { return !strings.HasPrefix(s, "https://") })
		for _, p := range have {
			if !slices.Contains(signing.OnIndex, p) {
				t.Errorf("%s asks for the attestation %s, which no index has", file, p)
			}
		}
		for _, p := range signing.OnIndex {
			if p != signing.Signature && !slices.Contains(have, p) { // an attestation is signed itself
				t.Errorf("%s does not ask for the attestation %s", file, p)
			}
		}
		expressions := find(doc, "subjectRegExp")
		if len(expressions) == 0 {
			t.Errorf("%s names no signer", file)
		}
		const workflow = "https://github.com/loomcycle/loomcycle-images/.github/workflows/release.yaml@"
		for _, e := range expressions {
			r := regexp.MustCompile(e)
			for identity, want := range map[string]bool{
				workflow + "refs/tags/v1.2.3":                                                 true,
				strings.Replace(workflow, ".yaml", ".yml", 1) + "refs/tags/v1.2.3":            true,
				workflow + "refs/heads/main":                                                  false,
				strings.Replace(workflow, "release", "ci", 1) + "refs/tags/v1.2.3":            false,
				strings.Replace(workflow, "loomcycle/", "evil/", 1) + "refs/tags/v1.2.3":      false,
				"https://example.test/?" + workflow + "refs/tags/v1.2.3":                      false,
				strings.Replace(workflow, "github.com", "githubxcom", 1) + "refs/tags/v1.2.3": false,
			} {
				if r.MatchString(identity) != want {
					t.Errorf("%s: %s matches %s: %v, want %v", file, e, identity, !want, want)
				}
			}
		}
	}
}

// The controller runs Rego of version 0 and asks for isCompliant.
func TestRegoOfClusterImagePolicy(t *testing.T) {
	var module string
	for _, text := range find(load(t, "cluster-image-policy.yaml"), "data") {
		module = text
	}
	const repository = "https://github.com/loomcycle/loomcycle-images"
	github := map[string]string{"GITHUB_ACTIONS": "true", "GITHUB_WORKFLOW_REF": "loomcycle/loomcycle-images/.github/workflows/release.yaml@refs/tags/v1.2.3"}
	for _, c := range []struct {
		name, repository string
		env              map[string]string
		want             bool
	}{
		{"a release", repository, github, true},
		{"a laptop's build", repository, nil, false},
		{"another repository", "https://github.com/evil/loomcycle-images", github, false},
	} {
		statement, err := provenance.Statement(provenance.Input{
			Image: "loomcycle", Platform: "linux/amd64", Digest: digest.FromString("m"), Version: "1.2.3", Repository: c.repository,
			Commit: strings.Repeat("a", 40), Lock: &lock.Lock{}, LockDigest: digest.FromString("l"), Worker: "amd64",
			Run: provenance.FromEnvironment(func(n string) string { return c.env[n] }, c.repository, "urn:uuid:1"),
		})
		if err != nil {
			t.Fatal(err)
		}
		var input any
		if err := json.Unmarshal(statement, &input); err != nil {
			t.Fatal(err)
		}
		got, err := rego.New(rego.SetRegoVersion(ast.RegoV0), rego.Module("policy.rego", module), rego.Query("data.sigstore.isCompliant"), rego.Input(input)).Eval(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != 1 || got[0].Expressions[0].Value != c.want {
			t.Errorf("%s: isCompliant is %v, want %v", c.name, got, c.want)
		}
	}
}

// skopeo reads policy.json with the library that podman and CRI-O have, and
// refuses what it does not know.
func TestContainersPolicyIsRead(t *testing.T) {
	skopeo := citest.Program(t, "skopeo", "apt-get install skopeo")
	text, err := os.ReadFile("policy.json")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, c := range map[string]struct {
		text []byte
		want string
	}{
		// The address is closed: the policy is read before anything is pulled.
		"good":   {bytes.ReplaceAll(text, []byte("registry.example"), []byte("127.0.0.1:1")), "connection refused"},
		"broken": {bytes.ReplaceAll(text, []byte("matchRepository"), []byte("matchAnything")), "matchAnything"},
	} {
		file := filepath.Join(dir, name+".json")
		if err := os.WriteFile(file, c.text, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), skopeo, "--policy", file, "copy", "docker://127.0.0.1:1/loomcycle/loomcycle:1", "dir:"+filepath.Join(dir, name)).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s policy: skopeo printed %q, want %q", name, out, c.want)
		}
	}
}

// The README's commands put an operator's registry in the place of every other.
func TestReadmeNamesTheRegistry(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```sh\n")
	commands, _, _ := strings.Cut(rest, "```")
	if n := strings.Count(commands, "kubectl apply -f -"); n != 2 {
		t.Fatalf("%d resources are applied:\n%s", n, commands)
	}
	out, err := exec.CommandContext(t.Context(), "sh", "-ec", strings.ReplaceAll(commands, "kubectl apply -f -", "cat")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Contains(string(out), "registry.example") || strings.Count(string(out), "MY.REGISTRY/PATH") < 2 {
		t.Errorf("a registry is left:\n%s", out)
	}
}
