package dist

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Load puts the variant for this machine into the first engine that answers, and
// returns the reference by which the engine knows it. podman is asked first, which
// the guides and the sidecar use, unless DOCKER_HOST names a docker.
func Load(ctx context.Context, getenv func(string) string, folder, image string) (ref, engine string, err error) {
	r, err := Read(folder)
	if err != nil {
		return "", "", err
	}
	img, err := r.Image(image)
	if err != nil {
		return "", "", err
	}
	v, err := img.Variant("linux/" + runtime.GOARCH)
	if err != nil {
		return "", "", err
	}
	host := getenv("DOCKER_HOST")
	engine, err = findEngine(ctx, host)
	if err != nil {
		return "", "", err
	}
	content, err := Content(folder, img, v)
	if err != nil {
		return "", "", err
	}
	if engine == "docker" {
		if content, err = ForDocker(content); err != nil {
			return "", "", err
		}
	}
	tag, err := name.NewTag("localhost/" + image + ":" + tagOf(r.Version))
	if err != nil {
		return "", "", err
	}
	cmd := ask(ctx, host, engine, "load", "-q")
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", "", err
	}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return "", "", err
	}
	err = errors.Join(tarball.Write(tag, content, in), in.Close(), cmd.Wait())
	if err != nil {
		return "", "", fmt.Errorf("%s load: %w\n%s", engine, err, out.String())
	}
	return tag.String(), engine, nil
}

// ForDocker is an image as every docker loads it: with plain layers where some are
// compressed with zstd, which none before version 23 can read.
func ForDocker(img v1.Image) (v1.Image, error) {
	m, err := img.Manifest()
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(m.Layers, func(l v1.Descriptor) bool { return l.MediaType == types.OCILayerZStd }) {
		return img, nil
	}
	layers, err := img.Layers()
	if err != nil {
		return nil, err
	}
	out := empty.Image
	for _, l := range layers {
		size := sync.OnceValues(func() (int64, error) {
			tar, err := l.Uncompressed()
			if err != nil {
				return 0, err
			}
			defer tar.Close()
			return io.Copy(io.Discard, tar)
		})
		if out, err = mutate.AppendLayers(out, plainLayer{l, size}); err != nil {
			return nil, err
		}
	}
	return sameConfig{out, img}, nil
}

type plainLayer struct {
	v1.Layer
	size func() (int64, error)
}

func (l plainLayer) Digest() (v1.Hash, error)            { return l.DiffID() }
func (l plainLayer) Compressed() (io.ReadCloser, error)  { return l.Uncompressed() }
func (l plainLayer) Size() (int64, error)                { return l.size() }
func (l plainLayer) MediaType() (types.MediaType, error) { return types.OCIUncompressedLayer, nil }

// sameConfig is an image with the configuration of another, to the byte.
type sameConfig struct {
	v1.Image
	of v1.Image
}

func (i sameConfig) ConfigName() (v1.Hash, error)   { return i.of.ConfigName() }
func (i sameConfig) RawConfigFile() ([]byte, error) { return i.of.RawConfigFile() }

// tagOf makes a tag of a version: build metadata's + is not allowed in one.
func tagOf(version string) string { return strings.ReplaceAll(version, "+", "_") }

// ask is a command of an engine's client.
func ask(ctx context.Context, dockerHost, engine string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, engine, args...)
	if dockerHost != "" {
		cmd.Env = append(os.Environ(), "DOCKER_HOST="+dockerHost)
	}
	return cmd
}

func findEngine(ctx context.Context, dockerHost string) (string, error) {
	engines := []string{"podman", "docker"}
	if dockerHost != "" {
		slices.Reverse(engines)
	}
	for _, engine := range engines {
		if ask(ctx, dockerHost, engine, "info").Run() == nil {
			return engine, nil
		}
	}
	return "", errors.New("no container engine answers here: install podman (apt-get install podman) or start docker")
}
