package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/release"
)

func init() {
	commands["bench-release"] = command{"[-root DIR] [-config FILE] [-syft PROGRAM] FIRST CHANGED: time the releases of two builds, and of the first one again, to a registry on loopback", runBenchRelease}
}

// The rows of the table, in order: a name and the steps that it adds up.
var timed = []struct {
	name  string
	steps []string
}{
	{"SBOMs of all variants", []string{"sbom"}},
	{"provenance", []string{"provenance"}},
	{"sign and attest", []string{"sign"}},
	{"policy", []string{"policy"}},
	{"release: check what is local and which tags are free", []string{"release: check what is to be released", "release: check that the version is free"}},
	{"release: push", []string{"release: push"}},
	{"release: attach signatures and attestations", []string{"release: attach signatures and attestations"}},
	{"release: verify what was pushed", []string{"release: check what was pushed"}},
	{"release: promote", []string{"release: promote"}},
	{"**release in all**", []string{"release"}},
	{"`verify` of every image, as a consumer", []string{"verify"}},
}

// measured is one release: how long each step took and what it sent.
type measured struct {
	took map[string]time.Duration
	mb   float64
}

// runBenchRelease does all that a release is made of for a first one, the same
// again, and one in which the programs changed.
func runBenchRelease(ctx context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("bench-release", flag.ContinueOnError)
	root := flags.String("root", ".", "the checkout of the builds")
	config := flags.String("config", "release.yaml", "the release configuration")
	program := flags.String("syft", "", "syft's program, the SBOM's peer; without it the version that this program is linked with is installed")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 2 {
		return errors.New("bench-release takes two dist folders: the first release, and one in which the programs changed")
	}
	space, err := cache.Temp(env.getenv)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(space, "bench-release-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	address, stop, err := loopback(filepath.Join(tmp, "registry"))
	if err != nil {
		return err
	}
	defer stop()
	// A key of its own, and no other variable of whoever runs it.
	at := environment{env.log, env.log, func(name string) string {
		switch name {
		case "LOOMCYCLE_CACHE":
			return tmp
		case "RELEASE_REGISTRY":
			return address
		}
		return ""
	}, env.now}
	var all []measured
	for _, folder := range []string{flags.Arg(0), flags.Arg(0), flags.Arg(1)} {
		m, err := benchRelease(ctx, at, *root, *config, folder)
		if err != nil {
			return err
		}
		all = append(all, m)
	}
	r, err := dist.Read(flags.Arg(0))
	if err != nil {
		return err
	}
	size, variants := int64(0), 0
	for _, i := range r.Images {
		for _, v := range i.Platforms {
			size += v.Size
			variants++
		}
	}
	peer, err := benchSyft(ctx, env, *root, flags.Arg(0), *program)
	if err != nil {
		return err
	}
	fmt.Fprintf(env.out, "%d cores; %d images, %d variants of %.0f MB together; a registry on loopback, a key.\n\n", runtime.NumCPU(), len(r.Images), variants, float64(size)/1e6)
	fmt.Fprint(env.out, "| step | first | unchanged | only programs changed | goal for the last |\n| --- | --- | --- | --- | --- |\n")
	line := func(name, goal string, figure func(measured) string) {
		fmt.Fprintf(env.out, "| %s |", name)
		for _, m := range all {
			fmt.Fprintf(env.out, " %s |", figure(m))
		}
		fmt.Fprintf(env.out, " %s |\n", goal)
	}
	for _, row := range timed {
		goal := ""
		if row.name == "**release in all**" {
			goal = "under 20 s"
		}
		line(row.name, goal, func(m measured) string {
			var d time.Duration
			for _, s := range row.steps {
				d += m.took[s]
			}
			return fmt.Sprintf("%.2f s", d.Seconds())
		})
	}
	line("MB sent", "", func(m measured) string { return fmt.Sprintf("%.2f", m.mb) })
	line("of the first release's bytes", "under 5 %", func(m measured) string { return fmt.Sprintf("%.2f %%", 100*m.mb/all[0].mb) })
	fmt.Fprintf(env.out, "\n%s\n", peer)
	return nil
}

func benchRelease(ctx context.Context, env environment, root, config, folder string) (measured, error) {
	m := measured{took: map[string]time.Duration{}}
	step := func(name string, run func() error) error {
		began := time.Now()
		defer func() { m.took[name] = time.Since(began) }()
		return run()
	}
	for _, c := range [][]string{
		{"sbom", "-root", root}, {"provenance", "-root", root}, {"sign"},
		{"policy", "-root", root, "-signatures", filepath.Join(folder, "signatures.json")},
	} {
		if err := step(c[0], func() error { return run(ctx, env, append(c, "-dist", folder)) }); err != nil {
			return m, err
		}
	}
	c, err := release.Load(config)
	if err == nil {
		err = c.Resolve(env.getenv, env.notice)
	}
	if err != nil {
		return m, err
	}
	c.Hooks = release.Hooks{} // smoke is another bench's, policy was timed
	t, err := trust(ctx, env)
	if err != nil {
		return m, err
	}
	sent := &counter{RoundTripper: http.DefaultTransport}
	err = step("release", func() error {
		return release.Publish(ctx, release.Options{Config: c, Dist: folder, State: filepath.Join(env.getenv("LOOMCYCLE_CACHE"), "state"), Trust: t,
			Registry: registry.Options{Transport: sent}, Notice: env.notice,
			Step: func(name string, run func() error) error { return step("release: "+name, run) }})
	})
	if err != nil {
		return m, err
	}
	m.mb = float64(sent.n.Load()) / 1e6
	r, err := dist.Read(folder)
	if err != nil {
		return m, err
	}
	return m, step("verify", func() error {
		for _, i := range r.Images {
			if err := run(ctx, env, []string{"verify", "-config", config, c.Registries[0].Address + "/" + c.Repository(i.Name) + ":" + r.Version}); err != nil {
				return err
			}
		}
		return nil
	})
}

// loopback serves a registry that keeps its blobs on disk.
func loopback(folder string) (string, func(), error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	s := &http.Server{Handler: ggcr.New(ggcr.WithBlobHandler(ggcr.NewDiskBlobHandler(folder)), ggcr.WithReferrersSupport(true), ggcr.Logger(log.New(io.Discard, "", 0)))}
	go func() { _ = s.Serve(l) }()
	return l.Addr().String(), func() { _ = s.Close() }, nil
}

// counter counts the bytes of request bodies.
type counter struct {
	http.RoundTripper
	n atomic.Int64
}

func (c *counter) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil && r.Body != http.NoBody {
		r = r.Clone(r.Context())
		r.Body = &countedBody{r.Body, &c.n}
	}
	return c.RoundTripper.RoundTrip(r)
}

type countedBody struct {
	io.ReadCloser
	n *atomic.Int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n.Add(int64(n))
	return n, err
}
