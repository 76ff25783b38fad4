// Package dist is the local result of a build: an OCI layout that holds the
// whole family, and release.json, which says what is in it.
package dist

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

// Release is the content of release.json; release.schema.json describes it.
type Release struct {
	SchemaVersion int           `json:"schemaVersion"`
	Version       string        `json:"version"`
	Source        Source        `json:"source"`
	Epoch         int64         `json:"epoch"` // SOURCE_DATE_EPOCH, seconds since 1970 UTC
	LockDigest    digest.Digest `json:"lockDigest"`
	Compression   string        `json:"compression"` // gzip or zstd
	Compressor    string        `json:"compressor"`  // whose bytes the layers are: a module, its version and settings
	Images        []Image       `json:"images"`
}

// Source is what the images were built from.
type Source struct {
	Repository string `json:"repository"`
	Commit     string `json:"commit"`
	// Loomcycle is the source of the runtime where it is not this repository.
	Loomcycle string `json:"loomcycle,omitempty"`
	// What is compiled of it, and with which linker flags, where that was asked for.
	LoomcyclePackage string `json:"loomcyclePackage,omitempty"`
	LoomcycleLDFlags string `json:"loomcycleLDFlags,omitempty"`
}

// exact tells whether the source names content, so that two builds of equal
// sources are builds of the same: no change beside a commit, and no binary.
func (s Source) exact() bool {
	loose := func(commit string) bool { return commit == "unknown" || strings.HasSuffix(commit, "-dirty") }
	if loose(s.Commit) || strings.HasPrefix(s.Loomcycle, "bin:") {
		return false
	}
	return s.Loomcycle == "" || !loose(s.Loomcycle[strings.LastIndex(s.Loomcycle, "#")+1:])
}

// Image is one image of the family.
type Image struct {
	Name        string        `json:"name"`
	IndexDigest digest.Digest `json:"indexDigest"`
	Platforms   []Variant     `json:"platforms"`
}

// Variant is an image for one platform.
type Variant struct {
	Platform string        `json:"platform"` // linux/amd64
	Digest   digest.Digest `json:"digest"`   // of the manifest
	Config   digest.Digest `json:"config"`
	Size     int64         `json:"size"` // bytes of all layers, compressed
	Layers   []Layer       `json:"layers"`
}

// Layer is a layer of a variant, the lowest first.
type Layer struct {
	Group  string        `json:"group"` // of groups.yaml, or files or programs
	Digest digest.Digest `json:"digest"`
	DiffID digest.Digest `json:"diffID"`
	Size   int64         `json:"size"` // bytes, compressed
}

//go:embed release.schema.json
var schema []byte

// Validate checks the JSON text of a release.json against its schema.
func Validate(text []byte) error {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		return err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("release.schema.json", doc); err != nil {
		return err
	}
	s, err := c.Compile("release.schema.json")
	if err != nil {
		return err
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("release.json: %w", err)
	}
	if err := s.Validate(v); err != nil {
		return fmt.Errorf("release.json: %w", err)
	}
	return nil
}

// Read reads the release.json of a dist folder.
func Read(folder string) (*Release, error) {
	name := filepath.Join(folder, "release.json")
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("%s holds no build; run `dist` or `images:build` first: %w", folder, err)
	}
	if err := Validate(text); err != nil {
		return nil, fmt.Errorf("%s: %w", folder, err)
	}
	var r Release
	return &r, json.Unmarshal(text, &r)
}

// Image finds an image by name.
func (r *Release) Image(name string) (*Image, error) {
	for i := range r.Images {
		if r.Images[i].Name == name {
			return &r.Images[i], nil
		}
	}
	names := make([]string, len(r.Images))
	for i, img := range r.Images {
		names[i] = img.Name
	}
	return nil, fmt.Errorf("this build has no image called %q; it has %s", name, strings.Join(names, ", "))
}

// Variant finds the image's variant for a platform.
func (img *Image) Variant(platform string) (*Variant, error) {
	for i := range img.Platforms {
		if img.Platforms[i].Platform == platform {
			return &img.Platforms[i], nil
		}
	}
	return nil, fmt.Errorf("%s was not built for %s", img.Name, platform)
}
