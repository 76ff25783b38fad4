package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/identity"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/tonistiigi/fsutil"

	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/cache"
)

// bk runs a container as one BuildKit step: its result is a file that is
// exported. It needs nothing but the builder, and can do what a build step can.
type bk struct {
	builder *buildkit.Builder

	mu     sync.Mutex
	tmp    string // folder for what is pulled
	pulled string // layout of the images that came from a registry
	have   map[digest.Digest]bool
}

// BuildKit is the engine of the builder that builds use.
func BuildKit(ctx context.Context, o buildkit.Options) (Engine, error) {
	o.Log = quiet{o.Log} // a display for each of a hundred steps tells nothing
	b, err := buildkit.Connect(ctx, o)
	if err != nil {
		return nil, err
	}
	tmp, err := cache.Temp(o.Getenv)
	if err != nil {
		return nil, err
	}
	return &bk{builder: b, tmp: tmp, have: map[digest.Digest]bool{}}, nil
}

// quiet passes on the notices of a connection and drops progress displays.
type quiet struct{ io.Writer }

func (q quiet) Write(p []byte) (int, error) {
	if bytes.HasPrefix(p, []byte("buildkit: ")) {
		return q.Writer.Write(p)
	}
	return len(p), nil
}

func (b *bk) Name() string { return "buildkit" }

func (b *bk) Can(c *Container) error {
	var lacks []string
	lack := func(is bool, what string) {
		if is {
			lacks = append(lacks, what)
		}
	}
	lack(len(c.Args) == 0, "run services")
	lack(c.DropCaps, "drop capabilities")
	lack(c.NoNewPrivileges, "set no-new-privileges")
	lack(c.Pids > 0 || c.Memory != "", "limit pids and memory")
	lack(c.Runtime != "", "choose a runtime")
	for _, m := range c.Mounts {
		lack(m.Volume != "" || m.Host != "" && !m.ReadOnly, "mount volumes")
		lack(m.Tmpfs != "" && m.Tmpfs != "01777", "mount a tmpfs of mode "+m.Tmpfs)
	}
	if len(lacks) > 0 {
		return fmt.Errorf("BuildKit cannot %s; install podman for this case: apt-get install podman runc", lacks[0])
	}
	return nil
}

// Load pulls an image of a registry here, with this user's credentials, for
// the builder may know neither them nor the registry.
func (b *bk) Load(_ context.Context, img *Image) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if img.Layout != "" || b.have[img.Manifest] {
		return nil
	}
	var err error
	if b.pulled == "" {
		if b.pulled, err = os.MkdirTemp(b.tmp, "smoke-pulled-*"); err != nil {
			return err
		}
		if _, err := layout.Write(b.pulled, empty.Index); err != nil {
			return err
		}
	}
	if err := layout.Path(b.pulled).AppendImage(img.Content); err != nil {
		return fmt.Errorf("pulling %s: %w", img.Ref, err)
	}
	b.have[img.Manifest] = true
	return nil
}

func (b *bk) Run(ctx context.Context, c *Container) (*Output, error) {
	const result = "/smoke-result"
	locals, stores := map[string]fsutil.FS{}, map[string]content.Store{}
	base, err := b.image(c.Image, stores)
	if err != nil {
		return nil, err
	}
	arch := strings.TrimPrefix(c.Image.Platform, "linux/")
	base = base.Platform(ocispec.Platform{OS: "linux", Architecture: arch})
	file, err := c.Image.Content.ConfigFile()
	if err != nil {
		return nil, err
	}
	config := file.Config
	// A step with a cache key of its own: smoke tests are never cached.
	opts := []llb.RunOption{
		llb.Args(append(c.Args, result+"/report.json")),
		llb.AddEnv("SMOKE_RUN", identity.NewID()), llb.IgnoreCache,
		llb.AddMount(result, llb.Scratch().File(llb.Mkdir("/out", 0o777)), llb.SourcePath("/out")),
		llb.User(config.User), llb.Dir(config.WorkingDir),
	}
	for _, kv := range append(config.Env, c.Env...) {
		k, v, _ := strings.Cut(kv, "=")
		opts = append(opts, llb.AddEnv(k, v))
	}
	if c.User != "" {
		opts = append(opts, llb.User(c.User))
	}
	if c.Workdir != "" {
		opts = append(opts, llb.Dir(c.Workdir))
	}
	if c.NoNetwork {
		opts = append(opts, llb.Network(llb.NetModeNone))
	}
	if c.ReadOnly {
		opts = append(opts, llb.ReadonlyRootFS())
	}
	for _, h := range c.Hosts {
		name, addr, _ := strings.Cut(h, ":")
		opts = append(opts, llb.AddExtraHost(name, net.ParseIP(addr)))
	}
	for _, m := range c.Mounts {
		if m.Tmpfs != "" {
			opts = append(opts, llb.AddMount(m.Path, llb.Scratch(), llb.Tmpfs(llb.TmpfsSize(2<<30))))
			continue
		}
		fs, err := fsutil.NewFS(m.Host)
		if err != nil {
			return nil, err
		}
		name := fmt.Sprint("smoke", len(locals))
		locals[name] = fs
		opts = append(opts, llb.AddMount(m.Path, llb.Local(name, llb.SharedKeyHint(m.Host)), llb.Readonly))
	}
	out := base.Run(opts...).GetMount(result)
	def, err := out.Marshal(ctx, llb.Platform(ocispec.Platform{OS: "linux", Architecture: arch}))
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "smoke-result-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	_, err = b.builder.Solve(ctx, buildkit.Job{Name: "smoke", Platform: c.Image.Platform, Definition: def, Opt: client.SolveOpt{
		LocalMounts: locals, OCIStores: stores,
		Exports: []client.ExportEntry{{Type: client.ExporterLocal, OutputDir: dir}},
	}})
	var failed *buildkit.Error
	if errors.As(err, &failed) && len(failed.Failed) > 0 {
		f := failed.Failed[0]
		return &Output{Exit: 1, Stderr: []byte(f.Message + "\n" + f.Log)}, nil
	}
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "out", "report.json"))
	return &Output{Stdout: text}, err
}

// image is the state of an image in a layout, which this process sends.
func (b *bk) image(img *Image, stores map[string]content.Store) (llb.State, error) {
	folder := img.Layout
	if folder == "" {
		folder = b.pulled
	}
	store, err := buildkit.OpenStore(folder, nil)
	if err != nil {
		return llb.State{}, err
	}
	const id = "smoke-layout"
	stores[id] = store
	return llb.OCILayout("localhost/"+img.Name+"@"+img.Manifest.String(), llb.OCIStore("", id)), nil
}

var errNoService = errors.New("BuildKit runs no services")

func (b *bk) Start(context.Context, *Container) (Running, error) { return nil, errNoService }
func (b *bk) Volume(context.Context, string) error               { return nil }
func (b *bk) RemoveVolume(context.Context, string) error         { return nil }
func (b *bk) Chown(context.Context, string, string) error        { return nil }
func (b *bk) Leaks(context.Context) ([]string, error)            { return nil, nil }

func (b *bk) Close(context.Context) error {
	errs := []error{b.builder.Close()}
	if b.pulled != "" {
		errs = append(errs, os.RemoveAll(b.pulled))
	}
	return errors.Join(errs...)
}
