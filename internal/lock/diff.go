package lock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// Change is a source that differs between two locks.
type Change struct {
	Group, Name string
	Arches      []string // the architectures that changed this way
	From, To    string   // versions; empty when absent
}

// String is one line: a sign, the name, the versions, where.
func (c Change) String() string {
	where := fmt.Sprintf("(%s; %s)", c.Group, strings.Join(c.Arches, ", "))
	switch {
	case c.From == "":
		return fmt.Sprintf("+ %s %s %s", c.Name, c.To, where)
	case c.To == "":
		return fmt.Sprintf("- %s %s %s", c.Name, c.From, where)
	case c.From == c.To:
		return fmt.Sprintf("! %s %s has another content under the same version %s", c.Name, c.To, where)
	}
	return fmt.Sprintf("~ %s %s -> %s %s", c.Name, c.From, c.To, where)
}

// Diff lists what changed from a to b, sorted by group and name.
func Diff(a, b *Lock) []Change {
	type key struct{ group, name, from, to string }
	merged := map[key][]string{}
	for _, arch := range Arches() {
		was, is := a.versions(arch), b.versions(arch)
		for id, v := range is {
			if old := was[id]; old != v {
				k := key{id[0], id[1], old.version, v.version}
				merged[k] = append(merged[k], arch)
			}
		}
		for id, old := range was {
			if _, ok := is[id]; !ok {
				k := key{id[0], id[1], old.version, ""}
				merged[k] = append(merged[k], arch)
			}
		}
	}
	var changes []Change
	for k, arches := range merged {
		changes = append(changes, Change{Group: k.group, Name: k.name, Arches: arches, From: k.from, To: k.to})
	}
	slices.SortFunc(changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Name, b.Name), cmp.Compare(a.To, b.To), cmp.Compare(a.From, b.From))
	})
	return changes
}

type content struct{ version, digest string }

// versions maps group and name to what the lock holds for an architecture. Go
// and what comes from npm is locked without its group; these are the names that
// images/groups.yaml gives to the groups.
func (l *Lock) versions(arch string) map[[2]string]content {
	out := map[[2]string]content{}
	if l == nil {
		return out
	}
	for _, p := range l.Debian[arch] {
		out[[2]string{p.Group, p.Name}] = content{p.Version, p.SHA256.String()}
	}
	if m, ok := l.Go[arch]; ok {
		out[[2]string{"go", "go"}] = content{m.Version, m.SHA256.String()}
	}
	for _, p := range l.NPM[arch] {
		name := p.Name
		if name != NPM {
			name = Node
		}
		out[[2]string{"node", name}] = content{p.Version, p.SHA256.String()}
	}
	return out
}

// Open reads a lock named by a path or else by a git revision of the
// repository in the working directory, in which the file is at path inRepo.
func Open(ctx context.Context, name, inRepo string) (*Lock, error) {
	text, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) && !strings.HasPrefix(name, "-") {
		var stderr strings.Builder
		git := exec.CommandContext(ctx, "git", "show", name+":"+inRepo)
		git.Stderr = &stderr
		if text, err = git.Output(); err != nil {
			return nil, fmt.Errorf("%q is neither a lock file nor a git revision that has one: %s", name, strings.TrimSpace(stderr.String()))
		}
	}
	if err != nil {
		return nil, err
	}
	l, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return l, nil
}
