package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/moby/buildkit/client"
	"github.com/tonistiigi/fsutil"

	"github.com/loomcycle/loomcycle-images/internal/build"
	"github.com/loomcycle/loomcycle-images/internal/buildkit"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/mirror"
	"github.com/loomcycle/loomcycle-images/internal/vcs"
)

// Build measures builds of the family, and the arm64 toolbox against a
// Dockerfile with the same packages under QEMU, through BuildKits that start
// empty. It takes about twenty-five minutes on two cores.
func Build(ctx context.Context, root string, getenv func(string) string, log io.Writer) (table string, err error) {
	if err := host.Need(ctx, log, "mmdebstrap", "qemu-aarch64-static"); err != nil {
		return "", err
	}
	if err := host.Emulate(ctx, log, "arm64"); err != nil {
		return "", err
	}
	tmp, err := buildkit.TempRoot(getenv)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(tmp, "bench-build-*")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, buildkit.Discard(ctx, dir)) }()
	checkout := filepath.Join(dir, "checkout")
	if err := vcs.Clone(ctx, root, checkout); err != nil {
		return "", err
	}
	b := bench{checkout: checkout, dir: dir, getenv: buildkit.WithoutCaches(getenv), log: log}

	rows, err := b.emulated(ctx)
	if err != nil {
		return "", err
	}
	fresh, err := b.fresh(ctx)
	if err != nil {
		return "", err
	}
	rows = append(rows, Row{"fresh checkout, no module and no compiled package there: BuildKit's first line", seconds(fresh), "within 3 minutes"})
	built, release, err := b.family(ctx)
	if err != nil {
		return "", err
	}
	rows = append(rows, built...)
	for _, img := range release.Images {
		for _, v := range img.Platforms {
			rows = append(rows, Row{img.Name + " " + v.Platform + ", compressed", fmt.Sprintf("%.1f MB", float64(v.Size)/1e6), ""})
		}
	}
	return fmt.Sprintf("%d cores, %s; a row from nothing starts with an empty BuildKit.\n\n%s", runtime.NumCPU(), release.Compression, Table(rows)), nil
}

// emulated compares the arm64 toolbox with a Dockerfile under QEMU. What the
// Dockerfile installs is the toolbox's Debian packages alone; Go is in both
// times of ours, since the toolbox's settings go into its go.env.
func (b *bench) emulated(ctx context.Context) ([]Row, error) {
	toolbox := build.Options{Images: []string{"loomcycle-toolbox"}, Platform: []string{"linux/arm64"}}
	packages, err := b.alone(ctx, "packages", toolbox, edit{"toolbox", "groups", "[rust, go]"}, edit{"toolbox", "programs", "[]"})
	if err != nil {
		return nil, err
	}
	whole, err := b.alone(ctx, "arm64", toolbox)
	if err != nil {
		return nil, err
	}
	d, err := b.daemon(ctx, "qemu")
	if err != nil {
		return nil, err
	}
	defer d.stop()
	base, install, err := b.dockerfile(ctx, d)
	if err != nil {
		return nil, err
	}
	b.told("dockerfile", base+install)
	if err := d.stop(); err != nil {
		return nil, err
	}
	docker, err := b.docker(ctx)
	if err != nil {
		return nil, err
	}
	return []Row{
		{"arm64 toolbox's Debian packages (and Go) from nothing, this pipeline, with export", seconds(packages), ""},
		{"the same Debian packages by Dockerfile under QEMU, with export", fmt.Sprintf("%s, and %s for its base", seconds(install), seconds(base)), ""},
		{"the same by `docker build` with docker's own BuildKit, into docker", docker, ""},
		{"ratio of the first two, with the base", fmt.Sprintf("%.1f", (base+install).Seconds()/packages.Seconds()), "12 or more"},
		{"ratio of the first two, without the base", fmt.Sprintf("%.1f", install.Seconds()/packages.Seconds()), ""},
		{"whole arm64 toolbox from nothing: also Node, the runtime and the compiled libraries", seconds(whole), ""},
	}, nil
}

// family measures builds of the whole family and of parts of it for both
// platforms, and leaves the release that the first one made.
func (b *bench) family(ctx context.Context) ([]Row, *dist.Release, error) {
	agents := build.Options{Images: []string{"loomcycle", "loomcycle-toolbox", "loomcycle-sandbox-session"}}
	const groups = "[rust, go, node]"
	plain, err := b.alone(ctx, "agents-plain", agents, edit{"toolbox", "groups", groups}, edit{"session-image", "groups", groups})
	if err != nil {
		return nil, nil, err
	}
	three, err := b.alone(ctx, "agents", agents)
	if err != nil {
		return nil, nil, err
	}
	d, err := b.daemon(ctx, family)
	if err != nil {
		return nil, nil, err
	}
	defer d.stop()
	whole, release, err := b.run(ctx, d, build.Options{})
	if err != nil {
		return nil, nil, err
	}
	b.told("family", whole)
	// For a comparison with a dist of the same commit that was built elsewhere.
	if err := dist.Summary(b.log, release); err != nil {
		return nil, nil, err
	}
	if _, err := b.command(ctx); err != nil { // compiles the targets
		return nil, nil, err
	}
	again, err := b.command(ctx)
	if err != nil {
		return nil, nil, err
	}
	b.told("no change", again)
	if err := b.change(); err != nil {
		return nil, nil, err
	}
	changed, err := b.command(ctx)
	if err != nil {
		return nil, nil, err
	}
	b.told("another runtime", changed)
	compiled, err := b.goBuild(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := d.stop(); err != nil {
		return nil, nil, err
	}
	shared, total, err := sharedBytes(release, "loomcycle-toolbox", "loomcycle-sandbox-session")
	if err != nil {
		return nil, nil, err
	}
	return []Row{
		{"`loomcycle`, toolbox and session without compiled libraries, both platforms, from an empty BuildKit", seconds(plain), "under 150 s"},
		{"the same with the compiled libraries, as they ship", seconds(three), "under 150 s"},
		{"whole family: also the sidecar's two images", seconds(whole), ""},
		{"no-change rebuild, `go run mage.go images:build`", seconds(again), "under 3 s"},
		{"the same after a change of the runtime", fmt.Sprintf("%s, %s of it `go build` for both platforms", seconds(changed), seconds(compiled)), "under 10 s beyond `go build`"},
		{"bytes of the session image that the toolbox has too", fmt.Sprintf("%.1f %%", 100*float64(shared)/float64(total)), "95 % or more"},
	}, release, nil
}

type bench struct {
	checkout, dir string
	getenv        func(string) string
	log           io.Writer
}

// private is a BuildKit that lives as long as a measurement.
type private struct {
	*buildkit.Builder
	stop func() error
}

// family is the BuildKit that a target finds by itself (command).
const family = "default"

func (b *bench) daemon(ctx context.Context, name string) (*private, error) {
	o := buildkit.Options{Getenv: b.getenv, Log: b.log, Root: b.checkout, Private: name, CacheDir: filepath.Join(b.dir, name)}
	conn, err := buildkit.Connect(ctx, o)
	if err != nil {
		return nil, err
	}
	stopped := false
	return &private{conn, func() error {
		if stopped {
			return nil
		}
		stopped = true
		conn.Close()
		d, err := buildkit.NewDaemon(o)
		if err != nil {
			return err
		}
		return d.Remove(ctx)
	}}, nil
}

func (b *bench) run(ctx context.Context, p *private, o build.Options) (time.Duration, *dist.Release, error) {
	o.Root, o.Getenv, o.Log, o.Builder = b.checkout, b.getenv, b.log, p.Builder
	start := time.Now()
	r, err := build.Run(ctx, o)
	return time.Since(start), r, err
}

// command is the time of a build of the family as a user starts it.
func (b *bench) command(ctx context.Context) (time.Duration, error) {
	cmd := host.Command(ctx, "go", "run", "mage.go", "images:build")
	cmd.Dir = b.checkout
	cmd.Env = append(os.Environ(), "LOOMCYCLE_CACHE="+filepath.Join(b.dir, family), "BUILDKIT_HOST=", "BUILDKIT_HOST_AMD64=", "BUILDKIT_HOST_ARM64=", "DOCKER_HOST=unix:///dev/null", "BUILDKIT_PROGRESS=plain", "CACHE_FROM=", "CACHE_TO=",
		"MAGEFILE_CACHE="+filepath.Join(b.dir, "mage"))
	cmd.Stdout, cmd.Stderr = b.log, b.log
	cmd.WaitDelay = 0 // it has a builder to leave
	start := time.Now()
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("go run mage.go images:build: %w", err)
	}
	return time.Since(start), nil
}

func (b *bench) told(what string, took time.Duration) {
	fmt.Fprintf(b.log, "bench: %s: %s\n", what, seconds(took))
}

// edit replaces the value of a key of an image's definition.
type edit struct{ folder, key, value string }

// alone is the time of a build that finds nothing: with a BuildKit and a
// checkout of its own, of changed definitions.
func (b *bench) alone(ctx context.Context, name string, o build.Options, edits ...edit) (time.Duration, error) {
	c := *b
	c.checkout = filepath.Join(b.dir, name+"-checkout")
	if err := vcs.Clone(ctx, b.checkout, c.checkout); err != nil {
		return 0, err
	}
	defer os.RemoveAll(c.checkout)
	for _, e := range edits {
		file := filepath.Join(c.checkout, e.folder, "image.yaml")
		text, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		line := regexp.MustCompile(`(?m)^` + e.key + `:.*$`)
		if !line.Match(text) {
			return 0, fmt.Errorf("%s has no key %q to change", file, e.key)
		}
		if err := os.WriteFile(file, line.ReplaceAll(text, []byte(e.key+": "+e.value)), 0o644); err != nil {
			return 0, err
		}
	}
	d, err := c.daemon(ctx, name)
	if err != nil {
		return 0, err
	}
	defer d.stop()
	took, _, err := c.run(ctx, d, o)
	if err != nil {
		return 0, err
	}
	b.told(name, took)
	return took, d.stop()
}

// fresh is the time from a clone to BuildKit's first line, where the go
// command has nothing in its caches and no buildkitd was compiled yet.
func (b *bench) fresh(ctx context.Context) (took time.Duration, err error) {
	at := func(name string) string { return filepath.Join(b.dir, "fresh", name) }
	if err := vcs.Clone(ctx, b.checkout, at("checkout")); err != nil {
		return 0, err
	}
	env := map[string]string{"GOCACHE": at("go-build"), "GOMODCACHE": at("go-mod"), "GOFLAGS": b.getenv("GOFLAGS") + " -modcacherw", "MAGEFILE_CACHE": at("mage"),
		"LOOMCYCLE_CACHE": at("cache"), "BUILDKIT_HOST": "", "BUILDKIT_PROGRESS": "plain", "CACHE_FROM": "", "CACHE_TO": ""}
	getenv := func(name string) string {
		if v, ok := env[name]; ok {
			return v
		}
		return b.getenv(name)
	}
	outer := ctx
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	cmd := host.Command(ctx, "go", "run", "mage.go", "images:build", "loomcycle")
	cmd.Dir, cmd.Env = at("checkout"), os.Environ()
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.WaitDelay = 0 // it has a builder to leave
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, in
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	go func() { in.CloseWithError(cmd.Wait()) }()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		fmt.Fprintln(b.log, "fresh:", lines.Text())
		if strings.HasPrefix(lines.Text(), "#1 ") {
			took = time.Since(start)
			break
		}
	}
	stop()
	_, _ = io.Copy(io.Discard, out) // until it has ended
	d, err := buildkit.NewDaemon(buildkit.Options{Getenv: getenv, Log: b.log, Root: at("checkout"), CacheDir: at("cache")})
	if err == nil {
		err = errors.Join(d.Remove(outer), buildkit.Discard(outer, at("")))
	}
	if took == 0 {
		err = errors.Join(errors.New("a fresh checkout did not come as far as BuildKit"), lines.Err(), err)
	}
	return took, err
}

// change makes another runtime of the checkout, as an edit would.
func (b *bench) change() error {
	file := filepath.Join(b.checkout, "runtime", "cmd", "loomcycle", "main.go")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	const before = "const usage = `loomcycle"
	if !bytes.Contains(text, []byte(before)) {
		return fmt.Errorf("%s has no %q to change", file, before)
	}
	return os.WriteFile(file, bytes.Replace(text, []byte(before), []byte(before+"+"), 1), 0o644)
}

// goBuild is the time that compiling the changed runtime takes by itself.
func (b *bench) goBuild(ctx context.Context) (time.Duration, error) {
	var total time.Duration
	for _, arch := range lock.Arches() {
		build := func() error {
			cmd := host.Command(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(b.dir, "loomcycle"), "./runtime/cmd/loomcycle")
			cmd.Dir = b.checkout
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("go build: %w\n%s", err, out)
			}
			return nil
		}
		if err := build(); err != nil { // fills the build cache
			return 0, err
		}
		if err := b.change(); err != nil {
			return 0, err
		}
		start := time.Now()
		if err := build(); err != nil {
			return 0, err
		}
		total += time.Since(start)
	}
	return total, nil
}

// dockerfile builds the toolbox's Debian packages the usual way: a base, then
// apt-get under emulation.
func (b *bench) dockerfile(ctx context.Context, p *private) (base, install time.Duration, err error) {
	m := mirror.FromMachine(ctx, b.getenv)
	at := func(kind lock.Kind) (string, error) {
		urls, err := m.Candidates(lock.Source{Kind: kind, Path: "x"})
		if err != nil {
			return "", err
		}
		return strings.TrimSuffix(urls[0], "/x"), nil
	}
	main, err := at(lock.KindDebian)
	if err != nil {
		return 0, 0, err
	}
	security, err := at(lock.KindSecurity)
	if err != nil {
		return 0, 0, err
	}
	folder := filepath.Join(b.dir, "dockerfile")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return 0, 0, err
	}
	keys := filepath.Join(b.checkout, "images", "lock", "keys")
	var sources []string
	for _, line := range []string{main + " trixie", main + " trixie-updates", security + " trixie-security", main + " trixie-backports"} {
		sources = append(sources, "deb "+line+" main")
	}
	start := time.Now()
	args := append([]string{"--architectures=arm64", "--variant=minbase", "--keyring=" + keys,
		`--aptopt=APT::Sandbox::User "root"`, // the keys lie in a folder that is this user's alone
		"trixie", filepath.Join(folder, "base.tar")}, sources...)
	debstrap := host.Command(ctx, "mmdebstrap", args...)
	debstrap.Env = append(os.Environ(), "TMPDIR="+folder)
	if out, err := debstrap.CombinedOutput(); err != nil {
		return 0, 0, fmt.Errorf("mmdebstrap: %w\n%s", err, out)
	}
	base = time.Since(start)

	groups, err := lock.LoadGroups(filepath.Join(b.checkout, "images", "groups.yaml"))
	if err != nil {
		return 0, 0, err
	}
	locked, err := lock.Load(filepath.Join(b.checkout, "images", "lock"))
	if err != nil {
		return 0, 0, err
	}
	var names []string
	for _, g := range groups.Chain("rust") {
		for _, p := range locked.Packages(g.Name, "arm64") {
			names = append(names, p.Name+"="+p.Version)
		}
	}
	text := "FROM scratch\nADD base.tar /\nRUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends " +
		strings.Join(names, " ") + " && rm -rf /var/lib/apt/lists/*\n"
	if err := os.WriteFile(filepath.Join(folder, "Dockerfile"), []byte(text), 0o644); err != nil {
		return 0, 0, err
	}
	fs, err := fsutil.NewFS(folder)
	if err != nil {
		return 0, 0, err
	}
	store, err := buildkit.OpenStore(filepath.Join(b.dir, "dockerfile-oci"), nil)
	if err != nil {
		return 0, 0, err
	}
	export, err := buildkit.Export{}.To(store)
	if err != nil {
		return 0, 0, err
	}
	export.Attrs["compression"] = "gzip" // BuildKit's own
	start = time.Now()
	_, err = p.Solve(ctx, buildkit.Job{Name: "dockerfile", Platform: "linux/arm64", Opt: client.SolveOpt{
		Frontend:      "dockerfile.v0",
		FrontendAttrs: map[string]string{"platform": "linux/arm64"},
		LocalMounts:   map[string]fsutil.FS{"context": fs, "dockerfile": fs},
		Exports:       []client.ExportEntry{export},
	}})
	return base, time.Since(start), err
}

// docker is the time of the same Dockerfile with a docker engine, whose
// `docker build` is buildx where docker has it.
func (b *bench) docker(ctx context.Context) (string, error) {
	if err := host.Command(ctx, "docker", "info").Run(); err != nil {
		return "not measured: no docker engine answers", nil
	}
	image := filepath.Join(b.dir, "docker-image")
	cmd := host.Command(ctx, "docker", "build", "--quiet", "--no-cache", "--platform=linux/arm64", "--iidfile="+image, filepath.Join(b.dir, "dockerfile"))
	cmd.Env = append(os.Environ(), "DOCKER_BUILDKIT=1")
	start := time.Now()
	if out, err := cmd.CombinedOutput(); ctx.Err() != nil {
		return "", context.Cause(ctx)
	} else if err != nil { // a docker without buildx, say
		return "not measured: " + reason(string(out)), nil
	}
	took := seconds(time.Since(start))
	id, err := os.ReadFile(image)
	if err != nil {
		return "", err
	}
	if out, err := host.Command(ctx, "docker", "rmi", string(id)).CombinedOutput(); err != nil {
		return "", fmt.Errorf("docker rmi: %w\n%s", err, out)
	}
	return took, nil
}

// reason is the line of a failed docker build that says why: buildx marks it, and
// a docker older than buildx ends with it.
func reason(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, line := range lines {
		if strings.HasPrefix(line, "ERROR: ") {
			return line
		}
	}
	return lines[len(lines)-1]
}

func sharedBytes(r *dist.Release, a, b string) (shared, total int64, err error) {
	x, err := r.Image(a)
	if err != nil {
		return 0, 0, err
	}
	y, err := r.Image(b)
	if err != nil {
		return 0, 0, err
	}
	has := map[string]bool{}
	for _, v := range x.Platforms {
		for _, l := range v.Layers {
			has[l.Digest.String()] = true
		}
	}
	for _, v := range y.Platforms {
		for _, l := range v.Layers {
			total += l.Size
			if has[l.Digest.String()] {
				shared += l.Size
			}
		}
	}
	return shared, total, nil
}
