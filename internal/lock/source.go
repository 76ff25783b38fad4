package lock

import (
	"cmp"
	"path"
	"slices"

	"github.com/opencontainers/go-digest"
)

// Kind says which protocol a source comes by, and so which variable names
// its mirrors.
type Kind string

// The kinds of sources.
const (
	KindDebian   Kind = "debian"
	KindSecurity Kind = "debian-security"
	KindGo       Kind = "go"
	KindNPM      Kind = "npm"
)

// Kinds lists the kinds of sources.
func Kinds() []Kind { return []Kind{KindDebian, KindSecurity, KindGo, KindNPM} }

// Variable is the environment variable that lists the mirrors of the kind.
func (k Kind) Variable() string {
	switch k {
	case KindDebian:
		return "DEBIAN_MIRROR"
	case KindSecurity:
		return "DEBIAN_SECURITY_MIRROR"
	case KindGo:
		return "GOPROXY"
	case KindNPM:
		return "NPM_CONFIG_REGISTRY"
	}
	return ""
}

// Source is one file that a mirror serves: the view of a lock entry that a
// download needs.
type Source struct {
	Kind   Kind
	Name   string        // for people: bash 5.2.37-2+b5 amd64
	Path   string        // below the mirror's root, not escaped
	Size   int64         // bytes; 0 when unknown
	Digest digest.Digest // sha256; empty when unknown
}

// File is the base name of the source's path.
func (s Source) File() string { return path.Base(s.Path) }

// Source is the package's view for a download.
func (l *Lock) Source(p Package) Source {
	kind := KindDebian
	for _, s := range l.Suites {
		if s.Name == p.Suite && s.Archive == Security {
			kind = KindSecurity
		}
	}
	return Source{Kind: kind, Name: p.String(), Path: p.Path, Size: p.Size, Digest: p.SHA256}
}

// Source is the module's view for a download.
func (m Module) Source() Source {
	return Source{Kind: KindGo, Name: m.String(), Path: m.Path, Size: m.Size, Digest: m.SHA256}
}

// Source is the npm package's view for a download.
func (p NPMPackage) Source() Source {
	return Source{Kind: KindNPM, Name: p.String(), Path: p.Path, Size: p.Size, Digest: p.SHA256}
}

// String is the package's name, version and architecture.
func (p Package) String() string { return p.Name + " " + p.Version + " " + p.Arch }

// String is the module's base name, which tells version and platform.
func (m Module) String() string { return "Go toolchain " + path.Base(m.Path) }

// String is the package's name and version.
func (p NPMPackage) String() string { return p.Name + " " + p.Version }

// Sources lists every source of the lock once, sorted by kind and path. One
// path with two digests is two sources: at most one of them can be fetched.
func (l *Lock) Sources() []Source {
	var all []Source
	for _, packages := range l.Debian {
		for _, p := range packages {
			all = append(all, l.Source(p))
		}
	}
	for _, m := range l.Go {
		all = append(all, m.Source())
	}
	for _, packages := range l.NPM {
		for _, p := range packages {
			all = append(all, p.Source())
		}
	}
	slices.SortFunc(all, func(a, b Source) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Path, b.Path), cmp.Compare(a.Digest, b.Digest))
	})
	return slices.Compact(all)
}

// Packages lists the Debian packages of a group for an architecture
// (Debian's name), sorted by name.
func (l *Lock) Packages(group, arch string) []Package {
	var out []Package
	for _, p := range l.Debian[arch] {
		if p.Group == group {
			out = append(out, p)
		}
	}
	return out
}
