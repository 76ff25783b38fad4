package images

import (
	_ "embed"
	"fmt"
	"strconv"

	"github.com/moby/buildkit/client/llb"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

//go:embed toolchain/gocache.sh
var goCacheScript []byte

// triplets are GCC's names of the architectures.
var triplets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// goCache is Go's standard library compiled for an architecture, by the
// worker's own Go toolchain with a C compiler for that architecture, and the
// program that serves it to a go command (internal/gocache). No instruction
// of the architecture is run.
func (g *Graph) goCache(group lock.Group, arch string) (llb.State, error) {
	compilers, ok := g.Groups.Get(group.GoCache)
	if !ok {
		return llb.State{}, fmt.Errorf("group %q: groups.yaml has no group %q", group.Name, group.GoCache)
	}
	root, err := g.chain(compilers.Name, g.Worker.Architecture)
	if err != nil {
		return llb.State{}, err
	}
	target, err := g.chain(compilers.After, arch)
	if err != nil {
		return llb.State{}, err
	}
	toolchain, err := g.Go(g.Worker.Architecture)
	if err != nil {
		return llb.State{}, err
	}
	program := Program{Name: "go-cache", Source: g.Source, Package: "./internal/gocache/cmd/go-cache", Label: "this repository", Offline: true}
	pack, err := g.Compile(program, g.Worker.Architecture)
	if err != nil {
		return llb.State{}, err
	}
	serve, err := g.Compile(program, arch)
	if err != nil {
		return llb.State{}, err
	}
	script := llb.Scratch().File(llb.Mkfile("/gocache.sh", 0o755, goCacheScript, llb.WithCreatedTime(g.Epoch)),
		llb.WithCustomName("plan: compile the Go standard library"))
	return root.Run(
		llb.Args([]string{"/script/gocache.sh"}),
		llb.Network(llb.NetModeNone),
		llb.AddMount("/script", script, llb.Readonly),
		llb.AddMount("/usr/local/go", toolchain, llb.SourcePath("/usr/local/go"), llb.Readonly),
		llb.AddMount("/target", target, llb.Readonly),
		llb.AddMount("/pack", pack, llb.Readonly),
		llb.AddMount("/program", serve, llb.Readonly),
		llb.AddMount("/tmp", llb.Scratch(), llb.Tmpfs()),
		llb.AddEnv("GOARCH", arch),
		llb.AddEnv("TRIPLET", triplets[arch]),
		llb.AddEnv("GOGC", compilersGOGC),
		llb.AddEnv("EPOCH", strconv.FormatInt(g.Epoch.Unix(), 10)),
		llb.WithCustomName("compile the Go standard library for "+arch),
		llb.Platform(g.Worker),
	).AddMount("/out", llb.Scratch()), nil
}

// chain is the unpacked packages of a group and of those that it builds on.
func (g *Graph) chain(name, arch string) (llb.State, error) {
	var layers []Layer
	for _, group := range g.Groups.Chain(name) {
		layer, err := g.group(group, arch, false)
		if err != nil {
			return llb.State{}, err
		}
		layers = append(layers, layer)
	}
	return merge(name+" for "+arch, layers), nil
}
