package smoke

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// sizes are those of the layers and packages at the last review of the
// budgets, in bytes compressed: smoke/golden/sizes.json. They only serve to
// tell what grew.
type sizes struct {
	// Layers by image, architecture and group.
	Layers map[string]map[string]map[string]int64 `json:"layers"`
	// Packages by group, architecture and name: the size of the .deb, npm
	// tarball or module zip.
	Packages map[string]map[string]map[string]int64 `json:"packages"`
}

func sizesFile(root string) string { return filepath.Join(root, "smoke", "golden", "sizes.json") }

func readSizes(root string) (*sizes, error) {
	text, err := os.ReadFile(sizesFile(root))
	if errors.Is(err, fs.ErrNotExist) {
		return &sizes{}, nil
	}
	if err != nil {
		return nil, err
	}
	var s sizes
	return &s, json.Unmarshal(text, &s)
}

// recordSizes makes a target's sizes those that growth is told against.
func (r *runner) recordSizes(t *target, layers map[string]int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, err := readSizes(r.Root)
	if err != nil {
		return err
	}
	set(&s.Layers, t.Name, t.arch(), layers)
	for group := range layers {
		packages, err := r.packages(t, group)
		if err != nil {
			return err
		}
		if len(packages) > 0 {
			set(&s.Packages, group, t.arch(), packages)
		}
	}
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(sizesFile(r.Root), append(text, '\n'), 0o644)
}

func set(m *map[string]map[string]map[string]int64, name, arch string, values map[string]int64) {
	if *m == nil {
		*m = map[string]map[string]map[string]int64{}
	}
	if (*m)[name] == nil {
		(*m)[name] = map[string]map[string]int64{}
	}
	(*m)[name][arch] = values
}

type growth struct {
	name     string
	was, now int64
}

// grown lists what is larger than it was, the most grown first.
func grown(was, now map[string]int64) []growth {
	var out []growth
	for name, n := range now {
		if n > was[name] {
			out = append(out, growth{name, was[name], n})
		}
	}
	slices.SortFunc(out, func(a, b growth) int {
		return cmp.Or(cmp.Compare(b.now-b.was, a.now-a.was), cmp.Compare(a.name, b.name))
	})
	return out
}

func (s *sizes) grown(image, arch string, now map[string]int64) []growth {
	return grown(s.Layers[image][arch], now)
}

// grownPackages is cut at ten: the largest tell the story.
func (s *sizes) grownPackages(group, arch string, now map[string]int64) []growth {
	g := grown(s.Packages[group][arch], now)
	return g[:min(10, len(g))]
}

// packages are the sizes of a group's locked sources.
func (r *runner) packages(t *target, group string) (map[string]int64, error) {
	l, err := lock.Load(filepath.Join(r.Root, "images", "lock"))
	if err != nil {
		return nil, err
	}
	return packageSizes(l, group, t.arch()), nil
}

func packageSizes(l *lock.Lock, group, arch string) map[string]int64 {
	out := map[string]int64{}
	for _, p := range l.Packages(group, arch) {
		out[p.Name] = p.Size
	}
	switch group {
	case "go":
		out["go"] = l.Go[arch].Size
	case "node":
		for _, p := range l.NPM[arch] {
			out[p.Name] = p.Size
		}
	}
	return out
}
