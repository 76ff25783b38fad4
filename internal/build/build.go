// Package build turns the family's definitions into a dist folder: it makes
// the graph, has BuildKit solve it on the right nodes, and lays out what
// comes back.
package build

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/identity"
	"github.com/moby/buildkit/session"
	"github.com/moby/buildkit/session/secrets/secretsprovider"
	digest "github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/tonistiigi/fsutil"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/vcs"
)

// Options say what to build and where.
type Options struct {
	Root     string   // the checkout
	Dist     string   // the result; Root/dist when empty
	Images   []string // names; the whole family when empty
	Platform []string // linux/amd64 and linux/arm64 when empty
	Getenv   func(string) string
	Log      io.Writer
	// Builder runs the solves; one is found when nil.
	Builder *buildkit.Builder
}

// builder holds what every part of one build needs.
type builder struct {
	Options
	family   *images.Family
	groups   lock.Groups
	lock     *lock.Lock
	locked   digest.Digest
	state    vcs.State
	build    images.Build
	cache    string
	compress dist.Compressor
	sources  *sources
	runtime  loomcycle
	goproxy  string               // as a compile step reads it
	modules  map[string]fsutil.FS // the folders that it names
	id       string               // tells the local sources of this build from another's
}

// Run builds into the dist folder, which is replaced in one step when
// everything is there, and not touched otherwise.
func Run(ctx context.Context, o Options) (release *dist.Release, err error) {
	started := time.Now()
	b, err := load(ctx, o)
	if err != nil {
		return nil, err
	}
	if b.Builder == nil {
		conn, err := buildkit.Connect(ctx, buildkit.Options{Getenv: b.Getenv, Log: b.Log, Platforms: b.Platform, Root: b.Root, Programs: programs(b.Getenv)})
		if err != nil {
			return nil, explain(err)
		}
		defer conn.Close()
		b.Builder = conn
	}
	if err := host.Need(ctx, b.Log, programs(b.Getenv)...); err != nil {
		return nil, explain(err)
	}
	stage, err := dist.Stage(b.Dist, b.compress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stage.Discard()) }()
	variants, err := b.solve(ctx, stage)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	manifests := make([]digest.Digest, len(variants))
	for i, v := range variants {
		manifests[i] = v.manifest
	}
	size, err := stage.Compress(ctx, manifests)
	if err != nil {
		return nil, err
	}
	if size > 0 {
		fmt.Fprintf(b.Log, "build: compressed %d MB of layers in %s\n", size/1e6, time.Since(start).Round(100*time.Millisecond))
	}
	made := dist.Made{Started: started.UTC(), Finished: time.Now().UTC(), Workers: map[string]string{}}
	for _, platform := range b.Platform {
		made.Workers[platform] = b.Builder.ForPlatform(platform).Arch()
	}
	for _, name := range b.Images {
		stage.Made[name] = made
	}
	return b.publish(stage, variants)
}

// programs are what a build needs of this machine, whoever runs its solves.
func programs(getenv func(string) string) []string {
	if getenv("NPM_CONFIG_REGISTRY") == "" && getenv("npm_config_registry") == "" {
		return []string{"npm"} // it knows which registry this machine uses
	}
	return nil
}

func explain(err error) error {
	var missing *host.MissingError
	if errors.As(err, &missing) && slices.Contains(missing.Packages, "npm") {
		return fmt.Errorf("%w (npm is not needed where NPM_CONFIG_REGISTRY names a registry)", err)
	}
	return err
}

func load(ctx context.Context, o Options) (*builder, error) {
	b := &builder{Options: o, id: identity.NewID()}
	if len(b.Platform) == 0 {
		b.Platform = []string{"linux/amd64", "linux/arm64"} // a release has both
	}
	if b.Dist == "" {
		b.Dist = filepath.Join(b.Root, "dist")
	}
	var err error
	if b.family, err = images.Load(os.DirFS(b.Root)); err != nil {
		return nil, err
	}
	if len(b.Images) == 0 {
		for _, img := range b.family.Images {
			b.Images = append(b.Images, img.Name)
		}
	}
	for i, name := range b.Images {
		if _, err := b.family.Image(name); err != nil {
			return nil, err
		}
		if slices.Contains(b.Images[:i], name) {
			return nil, fmt.Errorf("image %q is asked for twice", name)
		}
	}
	if b.groups, err = lock.LoadGroups(filepath.Join(b.Root, "images", "groups.yaml")); err != nil {
		return nil, err
	}
	locked := filepath.Join(b.Root, "images", "lock")
	if b.lock, err = lock.Load(locked); err != nil {
		return nil, err
	}
	if err := b.lock.CheckSignatures(locked); err != nil {
		return nil, err
	}
	if err := b.lock.CheckGroups(b.groups); err != nil {
		return nil, err
	}
	text, err := b.lock.Marshal()
	if err != nil {
		return nil, err
	}
	b.locked = digest.FromBytes(text)
	if b.cache, err = cache.Dir(b.Getenv); err != nil {
		return nil, err
	}
	if b.compress, err = dist.NewCompressor(b.Root, b.Getenv("COMPRESSION")); err != nil {
		return nil, err
	}
	if b.state, err = vcs.Describe(ctx, b.Root); err != nil {
		return nil, err
	}
	b.build = images.Build{Version: b.state.Version, Revision: b.state.Commit}
	if v := b.Getenv("VERSION"); v != "" {
		if b.build.Version, err = version(v); err != nil {
			return nil, err
		}
	}
	if b.build.Created, err = created(b.Getenv("SOURCE_DATE_EPOCH"), b.state.Time, b.lock.Epoch); err != nil {
		return nil, err
	}
	goproxy, err := mirror.GoEnv(ctx, b.Getenv, "GOPROXY")
	if err != nil {
		return nil, err
	}
	if b.goproxy, b.modules, err = modules(goproxy); err != nil {
		return nil, err
	}
	b.sources = newSources(mirror.FromMachine(ctx, b.Getenv))
	b.runtime, err = resolveLoomcycle(ctx, b.Getenv, b.cache, stamp(b.build.Version, b.build.Revision))
	return b, err
}

// created is the time that the images carry: SOURCE_DATE_EPOCH, else the
// commit's, and outside git the lock's.
func created(sourceDateEpoch string, commit time.Time, locked int64) (time.Time, error) {
	switch seconds, err := strconv.ParseInt(sourceDateEpoch, 10, 64); {
	case sourceDateEpoch == "" && commit.IsZero():
		return time.Unix(locked, 0), nil
	case sourceDateEpoch == "":
		return commit, nil
	case err != nil || seconds < 0:
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH=%q is not a number of seconds since 1970", sourceDateEpoch)
	default:
		return time.Unix(seconds, 0), nil
	}
}

// What an image's tag may hold, with the v of the tag vX.Y.Z before it. It is
// also a word of the linker's command line.
var versionSyntax = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z_.-]{0,126}$`)

func version(text string) (string, error) {
	v := strings.TrimPrefix(text, "v")
	if !versionSyntax.MatchString(v) {
		return "", fmt.Errorf("VERSION=%q can't be an image's tag: letters, digits, dots, dashes and underscores, such as 1.2.3", text)
	}
	return v, nil
}

// epoch is the newest modification time of a file in an image: the lock's
// and not the commit's, so that a commit which changes no source changes no
// layer of it.
func (b *builder) epoch() time.Time {
	return time.Unix(min(b.lock.Epoch, b.build.Created.Unix()), 0)
}

// variant is one image for one platform on its way through BuildKit.
type variant struct {
	image    *images.Image
	arch     string
	layers   []images.Layer
	manifest digest.Digest
}

// tries is how often a build begins again after a source was found on another
// mirror, or the first one well again.
const tries = 5

func (b *builder) solve(ctx context.Context, stage *dist.Staging) ([]variant, error) {
	store, err := buildkit.OpenStore(stage.Layout(), stage.Has, b.Builder.Blobs()...)
	if err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		jobs, variants, err := b.jobs(ctx)
		if err != nil {
			return nil, err
		}
		for i, v := range variants {
			export, err := buildkit.Export{
				Config: b.family.OCIConfig(v.image, v.arch, b.build),
				Layers: groupNames(v.layers),
			}.To(store)
			if err != nil {
				return nil, err
			}
			jobs[i].Opt.Exports = []client.ExportEntry{export}
		}
		responses, err := b.Builder.Solve(ctx, jobs...)
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			again, reason := b.sources.relocate(ctx, failedSteps(err))
			if reason != nil {
				return nil, reason
			}
			if again && try < tries {
				continue
			}
			return nil, err
		}
		for i, r := range responses {
			d, err := buildkit.Descriptor(r)
			if err != nil {
				return nil, err
			}
			variants[i].manifest = d.Digest
		}
		return variants, nil
	}
}

func failedSteps(err error) []buildkit.FailedStep {
	var steps []buildkit.FailedStep
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			steps = append(steps, failedSteps(e)...)
		}
		return steps
	}
	var failed *buildkit.Error
	if errors.As(err, &failed) {
		return failed.Failed
	}
	return nil
}

// jobs makes a solve for each variant, with the graph of its platform's node.
func (b *builder) jobs(ctx context.Context) ([]buildkit.Job, []variant, error) {
	var jobs []buildkit.Job
	var variants []variant
	nodes := map[string]*node{} // by the worker's architecture
	b.sources.begin()
	for _, name := range b.Images {
		img, err := b.family.Image(name)
		if err != nil {
			return nil, nil, err
		}
		for _, platform := range b.Platform {
			arch := strings.TrimPrefix(platform, "linux/")
			worker := b.Builder.ForPlatform(platform).Arch()
			if nodes[worker] == nil {
				if nodes[worker], err = b.node(ctx, worker); err != nil {
					return nil, nil, err
				}
			}
			n := nodes[worker]
			programs, err := n.programs(img, arch)
			if err != nil {
				return nil, nil, err
			}
			state, layers, err := n.graph.Image(img, arch, programs)
			if err != nil {
				return nil, nil, err
			}
			def, err := state.Marshal(ctx, llb.Platform(n.graph.Worker), llb.LocalUniqueID(b.id))
			if err != nil {
				return nil, nil, fmt.Errorf("%s for %s: %w", name, platform, err)
			}
			jobs = append(jobs, buildkit.Job{Name: name + "-" + arch, Platform: platform, Definition: def, Opt: client.SolveOpt{
				LocalMounts: n.mounts,
			}})
			variants = append(variants, variant{image: img, arch: arch, layers: layers})
		}
	}
	if b.sources.err != nil {
		return nil, nil, b.sources.err
	}
	secrets := b.secrets()
	maps.Copy(secrets, b.sources.secrets)
	for i := range jobs {
		jobs[i].Opt.Session = []session.Attachable{secretsprovider.FromMap(secrets)}
	}
	for _, n := range nodes {
		maps.Copy(n.mounts, b.sources.mounts)
	}
	return jobs, variants, nil
}

// publish lays out the variants as images and makes the result the dist.
func (b *builder) publish(stage *dist.Staging, variants []variant) (*dist.Release, error) {
	release := &dist.Release{
		SchemaVersion: 1,
		Version:       b.build.Version,
		Source: dist.Source{Repository: b.family.Source, Commit: b.state.Commit, Loomcycle: b.runtime.label,
			LoomcyclePackage: b.runtime.asked.pkg, LoomcycleLDFlags: b.runtime.asked.ldflags},
		Epoch:       b.build.Created.Unix(),
		LockDigest:  b.locked,
		Compression: b.compress.Compression,
		Compressor:  b.compress.Version,
	}
	indexes := map[string]ocispec.Descriptor{}
	for _, name := range b.Images {
		img, err := b.family.Image(name)
		if err != nil {
			return nil, err
		}
		annotations := b.family.Annotations(img, b.build)
		out := dist.Image{Name: name}
		var manifests []ocispec.Descriptor
		for _, v := range variants {
			if v.image.Name != name {
				continue
			}
			config := b.family.OCIConfig(img, v.arch, b.build)
			built, desc, err := stage.Add(dist.Built{
				Image: name, Platform: config.Platform, Manifest: v.manifest,
				Groups: groupNames(v.layers), Config: config, Annotations: annotations,
			})
			if err != nil {
				return nil, err
			}
			out.Platforms = append(out.Platforms, built)
			manifests = append(manifests, desc)
		}
		index, err := stage.Index(annotations, manifests)
		if err != nil {
			return nil, err
		}
		out.IndexDigest, indexes[name] = index.Digest, index
		release.Images = append(release.Images, out)
	}
	if err := stage.Keep(release, indexes); err != nil {
		return nil, err
	}
	return release, stage.Publish(release, indexes)
}

func groupNames(layers []images.Layer) []string {
	var names []string
	for _, l := range layers {
		names = append(names, l.Group)
	}
	return names
}

// node is what a graph needs of one kind of worker.
type node struct {
	b      *builder
	graph  *images.Graph
	mounts map[string]fsutil.FS
}

func (b *builder) node(ctx context.Context, arch string) (*node, error) {
	// What the unpacker makes of its inputs does not depend on the compiler; a layer's digest does not either.
	program, err := host.Program(ctx, b.Root, filepath.Join(b.cache, "unpack"), "./internal/unpack/cmd/unpack", arch)
	if err != nil {
		return nil, err
	}
	unpacker, err := fsutil.NewFS(filepath.Dir(program))
	if err != nil {
		return nil, err
	}
	gocache, err := source(b.Root, []string{"go.mod", "go.sum", "internal/gocache"})
	if err != nil {
		return nil, err
	}
	name := "unpacker-" + arch
	mounts := map[string]fsutil.FS{name: unpacker, "source-gocache": gocache}
	maps.Copy(mounts, b.modules)
	return &node{
		b:      b,
		mounts: mounts,
		graph: &images.Graph{
			Family: b.family, Groups: b.groups, Lock: b.lock,
			Worker:   ocispec.Platform{OS: "linux", Architecture: arch},
			Unpacker: llb.Local(name, llb.WithCustomName("send the unpacker")),
			Source:   llb.Local("source-gocache", llb.WithCustomName("send the source of go-cache")),
			Modules:  proxies(b.modules),
			Fetch:    func(src lock.Source) images.Located { return b.sources.fetch(ctx, src) },
			Epoch:    b.epoch(),
		},
	}, nil
}

// programs are the states of the programs that an image carries.
func (n *node) programs(img *images.Image, arch string) (map[string]llb.State, error) {
	out := map[string]llb.State{}
	for _, name := range img.Programs {
		i := slices.IndexFunc(n.b.family.Programs, func(p images.ProgramSource) bool { return p.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("image %s: family.yaml has no program %q", img.Name, name)
		}
		state, err := n.program(n.b.family.Programs[i], arch)
		if err != nil {
			return nil, err
		}
		out[name] = state
	}
	return out, nil
}

func (n *node) program(p images.ProgramSource, arch string) (llb.State, error) {
	run := n.b.runtime
	own := p.Name != "loomcycle" || run.dir == "" && run.bin == ""
	if !own && run.bin != "" {
		return n.prebuilt(run.bin, arch)
	}
	program := images.Program{Name: p.Name, Package: p.Package, LDFlags: stamp(n.b.build.Version, n.b.build.Revision), Label: "this repository"}
	if p.Name == "loomcycle" {
		program.LDFlags = run.ldflags
	}
	dir, include := n.b.Root, p.Include
	if !own {
		dir, include = run.dir, nil
		program.Package, program.Label = run.pkg, run.label
	}
	fs, err := source(dir, include)
	if err != nil {
		return llb.State{}, err
	}
	local := "source-" + p.Name
	n.mounts[local] = fs
	program.Source = llb.Local(local, llb.WithCustomName("send the source of "+p.Name))
	if !own && run.web {
		session, err := n.b.family.Image("loomcycle-sandbox-session")
		if err != nil {
			return llb.State{}, err
		}
		node, _, err := n.graph.Image(session, n.graph.Worker.Architecture, nil)
		if err != nil {
			return llb.State{}, err
		}
		program.Source = n.graph.Web(program.Source, node)
	}
	return n.graph.Compile(program, arch)
}

// source is a module's folder, without what no compiler reads.
func source(dir string, include []string) (fsutil.FS, error) {
	fs, err := fsutil.NewFS(dir)
	if err != nil {
		return nil, err
	}
	return fsutil.NewFilterFS(fs, &fsutil.FilterOpt{
		IncludePatterns: include,
		ExcludePatterns: []string{"**/*_test.go", "**/testdata", ".git", "**/node_modules"},
	})
}

// prebuilt takes the runtime's binary from the operator.
func (n *node) prebuilt(dir, arch string) (llb.State, error) {
	file := "loomcycle-linux-" + arch
	if err := checkBinary(filepath.Join(dir, file), arch); err != nil {
		return llb.State{}, err
	}
	fs, err := fsutil.NewFS(dir)
	if err != nil {
		return llb.State{}, err
	}
	n.mounts["loomcycle-bin"] = fs
	local := llb.Local("loomcycle-bin", llb.IncludePatterns([]string{"loomcycle-linux-*"}), llb.WithCustomName("send the prebuilt loomcycle"))
	return llb.Scratch().File(llb.Copy(local, file, "/loomcycle")), nil
}

// secrets are what compile steps may read of the machine's configuration.
func (b *builder) secrets() map[string][]byte {
	out := map[string][]byte{}
	if b.goproxy != "" {
		out[images.SecretGOPROXY] = []byte(b.goproxy)
	}
	if b.runtime.web { // the registry that Node comes from, wherever it is named
		if urls, err := b.sources.mirrors.Candidates(lock.Source{Kind: lock.KindNPM}); err == nil {
			out[images.SecretNPMRegistry] = []byte(urls[0])
		}
	}
	for _, name := range images.ProxyVariables() {
		if v := cmp.Or(b.Getenv(name), b.Getenv(strings.ToLower(name))); v != "" {
			out[name] = []byte(v)
		}
	}
	for _, file := range []string{b.Getenv("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"} {
		if file == "" {
			continue
		}
		if text, err := os.ReadFile(file); err == nil && len(text) < 500<<10 { // BuildKit's limit for a secret
			out[images.SecretCA] = text
			break
		}
	}
	return out
}
