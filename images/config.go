package images

import (
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Build says what a build is of; it stamps the images and nothing else.
type Build struct {
	Version  string    // 1.2.3, or what git describes
	Revision string    // the commit
	Created  time.Time // SOURCE_DATE_EPOCH, never the clock
}

// OCIConfig is the image's configuration for an architecture, but for the
// layers, which are not known before they are built.
func (f *Family) OCIConfig(img *Image, arch string, b Build) ocispec.Image {
	created := b.Created.UTC()
	c := ocispec.Image{
		Created:  &created,
		Author:   f.Vendor,
		Platform: ocispec.Platform{OS: "linux", Architecture: arch},
		Config: ocispec.ImageConfig{
			User:       img.Config.User,
			WorkingDir: img.Config.Workdir,
			Entrypoint: img.Config.Entrypoint,
			Cmd:        img.Config.Cmd,
			Env:        img.Config.Env,
			StopSignal: img.Config.StopSignal,
			Labels:     f.Annotations(img, b),
		},
	}
	for _, p := range img.Config.Ports {
		if c.Config.ExposedPorts == nil {
			c.Config.ExposedPorts = map[string]struct{}{}
		}
		c.Config.ExposedPorts[p] = struct{}{}
	}
	return c
}

// Annotations are the pre-defined keys of the OCI image specification
// (annotations.md), which the labels repeat.
func (f *Family) Annotations(img *Image, b Build) map[string]string {
	return map[string]string{
		ocispec.AnnotationTitle:         img.Title,
		ocispec.AnnotationDescription:   img.Description,
		ocispec.AnnotationSource:        f.Source,
		ocispec.AnnotationURL:           f.URL,
		ocispec.AnnotationVersion:       b.Version,
		ocispec.AnnotationRevision:      b.Revision,
		ocispec.AnnotationCreated:       b.Created.UTC().Format(time.RFC3339),
		ocispec.AnnotationLicenses:      f.Licenses,
		ocispec.AnnotationVendor:        f.Vendor,
		ocispec.AnnotationDocumentation: f.Source + "/blob/" + strings.TrimSuffix(b.Revision, "-dirty") + "/" + img.Documentation,
		ocispec.AnnotationBaseImageName: "scratch",
	}
}
