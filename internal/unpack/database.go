package unpack

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// statusOrder is the order in which dpkg writes the fields of its status
// file; fields that dpkg does not know follow in the order of the package.
var statusOrder = []string{
	"Package", "Essential", "Protected", "Status", "Priority", "Section", "Installed-Size", "Origin", "Maintainer",
	"Bugs", "Architecture", "Multi-Arch", "Source", "Version", "Replaces", "Provides", "Depends", "Pre-Depends",
	"Recommends", "Suggests", "Breaks", "Conflicts", "Enhances", "Conffiles", "Description",
}

// database writes what dpkg keeps about the whole system: status, triggers,
// diversions, architectures and the empty files and folders that it expects.
func (f *finish) database() error {
	const base = "var/lib/dpkg/"
	var status strings.Builder
	triggers := map[string][]string{} // by the file's name
	var diverted []string
	for _, r := range f.packages {
		s, err := parseStanza(r.Control)
		if err != nil {
			return fmt.Errorf("package %s: %w", r.Name, err)
		}
		status.WriteString(installed(s, r.Conffiles) + "\n")
		for line := range strings.Lines(r.Triggers) {
			if err := interest(triggers, line, qualified(s)); err != nil {
				return fmt.Errorf("package %s: triggers: %w", r.Name, err)
			}
		}
		divert := f.scripts[r.Name].diverts(f.plan.Arch)
		for _, from := range slices.Sorted(maps.Keys(divert)) {
			diverted = append(diverted, from, divert[from], r.Name)
		}
	}
	empty := func(name string, mode int64) error { return f.put(base+name, meta{mode: mode}, nil) }
	arch := []byte(f.plan.Arch + "\n")
	steps := []error{
		f.put(base+"status", meta{mode: 0o644}, []byte(status.String())),
		f.put(base+"diversions", meta{mode: 0o644}, lines(diverted)),
		f.put(base+"arch", meta{mode: 0o644}, arch),
		f.put(base+"arch-native", meta{mode: 0o644}, arch),
		f.put(base+"info/format", meta{mode: 0o644}, []byte("1\n")),
		empty("available", 0o644), empty("statoverride", 0o644),
		empty("lock", 0o640), empty("lock-frontend", 0o640),
		empty("triggers/Lock", 0o600), empty("triggers/Unincorp", 0o644),
		f.mkdir(base+"updates", meta{mode: 0o755}),
		f.mkdir(base+"parts", meta{mode: 0o755}),
	}
	for _, name := range slices.Sorted(maps.Keys(triggers)) {
		slices.Sort(triggers[name])
		steps = append(steps, f.put(base+"triggers/"+name, meta{mode: 0o644}, lines(triggers[name])))
	}
	for _, err := range steps {
		if err != nil {
			return err
		}
	}
	return nil
}

// installed returns a package's stanza in dpkg's status file.
func installed(s stanza, conffiles []conffile) string {
	extra := stanza{{"Status", "install ok installed"}}
	if len(conffiles) > 0 {
		var b strings.Builder
		for _, c := range conffiles {
			b.WriteString("\n " + c.Path + " " + c.MD5)
			if c.Flag != "" {
				b.WriteString(" " + c.Flag)
			}
		}
		extra = append(extra, field{"Conffiles", b.String()})
	}
	all := append(slices.Clone(s), extra...)
	rank := func(f field) int {
		for i, name := range statusOrder {
			if strings.EqualFold(name, f.name) {
				return i
			}
		}
		return len(statusOrder)
	}
	slices.SortStableFunc(all, func(a, b field) int { return rank(a) - rank(b) })
	var b strings.Builder
	for _, f := range all {
		b.WriteString(f.name + ":")
		if !strings.HasPrefix(f.value, "\n") {
			b.WriteString(" ")
		}
		b.WriteString(f.value + "\n")
	}
	return b.String()
}

// qualified is the name by which dpkg's database calls the package: with its
// architecture where several may be installed at once.
func qualified(s stanza) string {
	if s.get("Multi-Arch") == "same" {
		return s.get("Package") + ":" + s.get("Architecture")
	}
	return s.get("Package")
}

// interest adds a line of deb-triggers(5): paths go to the file File, names
// to a file of their own.
func interest(triggers map[string][]string, line, pkg string) error {
	words := strings.Fields(line)
	if len(words) == 0 || strings.HasPrefix(words[0], "#") || strings.HasPrefix(words[0], "activate") {
		return nil
	}
	if len(words) != 2 || strings.Contains(words[1], "..") {
		return fmt.Errorf("%q is not a trigger", line)
	}
	switch words[0] {
	case "interest", "interest-await":
	case "interest-noawait":
		pkg += "/noawait"
	default:
		return fmt.Errorf("%q is not a trigger", line)
	}
	if name := words[1]; strings.HasPrefix(name, "/") {
		triggers["File"] = append(triggers["File"], name+" "+pkg)
	} else if !strings.Contains(name, "/") {
		triggers[name] = append(triggers[name], pkg)
	} else {
		return fmt.Errorf("%q is not a trigger", line)
	}
	return nil
}
