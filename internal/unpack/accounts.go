package unpack

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// accounts writes /etc/passwd and /etc/group: base-passwd's masters, the
// groups that scripts make, then the plan's. With the passwd package they get
// shadow files. Every password is locked.
func (f *finish) accounts() error {
	passwd, err := f.master("usr/share/base-passwd/passwd.master")
	if err != nil {
		return err
	}
	group, err := f.master("usr/share/base-passwd/group.master")
	if err != nil {
		return err
	}
	static := len(group)
	for _, pkg := range slices.Sorted(maps.Keys(f.scripts)) {
		for _, name := range slices.Sorted(maps.Keys(f.scripts[pkg].Groups)) {
			group = append(group, []string{name, "x", strconv.Itoa(f.scripts[pkg].Groups[name]), ""})
		}
	}
	for _, g := range f.plan.Groups {
		group = append(group, []string{g.Name, "x", strconv.Itoa(g.GID), ""})
	}
	system := len(passwd)
	for _, u := range f.plan.Users {
		passwd = append(passwd, []string{u.Name, "x", strconv.Itoa(u.UID), strconv.Itoa(u.GID), "", u.Home, u.Shell})
	}
	days := strconv.FormatInt(max(f.plan.Epoch/86400, 1), 10) // 0 asks for a new password at once: shadow(5)
	var shadow, gshadow [][]string
	for i, u := range passwd {
		locked := "*"
		if i >= system {
			locked = "!"
		}
		shadow = append(shadow, []string{u[0], locked, days, "0", "99999", "7", "", "", ""})
	}
	for i, g := range group {
		locked := "*"
		if i >= static {
			locked = "!"
		}
		gshadow = append(gshadow, []string{g[0], locked, "", g[3]})
	}
	_, shadows := f.scripts["passwd"]
	for _, t := range []struct {
		path   string
		m      meta
		rows   [][]string
		shadow bool
	}{
		{"etc/passwd", meta{mode: 0o644}, passwd, false},
		{"etc/group", meta{mode: 0o644}, group, false},
		{"etc/shadow", meta{mode: 0o640, gid: groups["shadow"]}, shadow, true},
		{"etc/gshadow", meta{mode: 0o640, gid: groups["shadow"]}, gshadow, true},
	} {
		if t.shadow && !shadows {
			continue
		}
		text, err := colons(t.rows, !t.shadow)
		if err != nil {
			return fmt.Errorf("/%s: %w", t.path, err)
		}
		if err := f.put(t.path, t.m, text); err != nil {
			return err
		}
	}
	var sub []string
	for _, s := range f.plan.SubIDs {
		sub = append(sub, fmt.Sprintf("%s:%d:%d", s.User, s.First, s.Count))
	}
	if _, debian := f.scripts["base-passwd"]; !debian && sub == nil {
		return nil
	}
	for _, p := range []string{"etc/subuid", "etc/subgid"} {
		if err := f.put(p, meta{mode: 0o644}, lines(sub)); err != nil {
			return err
		}
	}
	return nil
}

// master reads one of base-passwd's tables; none when it is not installed.
func (f *finish) master(p string) ([][]string, error) {
	if !f.exists(p) {
		return nil, nil
	}
	b, err := f.root.ReadFile(p)
	if err != nil {
		return nil, err
	}
	var rows [][]string
	for line := range strings.Lines(string(b)) {
		row := strings.Split(strings.TrimSpace(line), ":")
		if len(row) < 4 {
			return nil, fmt.Errorf("/%s: the line %q is not an account", p, line)
		}
		row[1] = "x" // the password is in the shadow file
		rows = append(rows, row)
	}
	return rows, nil
}

// colons joins the rows and refuses a name, or an id where rows have one,
// that is there twice.
func colons(rows [][]string, haveIDs bool) ([]byte, error) {
	var out []string
	names, ids := map[string]bool{}, map[string]string{}
	for _, r := range rows {
		name, id := r[0], r[2]
		if name == "" || names[name] || strings.ContainsAny(strings.Join(r, ""), ":\n") {
			return nil, fmt.Errorf("account %q is there twice or not valid", name)
		}
		if other, twice := ids[id]; twice && haveIDs {
			return nil, fmt.Errorf("accounts %q and %q both have the id %s", other, name, id)
		}
		names[name], ids[id] = true, name
		out = append(out, strings.Join(r, ":"))
	}
	return lines(out), nil
}
