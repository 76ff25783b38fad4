// Package buildkit finds the BuildKit daemons that build the images, starts a
// private one where there is none, and runs solves on them with one progress
// display. It knows nothing of what is built.
package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/platforms"
	"github.com/moby/buildkit/client"

	"github.com/loomcycle/loomcycle-images/internal/cache"
)

// Options say where to look for a builder and where to talk about it. The
// zero value is what a command-line user wants.
type Options struct {
	// Getenv reads the environment; nil means os.Getenv.
	Getenv func(string) string
	// Log receives notices and the progress display; nil means os.Stderr.
	Log io.Writer
	// Platforms are the image platforms that will be built ("linux/arm64");
	// empty means linux/amd64 and linux/arm64. A default builder is looked for
	// only if one of them has no BUILDKIT_HOST_<ARCH> of its own.
	Platforms []string
	// Private names a private daemon with a state of its own and skips the
	// search, BUILDKIT_HOST included. Empty means search; the private daemon
	// that a search falls back on is named "default".
	Private string
	// Parallelism is how many steps a private daemon runs at a time; 0 means
	// as many as there are.
	Parallelism int
	// CacheDir is the project's cache folder; empty means cache.Dir(Getenv).
	CacheDir string
	// Root is the checkout, which holds tools/buildkitd; empty means the
	// nearest parent of the working directory that does.
	Root string
	// Programs are what the caller needs of this machine, too: when a private
	// daemon can't start, one error names them with what it lacks itself.
	Programs []string
}

func (o Options) withDefaults() (Options, error) {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Log == nil {
		o.Log = os.Stderr
	}
	if len(o.Platforms) == 0 {
		o.Platforms = []string{"linux/amd64", "linux/arm64"}
	}
	if o.CacheDir == "" {
		dir, err := cache.Dir(o.Getenv)
		if err != nil {
			return o, err
		}
		o.CacheDir = dir
	}
	dir, err := filepath.Abs(o.CacheDir)
	if err != nil {
		return o, fmt.Errorf("the cache folder %s has no absolute path: %w", o.CacheDir, err)
	}
	o.CacheDir = dir
	return o, nil
}

func (o Options) notice(format string, args ...any) {
	fmt.Fprintf(o.Log, "buildkit: "+format+"\n", args...)
}

// TempRoot is cache.Temp, in which also the daemons end that killed processes
// left a day ago.
func TempRoot(getenv func(string) string) (string, error) {
	root, err := cache.Temp(getenv)
	if err != nil {
		return "", err
	}
	old, err := cache.Stale(root)
	for _, dir := range old {
		sweep(dir, getenv)
	}
	return root, err
}

// sweep removes a folder, also one with files of a rootless daemon, after the
// daemons in it, which outlive who was killed. What stays is tried again the
// next time: it is no reason to stop what is to be done now.
func sweep(dir string, getenv func(string) string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, home := range cache.Daemons(dir) {
		d, err := NewDaemon(Options{Getenv: getenv, Log: io.Discard, CacheDir: filepath.Dir(filepath.Dir(home)), Private: filepath.Base(home)})
		if err != nil {
			continue
		}
		release, used := d.reserve()
		release()
		if used || d.Down(ctx) != nil {
			return
		}
	}
	if os.RemoveAll(dir) == nil || os.Geteuid() == 0 {
		return
	}
	if rm, err := remover(dir); err == nil {
		_ = rm.Run()
	}
}

// Node is one BuildKit daemon.
type Node struct {
	Client *client.Client
	// Source says how the node was found: "BUILDKIT_HOST", "docker engine",
	// "buildx", "private daemon", ...
	Source string
	// Address is what a BuildKit client dials, or a description of it.
	Address string
	// Version is the daemon's own, e.g. "v0.34.2".
	Version string
	// Platform is what the worker runs without emulation, e.g. "linux/amd64":
	// a program that a step runs is compiled for it.
	Platform string
	// Snapshotter is the worker's, e.g. "overlayfs".
	Snapshotter string

	leave  func() // see Daemon.join
	state  string // the private daemon's
	worker string // the daemon's identity
	// dial finds the node for a platform, where a builder has several.
	dial func(ctx context.Context, platform string) (*Node, error)
}

// Close ends the connection, not the daemon.
func (n *Node) Close() error {
	if n.leave != nil {
		n.leave()
	}
	return n.Client.Close()
}

// Arch is the worker's own architecture in Go's words ("amd64", "arm64").
func (n *Node) Arch() string { return strings.Split(n.Platform, "/")[1] }

// Builder is the set of nodes that builds the platforms.
type Builder struct {
	opts  Options
	def   *Node
	byPlt map[string]*Node
	auth  authFunc
}

// ForPlatform is the node that builds images of a platform ("linux/arm64"):
// the one of BUILDKIT_HOST_<ARCH>, else the default one. It is never nil.
func (b *Builder) ForPlatform(platform string) *Node {
	if n := b.byPlt[normalize(platform)]; n != nil {
		return n
	}
	return b.def
}

// Nodes are the builder's distinct nodes, the default one first.
func (b *Builder) Nodes() []*Node {
	nodes := []*Node{b.def}
	for _, p := range b.opts.Platforms {
		if n := b.ForPlatform(p); n != b.def {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// Blobs are the folders of this machine in which nodes keep what they export,
// as ALGORITHM/ENCODED.
func (b *Builder) Blobs() []string {
	var folders []string
	for _, n := range b.Nodes() {
		if n.state != "" {
			folders = append(folders, filepath.Join(n.state, "runc-"+n.Snapshotter, "content", "blobs"))
		}
	}
	return folders
}

// Close closes the connections. A private daemon goes on running, warm.
func (b *Builder) Close() error {
	var errs []error
	for _, n := range b.Nodes() {
		errs = append(errs, n.Close())
	}
	return errors.Join(errs...)
}

// Connect finds a node for every platform: BUILDKIT_HOST_<ARCH> for its own
// one; for the others BUILDKIT_HOST, else buildx's current builder (each of its
// nodes for its platforms) or the docker engine's BuildKit if it can do what a build
// needs, else the private daemon, which is built and started when it isn't up.
func Connect(ctx context.Context, opts Options) (*Builder, error) {
	return connect(ctx, opts, true)
}

func connect(ctx context.Context, opts Options, start bool) (_ *Builder, err error) {
	opts, err = opts.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Builder{opts: opts, byPlt: map[string]*Node{}, auth: dockerAuth}
	defer func() {
		if err != nil {
			for _, n := range b.byPlt {
				n.Close()
			}
		}
	}()
	needDefault := false
	for _, p := range opts.Platforms {
		name, err := hostVariable(p)
		if err != nil {
			return nil, err
		}
		addr := opts.Getenv(name)
		if addr == "" || opts.Private != "" {
			needDefault = true
			continue
		}
		n, err := dialRemote(ctx, opts, name, addr)
		if err != nil {
			return nil, err
		}
		b.byPlt[normalize(p)] = n
		if b.def == nil {
			b.def = n
		}
	}
	if needDefault {
		if b.def, err = defaultNode(ctx, opts, start); err != nil {
			return nil, err
		}
		b.spread(ctx)
	}
	return b, nil
}

// spread finds the nodes that the default node's builder has for single platforms.
func (b *Builder) spread(ctx context.Context) {
	if b.def.dial == nil {
		return
	}
	for _, p := range b.opts.Platforms {
		if b.byPlt[normalize(p)] != nil {
			continue
		}
		n, err := b.def.dial(ctx, p)
		if err != nil {
			b.opts.notice("the %s builds %s too: it has no other node for that: %v", b.def.Address, p, err)
		} else if n.worker == b.def.worker {
			n.Close()
		} else {
			b.byPlt[normalize(p)] = n
		}
	}
}

// hostVariable names the node of one platform alone.
func hostVariable(platform string) (string, error) {
	spec, err := platforms.Parse(platform)
	if err != nil {
		return "", fmt.Errorf("platform %q is not of the form linux/arm64: %w", platform, err)
	}
	return "BUILDKIT_HOST_" + strings.ToUpper(spec.Architecture), nil
}

func defaultNode(ctx context.Context, opts Options, start bool) (*Node, error) {
	if opts.Private == "" {
		if addr := opts.Getenv("BUILDKIT_HOST"); addr != "" {
			return dialRemote(ctx, opts, "BUILDKIT_HOST", addr)
		}
		if n := dialDocker(ctx, opts); n != nil {
			return n, nil
		}
	}
	d, err := NewDaemon(opts)
	if err != nil {
		return nil, err
	}
	if !start {
		return d.connect(ctx)
	}
	return d.Up(ctx)
}

// describe completes a node with what the daemon says of itself.
func describe(ctx context.Context, n *Node) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	workers, err := n.Client.ListWorkers(ctx)
	if err != nil {
		return err
	}
	if len(workers) == 0 || len(workers[0].Platforms) == 0 {
		return errors.New("the daemon has no worker")
	}
	// A worker lists the platform of its own hardware first; BuildKit's
	// default for a step without a platform is the same entry.
	w := workers[0]
	n.Platform = platforms.Format(platforms.Normalize(platforms.Platform{OS: w.Platforms[0].OS, Architecture: w.Platforms[0].Architecture}))
	n.Version, n.worker = w.BuildkitVersion.Version, w.ID
	n.Snapshotter = w.Labels["org.mobyproject.buildkit.worker.snapshotter"]
	return nil
}

func normalize(platform string) string {
	p, err := platforms.Parse(platform)
	if err != nil {
		return platform
	}
	return platforms.Format(platforms.Platform{OS: p.OS, Architecture: p.Architecture})
}
