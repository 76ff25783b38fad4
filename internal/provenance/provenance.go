// Package provenance states how a variant came to be: a SLSA v1 predicate
// with the builder, the parameters, and every locked source by its digest.
// Times and invocation ids are in it and in dist/build.json; no image has them.
package provenance

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	slsa "github.com/in-toto/attestation/go/predicates/provenance/v1"
	intoto "github.com/in-toto/attestation/go/v1"
	"github.com/opencontainers/go-digest"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/purl"
)

// PredicateType is SLSA's provenance, version 1.
const PredicateType = "https://slsa.dev/provenance/v1"

// Input is what a statement is made from.
type Input struct {
	Image, Platform  string
	Digest           digest.Digest // of the manifest
	Version          string
	Repository       string // https URL
	Commit           string // 40 hex digits, or with -dirty, or unknown
	Loomcycle        string // LOOMCYCLE_SOURCE as release.json has it: git:URL#COMMIT, dir:NAME#COMMIT, bin:NAME or empty
	Package, LDFlags string // LOOMCYCLE_PACKAGE and LOOMCYCLE_LDFLAGS, where they were set
	Epoch            int64
	Compression      string
	Groups           []string // of the layers
	Lock             *lock.Lock
	LockDigest       digest.Digest
	// Worker is the architecture (Debian's name) of the node that built it.
	Worker string
	// Compiled says that it has programs which the worker's locked Go
	// toolchain compiled.
	Compiled bool
	// Tools are groups whose packages, for the worker, made a layer and need
	// not be one: the C compilers of a Go cache, the Python of its bytecode.
	Tools []string
	// Modules are the Go modules linked into the programs.
	Modules []Module
	Run     Run
}

// Module is a Go module with the checksum database's hash (h1:...).
type Module struct{ Path, Version, H1 string }

// Run is where and when the build ran.
type Run struct {
	Builder    string
	Invocation string
	// Level is the SLSA build level that is true of this run; see FromEnvironment.
	Level             int
	Started, Finished time.Time // zero when not known
	Internal          map[string]any
}

// hosted are the builders that claim level 2: workflows of github.com for a
// tag, which are those that sign as themselves. policies/data.yaml would also
// believe one for a branch.
var hosted = regexp.MustCompile(`^https://github\.com/[^/]+/[^/]+/\.github/workflows/[^/@]+@refs/tags/.+$`)

// FromEnvironment says what ran the build. On a runner that GitHub hosts the
// platform makes the provenance's identity (its OIDC token signs it): build
// level 2. Level 3 would need the signing out of the workflow's reach, which
// it is not. Anywhere else, or with a key that the workflow holds, the
// provenance is the builder's own word: level 1. The job that signs may be
// another one: internal/signing puts no key under a higher level.
func FromEnvironment(getenv func(string) string, repository, invocation string) Run {
	if getenv("GITHUB_ACTIONS") != "true" {
		return Run{Builder: repository + "/builders/local", Invocation: invocation, Level: 1}
	}
	server := cmp.Or(getenv("GITHUB_SERVER_URL"), "https://github.com")
	run := Run{
		Builder:    server + "/" + getenv("GITHUB_WORKFLOW_REF"),
		Invocation: fmt.Sprintf("%s/%s/actions/runs/%s/attempts/%s", server, getenv("GITHUB_REPOSITORY"), getenv("GITHUB_RUN_ID"), cmp.Or(getenv("GITHUB_RUN_ATTEMPT"), "1")),
		Level:      1,
		Internal:   map[string]any{},
	}
	if getenv("RUNNER_ENVIRONMENT") == "github-hosted" && getenv("COSIGN_KEY") == "" && hosted.MatchString(run.Builder) {
		run.Level = 2
	}
	for key, name := range map[string]string{
		"event": "GITHUB_EVENT_NAME", "ref": "GITHUB_REF", "runner": "RUNNER_ENVIRONMENT", "repositoryId": "GITHUB_REPOSITORY_ID", "ownerId": "GITHUB_REPOSITORY_OWNER_ID",
	} {
		if v := getenv(name); v != "" {
			run.Internal[key] = v
		}
	}
	return run
}

// Statement makes the in-toto statement, as indented JSON.
func Statement(in Input) ([]byte, error) {
	sources, err := sources(in)
	if err != nil {
		return nil, fmt.Errorf("provenance of %s for %s: %w", in.Image, in.Platform, err)
	}
	options := map[string]any{
		"LOOMCYCLE_SOURCE":  in.Loomcycle,
		"SOURCE_DATE_EPOCH": fmt.Sprint(in.Epoch),
		"compression":       in.Compression,
	}
	for name, value := range map[string]string{"LOOMCYCLE_PACKAGE": in.Package, "LOOMCYCLE_LDFLAGS": in.LDFlags} {
		if value != "" {
			options[name] = value
		}
	}
	external, err := structpb.NewStruct(map[string]any{
		"source":   map[string]any{"uri": "git+" + in.Repository, "digest": in.Commit},
		"target":   "images:build",
		"image":    in.Image,
		"platform": in.Platform,
		"version":  in.Version,
		"options":  options,
	})
	if err != nil {
		return nil, err
	}
	internal := map[string]any{"slsaBuildLevel": in.Run.Level, "lock": in.LockDigest.String(), "worker": "linux/" + in.Worker}
	for k, v := range in.Run.Internal {
		internal[k] = v
	}
	internalParameters, err := structpb.NewStruct(internal)
	if err != nil {
		return nil, err
	}
	predicate := &slsa.Provenance{
		BuildDefinition: &slsa.BuildDefinition{
			BuildType:            in.Repository + "/build-types/image/v1",
			ExternalParameters:   external,
			InternalParameters:   internalParameters,
			ResolvedDependencies: sources,
		},
		RunDetails: &slsa.RunDetails{
			Builder:  &slsa.Builder{Id: in.Run.Builder},
			Metadata: &slsa.BuildMetadata{InvocationId: in.Run.Invocation, StartedOn: stamp(in.Run.Started), FinishedOn: stamp(in.Run.Finished)},
		},
	}
	if err := predicate.Validate(); err != nil {
		return nil, fmt.Errorf("provenance of %s for %s: %w", in.Image, in.Platform, err)
	}
	raw, err := protojson.Marshal(predicate)
	if err != nil {
		return nil, err
	}
	body := new(structpb.Struct)
	if err := protojson.Unmarshal(raw, body); err != nil {
		return nil, err
	}
	statement := &intoto.Statement{
		Type:          intoto.StatementTypeUri,
		Subject:       []*intoto.ResourceDescriptor{{Name: in.Image, Digest: map[string]string{in.Digest.Algorithm().String(): in.Digest.Encoded()}}},
		PredicateType: PredicateType,
		Predicate:     body,
	}
	if err := statement.Validate(); err != nil {
		return nil, fmt.Errorf("statement for %s %s: %w", in.Image, in.Platform, err)
	}
	if raw, err = protojson.Marshal(statement); err != nil {
		return nil, err
	}
	// protojson varies its white space on purpose; encoding/json does not.
	var buf bytes.Buffer
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return nil, err
	}
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t.UTC().Truncate(time.Second))
}

// sources lists what the variant is made of, without saying which mirror
// served it: any mirror serves the same digest.
func sources(in Input) ([]*intoto.ResourceDescriptor, error) {
	arch := path.Base(in.Platform)
	out := []*intoto.ResourceDescriptor{git(in.Repository, in.Commit, "source")}
	if in.Loomcycle != "" {
		out = append(out, loomcycle(in.Loomcycle))
	}
	add := func(uri string, sum digest.Digest, name string) error {
		if err := sum.Validate(); err != nil {
			return fmt.Errorf("%s has no digest in the lock: %w", uri, err)
		}
		out = append(out, &intoto.ResourceDescriptor{Uri: uri, Name: name, Digest: map[string]string{sum.Algorithm().String(): sum.Encoded()}})
		return nil
	}
	listed := map[digest.Digest]bool{} // a package for all architectures may be in the image and among the tools
	for _, from := range []struct {
		arch   string
		groups []string
	}{{arch, in.Groups}, {in.Worker, in.Tools}} {
		for _, p := range in.Lock.Debian[from.arch] {
			if !slices.Contains(from.groups, p.Group) || listed[p.SHA256] {
				continue
			}
			listed[p.SHA256] = true
			if err := add(purl.Debian(p), p.SHA256, path.Base(p.Path)); err != nil {
				return nil, err
			}
		}
	}
	if _, ok := in.Lock.Go[in.Worker]; (in.Compiled || len(in.Tools) > 0) && !ok {
		return nil, fmt.Errorf("it was built on the worker %q, for which the lock has no Go toolchain; build again", in.Worker)
	}
	for _, a := range slices.Compact(slices.Sorted(slices.Values([]string{arch, in.Worker}))) {
		m, ok := in.Lock.Go[a]
		if !ok || !(a == arch && slices.Contains(in.Groups, "go") || a == in.Worker && in.Compiled) {
			continue
		}
		if err := add(purl.Go(m, a), m.SHA256, path.Base(m.Path)); err != nil {
			return nil, err
		}
	}
	if slices.Contains(in.Groups, "node") {
		for _, p := range in.Lock.NPM[arch] {
			if err := add(purl.NPM(p), p.SHA256, path.Base(p.Path)); err != nil {
				return nil, err
			}
		}
	}
	for _, m := range in.Modules {
		sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.H1, "h1:"))
		if err != nil || len(sum) != 32 {
			return nil, fmt.Errorf("module %s %s has the checksum %q, which is not an h1 hash", m.Path, m.Version, m.H1)
		}
		// dirHash is in-toto's name for Go's h1 hash, in hexadecimal (DigestSet, dirHash).
		out = append(out, &intoto.ResourceDescriptor{
			Uri: "pkg:golang/" + m.Path + "@" + m.Version, Name: m.Path,
			Digest: map[string]string{"dirHash": hex.EncodeToString(sum)},
		})
	}
	return out, nil
}

func git(repository, commit, name string) *intoto.ResourceDescriptor {
	d := &intoto.ResourceDescriptor{Uri: "git+" + repository, Name: name}
	if clean, dirty := strings.CutSuffix(commit, "-dirty"); len(clean) == 40 {
		d.Digest = map[string]string{"gitCommit": clean}
		if dirty {
			d.Annotations, _ = structpb.NewStruct(map[string]any{"modified": true})
		}
	}
	return d
}

func loomcycle(label string) *intoto.ResourceDescriptor {
	kind, rest, _ := strings.Cut(label, ":")
	where, commit, _ := strings.Cut(rest, "#")
	if kind == "git" {
		return git(where, commit, "loomcycle")
	}
	d := git(where, commit, "loomcycle")
	d.Uri = kind + ":" + where
	return d
}
