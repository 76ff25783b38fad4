package images

import (
	_ "embed"
	"strconv"

	"github.com/moby/buildkit/client/llb"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

//go:embed toolchain/pycache.py
var pyCacheScript []byte

// pyCache is the bytecode of the Python sources of a group's chain. A session
// can't write beside them and would compile them at every start.
func (g *Graph) pyCache(group lock.Group, arch string) (llb.State, error) {
	root, err := g.chain(group.PyCache, g.Worker.Architecture)
	if err != nil {
		return llb.State{}, err
	}
	target, err := g.chain(group.PyCache, arch)
	if err != nil {
		return llb.State{}, err
	}
	script := llb.Scratch().File(llb.Mkfile("/pycache.py", 0o644, pyCacheScript, llb.WithCreatedTime(g.Epoch)),
		llb.WithCustomName("plan: compile Python's library"))
	return root.Run(
		llb.Args([]string{"/usr/bin/python3", "-S", "-B", "/script/pycache.py", "/target", "/out", strconv.FormatInt(g.Epoch.Unix(), 10)}),
		llb.Network(llb.NetModeNone),
		llb.AddMount("/script", script, llb.Readonly),
		llb.AddMount("/target", target, llb.Readonly),
		llb.AddMount("/tmp", llb.Scratch(), llb.Tmpfs()),
		llb.AddEnv("PYTHONHASHSEED", "0"),
		llb.WithCustomName("compile Python's library for "+arch),
		llb.Platform(g.Worker),
	).AddMount("/out", llb.Scratch()), nil
}
