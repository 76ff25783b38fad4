package images

import (
	"fmt"
	"strings"

	"github.com/moby/buildkit/client/llb"
)

// Program is one of our own programs, compiled from a Go module.
type Program struct {
	Name    string
	Source  llb.State // the module at its root
	Package string    // ./cmd/loomcycle
	LDFlags []string
	Label   string // tells the source in the progress display
	Offline bool   // needs no module but its own: no network
}

// Secrets that a compile step is given, by their BuildKit ids. They are in no
// cache key and in no layer.
const (
	SecretGOPROXY     = "goproxy" // a module proxy's URL may hold a password
	SecretCA          = "ca"      // the machine's CA bundle, for a proxy with a private one
	SecretNPMRegistry = "npm-registry"
)

// ProxyVariables are the environment variables with which a step is told of the
// machine's HTTP proxy. Each is a secret by its own name: the URL may hold a password.
func ProxyVariables() []string { return []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} }

// followProxy has a step with a network follow the machine's HTTP proxy.
func followProxy() []llb.RunOption {
	var opts []llb.RunOption
	for _, name := range ProxyVariables() {
		opts = append(opts, llb.AddSecret(name, llb.SecretID(name), llb.SecretAsEnv(true), llb.SecretOptional))
	}
	return opts
}

// compilersGOGC buys CPU time with memory: most of what a compiler allocates is
// needed to its end.
const compilersGOGC = "400"

// Compile builds a program for an architecture with the locked Go toolchain
// of the worker's own, and returns a state with the file /NAME.
func (g *Graph) Compile(p Program, arch string) (llb.State, error) {
	toolchain, err := g.Go(g.Worker.Architecture)
	if err != nil {
		return llb.State{}, err
	}
	args := []string{"/usr/local/go/bin/go", "build", "-trimpath", "-gcflags=all=-dwarf=false", "-o", "/out/" + p.Name, // -s would drop it, once made
		"-ldflags", strings.Join(append([]string{"-s", "-w"}, p.LDFlags...), " "), p.Package}
	opts := []llb.RunOption{
		llb.Args(args),
		llb.Dir("/src"),
		llb.AddMount("/usr/local/go", toolchain, llb.SourcePath("/usr/local/go"), llb.Readonly),
		llb.AddMount("/src", p.Source, llb.Readonly),
		llb.AddMount("/cache/mod", llb.Scratch(), llb.AsPersistentCacheDir("loomcycle-go-modules", llb.CacheMountShared)),
		// One step at a time for an architecture: steps that begin together
		// would each compile the standard library.
		llb.AddMount("/cache/build", llb.Scratch(), llb.AsPersistentCacheDir("loomcycle-go-build-"+arch, llb.CacheMountLocked)),
		llb.AddMount("/tmp", llb.Scratch(), llb.Tmpfs()),
		llb.AddEnv("HOME", "/tmp"),
		llb.AddEnv("GOCACHE", "/cache/build"),
		llb.AddEnv("GOMODCACHE", "/cache/mod"),
		llb.AddEnv("GOTOOLCHAIN", "local"),
		llb.AddEnv("GOGC", compilersGOGC),
		llb.AddEnv("GOFLAGS", "-mod=readonly -buildvcs=false"),
		llb.AddEnv("CGO_ENABLED", "0"),
		llb.AddEnv("GOOS", "linux"),
		llb.AddEnv("GOARCH", arch),
		llb.AddSecret("GOPROXY", llb.SecretID(SecretGOPROXY), llb.SecretAsEnv(true), llb.SecretOptional),
		llb.AddSecret("/etc/ssl/certs/ca-certificates.crt", llb.SecretID(SecretCA), llb.SecretOptional),
		llb.WithCustomName(fmt.Sprintf("compile %s (%s) for %s", p.Name, p.Label, arch)),
		llb.Platform(g.Worker),
	}
	if p.Offline {
		opts = append(opts, llb.Network(llb.NetModeNone))
	} else {
		opts = append(append(opts, followProxy()...), g.Modules...)
	}
	return llb.Scratch().Run(opts...).AddMount("/out", llb.Scratch()), nil
}

// Web builds the user interface of a module that has one in web/, in an image
// with Node, and returns the module with the result in it.
func (g *Graph) Web(source, node llb.State) llb.State {
	return node.Run(append(followProxy(),
		llb.Args([]string{"/bin/sh", "-ec", "npm ci --no-audit --no-fund && npm run build && rm -rf node_modules"}),
		llb.Dir("/src/web"),
		llb.AddMount("/cache", llb.Scratch(), llb.AsPersistentCacheDir("loomcycle-npm", llb.CacheMountShared)),
		llb.AddMount("/tmp", llb.Scratch(), llb.Tmpfs()),
		llb.AddEnv("HOME", "/tmp"),
		llb.AddEnv("PATH", "/usr/local/bin:/usr/bin:/bin"),
		llb.AddEnv("npm_config_cache", "/cache"),
		llb.AddEnv("NODE_EXTRA_CA_CERTS", "/etc/ssl/certs/ca-certificates.crt"), // Node has a bundle of its own
		llb.AddSecret("npm_config_registry", llb.SecretID(SecretNPMRegistry), llb.SecretAsEnv(true), llb.SecretOptional),
		llb.AddSecret("/etc/ssl/certs/ca-certificates.crt", llb.SecretID(SecretCA), llb.SecretOptional),
		llb.WithCustomName("build the web UI"),
		llb.Platform(g.Worker),
	)...).AddMount("/src", source)
}
