package differential

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

//go:embed differences.yaml
var listYAML []byte

// Difference is one kind of difference that is meant to be.
type Difference struct {
	Paths  []string `yaml:"paths"` // a star matches slashes too
	As     Kind     `yaml:"as"`
	Reason string   `yaml:"reason"`
}

// Kind says what may differ.
type Kind string

// The kinds of differences.
const (
	Missing Kind = "missing" // only the reference has it
	Extra   Kind = "extra"   // only we have it
	Content Kind = "content" // a file's content
	Order   Kind = "order"   // a file's lines are the same in another order
	Subset  Kind = "subset"  // a file lacks lines that name files we leave out
	Comment Kind = "comment" // a file's lines are the same but for comments
	Meta    Kind = "meta"    // mode or owner
)

// Listed reads the list of differences.
func Listed() ([]Difference, error) {
	var list []Difference
	dec := yaml.NewDecoder(bytes.NewReader(listYAML))
	dec.KnownFields(true)
	if err := dec.Decode(&list); err != nil {
		return nil, fmt.Errorf("differences.yaml: %w", err)
	}
	for _, d := range list {
		if len(d.Paths) == 0 || d.Reason == "" {
			return nil, fmt.Errorf("differences.yaml: an entry lacks its paths or its reason")
		}
	}
	return list, nil
}

// Report is the result of a comparison.
type Report struct {
	Paths    int            // compared: those of both trees
	Equal    int            // equal in type, mode, owner, target and content
	Listed   map[string]int // differences by reason
	Unlisted []string       // differences that are on no list
	Unused   []string       // patterns of the list that matched none
}

// Err is nil when the trees differ exactly as listed.
func (r *Report) Err() error {
	if len(r.Unlisted)+len(r.Unused) == 0 {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d differences are not listed in internal/unpack/differential/differences.yaml", len(r.Unlisted))
	for _, u := range r.Unlisted[:min(len(r.Unlisted), 200)] {
		b.WriteString("\n  " + u)
	}
	for _, u := range r.Unused {
		b.WriteString("\n  listed, but it no longer occurs: " + u)
	}
	return fmt.Errorf("%s", b.String())
}

// Compare compares our tree with the reference.
func Compare(ours, reference Tree, list []Difference) *Report {
	r := &Report{Listed: map[string]int{}}
	used := map[string]bool{}
	all := map[string]bool{}
	for p := range ours {
		all[p] = true
	}
	for p := range reference {
		all[p] = true
	}
	r.Paths = len(all)
	for _, p := range slices.Sorted(maps.Keys(all)) {
		a, here := ours[p]
		b, there := reference[p]
		kinds := differ(a, here, b, there)
		if len(kinds) == 0 {
			r.Equal++
			continue
		}
		for _, k := range kinds {
			if d, pattern := find(list, p, k, a, b, ours); d != nil {
				r.Listed[d.Reason]++
				used[string(d.As)+" "+pattern] = true
				continue
			}
			text := fmt.Sprintf("%s %s: ours is %s, the reference %s", k, p, a, b)
			switch k {
			case Missing:
				text = fmt.Sprintf("missing %s: the reference has a %s", p, b)
			case Extra:
				text = fmt.Sprintf("extra %s: ours is a %s", p, a)
			}
			r.Unlisted = append(r.Unlisted, text)
		}
	}
	for _, d := range list {
		for _, pattern := range d.Paths {
			if !used[string(d.As)+" "+pattern] {
				r.Unused = append(r.Unused, string(d.As)+" "+pattern)
			}
		}
	}
	return r
}

// differ returns in which ways two entries differ.
func differ(a Entry, here bool, b Entry, there bool) []Kind {
	switch {
	case !here:
		return []Kind{Missing}
	case !there:
		return []Kind{Extra}
	}
	var kinds []Kind
	if a.Type != b.Type || a.Target != b.Target || a.Hash != b.Hash {
		kinds = append(kinds, Content)
	}
	if a.Mode != b.Mode || a.UID != b.UID || a.GID != b.GID {
		kinds = append(kinds, Meta)
	}
	return kinds
}

// find returns the entry of the list that allows the difference.
func find(list []Difference, p string, k Kind, a, b Entry, ours Tree) (*Difference, string) {
	for i, d := range list {
		for _, pattern := range d.Paths {
			if !match(pattern, p) {
				continue
			}
			switch {
			case d.As == k,
				d.As == Order && k == Content && a.Type == b.Type && sortedLines(a.text) == sortedLines(b.text),
				d.As == Comment && k == Content && a.Type == b.Type && uncommented(a.text) == uncommented(b.text),
				d.As == Subset && k == Content && a.Type == b.Type && subset(a.text, b.text, ours):
				return &list[i], pattern
			}
		}
	}
	return nil, ""
}

// match matches with stars that cross slashes.
func match(pattern, p string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == p
	}
	if !strings.HasPrefix(p, parts[0]) {
		return false
	}
	p = p[len(parts[0]):]
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(p, part)
		if i < 0 {
			return false
		}
		p = p[i+len(part):]
	}
	return strings.HasSuffix(p, parts[len(parts)-1])
}

func sortedLines(b []byte) string {
	l := strings.Split(string(b), "\n")
	slices.Sort(l)
	return strings.Join(l, "\n")
}

func uncommented(b []byte) string {
	var kept []string
	for line := range strings.Lines(string(b)) {
		if !strings.HasPrefix(line, "#") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// subset reports whether a is b without lines whose path our tree lacks: the
// lists and sums of dpkg's database.
func subset(a, b []byte, ours Tree) bool {
	have := strings.Split(string(a), "\n")
	for _, line := range strings.Split(string(b), "\n") {
		if len(have) > 0 && have[0] == line {
			have = have[1:]
			continue
		}
		_, name, sums := strings.Cut(line, "  ")
		if !sums {
			name = line
		}
		// Another package may have brought the folder back.
		if e, there := ours[path.Join("/", name)]; there && e.Type != 'd' {
			return false
		}
	}
	return len(have) == 0
}
