package sbom

import (
	"slices"
	"strings"
)

// alternatives gives the choices that a compound SPDX licence expression
// leaves, each the licences that hold together (SPDX 2.3, annex D: AND binds
// tighter than OR, WITH tighter than both). It is nil for a single licence and
// for what is no expression.
func alternatives(text string) [][]string {
	e := expression{strings.Fields(strings.NewReplacer("(", " ( ", ")", " ) ").Replace(text))}
	out, ok := e.or()
	if !ok || len(e.words) > 0 || len(out) == 1 && len(out[0]) == 1 {
		return nil
	}
	return out
}

// tooMany choices are no licence that anybody meant.
const tooMany = 256

var operators = []string{"AND", "OR", "WITH", "(", ")"}

// expression is what is left to read of one.
type expression struct{ words []string }

func (e *expression) next(word string) bool {
	if len(e.words) == 0 || e.words[0] != word {
		return false
	}
	e.words = e.words[1:]
	return true
}

func (e *expression) or() ([][]string, bool) {
	out, ok := e.and()
	for ok && e.next("OR") {
		var more [][]string
		more, ok = e.and()
		out = append(out, more...)
	}
	return out, ok
}

func (e *expression) and() ([][]string, bool) {
	out, ok := e.term()
	for ok && e.next("AND") {
		var right, both [][]string
		right, ok = e.term()
		if len(out)*len(right) > tooMany {
			return nil, false
		}
		for _, a := range out {
			for _, b := range right {
				both = append(both, slices.Concat(a, b))
			}
		}
		out = both
	}
	return out, ok
}

func (e *expression) term() ([][]string, bool) {
	if e.next("(") {
		out, ok := e.or()
		return out, ok && e.next(")")
	}
	id, ok := e.id()
	if ok && e.next("WITH") {
		var exception string
		exception, ok = e.id()
		id += " WITH " + exception
	}
	return [][]string{{id}}, ok
}

func (e *expression) id() (string, bool) {
	if len(e.words) == 0 || slices.Contains(operators, e.words[0]) {
		return "", false
	}
	n := 1 // some write "Apache 2.0"
	for n < len(e.words) && !slices.Contains(operators, e.words[n]) {
		n++
	}
	id := strings.Join(e.words[:n], " ")
	e.words = e.words[n:]
	return id, true
}
