package config

import (
	"regexp"
	"slices"
	"strings"
)

// Unknown is a variable that looks like the sidecar's and is not.
type Unknown struct{ Name, Nearest string }

func (u Unknown) Error() string {
	text := "the sidecar reads no variable " + u.Name
	if u.Nearest == "" {
		return text + "; `loomcycle-builder config` names those that it reads"
	}
	return text + "; " + u.Nearest + " may be meant"
}

const prefix = "SANDBOX_"

// link is what Kubernetes puts into every container for a service whose name begins
// with sandbox (Service concept, "Environment variables").
var link = regexp.MustCompile(`^[A-Z0-9_]+_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=|^[A-Z0-9_]+_PORT=(tcp|udp|sctp)://`)

// UnknownVars returns those of an environment (NAME=VALUE) that nobody reads, by name:
// of a variable with a typo the sidecar would take the default.
func UnknownVars(environ []string) (unknown []Unknown) {
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, prefix) || link.MatchString(kv) || slices.ContainsFunc(Vars, func(v Var) bool { return v.Name == name }) {
			continue
		}
		u, part := Unknown{Name: name}, strings.TrimPrefix(name, prefix)
		least := max(2, len(part)/3) + 1
		for _, v := range Vars {
			known, ok := strings.CutPrefix(v.Name, prefix)
			if d := distance(part, known); ok && d < least {
				u.Nearest, least = v.Name, d
			}
		}
		unknown = append(unknown, u)
	}
	slices.SortFunc(unknown, func(a, b Unknown) int { return strings.Compare(a.Name, b.Name) })
	return unknown
}

// distance is Levenshtein's: how many letters to add, remove or change.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := corner
			if a[i] != b[j] {
				d = 1 + min(corner, row[j], row[j+1])
			}
			corner, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}
