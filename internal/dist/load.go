package dist

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Load puts the variant for this machine into the first engine that answers, and
// returns the reference by which the engine knows it. podman is asked first, which
// the guides and the sidecar use, unless DOCKER_HOST names a docker.
func Load(ctx context.Context, folder, image string) (ref, engine string, err error) {
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
	engine, err = findEngine(ctx, os.Getenv("DOCKER_HOST"))
	if err != nil {
		return "", "", err
	}
	content, err := Content(folder, img, v)
	if err != nil {
		return "", "", err
	}
	tag, err := name.NewTag("localhost/" + image + ":" + tagOf(r.Version))
	if err != nil {
		return "", "", err
	}
	cmd := exec.CommandContext(ctx, engine, "load", "-q")
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

// tagOf makes a tag of a version: build metadata's + is not allowed in one.
func tagOf(version string) string { return strings.ReplaceAll(version, "+", "_") }

func findEngine(ctx context.Context, dockerHost string) (string, error) {
	engines := []string{"podman", "docker"}
	if dockerHost != "" {
		slices.Reverse(engines)
	}
	for _, engine := range engines {
		if exec.CommandContext(ctx, engine, "info").Run() == nil {
			return engine, nil
		}
	}
	return "", errors.New("no container engine answers here: install podman (apt-get install podman) or start docker")
}
