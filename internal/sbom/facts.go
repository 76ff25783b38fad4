package sbom

import (
	"archive/tar"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/anchore/syft/syft/artifact"
	"github.com/anchore/syft/syft/pkg"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
)

// Facts are what policy judges of a variant's content; see policies/.
type Facts struct {
	Image    string        `json:"image"`
	Platform string        `json:"platform"`
	Digest   digest.Digest `json:"digest"`
	// Packages are the components, sorted by type, name and version.
	Packages []PackageFacts `json:"packages"`
	// Files and Bytes count the regular files.
	Files int   `json:"files"`
	Bytes int64 `json:"bytes"`
	// Special are the entries that are not plainly root's own: set-id or
	// sticky bits, file capabilities, world-writable, another owner, devices.
	Special   []FileFacts              `json:"special"`
	Unclaimed []Unclaimed              `json:"unclaimed"`
	Missing   []string                 `json:"missing"`
	Extra     []string                 `json:"extra"`
	Secrets   []Finding                `json:"secrets"`
	Programs  map[string]digest.Digest `json:"programs"`
}

// PackageFacts is one component.
type PackageFacts struct {
	Name     string   `json:"name"`
	Version  string   `json:"version"`
	Type     string   `json:"type"`
	PURL     string   `json:"purl"`
	Source   string   `json:"source,omitempty"` // Debian source package
	Licences []string `json:"licences"`
	// Alternatives are the choices that those of the licences leave which are
	// compound expressions: lists of licences that hold together.
	Alternatives map[string][][]string `json:"alternatives,omitempty"`
	// Within names the component that a module is linked or bundled into.
	Within     string        `json:"within,omitempty"`
	WithinType string        `json:"withinType,omitempty"`
	Files      int           `json:"files"`
	Locked     digest.Digest `json:"locked,omitempty"` // of the archive in the lock
	H1         string        `json:"h1,omitempty"`     // of a Go module, from the checksum database
}

// FileFacts is one path; Mode is octal, as `stat -c %a` prints it.
type FileFacts struct {
	Path       string `json:"path"`
	Type       string `json:"type"`
	Mode       string `json:"mode"`
	UID        int    `json:"uid"`
	GID        int    `json:"gid"`
	Setuid     bool   `json:"setuid,omitempty"`
	Setgid     bool   `json:"setgid,omitempty"`
	Sticky     bool   `json:"sticky,omitempty"`
	Capability bool   `json:"capability,omitempty"`
	World      bool   `json:"worldWritable,omitempty"`
	Component  string `json:"component,omitempty"`
}

var fileTypes = map[byte]string{
	tar.TypeReg: "file", tar.TypeDir: "directory", tar.TypeSymlink: "link",
	tar.TypeChar: "character-device", tar.TypeBlock: "block-device", tar.TypeFifo: "fifo",
}

// Facts sums the catalog up; config is searched for secrets as well.
func (c *Catalog) Facts(config *v1.ConfigFile) (Facts, error) {
	v := c.Variant
	out := Facts{
		Image: v.Image, Platform: v.Platform, Digest: v.Digest, Programs: c.Programs,
		Unclaimed: list(c.Unclaimed), Missing: list(c.Missing), Extra: list(c.Extra),
		Packages: []PackageFacts{}, Special: []FileFacts{},
	}
	for _, f := range v.FS.All() {
		if f.Regular() {
			out.Files++
			out.Bytes += f.Size
		}
		device := f.Type == tar.TypeChar || f.Type == tar.TypeBlock
		world := f.Mode&0o002 != 0 && f.Type != tar.TypeSymlink
		if f.Mode&0o7000 == 0 && !world && f.UID == 0 && f.GID == 0 && !f.Capability && !device {
			continue
		}
		out.Special = append(out.Special, FileFacts{
			Path: f.Path, Type: fileTypes[f.Type], Mode: fmt.Sprintf("%o", f.Mode), UID: f.UID, GID: f.GID,
			Setuid: f.Mode&0o4000 != 0, Setgid: f.Mode&0o2000 != 0, Sticky: f.Mode&0o1000 != 0,
			Capability: f.Capability, World: world, Component: c.name(c.Owner[f.Path]),
		})
	}
	for _, p := range c.sbom.Artifacts.Packages.Sorted() {
		out.Packages = append(out.Packages, c.packageFacts(p))
	}
	slices.SortFunc(out.Packages, func(a, b PackageFacts) int {
		return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Version, b.Version), cmp.Compare(a.Within, b.Within))
	})
	var err error
	out.Secrets, err = c.secrets(config)
	return out, err
}

func list[T any](in []T) []T {
	if in == nil {
		return []T{}
	}
	return in
}

func (c *Catalog) name(id artifact.ID) string {
	if p := c.sbom.Artifacts.Packages.Package(id); p != nil {
		return p.Name
	}
	return ""
}

func (c *Catalog) packageFacts(p pkg.Package) PackageFacts {
	out := PackageFacts{
		Name: p.Name, Version: p.Version, Type: string(p.Type), PURL: p.PURL,
		Files: c.files[p.ID()], Locked: c.sources[p.ID()], Licences: []string{},
	}
	if entry, ok := p.Metadata.(pkg.DpkgDBEntry); ok {
		out.Source = cmp.Or(entry.Source, entry.Package)
	}
	if entry, ok := p.Metadata.(pkg.GolangBinaryBuildinfoEntry); ok {
		out.H1 = entry.H1Digest
	}
	if in := c.sbom.Artifacts.Packages.Package(c.within[p.ID()]); in != nil {
		out.Within, out.WithinType = in.Name, string(in.Type)
	}
	for _, l := range p.Licenses.ToSlice() {
		out.Licences = append(out.Licences, cmp.Or(l.SPDXExpression, l.Value, "LicenseRef-"+strings.TrimPrefix(l.Contents, "sha256:")))
	}
	slices.Sort(out.Licences)
	out.Licences = slices.Compact(out.Licences)
	for _, l := range out.Licences {
		if choices := alternatives(l); choices != nil {
			if out.Alternatives == nil {
				out.Alternatives = map[string][][]string{}
			}
			out.Alternatives[l] = choices
		}
	}
	return out
}

// ReadFacts reads a facts document.
func ReadFacts(data []byte) (f Facts, err error) {
	if err := json.Unmarshal(data, &f); err != nil {
		return f, fmt.Errorf("not a facts document of this program: %w", err)
	}
	return f, nil
}
