package lock

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Group is a set of sources that becomes one layer.
type Group struct {
	Name  string `yaml:"name"`
	Title string `yaml:"title"` // what the layer holds, for people
	// After names the group whose layers lie below; its closure, and its own
	// chain's, are not repeated.
	After string `yaml:"after"`
	// Closure is false when exactly the named packages are meant, without
	// their dependencies.
	Closure *bool `yaml:"closure"`
	// Debian holds package names in the syntax of apt-get install.
	Debian []string `yaml:"debian"`
	Go     bool     `yaml:"go"`  // the Go toolchain
	NPM    []string `yaml:"npm"` // node, npm
	// GoCache is the standard library compiled by the Go toolchain and the C
	// compilers of the named group.
	GoCache string `yaml:"gocache"`
	// PyCache is the bytecode of the Python sources in the chain of the named
	// group.
	PyCache string `yaml:"pycache"`
}

// Groups are the groups of images/groups.yaml in the file's order.
type Groups []Group

// LoadGroups reads and checks a groups file.
func LoadGroups(file string) (Groups, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var content struct {
		Groups Groups `yaml:"groups"`
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&content); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if err := content.Groups.validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return content.Groups, nil
}

// Get returns the group of that name.
func (gs Groups) Get(name string) (Group, bool) {
	i := slices.IndexFunc(gs, func(g Group) bool { return g.Name == name })
	if i < 0 {
		return Group{}, false
	}
	return gs[i], true
}

// Chain lists the groups below the named one, the lowest first, and the
// named one last. It is empty when there is no such group.
func (gs Groups) Chain(name string) []Group {
	var chain []Group
	for g, ok := gs.Get(name); ok; g, ok = gs.Get(g.After) {
		chain = append(chain, g)
	}
	slices.Reverse(chain)
	return chain
}

// validate demands that a group comes after the one it builds on, which
// also rules out a loop.
func (gs Groups) validate() error {
	seen := map[string]bool{}
	for i, g := range gs {
		switch {
		case g.Name == "":
			return fmt.Errorf("group %d has no name", i+1)
		case seen[g.Name]:
			return fmt.Errorf("group %q is declared twice", g.Name)
		case g.After != "" && !seen[g.After]:
			return fmt.Errorf("group %q comes after %q, which is not declared above it", g.Name, g.After)
		case g.GoCache != "" && !seen[g.GoCache]:
			return fmt.Errorf("group %q compiles with group %q, which is not declared above it", g.Name, g.GoCache)
		case g.PyCache != "" && !seen[g.PyCache]:
			return fmt.Errorf("group %q compiles the Python of group %q, which is not declared above it", g.Name, g.PyCache)
		case len(g.Debian) == 0 && !g.Go && len(g.NPM) == 0 && g.GoCache == "" && g.PyCache == "":
			return fmt.Errorf("group %q names no source: give it debian, go, npm, gocache or pycache", g.Name)
		}
		for _, name := range g.NPM {
			if name != Node && name != NPM {
				return fmt.Errorf("group %q names the npm package %q: only %s and %s are locked", g.Name, name, Node, NPM)
			}
		}
		seen[g.Name] = true
	}
	return nil
}

// CheckGroups reports the first group whose declared packages the lock does
// not hold: the groups file was changed and lock:update not run.
func (l *Lock) CheckGroups(gs Groups) error {
	for _, g := range gs {
		for _, arch := range Arches() {
			have := map[string]bool{}
			for _, below := range gs.Chain(g.Name) {
				for _, p := range l.Packages(below.Name, arch) {
					have[p.Name] = true
				}
			}
			for _, name := range g.Debian {
				name, _, _ = strings.Cut(name, "/")
				if !strings.HasPrefix(name, "?") && !have[name] {
					return fmt.Errorf("group %s asks for %s, which is not locked for %s: run lock:update", g.Name, name, arch)
				}
			}
		}
	}
	for arch := range l.Debian {
		for _, p := range l.Debian[arch] {
			if _, ok := gs.Get(p.Group); !ok {
				return fmt.Errorf("the lock holds %s in group %s, which no longer exists: run lock:update", p, p.Group)
			}
		}
	}
	return nil
}
