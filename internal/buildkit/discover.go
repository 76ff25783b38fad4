package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/docker/cli/cli/connhelper/commandconn"
	"github.com/moby/buildkit/client"
	_ "github.com/moby/buildkit/client/connhelper/dockercontainer" // docker-container://
	_ "github.com/moby/buildkit/client/connhelper/kubepod"         // kube-pod://
	_ "github.com/moby/buildkit/client/connhelper/nerdctlcontainer"
	_ "github.com/moby/buildkit/client/connhelper/podmancontainer" // podman-container://
	_ "github.com/moby/buildkit/client/connhelper/ssh"             // ssh://
	"github.com/moby/buildkit/client/llb"
	docker "github.com/moby/moby/client"
)

// dialRemote connects to the address that a variable names. What the user asked
// for by name is used or is an error, never silently replaced.
func dialRemote(ctx context.Context, opts Options, variable, addr string) (*Node, error) {
	var copts []client.ClientOpt
	// The file names are those of buildctl --tlsdir.
	if dir := opts.Getenv("BUILDKIT_TLS_DIR"); dir != "" && strings.HasPrefix(addr, "tcp://") {
		copts = append(copts,
			client.WithServerConfig(opts.Getenv("BUILDKIT_TLS_SERVER_NAME"), filepath.Join(dir, "ca.pem")),
			client.WithCredentials(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")))
	}
	c, err := client.New(ctx, addr, copts...)
	if err != nil {
		return nil, fmt.Errorf("%s=%s can't be used: %w", variable, addr, err)
	}
	n := &Node{Client: c, Source: variable, Address: addr}
	if err := errors.Join(describe(ctx, n), probeIf(ctx, n)); err != nil {
		c.Close()
		return nil, fmt.Errorf("the BuildKit daemon at %s=%s can't be used: %w; start it, or unset %s to use another one", variable, addr, err, variable)
	}
	return n, nil
}

func probeIf(ctx context.Context, n *Node) error {
	if n.Platform == "" {
		return nil // describe has failed already
	}
	return probe(ctx, n.Client)
}

// probe runs the smallest build that needs what ours need: the merge op and
// the OCI exporter. Whether a daemon has them depends on its version, and for the one in a
// docker engine on the image store too, so trying is surer than comparing versions.
func probe(ctx context.Context, c *client.Client) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	file := func(name string) llb.State {
		return llb.Scratch().File(llb.Mkfile(name, 0o644, nil), llb.WithCustomName("[probe] "+name))
	}
	def, err := llb.Merge([]llb.State{file("/a"), file("/b")}).Marshal(ctx)
	if err != nil {
		return err
	}
	_, err = c.Solve(ctx, def, client.SolveOpt{Internal: true, Exports: []client.ExportEntry{{
		Type:   client.ExporterOCI,
		Output: func(map[string]string) (io.WriteCloser, error) { return discard{}, nil },
	}}}, nil)
	if err != nil {
		return fmt.Errorf("it can't merge layers or export an OCI layout: %w", err)
	}
	return nil
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) Close() error                { return nil }

// dialDocker returns buildx's current builder, else the docker engine's own
// BuildKit, whichever answers and passes the probe first; else nil. A DOCKER_HOST
// where nothing answers says that docker is not to be used, buildx included.
func dialDocker(ctx context.Context, opts Options) *Node {
	host := dockerHost(ctx, opts)
	engine := engineAt(ctx, opts, host, dockerTimeout)
	if engine == nil && opts.Getenv("DOCKER_HOST") != "" {
		return nil
	}
	if x := currentBuildx(ctx, opts); x.driver != "" && x.driver != "docker" {
		n, err := x.dial(ctx, "")
		if err == nil {
			if x.nodes > 1 {
				n.dial = x.dial
			}
			if engine != nil {
				engine.Close()
			}
			return n
		}
		opts.notice("passing over the %s: %v", x, err)
	}
	if engine == nil {
		return nil
	}
	n, err := tried(ctx, "docker engine", "docker engine at "+host,
		client.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return engine.DialHijack(ctx, "/grpc", "h2c", nil)
		}),
		client.WithSessionDialer(func(ctx context.Context, proto string, meta map[string][]string) (net.Conn, error) {
			return engine.DialHijack(ctx, "/session", proto, meta)
		}))
	if err != nil {
		engine.Close()
		opts.notice("passing over the docker engine at %s: %v", host, err)
		return nil
	}
	if v, err := engine.ServerVersion(ctx, docker.ServerVersionOptions{}); err == nil && n.Version == "" { // older engines don't say which BuildKit they have
		n.Version = "of docker " + v.Version
	}
	return n
}

// tried is the node behind a dialer, if it passes the probe.
func tried(ctx context.Context, source, address string, copts ...client.ClientOpt) (*Node, error) {
	c, err := client.New(ctx, "", copts...)
	if err != nil {
		return nil, err
	}
	n := &Node{Client: c, Source: source, Address: address}
	if err = describe(ctx, n); err == nil {
		err = probe(ctx, c)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return n, nil
}

// dockerTimeout is what a docker engine, or the docker command, that has other
// things to do may take for its first answer.
const dockerTimeout = 10 * time.Second

// engineAt is a client of the docker engine, nil when none answers. That one is
// there which does not answer in time is said: another builder takes its place.
func engineAt(ctx context.Context, opts Options, host string, limit time.Duration) *docker.Client {
	engine, err := docker.New(docker.FromEnv, docker.WithHost(host))
	if err != nil {
		return nil
	}
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if _, err := engine.Ping(within, docker.PingOptions{NegotiateAPIVersion: true}); err != nil {
		engine.Close()
		if within.Err() != nil && ctx.Err() == nil {
			opts.notice("passing over the docker engine at %s: it does not answer within %s", host, limit)
		}
		return nil
	}
	return engine
}

// dockerHost is where the docker command would look for its engine:
// DOCKER_HOST, else the current context's endpoint, else the default socket.
func dockerHost(ctx context.Context, opts Options) string {
	if h := opts.Getenv("DOCKER_HOST"); h != "" {
		return h
	}
	within, cancel := context.WithTimeout(ctx, dockerTimeout)
	defer cancel()
	out, err := exec.CommandContext(within, "docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}").Output()
	if h := strings.TrimSpace(string(out)); err == nil && h != "" {
		return h
	}
	if within.Err() != nil && ctx.Err() == nil {
		opts.notice("docker context inspect does not answer within %s: looking for the docker engine at %s", dockerTimeout, docker.DefaultDockerHost)
	}
	return docker.DefaultDockerHost
}

// buildx is a builder of docker buildx.
type buildx struct {
	name, driver   string
	nodes, running int
}

func (x buildx) String() string { return "buildx builder " + x.name + " (" + x.driver + ")" }

// dial connects to the node that buildx would choose for a platform; the empty
// one is any node.
func (x buildx) dial(ctx context.Context, platform string) (*Node, error) {
	if x.driver == "remote" && x.running == 0 { // buildx would wait for 20 s; other drivers start their nodes
		return nil, errors.New("no node of it answers")
	}
	args := []string{"buildx", "dial-stdio", "--builder", x.name, "--progress", "quiet"}
	address := x.String()
	if platform != "" {
		args, address = append(args, "--platform", platform), address+" for "+platform
	}
	return tried(ctx, "buildx", address, client.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		// The connection outlives the dialling context.
		return commandconn.New(context.WithoutCancel(ctx), "docker", args...)
	}))
}

// currentBuildx is buildx's current builder; the zero value where there is no buildx.
func currentBuildx(ctx context.Context, opts Options) buildx {
	// buildx asks each node what it is, and gives up after 20 s.
	ctx, cancel := context.WithTimeout(ctx, 25*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", "buildx", "inspect").Output()
	if err == nil {
		return parseBuildx(out)
	}
	if name := opts.Getenv("BUILDX_BUILDER"); name != "" || ctx.Err() != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
		}
		opts.notice("passing over buildx's builder %s: docker buildx inspect: %v", name, err)
	}
	return buildx{}
}

// parseBuildx reads docker buildx inspect, the one listing that marks the current
// builder in every version of buildx.
func parseBuildx(out []byte) (x buildx) {
	for line := range strings.Lines(string(out)) {
		switch key, value, _ := strings.Cut(line, ":"); {
		case key == "Name" && x.name == "":
			x.name = strings.TrimSpace(value)
		case key == "Driver" && x.driver == "":
			x.driver = strings.TrimSpace(value)
		case key == "Name":
			x.nodes++
		case key == "Status" && strings.TrimSpace(value) == "running":
			x.running++
		}
	}
	return x
}
