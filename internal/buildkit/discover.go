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
	docker "github.com/docker/docker/client"
	"github.com/moby/buildkit/client"
	_ "github.com/moby/buildkit/client/connhelper/dockercontainer" // docker-container://
	_ "github.com/moby/buildkit/client/connhelper/kubepod"         // kube-pod://
	_ "github.com/moby/buildkit/client/connhelper/nerdctlcontainer"
	_ "github.com/moby/buildkit/client/connhelper/podmancontainer" // podman-container://
	_ "github.com/moby/buildkit/client/connhelper/ssh"             // ssh://
	"github.com/moby/buildkit/client/llb"
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
// BuildKit, if an engine answers and what it has passes the probe; else nil.
func dialDocker(ctx context.Context, opts Options) *Node {
	host := dockerHost(ctx, opts)
	engine := engineAt(ctx, host)
	if engine == nil {
		return nil
	}
	type candidate struct {
		source, address string
		dial            func(context.Context) (*client.Client, error)
	}
	var candidates []candidate
	if name, driver := currentBuildx(ctx); driver != "" && driver != "docker" {
		candidates = append(candidates, candidate{"buildx", "buildx builder " + name + " (" + driver + ")", func(ctx context.Context) (*client.Client, error) {
			return client.New(ctx, "", client.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				// The connection outlives the dialling context.
				return commandconn.New(context.WithoutCancel(ctx), "docker", "buildx", "dial-stdio", "--builder", name, "--progress", "quiet")
			}))
		}})
	}
	candidates = append(candidates, candidate{"docker engine", "docker engine at " + host, func(ctx context.Context) (*client.Client, error) {
		return client.New(ctx, "",
			client.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return engine.DialHijack(ctx, "/grpc", "h2c", nil)
			}),
			client.WithSessionDialer(func(ctx context.Context, proto string, meta map[string][]string) (net.Conn, error) {
				return engine.DialHijack(ctx, "/session", proto, meta)
			}))
	}})
	for _, cand := range candidates {
		c, err := cand.dial(ctx)
		if err == nil {
			n := &Node{Client: c, Source: cand.source, Address: cand.address}
			if err = describe(ctx, n); err == nil {
				err = probe(ctx, c)
			}
			if err == nil {
				return n
			}
			c.Close()
		}
		opts.notice("passing over the %s: %v", cand.address, err)
	}
	engine.Close()
	return nil
}

// engineAt is a client of the docker engine, nil when none answers.
func engineAt(ctx context.Context, host string) *docker.Client {
	engine, err := docker.NewClientWithOpts(docker.FromEnv, docker.WithHost(host), docker.WithAPIVersionNegotiation())
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := engine.Ping(ctx); err != nil {
		engine.Close()
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
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}").Output()
	if h := strings.TrimSpace(string(out)); err == nil && h != "" {
		return h
	}
	return docker.DefaultDockerHost
}

// currentBuildx is the name and driver of buildx's current builder; empty
// strings where there is no buildx.
func currentBuildx(ctx context.Context) (name, driver string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", "buildx", "inspect").Output()
	if err != nil {
		return "", ""
	}
	return parseBuildx(out)
}

// parseBuildx reads the head of docker buildx inspect, the one listing that
// marks the current builder in every version of buildx.
func parseBuildx(out []byte) (name, driver string) {
	for line := range strings.Lines(string(out)) {
		switch key, value, _ := strings.Cut(line, ":"); {
		case key == "Name" && name == "":
			name = strings.TrimSpace(value)
		case key == "Driver":
			return name, strings.TrimSpace(value)
		case key == "Nodes":
			return "", ""
		}
	}
	return "", ""
}
