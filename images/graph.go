package images

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/buildkit/client/llb"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// Graph makes the LLB of images from locked sources. Its states run on one
// kind of worker; what they produce does not depend on which.
type Graph struct {
	Family *Family
	Groups lock.Groups
	Lock   *lock.Lock
	// Worker is the platform whose instructions the builder's worker runs.
	Worker ocispec.Platform
	// Unpacker holds the program /unpack, compiled for the worker.
	Unpacker llb.State
	// Source is this repository: what internal/gocache is compiled from.
	Source llb.State
	// Modules are mounts that a compile step needs to find Go modules.
	Modules []llb.RunOption
	// Fetch places a source into the graph.
	Fetch func(lock.Source) Located
	// Epoch is the newest modification time of a file in an image.
	Epoch time.Time
}

// Located is a file in a state. Sources that come from the same state say so
// with the same key, and share one mount.
type Located struct {
	State llb.State
	Key   string
	Path  string
}

// Layer is one layer of an image.
type Layer struct {
	Group string // of groups.yaml, or Files, or Programs
	State llb.State
	// meta is what the packages of a group say of themselves, for the package
	// database; nil in a layer without Debian packages.
	meta *llb.State
}

// The layers above the groups: what the image adds to its packages, and our
// own programs.
const (
	Files    = "files"
	Programs = "programs"
)

// Image is the state of an image for an architecture, and its layers, the
// lowest first. Programs holds a state with /NAME for each of ours.
func (g *Graph) Image(img *Image, arch string, programs map[string]llb.State) (llb.State, []Layer, error) {
	var layers []Layer
	groups, err := g.Closure(img)
	if err != nil {
		return llb.State{}, nil, err
	}
	for _, group := range groups {
		layer, err := g.group(group, arch, img.Distroless)
		if err != nil {
			return llb.State{}, nil, err
		}
		layers = append(layers, layer)
	}
	files, err := g.files(img, arch, layers)
	if err != nil {
		return llb.State{}, nil, err
	}
	layers = append(layers, Layer{Group: Files, State: files})
	if len(img.Programs) > 0 {
		state, err := g.programs(img, programs)
		if err != nil {
			return llb.State{}, nil, err
		}
		layers = append(layers, Layer{Group: Programs, State: state})
	}
	return merge(img.Name, layers), layers, nil
}

// Closure lists the image's groups with those they build on, the lowest
// first.
func (g *Graph) Closure(img *Image) ([]lock.Group, error) {
	var out []lock.Group
	for _, name := range img.Groups {
		chain := g.Groups.Chain(name)
		if len(chain) == 0 {
			return nil, fmt.Errorf("image %s: groups.yaml has no group %q", img.Name, name)
		}
		for _, group := range chain {
			if !slices.ContainsFunc(out, func(o lock.Group) bool { return o.Name == group.Name }) {
				out = append(out, group)
			}
		}
	}
	return out, nil
}

// Installed are the groups of packages in the images with dpkg's database, in
// the order of their layers.
func (f *Family) Installed(all lock.Groups) ([]string, error) {
	var names []string
	for i := range f.Images {
		if f.Images[i].Distroless {
			continue
		}
		groups, err := (&Graph{Groups: all}).Closure(&f.Images[i])
		if err != nil {
			return nil, err
		}
		for _, g := range groups {
			if len(g.Debian) > 0 && !slices.Contains(names, g.Name) {
				names = append(names, g.Name)
			}
		}
	}
	return names, nil
}

func merge(name string, layers []Layer) llb.State {
	states := make([]llb.State, len(layers))
	for i, l := range layers {
		states[i] = l.State
	}
	return llb.Merge(states, llb.WithCustomName("merge "+name))
}

// group is the layer of a group's sources: a function of the group, the
// architecture and the lock alone, so that images share it.
func (g *Graph) group(group lock.Group, arch string, distroless bool) (Layer, error) {
	packages := g.Lock.Packages(group.Name, arch)
	kinds := 0
	for _, has := range []bool{len(group.Debian) > 0, group.Go, len(group.NPM) > 0, group.GoCache != "", group.PyCache != ""} {
		if has {
			kinds++
		}
	}
	var state llb.State
	var err error
	switch {
	case kinds != 1:
		return Layer{}, fmt.Errorf("group %q has %d kinds of source; a group becomes one layer, so it has one", group.Name, kinds)
	case group.Go:
		state, err = g.Go(arch)
	case len(group.NPM) > 0:
		state, err = g.node(arch)
	case group.GoCache != "":
		state, err = g.goCache(group, arch)
	case group.PyCache != "":
		state, err = g.pyCache(group, arch)
	case len(packages) == 0:
		return Layer{}, fmt.Errorf("the lock has no packages of group %q for %s; run `lock:update`", group.Name, arch)
	default:
		return g.debian(group.Name, arch, packages, distroless)
	}
	return Layer{Group: group.Name, State: state}, err
}

func (g *Graph) debian(name, arch string, packages []lock.Package, distroless bool) (Layer, error) {
	p := plan.Group{Arch: arch, Epoch: g.Epoch.Unix()}
	p.Database, p.Paths = rules(distroless)
	in := inputs{fetch: g.Fetch}
	for _, pkg := range packages {
		p.Packages = append(p.Packages, plan.Package{Name: pkg.Name, Version: pkg.Version, Arch: pkg.Arch, Input: in.add(g.Lock.Source(pkg))})
	}
	step, err := g.run(fmt.Sprintf("unpack %s for %s (%d packages)", name, arch, len(packages)), p, in.mounts(),
		"group", "-in", "/in", "-meta", "/meta")
	if err != nil {
		return Layer{}, err
	}
	meta := step.AddMount("/meta", llb.Scratch())
	return Layer{Group: name, State: step.AddMount("/out", llb.Scratch()), meta: &meta}, nil
}

// rules are the package database and the paths left out.
func rules(distroless bool) (plan.Database, []string) {
	if distroless {
		return plan.StatusD, plan.Distroless
	}
	return plan.Dpkg, plan.Slim
}

// Go is the locked Go toolchain at /usr/local/go.
func (g *Graph) Go(arch string) (llb.State, error) {
	module, ok := g.Lock.Go[arch]
	if !ok {
		return llb.State{}, fmt.Errorf("the lock has no Go toolchain for %s; run `lock:update`", arch)
	}
	in := inputs{fetch: g.Fetch}
	input := in.add(module.Source())
	p := plan.Go{Epoch: g.Epoch.Unix(), Version: strings.TrimSuffix(path.Base(module.Path), ".zip"), SHA256: input.SHA256}
	return g.out(fmt.Sprintf("unpack Go %s for %s", module.Version, arch), p, in.mounts(), "go", "-in", "/in/"+input.File)
}

// node is Node.js with npm at /usr/local.
func (g *Graph) node(arch string) (llb.State, error) {
	p := plan.NPM{Epoch: g.Epoch.Unix()}
	in := inputs{fetch: g.Fetch}
	for _, pkg := range g.Lock.NPM[arch] {
		switch {
		case pkg.Name == lock.NPM:
			p.NPM = in.add(pkg.Source())
		default:
			p.Node = in.add(pkg.Source())
		}
	}
	if p.NPM.File == "" || p.Node.File == "" {
		return llb.State{}, fmt.Errorf("the lock lacks node or npm for %s; run `lock:update`", arch)
	}
	return g.out("unpack Node.js for "+arch, p, in.mounts(), "npm", "-in", "/in")
}

// files is the layer that makes a system of the packages: what maintainer
// scripts would have done, the dpkg database, accounts, and the image's own
// files. It holds nothing that the layers below already have.
func (g *Graph) files(img *Image, arch string, layers []Layer) (llb.State, error) {
	p := plan.Finish{Arch: arch, Epoch: g.Epoch.Unix(), Locale: "C.UTF-8", AptSources: !img.Distroless, Backports: !img.Distroless}
	p.Database, p.Paths = rules(img.Distroless)
	uid, err := img.owner()
	if err != nil {
		return llb.State{}, err
	}
	for _, a := range img.Accounts {
		p.Users = append(p.Users, plan.User{Name: a.Name, UID: a.UID, GID: a.GID, Home: a.Home, Shell: a.Shell})
		p.Groups = append(p.Groups, plan.AccountGroup{Name: a.Name, GID: a.GID})
		if a.MakeHome {
			p.Dirs = append(p.Dirs, plan.Dir{Path: a.Home, Mode: "0700", UID: a.UID, GID: a.GID})
		}
		if a.SubIDs.Count > 0 {
			p.SubIDs = append(p.SubIDs, plan.SubID{User: a.Name, First: a.SubIDs.First, Count: a.SubIDs.Count})
		}
	}
	for _, d := range img.Dirs {
		// Group 0 may write, for engines that start a container under an
		// arbitrary uid with gid 0.
		dir := plan.Dir{Path: path.Join(img.Home, d), Mode: "0775", UID: uid, GID: 0}
		if d == "." && img.HomeMode != "" {
			dir.Mode = img.HomeMode
		}
		p.Dirs = append(p.Dirs, dir)
	}
	for _, f := range img.Files {
		if f.Link != "" {
			p.Links = append(p.Links, plan.Link{Path: f.Path, Target: f.Link})
			continue
		}
		p.Files = append(p.Files, plan.File{Path: f.Path, Content: f.Content, Prepend: f.Prepend, Mode: f.Mode})
	}
	args := []string{"finish", "-root", "/rootfs"}
	// What is compiled from a group holds nothing that is looked at here.
	packages := slices.DeleteFunc(slices.Clone(layers), func(l Layer) bool {
		group, _ := g.Groups.Get(l.Group)
		return group.GoCache != "" || group.PyCache != ""
	})
	mounts := []llb.RunOption{llb.AddMount("/rootfs", merge(img.Name, packages), llb.Readonly)}
	for _, l := range layers {
		if l.meta != nil {
			at := "/meta/" + l.Group
			args = append(args, "-meta", at)
			mounts = append(mounts, llb.AddMount(at, *l.meta, llb.Readonly))
		}
	}
	return g.out(fmt.Sprintf("finish %s for %s", img.Name, arch), p, mounts, args...)
}

// owner is the image's user, whose home and caches these are.
func (img *Image) owner() (uid int, err error) {
	u, group, ok := strings.Cut(img.Config.User, ":")
	if ok {
		if uid, err = strconv.Atoi(u); err == nil {
			_, err = strconv.Atoi(group)
		}
	}
	if !ok || err != nil {
		return 0, fmt.Errorf("image %s: config.user %q is not uid:gid in numbers", img.Name, img.Config.User)
	}
	return uid, nil
}

func (g *Graph) programs(img *Image, programs map[string]llb.State) (llb.State, error) {
	var all *llb.FileAction
	for _, name := range img.Programs {
		program, ok := programs[name]
		if !ok {
			return llb.State{}, fmt.Errorf("image %s: no program is called %q", img.Name, name)
		}
		if all == nil {
			all = llb.Copy(program, "/"+name, "/"+name)
		} else {
			all = all.Copy(program, "/"+name, "/"+name)
		}
	}
	// In one copy: each makes a layer, and a second one into the same folder
	// leaves that folder with the time of the build.
	name := llb.WithCustomName("add " + strings.Join(img.Programs, ", "))
	return llb.Scratch().File(llb.Copy(llb.Scratch().File(all, name), "/", "/usr/local/bin",
		&llb.CopyInfo{CopyDirContentsOnly: true, CreateDestPath: true, Mode: &llb.ChmodOpt{Mode: 0o755}},
		llb.WithCreatedTime(g.Epoch)), name), nil
}

// run is one run of the unpacker: a plan and read-only inputs in, a layer at
// /out.
func (g *Graph) run(name string, p any, mounts []llb.RunOption, args ...string) (llb.ExecState, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return llb.ExecState{}, err
	}
	planned := llb.Scratch().File(llb.Mkfile("/plan.json", 0o644, text, llb.WithCreatedTime(g.Epoch)),
		llb.WithCustomName("plan: "+name))
	opts := append([]llb.RunOption{
		llb.Args(append([]string{"/bin/unpack", args[0], "-plan", "/plan/plan.json", "-out", "/out"}, args[1:]...)),
		llb.Network(llb.NetModeNone),
		llb.AddMount("/bin", g.Unpacker, llb.Readonly),
		llb.AddMount("/plan", planned, llb.Readonly),
		llb.WithCustomName(name),
		llb.Platform(g.Worker),
	}, mounts...)
	return llb.Scratch().Run(opts...), nil
}

func (g *Graph) out(name string, p any, mounts []llb.RunOption, args ...string) (llb.State, error) {
	step, err := g.run(name, p, mounts, args...)
	if err != nil {
		return llb.State{}, err
	}
	return step.AddMount("/out", llb.Scratch()), nil
}

// inputs collects sources and gives each the name under /in by which a plan
// knows it.
type inputs struct {
	fetch func(lock.Source) Located
	keys  []string
	at    []Located
}

func (in *inputs) add(s lock.Source) plan.Input {
	l := in.fetch(s)
	i := slices.Index(in.keys, l.Key)
	if i < 0 {
		i = len(in.keys)
		in.keys, in.at = append(in.keys, l.Key), append(in.at, l)
	}
	return plan.Input{File: path.Join(strconv.Itoa(i), l.Path), SHA256: s.Digest}
}

func (in *inputs) mounts() []llb.RunOption {
	opts := make([]llb.RunOption, len(in.at))
	for i, l := range in.at {
		opts[i] = llb.AddMount("/in/"+strconv.Itoa(i), l.State, llb.Readonly)
	}
	return opts
}
