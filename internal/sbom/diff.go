package sbom

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Diff is what changed between two variants of the same image.
type Diff struct {
	Added, Removed []PackageFacts
	Changed        []Change
	Relicensed     []Change
	Files, Bytes   int64 // more (or less) than before
}

// Change is one component before and after.
type Change struct{ From, To PackageFacts }

// Compare finds the components that were added, removed or changed. Where an
// image has several versions of one module they are compared as a set.
func Compare(from, to Facts) Diff {
	type key struct{ kind, name string }
	index := func(f Facts) map[key][]PackageFacts {
		out := map[key][]PackageFacts{}
		for _, p := range f.Packages {
			k := key{p.Type, p.Name}
			out[k] = append(out[k], p)
		}
		return out
	}
	d := Diff{Files: int64(to.Files - from.Files), Bytes: to.Bytes - from.Bytes}
	before, after := index(from), index(to)
	names := maps.Clone(before)
	maps.Copy(names, after)
	keys := slices.SortedFunc(maps.Keys(names), func(a, b key) int {
		return strings.Compare(a.kind+"\x00"+a.name, b.kind+"\x00"+b.name)
	})
	for _, k := range keys {
		var gone, come []PackageFacts
		for _, p := range before[k] {
			i := slices.IndexFunc(after[k], func(q PackageFacts) bool { return q.Version == p.Version })
			if i < 0 {
				gone = append(gone, p)
			} else if q := after[k][i]; !slices.Equal(p.Licences, q.Licences) {
				d.Relicensed = append(d.Relicensed, Change{p, q})
			}
		}
		for _, q := range after[k] {
			if !slices.ContainsFunc(before[k], func(p PackageFacts) bool { return p.Version == q.Version }) {
				come = append(come, q)
			}
		}
		for len(gone) > 0 && len(come) > 0 {
			d.Changed = append(d.Changed, Change{gone[0], come[0]})
			if !slices.Equal(gone[0].Licences, come[0].Licences) {
				d.Relicensed = append(d.Relicensed, Change{gone[0], come[0]})
			}
			gone, come = gone[1:], come[1:]
		}
		d.Removed, d.Added = append(d.Removed, gone...), append(d.Added, come...)
	}
	return d
}

// Empty says that nothing changed.
func (d Diff) Empty() bool {
	return len(d.Added)+len(d.Removed)+len(d.Changed)+len(d.Relicensed) == 0 && d.Files == 0 && d.Bytes == 0
}

// Print writes the difference as a list, one component a line.
func (d Diff) Print(w io.Writer) {
	if d.Empty() {
		fmt.Fprintln(w, "no difference")
		return
	}
	for _, p := range d.Added {
		fmt.Fprintf(w, "+ %s %s %s (%s)\n", p.Type, p.Name, p.Version, strings.Join(p.Licences, ", "))
	}
	for _, p := range d.Removed {
		fmt.Fprintf(w, "- %s %s %s\n", p.Type, p.Name, p.Version)
	}
	for _, c := range d.Changed {
		fmt.Fprintf(w, "~ %s %s %s -> %s\n", c.To.Type, c.To.Name, c.From.Version, c.To.Version)
	}
	for _, c := range d.Relicensed {
		fmt.Fprintf(w, "§ %s %s %s: %s -> %s\n", c.To.Type, c.To.Name, c.To.Version, strings.Join(c.From.Licences, ", "), strings.Join(c.To.Licences, ", "))
	}
	fmt.Fprintf(w, "= %+d files, %+d bytes\n", d.Files, d.Bytes)
}
