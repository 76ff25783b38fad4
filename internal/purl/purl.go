// Package purl names locked sources as package URLs, the same in SBOMs and
// provenance: by ecosystem, name and version, never by a mirror's host.
package purl

import (
	"strings"

	"github.com/anchore/packageurl-go"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// Debian names a package as the purl specification's `deb` type does.
func Debian(p lock.Package) string {
	return packageurl.NewPackageURL(packageurl.TypeDebian, "debian", p.Name, p.Version,
		packageurl.Qualifiers{{Key: "arch", Value: p.Arch}, {Key: "distro", Value: p.Suite}}, "").ToString()
}

// Go names the toolchain of an architecture (Debian's name) as the module
// that the go command downloads it as.
func Go(m lock.Module, arch string) string {
	return packageurl.NewPackageURL(packageurl.TypeGolang, "golang.org", "toolchain", lock.ToolchainVersion(m.Version, arch), nil, "").ToString()
}

// NPM names an npm package.
func NPM(p lock.NPMPackage) string {
	scope, name, ok := strings.Cut(p.Name, "/")
	if !ok {
		scope, name = "", p.Name
	}
	return packageurl.NewPackageURL(packageurl.TypeNPM, scope, name, p.Version, nil, "").ToString()
}
