package unpack

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// aliases are the folders of the file system's top that Debian 13 keeps below
// /usr, with a link at the old place. dpkg knows packages' files by the old
// names and follows the links; here the names are rewritten before writing.
var aliases = map[string]bool{
	"bin": true, "sbin": true, "lib": true, "lib32": true, "lib64": true, "libo32": true, "libx32": true,
}

// memberPath checks a tar member's name and returns it without the leading
// "./" and a trailing slash ("" for the root).
func memberPath(name string) (string, error) {
	p := strings.TrimSuffix(name, "/")
	p = strings.TrimPrefix(strings.TrimPrefix(p, "."), "/")
	if strings.HasPrefix(name, "/") || (p != "" && path.Clean("/"+p) != "/"+p) || strings.ContainsAny(p, "\x00\n") {
		return "", fmt.Errorf("its path is absolute, not canonical, or leads out of the root")
	}
	return p, nil
}

// merged rewrites a member's path through the usr-merge. A link at an alias's
// own place (base-files has them) stays where it is.
func merged(p string, isDir bool) string {
	first, rest, deeper := strings.Cut(p, "/")
	if !aliases[first] || (!deeper && !isDir) {
		return p
	}
	return strings.TrimSuffix("usr/"+first+"/"+rest, "/")
}

// filter decides by dpkg's path-exclude and path-include options what is left out.
type filter []rule

type rule struct {
	include bool
	pattern string
	re      *regexp.Regexp
}

func newFilter(lines []string) (filter, error) {
	var f filter
	for _, line := range lines {
		kind, pattern, _ := strings.Cut(line, "=")
		if (kind != "path-exclude" && kind != "path-include") || !strings.HasPrefix(pattern, "/") {
			return nil, fmt.Errorf("paths: %q is not path-exclude=/PATTERN or path-include=/PATTERN", line)
		}
		re, err := glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("paths: %q: %w", line, err)
		}
		f = append(f, rule{kind == "path-include", pattern, re})
	}
	return f, nil
}

// glob compiles a pattern of fnmatch(3) without FNM_PATHNAME, as dpkg uses it:
// a star matches slashes too.
func glob(pattern string) (*regexp.Regexp, error) {
	var b strings.Builder
	b.WriteString(`(?s)\A`)
	for _, c := range pattern {
		switch c {
		case '*':
			b.WriteString(".*")
		case '?':
			b.WriteString(".")
		case '[', ']', '\\':
			return nil, fmt.Errorf("only * and ? are supported")
		default:
			b.WriteString(regexp.QuoteMeta(string(c)))
		}
	}
	b.WriteString(`\z`)
	return regexp.Compile(b.String())
}

// skips reports whether the path (without a leading slash) is left out; the
// last matching rule wins.
func (f filter) skips(p string) bool {
	p = "/" + p
	for i := len(f) - 1; i >= 0; i-- {
		if f[i].re.MatchString(p) {
			return !f[i].include
		}
	}
	return false
}

// leads reports whether an included file may lie below p, so that a link at
// that place must be kept: a package's doc folder may be a link to another's,
// which holds the licence of both.
func (f filter) leads(p string) bool {
	have := strings.Split("/"+p, "/")
	for _, r := range f {
		want := strings.Split(r.pattern, "/")
		if !r.include || len(want) <= len(have) {
			continue
		}
		ok := true
		for i := range have {
			m, _ := path.Match(want[i], have[i])
			ok = ok && m
		}
		if ok {
			return true
		}
	}
	return false
}
