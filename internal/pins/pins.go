// Package pins writes a release's images as references that operators commit:
// by version for people and update bots, and by digest for machines.
package pins

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// Pin is an image of a release in a registry.
type Pin struct {
	Image      string // name in the family
	Repository string // HOST/PATH, without tag
	Version    string
	Digest     string // of the index, so that it fits every platform
}

func (p Pin) tag() string       { return p.Version + "@" + p.Digest }
func (p Pin) reference() string { return p.Repository + ":" + p.tag() }

// Files are the four forms, by file name.
func Files(pins []Pin) (map[string][]byte, error) {
	type object = map[string]any
	services, values, images := object{}, object{}, []object{}
	var text bytes.Buffer
	for _, p := range pins {
		services[p.Image] = object{"image": p.reference()}
		images = append(images, object{"name": p.Image, "newName": p.Repository, "newTag": p.tag()})
		values[camel(p.Image)] = object{"image": object{"repository": p.Repository, "tag": p.tag()}}
		fmt.Fprintf(&text, "%s %s\n", p.Image, p.reference())
	}
	out := map[string][]byte{"pins.txt": text.Bytes()}
	for name, v := range map[string]struct {
		comment string
		value   any
	}{
		"compose.pins.yaml":  {"A Compose override: docker compose -f compose.yaml -f compose.pins.yaml up", object{"services": services}},
		"kustomization.yaml": {"A Kustomize component of image pins.", object{"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "images": images}},
		"pins-values.yaml":   {"Helm values: helm upgrade -f pins-values.yaml ...", values},
	} {
		var b bytes.Buffer
		fmt.Fprintf(&b, "# %s\n", v.comment)
		e := yaml.NewEncoder(&b)
		e.SetIndent(2)
		if err := errors.Join(e.Encode(v.value), e.Close()); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out[name] = b.Bytes()
	}
	return out, nil
}

// camel makes an image's name a Helm value's: loomcycle-builder, loomcycleBuilder.
func camel(name string) string {
	parts := strings.Split(name, "-")
	for i, p := range parts[1:] {
		parts[i+1] = strings.ToUpper(p[:1]) + p[1:]
	}
	return strings.Join(parts, "")
}

// Change is a value that Update replaced.
type Change struct {
	File     string
	Line     int
	From, To string
}

// Update pins every reference to the images in the YAML and text files below a
// folder, in place: only the values change, each on its line, so comments,
// order and style stay. A reference is known by the last parts of its
// repository; its registry stays, because a mirror has the same digests. What
// looks like a pin and can't be one is told to left, with the reason: a template
// that is no YAML, a reference with a variable, one that may be two images'.
// The error has every file that could not be updated; the others are.
func Update(folder string, pins []Pin, left func(where, why string)) ([]Change, error) {
	var all []Change
	var failed []error
	err := filepath.WalkDir(folder, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && file != folder {
			return filepath.SkipDir
		}
		var edit func([]byte, *finder) ([]byte, []Change, error)
		switch filepath.Ext(file) {
		case ".yaml", ".yml":
			edit = updateYAML
		case ".txt", ".env":
			edit = updateText
		}
		if !d.Type().IsRegular() || edit == nil {
			return nil
		}
		old, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		text, changes, err := edit(old, &finder{pins, func(line int, why string) { left(fmt.Sprintf("%s:%d", file, line), why) }})
		switch {
		case err != nil && bytes.Contains(old, []byte("{{")): // a Helm chart's
			left(file, "it is a template")
			return nil
		case err != nil:
			failed = append(failed, fmt.Errorf("%s: %w", file, err))
			return nil
		}
		if len(changes) == 0 {
			return nil
		}
		for _, c := range changes {
			c.File = file
			all = append(all, c)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return atomicfile.Write(file, text, info.Mode().Perm())
	})
	return all, errors.Join(append(failed, err)...)
}

// finder knows the pins, and whom to tell what is left in a file.
type finder struct {
	pins []Pin
	left func(line int, why string)
}

// find tells whose image a repository is: that of which most of the last parts
// are the same.
func (f *finder) find(repository string, line int) (Pin, bool) {
	var best []Pin
	most := 1
	for _, p := range f.pins {
		same := 0
		for a, b := repository, p.Repository; a != "." && b != "." && path.Base(a) == path.Base(b); a, b = path.Dir(a), path.Dir(b) {
			same++
		}
		if same > most {
			most, best = same, nil
		}
		if same == most {
			best = append(best, p)
		}
	}
	if len(best) > 1 {
		f.left(line, fmt.Sprintf("%s may be %s or %s; name more of the repository", repository, best[0].Repository, best[1].Repository))
	}
	return append(best, Pin{})[0], len(best) == 1
}

var (
	reference = regexp.MustCompile(`^((?:[a-zA-Z0-9][a-zA-Z0-9.-]*(?::[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*?)(:[A-Za-z0-9_][A-Za-z0-9._-]*)?(@sha256:[0-9a-f]{64})?$`)
	word      = regexp.MustCompile(`[^\s='"]+`)
)

// pinned is a reference with the release's tag and digest. In free text a
// reference names its registry and a tag or digest, as anything less may be a
// path, or a host and port.
func (f *finder) pinned(ref string, text bool, line int) (string, bool) {
	m := reference.FindStringSubmatch(ref)
	if m == nil && !text && strings.Contains(ref, "$") {
		name := strings.FieldsFunc(path.Base(ref), func(r rune) bool { return strings.ContainsRune(":@}", r) })
		if len(name) > 0 && slices.ContainsFunc(f.pins, func(p Pin) bool { return path.Base(p.Repository) == name[0] }) {
			f.left(line, fmt.Sprintf("%s has a variable in it; write the reference out, or pin it by hand", ref))
		}
	}
	if m == nil || m[2]+m[3] == "" && !strings.Contains(m[1], "/") {
		return "", false // a bare word may be a service's name
	}
	host, _, _ := strings.Cut(m[1], "/")
	if text && (host == m[1] || m[2]+m[3] == "" || !strings.ContainsAny(host, ".:") && host != "localhost") {
		return "", false
	}
	p, ok := f.find(m[1], line)
	return m[1] + ":" + p.tag(), ok
}

func updateText(old []byte, f *finder) ([]byte, []Change, error) {
	lines := strings.SplitAfter(string(old), "\n")
	var changes []Change
	for i, l := range lines {
		if strings.HasPrefix(strings.TrimSpace(l), "#") {
			continue
		}
		lines[i] = word.ReplaceAllStringFunc(l, func(from string) string {
			to, ok := f.pinned(from, true, i+1)
			if !ok || to == from {
				return from
			}
			changes = append(changes, Change{"", i + 1, from, to})
			return to
		})
	}
	return []byte(strings.Join(lines, "")), changes, nil
}

func updateYAML(old []byte, f *finder) ([]byte, []Change, error) {
	var edits []edit
	d := yaml.NewDecoder(bytes.NewReader(old))
	for {
		var doc yaml.Node
		if err := d.Decode(&doc); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, nil, fmt.Errorf("it is not YAML: %w", err)
		}
		f.walk(&doc, &edits)
	}
	return apply(old, edits)
}

// edit gives a scalar another value.
type edit struct {
	node *yaml.Node
	to   string
}

func (f *finder) walk(n *yaml.Node, edits *[]edit) {
	if n.Kind == yaml.MappingNode {
		fields := map[string]*yaml.Node{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i+1].Kind == yaml.ScalarNode && n.Content[i+1].Tag != "!!null" {
				fields[n.Content[i].Value] = n.Content[i+1]
			}
		}
		set := func(field, to string) {
			if v := fields[field]; v != nil && v.Value != to {
				*edits = append(*edits, edit{v, to})
			}
		}
		// A workload's or a service's image.
		if v := fields["image"]; v != nil {
			if to, ok := f.pinned(v.Value, false, v.Line); ok {
				set("image", to)
			}
		}
		// Kustomize: {name, newName, newTag, digest}. Helm: {repository, tag, digest}.
		for _, form := range [][3]string{{"newName", "newTag", "digest"}, {"name", "newTag", "digest"}, {"repository", "tag", "digest"}} {
			v := fields[form[0]]
			if v == nil || fields[form[1]] == nil && fields[form[2]] == nil {
				continue
			}
			p, ok := f.find(v.Value, v.Line)
			if !ok {
				continue
			}
			if fields[form[2]] == nil {
				set(form[1], p.tag())
			} else {
				set(form[1], p.Version)
				set(form[2], p.Digest)
			}
			break
		}
	}
	for _, c := range n.Content {
		f.walk(c, edits)
	}
}

// properties are the anchor and the tag that stand between a node's place and
// its text (YAML 1.2, 6.9).
var properties = regexp.MustCompile(`^(?:[&!]\S*\s+)+`)

// apply writes the new values over the old ones, the last first, so that the
// earlier positions stay right.
func apply(old []byte, edits []edit) ([]byte, []Change, error) {
	slices.SortFunc(edits, func(a, b edit) int {
		if a.node.Line != b.node.Line {
			return b.node.Line - a.node.Line
		}
		return b.node.Column - a.node.Column
	})
	lines := bytes.SplitAfter(old, []byte("\n"))
	var changes []Change
	for _, e := range edits {
		line := lines[e.node.Line-1]
		at := e.node.Column - 1 // yaml counts runes; what stands before a value is nearly always ASCII
		if runes := []rune(string(line)); len(runes) >= at {
			at = len(string(runes[:at]))
		}
		quote := ""
		switch e.node.Style & (yaml.SingleQuotedStyle | yaml.DoubleQuotedStyle) {
		case yaml.SingleQuotedStyle:
			quote = "'"
		case yaml.DoubleQuotedStyle:
			quote = `"`
		}
		raw := quote + e.node.Value + quote
		at += len(properties.Find(line[at:]))
		if !bytes.HasPrefix(line[at:], []byte(raw)) {
			return nil, nil, fmt.Errorf("line %d: the value %q is written in a way that can't be replaced in place; write it on one line", e.node.Line, e.node.Value)
		}
		lines[e.node.Line-1] = slices.Concat(line[:at], []byte(quote+e.to+quote), line[at+len(raw):])
		changes = append(changes, Change{"", e.node.Line, e.node.Value, e.to})
	}
	slices.Reverse(changes)
	return bytes.Join(lines, nil), changes, nil
}
