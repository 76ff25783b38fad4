package unpack

import (
	"fmt"
	"strings"
)

// field is a field of a control file, with its value as written: without the
// blanks before it, with the line breaks and blanks of continuation lines.
type field struct{ name, value string }

// stanza is a paragraph of a control file in the order of its fields.
type stanza []field

// parseStanza reads the single paragraph of a package's control file, deb-control(5).
func parseStanza(text string) (stanza, error) {
	var s stanza
	for line := range strings.SplitSeq(strings.Trim(text, "\n"), "\n") {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			return nil, fmt.Errorf("it has more than one paragraph")
		case line[0] == ' ' || line[0] == '\t':
			if len(s) == 0 {
				return nil, fmt.Errorf("it begins with a continuation line")
			}
			s[len(s)-1].value += "\n" + line
		default:
			name, value, ok := strings.Cut(line, ":")
			if !ok || name == "" || strings.ContainsAny(name, " \t") {
				return nil, fmt.Errorf("%.60q is not a field", line)
			}
			if s.get(name) != "" {
				return nil, fmt.Errorf("field %s is there twice", name)
			}
			s = append(s, field{name, strings.TrimLeft(value, " \t")})
		}
	}
	// dpkg keeps blanks at the end of a line, but not at the end of a value.
	for i := range s {
		s[i].value = strings.TrimRight(s[i].value, " \t\n")
	}
	for _, name := range []string{"Package", "Version", "Architecture"} {
		if v := s.get(name); v == "" || strings.ContainsAny(v, "/ \n") {
			return nil, fmt.Errorf("field %s is missing or not one word", name)
		}
	}
	return s, nil
}

// get returns a field's value or "".
func (s stanza) get(name string) string {
	for _, f := range s {
		if strings.EqualFold(f.name, name) {
			return f.value
		}
	}
	return ""
}
