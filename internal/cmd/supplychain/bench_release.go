package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/dist/disttest"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/release"
	"github.com/loomcycle/loomcycle-images/internal/signing"
)

func init() {
	commands["bench-release"] = command{"[-dist DIR] [-config FILE]: time releases of images with the build's layer sizes to a registry on loopback", runBenchRelease}
}

// ordinary are layer sizes, in MB, for when there is no build to take them from.
var ordinary = map[string][]disttest.Layer{
	"loomcycle":         {{Name: "certificates", Size: 1}, {Name: "programs", Size: 12}},
	"loomcycle-toolbox": {{Name: "base", Size: 35}, {Name: "c", Size: 90}, {Name: "go", Size: 75}, {Name: "rust", Size: 110}, {Name: "node", Size: 45}, {Name: "python", Size: 20}, {Name: "programs", Size: 12}},
	"loomcycle-session": {{Name: "base", Size: 35}, {Name: "c", Size: 90}, {Name: "go", Size: 75}, {Name: "rust", Size: 110}, {Name: "node", Size: 45}, {Name: "python", Size: 20}},
}

// runBenchRelease publishes a first release, the same again, and one in which
// only the layers of our programs changed.
func runBenchRelease(ctx context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("bench-release", flag.ContinueOnError)
	folder := flags.String("dist", "dist", "the build whose layer sizes are taken")
	config := flags.String("config", "release.yaml", "the release configuration")
	if err := flags.Parse(args); err != nil {
		return err
	}
	images := map[string][]disttest.Layer{}
	origin := "ordinary sizes"
	if r, err := dist.Read(*folder); err == nil {
		origin = "sizes of " + *folder
		for _, i := range r.Images {
			for _, l := range i.Platforms[0].Layers {
				// One name, one content: a layer that two images share is shared here too.
				name := l.Group + "-" + l.Digest.Encoded()[:8]
				images[i.Name] = append(images[i.Name], disttest.Layer{Name: name, Size: int(l.Size)})
			}
		}
	} else {
		for name, layers := range ordinary {
			for _, l := range layers {
				images[name] = append(images[name], disttest.Layer{Name: l.Name, Size: l.Size << 20})
			}
		}
	}
	tmp, err := os.MkdirTemp("", "bench-release-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	address, stop, err := loopback(filepath.Join(tmp, "registry"))
	if err != nil {
		return err
	}
	defer stop()
	s, err := signing.Open(ctx, signing.Config{CacheDir: tmp})
	if err != nil {
		return err
	}
	trusted, err := signing.TrustFromEnv(func(string) string { return "" }, tmp)
	if err != nil {
		return err
	}
	t, err := signing.NewTrust(ctx, trusted)
	if err != nil {
		return err
	}
	c, err := release.Load(*config)
	if err != nil {
		return err
	}
	c.Hooks, c.Registries = release.Hooks{}, []release.Registry{{Address: address}}
	fmt.Fprintf(env.out, "%s, two platforms, a registry on loopback\n\n", origin)
	w := tabwriter.NewWriter(env.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "release\tMB in all\tsign and attest\tcheck\tpush\tattach\tverify\tpromote\ttotal\tMB sent\t% of first\t")
	var first float64
	for _, b := range []struct{ name, version, programs string }{
		{"first", "1.0.0", ""}, {"unchanged", "1.0.0", ""}, {"runtime only", "1.0.1", "changed"},
	} {
		at := filepath.Join(tmp, "dist")
		f := disttest.Family{Version: b.version, Images: map[string][]disttest.Layer{}}
		for name, layers := range images {
			for _, l := range layers {
				if strings.HasPrefix(l.Name, "programs") {
					l.Name += b.programs
				}
				f.Images[name] = append(f.Images[name], l)
			}
		}
		r, err := f.Write(at)
		if err != nil {
			return err
		}
		began := time.Now()
		if _, err := signing.SignFamily(ctx, at, r, s); err != nil {
			return err
		}
		took := map[string]time.Duration{"sign": time.Since(began)}
		sent := &counter{RoundTripper: http.DefaultTransport}
		err = release.Publish(ctx, release.Options{Config: c, Dist: at, State: filepath.Join(tmp, "state"), Trust: t, Registry: registry.Options{Transport: sent},
			Step: func(name string, run func() error) error {
				began := time.Now()
				defer func() { took[name] = time.Since(began) }()
				return run()
			}})
		if err != nil {
			return err
		}
		total := time.Since(began)
		mb := float64(sent.n.Load()) / 1e6
		if first == 0 {
			first = mb
		}
		size := 0.0
		for _, i := range r.Images {
			for _, v := range i.Platforms {
				size += float64(v.Size) / 1e6
			}
		}
		seconds := func(names ...string) string {
			var d time.Duration
			for _, n := range names {
				d += took[n]
			}
			return fmt.Sprintf("%.2f s", d.Seconds())
		}
		fmt.Fprintf(w, "%s\t%.1f\t%s\t%s\t%s\t%s\t%s\t%s\t%.2f s\t%.2f\t%.2f\t\n", b.name, size, seconds("sign"), seconds("check what is to be released", "check that the version is free"),
			seconds("push"), seconds("attach signatures and attestations"), seconds("check what was pushed"), seconds("promote"), total.Seconds(), mb, 100*mb/first)
	}
	return w.Flush()
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
