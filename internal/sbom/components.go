package sbom

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/anchore/syft/syft/file"
	"github.com/anchore/syft/syft/pkg"
	"github.com/bmatcuk/doublestar/v4"
	"go.yaml.in/yaml/v3"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
)

//go:embed components.yaml
var defaultComponents []byte

// Components says which component a file belongs to when no package database
// lists it: components.yaml.
type Components struct {
	Components []Component `yaml:"components"`
	// Programs are the paths of the project's own Go programs; each is
	// claimed by the main module in its build information.
	Programs []string `yaml:"programs"`
	// NPM is the folder that holds the locked npm packages.
	NPM string `yaml:"npm"`
	// Bytecode is the layer group whose files belong to the packages of the
	// Python sources that they were compiled from.
	Bytecode string `yaml:"bytecode"`
}

// Component owns the files that its patterns match.
type Component struct {
	Name     string   `yaml:"name"`
	Source   string   `yaml:"source"` // what of the lock it is: go, node, or nothing
	Group    string   `yaml:"group"`  // only files of this layer group; any when empty
	Licences []string `yaml:"licences"`
	Supplier string   `yaml:"supplier"`
	CPE      string   `yaml:"cpe"` // with VERSION in place of the locked version
	Paths    []string `yaml:"paths"`
	// Says is where its own files name its version: the groups of the pattern,
	// with dots between them. It has to be the locked one.
	Says struct {
		File    string `yaml:"file"`
		Version string `yaml:"version"` // a regular expression
	} `yaml:"says"`
	// Definition adds the paths that the image's definition declares, in the
	// layer group `files`. Its files are listed one by one in the documents.
	Definition bool `yaml:"definition"`
}

// DefaultComponents gives the family's own table.
func DefaultComponents() (Components, error) { return ParseComponents(defaultComponents) }

// ParseComponents reads a table and refuses patterns that would claim files
// nobody thought of.
func ParseComponents(data []byte) (Components, error) {
	var c Components
	d := yaml.NewDecoder(strings.NewReader(string(data)))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil {
		return c, fmt.Errorf("components.yaml: %w", err)
	}
	var errs []error
	for _, component := range c.Components {
		if _, err := regexp.Compile(component.Says.Version); err != nil {
			errs = append(errs, fmt.Errorf("component %s: says: %w", component.Name, err))
		}
		for _, p := range component.Paths {
			if err := checkPattern(p, component.Source != "" && component.Group != ""); err != nil {
				errs = append(errs, fmt.Errorf("component %s: %w", component.Name, err))
			}
		}
	}
	for _, p := range c.Programs {
		if err := checkPattern(p, false); err != nil {
			errs = append(errs, fmt.Errorf("programs: %w", err))
		}
	}
	return c, errors.Join(errs...)
}

// checkPattern allows wildcards in the last element only, next to something
// literal. A whole tree may be claimed only in the layer of a locked source.
func checkPattern(p string, tree bool) error {
	dir, base := path.Split(p)
	switch {
	case p == "" || strings.HasPrefix(p, "/") || !doublestar.ValidatePattern(p):
		return fmt.Errorf("%q is not a pattern for a path without a leading slash", p)
	case strings.ContainsAny(dir, "*?[{"):
		return fmt.Errorf("%q has a wildcard in the middle; name the folder", p)
	case base == "**" && tree && strings.Count(dir, "/") >= 3:
		return nil
	case strings.Contains(base, "**"):
		return fmt.Errorf("%q claims a whole tree, which only the component of a locked source may do, in its own layer group and three folders deep", p)
	case strings.Trim(base, "*?") == "":
		return fmt.Errorf("%q claims everything in a folder; name the files", p)
	}
	return nil
}

func (c Component) claims(v Variant, f *imagefs.File) bool {
	group := v.group(f)
	if c.Group != "" && c.Group != group {
		return false
	}
	return c.Definition && slices.Contains(v.Files, f.Path) ||
		slices.ContainsFunc(c.Paths, func(p string) bool { return doublestar.MatchUnvalidated(p, f.Path) })
}

// version is what its files in the image say that it is; "unknown" where they
// say nothing.
func (c Component) version(fsys *imagefs.FS) string {
	text, err := fsys.ReadFile(c.Says.File)
	if m := regexp.MustCompile(c.Says.Version).FindSubmatch(text); err == nil && m != nil {
		return string(bytes.Join(m[1:], []byte(".")))
	}
	return "unknown"
}

// ownsProgram says whether a module was found in one of the programs' places.
func (c Components) ownsProgram(p pkg.Package) bool {
	return slices.ContainsFunc(p.Locations.ToSlice(), func(l file.Location) bool {
		return c.program(strings.TrimPrefix(l.RealPath, "/"))
	})
}

func (c Components) program(name string) bool {
	return slices.ContainsFunc(c.Programs, func(p string) bool { return doublestar.MatchUnvalidated(p, name) })
}
