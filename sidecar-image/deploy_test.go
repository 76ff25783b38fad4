// Package sidecarimage checks what operators deploy and read against the
// sidecar's own tables: the bundle, the Compose files, the Kustomize base and
// the guides.
package sidecarimage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/kustomize/kyaml/openapi"
	kyaml "sigs.k8s.io/kustomize/kyaml/yaml"
	k8syaml "sigs.k8s.io/yaml"

	"github.com/loomcycle/loomcycle-images/bundles"
	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
)

var update = flag.Bool("update", false, "write the tables of variables and limits into docs/SANDBOX.md")

const (
	repo    = ".."
	compose = repo + "/bundles/sandbox/compose"
	kube    = repo + "/bundles/sandbox/kustomize"
)

// bundle is bundle.yaml. Which fields there are is the schema's matter.
type bundle struct {
	Servers map[string]struct {
		URL     string            `yaml:"url"`
		Headers map[string]string `yaml:"headers"`
		Timeout int64             `yaml:"timeout_seconds"`
	} `yaml:"mcp_servers"`
	Agents map[string]struct {
		Server string   `yaml:"server"`
		Tools  []string `yaml:"tools"`
		Skills []string `yaml:"skills"`
		Input  any      `yaml:"input"`
	} `yaml:"agents"`
	Skills map[string]struct {
		File  string   `yaml:"file"`
		Tools []string `yaml:"tools"`
	} `yaml:"skills"`
}

func readBundle(t *testing.T) (b bundle, any any) {
	t.Helper()
	text, err := fs.ReadFile(bundles.Files(), "sandbox/bundle.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &any); err != nil {
		t.Fatal(err)
	}
	return b, any
}

func bundleSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	text, err := fs.ReadFile(bundles.Files(), "bundle.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("bundle.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("bundle.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serverTools are the sidecar's tools as a client sees them.
func serverTools(t *testing.T) map[string]*mcp.Tool {
	t.Helper()
	srv := mcp.NewServer(&mcp.Implementation{Name: "sidecar"}, nil)
	(&tools.Tools{Config: &config.Config{}}).Register(srv)
	client, server := mcp.NewInMemoryTransports()
	ss, err := srv.Connect(t.Context(), server, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ss.Close()
	cs, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(t.Context(), client, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer cs.Close()
	out := map[string]*mcp.Tool{}
	for tool, err := range cs.Tools(t.Context(), nil) {
		if err != nil {
			t.Fatal(err)
		}
		out[tool.Name] = tool
	}
	return out
}

func TestBundleIsValid(t *testing.T) {
	schema := bundleSchema(t)
	_, doc := readBundle(t)
	if err := schema.Validate(doc); err != nil {
		t.Error(err)
	}
	// The schema refuses what it should.
	for name, wrong := range map[string]string{
		"unknown field": "{name: x, description: x, mcp_server: {}}",
		"no url":        "{name: x, description: x, mcp_servers: {s: {headers: {}}}}",
		"no tools":      "{name: x, description: x, agents: {a/b: {description: x, executor: x, tools: []}}}",
		"tool pattern":  "{name: x, description: x, agents: {a/b: {description: x, executor: x, tools: ['*']}}}",
		"agent name":    "{name: x, description: x, agents: {a: {description: x, executor: x, tools: [Bash]}}}",
		"skill outside": "{name: x, description: x, skills: {a/b: {description: x, file: ../x.md}}}",
		"input":         "{name: x, description: x, agents: {a/b: {description: x, executor: x, tools: [Bash], input: {type: thing}}}}",
	} {
		var doc any
		if err := yaml.Unmarshal([]byte(wrong), &doc); err != nil {
			t.Fatal(err)
		}
		if schema.Validate(doc) == nil {
			t.Errorf("%s: the schema accepts %s", name, wrong)
		}
	}
}

// Everything that the bundle refers to is there: tools of the sidecar, skills,
// servers, variables and headers that either side reads.
func TestBundleRefersToWhatIsThere(t *testing.T) {
	b, _ := readBundle(t)
	have := serverTools(t)
	covered := func(where string, patterns []string) {
		for _, p := range patterns {
			rest, ok := strings.CutPrefix(p, "mcp__sandbox__")
			hits := 0
			for name := range have {
				if hit, _ := path.Match(rest, name); ok && hit {
					hits++
				}
			}
			if hits == 0 {
				t.Errorf("%s: %s covers none of the sidecar's tools %v", where, p, slices.Sorted(maps.Keys(have)))
			}
		}
	}
	for name, a := range b.Agents {
		covered(name, a.Tools)
		if _, ok := b.Servers[a.Server]; !ok {
			t.Errorf("%s: there is no server %q", name, a.Server)
		}
		for _, s := range a.Skills {
			if _, ok := b.Skills[s]; !ok {
				t.Errorf("%s: there is no skill %q", name, s)
			}
		}
	}
	for name, s := range b.Skills {
		covered(name, s.Tools)
	}
	for _, name := range []string{"dev/sandbox-usage", "team/sandbox-code-review"} {
		if _, ok := b.Skills[name]; !ok {
			t.Errorf("skill %s is missing", name)
		}
	}
	server := b.Servers["sandbox"]
	want := map[string]string{"Authorization": "Bearer ${SANDBOX_AUTH_TOKEN}", "X-Loom-Root-Run": "${run.root_run_id}", "X-Loom-Tenant": "${run.tenant_id}"}
	if !maps.Equal(server.Headers, want) {
		t.Errorf("headers %v; want %v", server.Headers, want)
	}
	c, err := config.Load(func(string) string { return "" })
	if c == nil {
		t.Fatal(err)
	}
	if server.Timeout <= int64(c.MaxTimeout.Seconds()) {
		t.Errorf("the runtime gives up after %d s and the sidecar after %v: the sidecar has to be first", server.Timeout, c.MaxTimeout)
	}
}

// The agent's input is what the runtime's contract names, as a schema that
// works.
func TestAgentInput(t *testing.T) {
	b, _ := readBundle(t)
	c := jsonschema.NewCompiler()
	if err := c.AddResource("input.json", b.Agents["dev/sandbox"].Input); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("input.json")
	if err != nil {
		t.Fatal(err)
	}
	fields := slices.Sorted(maps.Keys(s.Properties))
	if want := strings.Fields("close commands continue_on_error files keep_open network read session_id workspace"); !slices.Equal(fields, want) {
		t.Errorf("fields %v; want %v", fields, want)
	}
	for envelope, ok := range map[string]bool{
		`{"files": {"main.go": "package main"}, "commands": ["go build ./..."], "read": ["main"], "keep_open": true}`: true,
		`{}`: true, `{"command": "ls"}`: false, `{"commands": "ls"}`: false, `{"network": "host"}`: false, `{"workspace": "../x"}`: false,
	} {
		var v any
		if err := json.Unmarshal([]byte(envelope), &v); err != nil {
			t.Fatal(err)
		}
		if err := s.Validate(v); (err == nil) != ok {
			t.Errorf("%s: %v", envelope, err)
		}
	}
}

var (
	fence    = regexp.MustCompile("(?s)```json\n(.*?)```")
	toolName = regexp.MustCompile(`\bsandbox_[a-z_]+\b`)
)

// Each call in a skill is one that the sidecar accepts, and each tool that it
// speaks of is there.
func TestSkills(t *testing.T) {
	b, _ := readBundle(t)
	have := serverTools(t)
	for name, skill := range b.Skills {
		text, err := fs.ReadFile(bundles.Files(), "sandbox/"+skill.File)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, tool := range toolName.FindAllString(string(text), -1) {
			if have[tool] == nil {
				t.Errorf("%s speaks of %s, which is no tool", name, tool)
			}
			if !slices.ContainsFunc(skill.Tools, func(p string) bool { ok, _ := path.Match(p, "mcp__sandbox__"+tool); return ok }) {
				t.Errorf("%s speaks of %s, which its tools do not cover", name, tool)
			}
		}
		calls := fence.FindAllStringSubmatch(string(text), -1)
		if len(calls) == 0 {
			t.Errorf("%s shows no call", name)
		}
		for _, m := range calls {
			var call struct {
				Tool      string `json:"tool"`
				Arguments any    `json:"arguments"`
			}
			if err := json.Unmarshal([]byte(m[1]), &call); err != nil {
				t.Errorf("%s: %s: %v", name, m[1], err)
				continue
			}
			if err := acceptable(have[call.Tool], call.Arguments); err != nil {
				t.Errorf("%s: %s: %v", name, m[1], err)
			}
		}
	}
}

func acceptable(tool *mcp.Tool, args any) error {
	if tool == nil {
		return errors.New("there is no such tool")
	}
	text, err := json.Marshal(tool.InputSchema)
	if err != nil {
		return err
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("in.json", doc); err != nil {
		return err
	}
	s, err := c.Compile("in.json")
	if err != nil {
		return err
	}
	return s.Validate(args)
}

// variables are those that an operator sets for the Compose files.
var variables = []string{
	"LOOMCYCLE_REGISTRY=registry.example/loomcycle", "LOOMCYCLE_AUTH_TOKEN=runtime-token", "SANDBOX_AUTH_TOKEN=sandbox-token", "DOCKER_GID=999",
	"LOOMCYCLE_DIGEST=" + digest, "LOOMCYCLE_BUILDER_DIGEST=" + digest, "LOOMCYCLE_BUILDER_DOCKER_DIGEST=" + digest, "LOOMCYCLE_SESSION_DIGEST=" + digest,
}

const digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

func loadCompose(ctx context.Context, file string, env []string) (*types.Project, error) {
	o, err := cli.NewProjectOptions([]string{filepath.Join(compose, file)}, cli.WithEnv(env))
	if err != nil {
		return nil, err
	}
	return o.LoadProject(ctx)
}

// Each Compose file is valid by the Compose specification, and its sidecar has
// what the image and the sidecar's own table say.
func TestCompose(t *testing.T) {
	for file, want := range map[string]struct {
		image      string
		privileged bool
		runtime    string
		socket     bool
	}{
		"privileged.yaml": {image: "loomcycle-builder", privileged: true},
		"sysbox.yaml":     {image: "loomcycle-builder", runtime: "sysbox-runc"},
		"socket.yaml":     {image: "loomcycle-builder-docker", socket: true},
	} {
		t.Run(file, func(t *testing.T) {
			p, err := loadCompose(t.Context(), file, variables)
			if err != nil {
				t.Fatal(err)
			}
			s, ok := p.Services["sandbox"]
			if !ok || s.Image != "registry.example/loomcycle/"+want.image+"@"+digest || s.Privileged != want.privileged || s.Runtime != want.runtime {
				t.Errorf("sandbox: image %q, privileged %v, runtime %q; want %+v", s.Image, s.Privileged, s.Runtime, want)
			}
			env := map[string]string{}
			for k, v := range s.Environment {
				if v != nil {
					env[k] = *v
				}
			}
			img := definition(t, want.image)
			checkEnv(t, env, img)
			mounted := map[string]string{}
			for _, v := range s.Volumes {
				mounted[v.Target] = v.Source
			}
			if _, ok := mounted["/var/run/docker.sock"]; ok != want.socket {
				t.Errorf("mounts %v; the socket among them is %v", mounted, want.socket)
			}
			if !want.socket && mounted["/var/lib/containers"] == "" {
				t.Errorf("mounts %v; the kernel's overlay needs a volume at /var/lib/containers", mounted)
			}
			state := env["SANDBOX_STATE_DIR"]
			if state == "" {
				if state, err = img.Env("SANDBOX_STATE_DIR"); err != nil {
					state = defaultOf("SANDBOX_STATE_DIR")
				}
			}
			for _, dir := range []string{state, env["SANDBOX_WORKSPACE_ROOT"]} {
				if mounted[dir] == "" {
					t.Errorf("%s would be lost with the container; mounts %v", dir, mounted)
				}
			}
			if want.socket && mounted[env["SANDBOX_WORKSPACE_ROOT"]] != env["SANDBOX_WORKSPACE_ROOT"] {
				t.Errorf("the engine sees the workspaces at another path: %v", mounted)
			}
			// One token, one name.
			r := p.Services["loomcycle"]
			if v := r.Environment["SANDBOX_AUTH_TOKEN"]; v == nil || *v != env["SANDBOX_AUTH_TOKEN"] {
				t.Error("runtime and sidecar have different tokens")
			}
			if v := r.Environment["LOOMCYCLE_AUTH_TOKEN"]; v == nil || *v != env["SANDBOX_RUN_STATUS_TOKEN"] {
				t.Error("the sidecar asks the runtime with another token than the runtime knows")
			}
			if !r.ReadOnly || !slices.Contains(r.CapDrop, "ALL") || len(r.CapAdd) > 0 || !slices.Equal(r.SecurityOpt, []string{"no-new-privileges:true"}) {
				t.Error("the runtime is not hardened")
			}
			// It can only ask: nothing of the host is its own.
			if r.Privileged || r.User != "" || len(r.Devices) > 0 || len(r.GroupAdd) > 0 || len(r.VolumesFrom) > 0 || r.Pid != "" || r.Ipc != "" || r.NetworkMode != "" || r.UserNSMode != "" {
				t.Errorf("the runtime has of the host what it does not need: %+v", r)
			}
			for _, v := range r.Volumes {
				if v.Type != types.VolumeTypeVolume || p.Volumes[v.Source].Driver != "" || len(p.Volumes[v.Source].DriverOpts) > 0 || strings.Contains(v.Source+v.Target, "docker.sock") {
					t.Errorf("the runtime mounts more than volumes: %+v", v)
				}
			}
			if s.HealthCheck == nil || !slices.Equal(s.HealthCheck.Test, []string{"CMD", img.Config.Entrypoint[0], "healthcheck"}) {
				t.Errorf("health check %+v", s.HealthCheck)
			}
		})
	}
}

// A variable that is not set is asked for, not guessed.
func TestComposeAsksForItsVariables(t *testing.T) {
	for i, v := range variables {
		name, _, _ := strings.Cut(v, "=")
		env := slices.Delete(slices.Clone(variables), i, i+1)
		asked := false
		for _, file := range []string{"privileged.yaml", "socket.yaml"} {
			_, err := loadCompose(t.Context(), file, env)
			asked = asked || err != nil && strings.Contains(err.Error(), name)
		}
		if !asked {
			t.Errorf("no file asks for %s", name)
		}
	}
}

func definition(t *testing.T, name string) *images.Image {
	t.Helper()
	f, err := images.Load(os.DirFS(repo))
	if err != nil {
		t.Fatal(err)
	}
	img, err := f.Image(name)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func defaultOf(name string) string {
	i := slices.IndexFunc(config.Vars, func(v config.Var) bool { return v.Name == name })
	return config.Vars[i].Default
}

// checkEnv loads an environment, on top of the image's own, as the sidecar
// would, and refuses names that it does not read.
func checkEnv(t *testing.T, env map[string]string, img *images.Image) {
	t.Helper()
	for name := range env {
		if !slices.ContainsFunc(config.Vars, func(v config.Var) bool { return v.Name == name }) {
			t.Errorf("the sidecar reads no variable %s", name)
		}
	}
	if _, err := config.Load(func(name string) string {
		if v, ok := env[name]; ok {
			return v
		}
		v, _ := img.Env(name)
		return v
	}); err != nil {
		t.Error(err)
	}
}

// The images' own environments name variables of the sidecar's.
func TestImageEnvironments(t *testing.T) {
	for _, name := range []string{"loomcycle-builder", "loomcycle-builder-docker"} {
		img := definition(t, name)
		env := map[string]string{"SANDBOX_IMAGE": "x"}
		for _, kv := range img.Config.Env {
			if k, v, _ := strings.Cut(kv, "="); strings.HasPrefix(k, "SANDBOX_") {
				env[k] = v
			}
		}
		checkEnv(t, env, img)
		c, err := config.Load(func(name string) string { return env[name] })
		if err != nil {
			t.Fatal(err)
		}
		if dir, agent := path.Split(c.Agent); !slices.Contains(img.Programs, agent) || dir != "/usr/local/bin/" {
			t.Errorf("%s: SANDBOX_AGENT=%s is not where its programs are", name, c.Agent)
		}
	}
}

// required are fields that the API's validation asks for and its schema does not say,
// as other objects have them in other ways.
var required = map[string][][]string{
	"":            {{"metadata", "name"}},
	"StatefulSet": {{"spec", "template", "spec", "containers", "*", "image"}, {"spec", "volumeClaimTemplates", "*", "metadata", "name"}, {"spec", "volumeClaimTemplates", "*", "spec", "accessModes", "0"}, {"spec", "volumeClaimTemplates", "*", "spec", "resources", "requests", "storage"}},
	"Service":     {{"spec", "ports", "*", "port"}},
}

// lacking lists the fields that the API requires, by its published schema and by required,
// and an object does not have.
func lacking(t *testing.T, object map[string]any) []string {
	t.Helper()
	api, _ := object["apiVersion"].(string)
	kind, _ := object["kind"].(string)
	schema := openapi.SchemaForResourceType(kyaml.TypeMeta{APIVersion: api, Kind: kind})
	if schema == nil {
		t.Fatalf("the API has no %s of %s", kind, api)
	}
	out := bySchema(schema, kind, object)
	for _, fields := range slices.Concat(required[""], required[kind]) {
		out = append(out, byPath(kind, object, fields)...)
	}
	return out
}

func bySchema(schema *openapi.ResourceSchema, at string, v any) (out []string) {
	switch v := v.(type) {
	case map[string]any:
		for _, name := range schema.Schema.Required {
			if v[name] == nil {
				out = append(out, at+"."+name)
			}
		}
		for name, child := range v {
			if field := schema.Field(name); field != nil {
				out = append(out, bySchema(field, at+"."+name, child)...)
			}
		}
	case []any:
		for i, child := range v {
			if element := schema.Elements(); element != nil {
				out = append(out, bySchema(element, fmt.Sprintf("%s.%d", at, i), child)...)
			}
		}
	}
	return out
}

func byPath(at string, v any, fields []string) (out []string) {
	if len(fields) == 0 {
		if v == nil || v == "" {
			return []string{at}
		}
		return nil
	}
	switch x := v.(type) {
	case map[string]any:
		return byPath(at+"."+fields[0], x[fields[0]], fields[1:])
	case []any:
		for i, child := range x {
			if n := strconv.Itoa(i); fields[0] == "*" || fields[0] == n {
				out = append(out, byPath(at+"."+n, child, fields[1:])...)
			}
		}
		if len(x) > 0 {
			return out
		}
	}
	return []string{at + "." + strings.Join(fields, ".")}
}

// The example overlay renders, every object is one that the API's types know
// to the last field and has those that the API requires, and what they refer to is there.
func TestKustomize(t *testing.T) {
	rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(kube, "example"))
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.StatefulSet
	var service corev1.Service
	var policy networkingv1.NetworkPolicy
	var settings corev1.ConfigMap
	var namespace corev1.Namespace
	into := map[string]any{"StatefulSet": &set, "Service": &service, "NetworkPolicy": &policy, "ConfigMap": &settings, "Namespace": &namespace}
	for _, r := range rendered.Resources() {
		text, err := r.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		if into[r.GetKind()] == nil {
			t.Fatalf("a second or unexpected %s:\n%s", r.GetKind(), text)
		}
		if err := k8syaml.UnmarshalStrict(text, into[r.GetKind()]); err != nil {
			t.Errorf("%s %s: %v", r.GetKind(), r.GetName(), err)
		}
		object, err := r.Map()
		if err != nil {
			t.Fatal(err)
		}
		if fields := lacking(t, object); len(fields) > 0 {
			t.Errorf("%s %s lacks %v", r.GetKind(), r.GetName(), fields)
		}
		delete(into, r.GetKind())
	}
	if len(into) > 0 {
		t.Fatalf("missing: %v", slices.Sorted(maps.Keys(into)))
	}
	pod := set.Spec.Template
	c := pod.Spec.Containers[0]
	img := definition(t, "loomcycle-builder")
	if c.Image != "registry.example/loomcycle/loomcycle-builder@"+digest {
		t.Errorf("image %s: the overlay does not set it", c.Image)
	}
	for what, selector := range map[string]map[string]string{"the service": service.Spec.Selector, "the policy": policy.Spec.PodSelector.MatchLabels, "the set": set.Spec.Selector.MatchLabels} {
		if len(selector) == 0 {
			t.Errorf("%s selects every pod", what)
		}
		for k, v := range selector {
			if pod.Labels[k] != v {
				t.Errorf("%s selects %s=%s, which the pod has not: %v", what, k, v, pod.Labels)
			}
		}
	}
	port := fmt.Sprintf("%d/tcp", c.Ports[0].ContainerPort)
	if !slices.Contains(img.Config.Ports, port) || service.Spec.Ports[0].TargetPort.StrVal != c.Ports[0].Name || policy.Spec.Ingress[0].Ports[0].Port.StrVal != c.Ports[0].Name {
		t.Errorf("ports: image %v, container %v, service %v", img.Config.Ports, c.Ports, service.Spec.Ports)
	}
	letIn(t, policy)
	b, _ := readBundle(t)
	if endpoint := fmt.Sprintf("http://%s:%d/mcp", service.Name, service.Spec.Ports[0].Port); !strings.Contains(b.Servers["sandbox"].URL, endpoint) {
		t.Errorf("the bundle's endpoint %s is not the service's %s", b.Servers["sandbox"].URL, endpoint)
	}
	if set.Spec.ServiceName != service.Name {
		t.Errorf("the set names the service %s", set.Spec.ServiceName)
	}
	if c.EnvFrom[0].ConfigMapRef.Name != settings.Name {
		t.Errorf("the container reads %s; the settings are %s", c.EnvFrom[0].ConfigMapRef.Name, settings.Name)
	}
	env := maps.Clone(settings.Data)
	for _, e := range c.Env {
		env[e.Name] = "from a secret"
		if e.ValueFrom == nil || e.ValueFrom.SecretKeyRef == nil || e.ValueFrom.SecretKeyRef.Key != e.Name {
			t.Errorf("%s: the secret's key should have the variable's name", e.Name)
		}
	}
	env["SANDBOX_AUTH_TOKEN"] = "one-token-of-enough-length"
	checkEnv(t, env, img)
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
	}
	for _, v := range set.Spec.VolumeClaimTemplates {
		volumes[v.Name] = true
	}
	claimLabels(t, set)
	for _, m := range c.VolumeMounts {
		if !volumes[m.Name] {
			t.Errorf("%s mounts %s, which is no volume", m.MountPath, m.Name)
		}
		delete(volumes, m.Name)
	}
	if len(volumes) > 0 {
		t.Errorf("volumes that nothing mounts: %v", volumes)
	}
	if namespace.Labels["pod-security.kubernetes.io/enforce"] != "privileged" || set.Namespace != namespace.Name {
		t.Errorf("the namespace %s does not admit the pod of %s", namespace.Name, set.Namespace)
	}
}

// claimLabels checks that the claims' labels, which an API server refuses to have changed, are in
// the file itself, as all that were deployed have them: whether includeTemplates labels claims
// depends on the version of kustomize.
func claimLabels(t *testing.T, rendered appsv1.StatefulSet) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(kube, "base", "statefulset.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file appsv1.StatefulSet
	if err := k8syaml.UnmarshalStrict(text, &file); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"app.kubernetes.io/name": "loomcycle-builder", "app.kubernetes.io/part-of": "loomcycle"}
	for _, set := range []appsv1.StatefulSet{file, rendered} {
		for _, claim := range set.Spec.VolumeClaimTemplates {
			if !maps.Equal(claim.Labels, want) {
				t.Errorf("the claim %s has the labels %v", claim.Name, claim.Labels)
			}
		}
	}
}

// letIn checks whom the policy lets in: runtimes, from their pods as another kustomization would label
// them, and Prometheus, where an administrator wants that.
func letIn(t *testing.T, policy networkingv1.NetworkPolicy) {
	t.Helper()
	has := func(labels, wanted map[string]string) bool {
		for k, v := range wanted {
			if labels[k] != v {
				return false
			}
		}
		return len(wanted) > 0
	}
	type labels map[string]string
	watched := labels{"kubernetes.io/metadata.name": "monitoring", "loomcycle-sandbox-metrics": "true"}
	runtime, prometheus := labels{"app.kubernetes.io/name": "loomcycle", "loomcycle-sandbox-client": "true"}, labels{"app.kubernetes.io/name": "prometheus"}
	for _, tc := range []struct {
		namespace, pod labels // no namespace is the policy's own
		in             bool
	}{
		{nil, runtime, true}, {nil, labels{"loomcycle-sandbox-client": "true"}, true}, {nil, labels{"app.kubernetes.io/name": "loomcycle"}, false}, {nil, prometheus, false},
		{watched, prometheus, true}, {watched, runtime, false}, {labels{"kubernetes.io/metadata.name": "other"}, prometheus, false}, {labels{"kubernetes.io/metadata.name": "other"}, runtime, false},
	} {
		in := false
		for _, peer := range policy.Spec.Ingress[0].From {
			if peer.IPBlock != nil || peer.PodSelector == nil || len(peer.PodSelector.MatchExpressions) > 0 {
				t.Fatalf("this test does not read %+v", peer)
			}
			there := tc.namespace == nil
			if peer.NamespaceSelector != nil {
				there = has(tc.namespace, peer.NamespaceSelector.MatchLabels)
			}
			in = in || there && has(tc.pod, peer.PodSelector.MatchLabels)
		}
		if in != tc.in || len(policy.Spec.Ingress) != 1 {
			t.Errorf("of namespace %v the pod %v is let in: %v", tc.namespace, tc.pod, in)
		}
	}
}

// Each field that a cluster would refuse an object without is missed.
func TestLacking(t *testing.T) {
	rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(kube, "example"))
	if err != nil {
		t.Fatal(err)
	}
	for _, without := range []string{
		"StatefulSet.metadata.name", "StatefulSet.spec.selector", "StatefulSet.spec.template", "StatefulSet.spec.serviceName", "StatefulSet.spec.template.spec.containers", "StatefulSet.spec.template.spec.containers.0.name",
		"StatefulSet.spec.template.spec.containers.0.image", "StatefulSet.spec.template.spec.containers.0.env.0.name", "StatefulSet.spec.template.spec.containers.0.ports.0.containerPort", "StatefulSet.spec.template.spec.containers.0.volumeMounts.1.mountPath",
		"StatefulSet.spec.template.spec.containers.0.readinessProbe.httpGet.port", "StatefulSet.spec.volumeClaimTemplates.1.spec.accessModes", "StatefulSet.spec.volumeClaimTemplates.0.spec.resources.requests.storage", "StatefulSet.spec.volumeClaimTemplates.0.metadata.name",
		"Service.metadata.name", "Service.spec.ports.0.port", "NetworkPolicy.spec.podSelector", "ConfigMap.metadata.name", "Namespace.metadata.name",
	} {
		fields := strings.Split(without, ".")
		for _, r := range rendered.Resources() {
			if r.GetKind() != fields[0] {
				continue
			}
			object, err := r.Map()
			if err != nil {
				t.Fatal(err)
			}
			var at any = object
			for _, name := range fields[1 : len(fields)-1] {
				if list, ok := at.([]any); ok {
					i, _ := strconv.Atoi(name)
					at = list[i]
				} else {
					at = at.(map[string]any)[name]
				}
			}
			last := fields[len(fields)-1]
			if _, ok := at.(map[string]any)[last]; !ok {
				t.Errorf("there is no %s", without)
			}
			delete(at.(map[string]any), last)
			if got := lacking(t, object); !slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, without) }) {
				t.Errorf("without %s it misses %v", without, got)
			}
		}
	}
}

// docs/SANDBOX.md has the table of variables as the sidecar knows it.
func TestVariablesAreDocumented(t *testing.T) {
	var want bytes.Buffer
	config.Markdown(&want)
	documented(t, "variables", want.String())
}

var (
	variable = regexp.MustCompile(`\bSANDBOX_[A-Z0-9_]+\b`)
	link     = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
)

// The guides speak of variables that exist and link to files that exist.
func TestGuides(t *testing.T) {
	for _, guide := range []string{"docs/SANDBOX.md", "sidecar-image/README.md", "session-image/README.md", "toolbox/README.md", "images/README.md", "bundles/sandbox/README.md"} {
		text, err := os.ReadFile(filepath.Join(repo, guide))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, name := range variable.FindAllString(string(text), -1) {
			if strings.HasPrefix(name, "SANDBOX_TEST_") { // read by tests
				continue
			}
			if name = strings.TrimSuffix(name, "_"); !slices.ContainsFunc(config.Vars, func(v config.Var) bool { return strings.HasPrefix(v.Name, name) }) {
				t.Errorf("%s speaks of %s, which the sidecar does not read", guide, name)
			}
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(repo, filepath.Dir(guide), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", guide, m[1], err)
			}
		}
	}
}
