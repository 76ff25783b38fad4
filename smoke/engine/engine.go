// Package engine runs the containers of smoke cases: podman and docker by
// their command lines, and BuildKit, which works wherever the build works.
package engine

import (
	"context"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
)

// Image is a variant to test: in an OCI layout, or at a reference.
type Image struct {
	Name     string // of the family
	Platform string // linux/arm64
	Index    digest.Digest
	Manifest digest.Digest
	Config   digest.Digest
	Layout   string // folder of the OCI layout; empty for a reference
	Ref      string // registry/repository@digest
	Content  v1.Image
}

// Container is how a container is started.
type Container struct {
	Image           *Image
	Args            []string // entrypoint and arguments; the image's own when empty
	User            string   // uid[:gid]; the image's when empty
	Workdir         string
	Env             []string
	NoNetwork       bool
	ReadOnly        bool
	DropCaps        bool
	NoNewPrivileges bool
	Pids            int
	Memory          string
	Runtime         string
	Hosts           []string
	Ports           []int // published on this machine's loopback
	Mounts          []Mount
}

// Mount is a tmpfs, a folder of the host or a volume at a path.
type Mount struct {
	Path     string
	Tmpfs    string // its mode
	Host     string // folder
	Volume   string // name
	ReadOnly bool
}

// Output is what a container left.
type Output struct {
	Exit   int
	Stdout []byte
	Stderr []byte
}

// Engine runs containers. Everything that it makes is labelled with the run,
// and gone after Close.
type Engine interface {
	Name() string
	// Can tells why the engine cannot start such a container: a sentence for
	// the operator, naming what to install.
	Can(c *Container) error
	// Load makes an image ready to run.
	Load(ctx context.Context, img *Image) error
	// Run runs a container to its end and removes it. The result file that
	// the last argument names, if there is one, is its standard output.
	Run(ctx context.Context, c *Container) (*Output, error)
	// Start starts a container that goes on running.
	Start(ctx context.Context, c *Container) (Running, error)
	// Volume makes a volume, which is removed by RemoveVolume.
	Volume(ctx context.Context, name string) error
	RemoveVolume(ctx context.Context, name string) error
	// Chown gives a folder of the host to the uid:gid of the containers.
	Chown(ctx context.Context, folder, owner string) error
	// Leaks lists what is still there of what this run made.
	Leaks(ctx context.Context) ([]string, error)
	// Close removes whatever is left.
	Close(ctx context.Context) error
}

// Running is a started container.
type Running interface {
	Exec(ctx context.Context, argv []string) (*Output, error)
	// Published is the address (127.0.0.1:49153) of one of its Ports.
	Published(ctx context.Context, port int) (string, error)
	// Stop stops it as an operator would, and says how long that took and
	// with which code the main process ended. It fails when there is nothing
	// left to stop.
	Stop(ctx context.Context) (took time.Duration, exit int, err error)
	Logs(ctx context.Context) (string, error)
	Remove(ctx context.Context) error
}
