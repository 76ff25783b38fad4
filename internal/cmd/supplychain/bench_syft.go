package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/sbom"
)

const syftModule = "github.com/anchore/syft"

// benchSyft times the SBOM of the toolbox, from nothing, beside syft's command
// on the same image, and says so in a sentence.
func benchSyft(ctx context.Context, env environment, root, folder, program string) (string, error) {
	b, err := openBuild(folder, root, filepath.Join(root, "images", "lock", "lock.json"))
	if err != nil {
		return "", err
	}
	image, err := b.release.Image("loomcycle-toolbox")
	if err != nil {
		return "", err
	}
	v, err := image.Variant("linux/" + runtime.GOARCH)
	if err != nil {
		return "", err
	}
	tmp, err := cache.Temp(os.Getenv)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(tmp, "bench-syft-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	if program == "" {
		if program, err = installSyft(ctx, dir); err != nil {
			return "", err
		}
	}
	ours, err := b.timeOurs(ctx, dir, *image, *v)
	if err != nil {
		return "", err
	}
	// Syft's command reads a layout that holds one image.
	single, err := layout.Write(filepath.Join(dir, "oci"), empty.Index)
	if err != nil {
		return "", err
	}
	img, _, err := b.image(image.IndexDigest, *v)
	if err != nil {
		return "", err
	}
	if err := single.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH})); err != nil {
		return "", err
	}
	start := time.Now()
	cmd := exec.CommandContext(ctx, program, "scan", "-q", "oci-dir:"+string(single), "-o", "spdx-json="+filepath.Join(dir, "syft.spdx.json"), "-o", "cyclonedx-json="+filepath.Join(dir, "syft.cdx.json"))
	cmd.Env = append(os.Environ(), "SYFT_CHECK_FOR_APP_UPDATE=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", program, err, out)
	}
	peer := time.Since(start)
	return fmt.Sprintf("SBOM of %s for %s, in both formats: %.1f s; syft's own command on the same image: %.1f s.", image.Name, v.Platform, ours.Seconds(), peer.Seconds()), nil
}

// timeOurs describes a variant from nothing: no layer is shared with another.
func (b *build) timeOurs(ctx context.Context, dir string, image dist.Image, v dist.Variant) (time.Duration, error) {
	family, err := images.Load(os.DirFS(b.root))
	if err != nil {
		return 0, err
	}
	definition, err := family.Image(image.Name)
	if err != nil {
		return 0, err
	}
	components, err := sbom.DefaultComponents()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if ctx, err = sbom.WithLicences(ctx); err != nil {
		return 0, err
	}
	store, err := imagefs.NewStore(dir)
	if err != nil {
		return 0, err
	}
	at := *b
	at.folder = dir
	_, err = at.describe(ctx, store, components, definition, family.Licenses, image, v)
	took := time.Since(start)
	return took, errors.Join(err, store.Close())
}

// installSyft compiles syft's command in the version of the library.
func installSyft(ctx context.Context, dir string) (string, error) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "", fmt.Errorf("this program has no build information; name syft's program with -syft")
	}
	for _, m := range info.Deps {
		if m.Path != syftModule {
			continue
		}
		cmd := exec.CommandContext(ctx, "go", "install", syftModule+"/cmd/syft@"+m.Version)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOBIN="+dir, "GOFLAGS=")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("go install %s/cmd/syft@%s: %w: %s", syftModule, m.Version, err, out)
		}
		return filepath.Join(dir, "syft"), nil
	}
	return "", fmt.Errorf("this program is not linked with %s", syftModule)
}
