package unpack

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// alternative is a link group of update-alternatives(1).
type alternative struct {
	link    string
	slaves  map[string]string // name: link
	choices map[string]choice // by path
}

type choice struct {
	priority int
	slaves   map[string]string // name: path
}

// alternatives makes the links that the packages' scripts ask
// update-alternatives for, and its database.
func (f *finish) alternatives() error {
	all := map[string]*alternative{}
	for _, pkg := range slices.Sorted(maps.Keys(f.scripts)) {
		for _, line := range f.scripts[pkg].Alternatives {
			if err := f.install(all, strings.Fields(line)); err != nil {
				return fmt.Errorf("scripts.yaml: %s: alternative %q: %w", pkg, line, err)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := f.alternative(name, all[name]); err != nil {
			return fmt.Errorf("alternative %s: %w", name, err)
		}
	}
	return nil
}

// install reads LINK NAME PATH PRIORITY [--slave LINK NAME PATH]... A choice
// whose file is left out of the image is none.
func (f *finish) install(all map[string]*alternative, args []string) error {
	if len(args) < 4 || len(args)%4 != 0 {
		return fmt.Errorf("it is not LINK NAME PATH PRIORITY [--slave LINK NAME PATH]")
	}
	link, name, target := args[0], args[1], args[2]
	priority, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	p, err := clean(target)
	if err != nil {
		return err
	}
	if !f.exists(p) {
		if f.filter.skips(p) {
			return nil
		}
		return fmt.Errorf("the image has no %s", target)
	}
	a := all[name]
	if a == nil {
		a = &alternative{link, map[string]string{}, map[string]choice{}}
		all[name] = a
	}
	if a.link != link {
		return fmt.Errorf("its link is %s elsewhere", a.link)
	}
	c := choice{priority, map[string]string{}}
	for s := args[4:]; len(s) > 0; s = s[4:] {
		if s[0] != "--slave" {
			return fmt.Errorf("%q is not --slave", s[0])
		}
		a.slaves[s[2]] = s[1]
		c.slaves[s[2]] = s[3]
	}
	a.choices[target] = c
	return nil
}

// alternative writes one group's links and record, in automatic mode: the
// highest priority wins.
func (f *finish) alternative(name string, a *alternative) error {
	paths := slices.Sorted(maps.Keys(a.choices))
	best := slices.MaxFunc(paths, func(x, y string) int { return a.choices[x].priority - a.choices[y].priority })
	slaves := slices.Sorted(maps.Keys(a.slaves))
	record := []string{"auto", a.link}
	for _, s := range slaves {
		record = append(record, s, a.slaves[s])
	}
	record = append(record, "")
	for _, p := range paths {
		record = append(record, p, strconv.Itoa(a.choices[p].priority))
		for _, s := range slaves {
			record = append(record, a.choices[p].slaves[s])
		}
	}
	record = append(record, "")
	if err := f.put("var/lib/dpkg/alternatives/"+name, meta{mode: 0o644}, lines(record)); err != nil {
		return err
	}
	links := [][3]string{{a.link, name, best}}
	for _, s := range slaves {
		links = append(links, [3]string{a.slaves[s], s, a.choices[best].slaves[s]})
	}
	for i, l := range links {
		at, err := clean(l[0])
		if err != nil {
			return err
		}
		if i > 0 { // a slave without its file has no link
			to, err := clean(path.Clean(l[2]))
			if err != nil || !f.exists(to) {
				continue
			}
		}
		if err := f.link(at, "/etc/alternatives/"+l[1]); err != nil {
			return err
		}
		if err := f.link("etc/alternatives/"+l[1], l[2]); err != nil {
			return err
		}
	}
	return nil
}
