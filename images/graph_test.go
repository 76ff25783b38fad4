package images

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/solver/pb"
	digest "github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

const root = ".."

func family(t *testing.T) *Family {
	t.Helper()
	f, err := Load(os.DirFS(root))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func graph(t *testing.T, worker string) *Graph {
	t.Helper()
	groups, err := lock.LoadGroups(filepath.Join(root, "images", "groups.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := lock.Load(filepath.Join(root, "images", "lock"))
	if err != nil {
		t.Fatal(err)
	}
	return &Graph{
		Family: family(t), Groups: groups, Lock: l,
		Worker:   ocispec.Platform{OS: "linux", Architecture: worker},
		Unpacker: llb.Local("unpacker"),
		Source:   llb.Local("source"),
		Epoch:    time.Unix(l.Epoch, 0),
		Fetch: func(s lock.Source) Located {
			url := "https://mirror.example.test/" + s.Path
			return Located{Key: url, Path: s.File(), State: llb.HTTP(url, llb.Checksum(s.Digest), llb.Filename(s.File()))}
		},
	}
}

// ops marshals a state and returns its operations.
func ops(t *testing.T, s llb.State) map[digest.Digest]*pb.Op {
	t.Helper()
	def, err := s.Marshal(t.Context(), llb.LinuxAmd64)
	if err != nil {
		t.Fatal(err)
	}
	out := map[digest.Digest]*pb.Op{}
	for _, text := range def.Def {
		var op pb.Op
		if err := op.UnmarshalVT(text); err != nil {
			t.Fatal(err)
		}
		out[digest.FromBytes(text)] = &op
	}
	return out
}

func programs() map[string]llb.State {
	out := map[string]llb.State{}
	for _, name := range []string{"loomcycle", "loomcycle-builder", "session-agent"} {
		out[name] = llb.Local("program-" + name)
	}
	return out
}

// Every image of the family, for both platforms: no registry source, no step
// on a foreign architecture, no step with a network, every download pinned.
func TestGraphIsHermetic(t *testing.T) {
	for _, img := range family(t).Images {
		for _, arch := range lock.Arches() {
			t.Run(img.Name+"/"+arch, func(t *testing.T) {
				g := graph(t, "amd64")
				state, layers, err := g.Image(&img, arch, programs())
				if err != nil {
					t.Fatal(err)
				}
				downloads := map[string]bool{}
				for _, op := range ops(t, state) {
					if src := op.GetSource(); src != nil {
						switch {
						case strings.HasPrefix(src.Identifier, "https://"):
							downloads[strings.TrimPrefix(src.Identifier, "https://mirror.example.test/")] = true
							if !strings.HasPrefix(src.Attrs[pb.AttrHTTPChecksum], "sha256:") {
								t.Errorf("%s has no checksum", src.Identifier)
							}
						case !strings.HasPrefix(src.Identifier, "local://"):
							t.Errorf("%s comes from neither the lock nor this repository", src.Identifier)
						}
					}
					if exec := op.GetExec(); exec != nil {
						if exec.Network != pb.NetMode_NONE {
							t.Errorf("%v runs with a network", exec.Meta.Args)
						}
						if op.Platform.Architecture != "amd64" {
							t.Errorf("%v runs on %s and the worker is amd64", exec.Meta.Args, op.Platform.Architecture)
						}
					}
				}
				want := map[string]bool{}
				add := func(groups []lock.Group, arch string) {
					for _, group := range groups {
						for _, p := range g.Lock.Packages(group.Name, arch) {
							want[p.Path] = true
						}
						for _, p := range g.Lock.NPM[arch] {
							want[p.Path] = want[p.Path] || len(group.NPM) > 0
						}
						want[g.Lock.Go[arch].Path] = want[g.Lock.Go[arch].Path] || group.Go
						// Made by the worker's own compilers and interpreter.
						want[g.Lock.Go["amd64"].Path] = want[g.Lock.Go["amd64"].Path] || group.GoCache != ""
						for _, tools := range []string{group.GoCache, group.PyCache} {
							for _, group := range g.Groups.Chain(tools) {
								for _, p := range g.Lock.Packages(group.Name, "amd64") {
									want[p.Path] = true
								}
							}
						}
					}
				}
				groups, err := g.Closure(&img)
				if err != nil {
					t.Fatal(err)
				}
				add(groups, arch)
				maps.DeleteFunc(want, func(_ string, yes bool) bool { return !yes })
				if !maps.Equal(downloads, want) {
					t.Errorf("the graph downloads %d files, the lock has %d for it", len(downloads), len(want))
				}
				if last := layers[len(layers)-1].Group; len(img.Programs) > 0 && last != Programs || len(img.Programs) == 0 && last != Files {
					t.Errorf("the last layer is %q", last)
				}
			})
		}
	}
}

// An image's own programs are one layer, however many there are.
func TestProgramsAreOneLayer(t *testing.T) {
	img := Image{Name: "x", Programs: []string{"loomcycle-builder", "session-agent"}}
	state, err := graph(t, "amd64").programs(&img, programs())
	if err != nil {
		t.Fatal(err)
	}
	copies := 0
	for _, op := range ops(t, state) {
		for _, a := range op.GetFile().GetActions() {
			if c := a.GetCopy(); c != nil && strings.HasPrefix(c.Dest, "/usr/local/bin") {
				copies++
			}
		}
	}
	if copies != 1 {
		t.Errorf("%d copies into the image; each would be a layer", copies)
	}
}

// What family.yaml says a program is compiled from holds every package of
// this repository that it imports.
func TestProgramSourcesAreComplete(t *testing.T) {
	for _, p := range family(t).Programs {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if and .Module .Module.Main}}{{.Dir}}{{end}}", p.Package)
		cmd.Dir, cmd.Env = root, append(os.Environ(), "GOOS=linux", "CGO_ENABLED=0")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v", p.Name, err)
		}
		top, err := filepath.Abs(root)
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range strings.Fields(string(out)) {
			rel, err := filepath.Rel(top, dir)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(p.Include, func(in string) bool { return rel == in || strings.HasPrefix(rel, in+"/") }) {
				t.Errorf("family.yaml: program %s imports %s, and its include has only %v", p.Name, rel, p.Include)
			}
		}
	}
}

// The toolbox and the session image differ in nothing but their last layers.
func TestToolboxAndSessionShareLayers(t *testing.T) {
	g := graph(t, "amd64")
	f := family(t)
	var digests [2][]digest.Digest
	for i, name := range []string{"loomcycle-toolbox", "loomcycle-sandbox-session"} {
		img, err := f.Image(name)
		if err != nil {
			t.Fatal(err)
		}
		_, layers, err := g.Image(img, "arm64", programs())
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range layers {
			if l.Group == Files || l.Group == Programs {
				continue
			}
			def, err := l.State.Marshal(t.Context(), llb.LinuxAmd64, llb.LocalUniqueID("test"))
			if err != nil {
				t.Fatal(err)
			}
			digests[i] = append(digests[i], digest.FromBytes(def.Def[len(def.Def)-1]))
		}
	}
	if len(digests[0]) < 5 || !slices.Equal(digests[0], digests[1]) {
		t.Errorf("the toolchain layers differ:\n%v\n%v", digests[0], digests[1])
	}
}

// A plan, and so a layer, is the same whatever the worker is.
func TestPlansDoNotDependOnTheWorker(t *testing.T) {
	img, err := family(t).Image("loomcycle-toolbox")
	if err != nil {
		t.Fatal(err)
	}
	// What compiles a library is the worker's own; that it makes the same of it
	// no plan can tell.
	img.Groups = slices.DeleteFunc(img.Groups, func(name string) bool { return name == "gocache" || name == "pycache" })
	var plans [2][]string
	for i, worker := range []string{"amd64", "arm64"} {
		state, _, err := graph(t, worker).Image(img, "arm64", programs())
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range ops(t, state) {
			if file := op.GetFile(); file != nil && file.Actions[0].GetMkfile() != nil {
				plans[i] = append(plans[i], string(file.Actions[0].GetMkfile().Data))
			}
		}
		slices.Sort(plans[i])
	}
	if len(plans[0]) == 0 || !slices.Equal(plans[0], plans[1]) {
		t.Errorf("%d and %d plans, or they differ", len(plans[0]), len(plans[1]))
	}
}

func TestFilesAreRendered(t *testing.T) {
	for _, name := range []string{"loomcycle-toolbox", "loomcycle-sandbox-session"} {
		img, err := family(t).Image(name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := img.Env("PATH")
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(img.Files, func(f File) bool { return f.Path == "/etc/profile.d/loomcycle.sh" })
		if i < 0 || img.Files[i].Content != "export PATH="+want+"\n" {
			t.Errorf("%s: the profile does not set the image's PATH", name)
		}
	}
}

// finished is the plan of an image's last step.
func finished(t *testing.T, g *Graph, img *Image, arch string) plan.Finish {
	t.Helper()
	state, _, err := g.Image(img, arch, programs())
	if err != nil {
		t.Fatal(err)
	}
	var found []plan.Finish
	for _, op := range ops(t, state) {
		file := op.GetFile()
		if file == nil || file.Actions[0].GetMkfile() == nil || file.Actions[0].GetMkfile().Path != "/plan.json" {
			continue
		}
		d := json.NewDecoder(bytes.NewReader(file.Actions[0].GetMkfile().Data))
		d.DisallowUnknownFields() // of the plans of other steps
		var p plan.Finish
		if d.Decode(&p) == nil {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s for %s: %d plans finish it", img.Name, arch, len(found))
	}
	return found[0]
}

// Every image has a locale, and one with apt the sources that its packages came
// from: also those of security updates and backports.
func TestFinish(t *testing.T) {
	g := graph(t, "amd64")
	for _, img := range g.Family.Images {
		for _, arch := range lock.Arches() {
			p := finished(t, g, &img, arch)
			database := plan.Dpkg
			if img.Distroless {
				database = plan.StatusD
			}
			if p.Arch != arch || p.Epoch != g.Lock.Epoch || p.Locale != "C.UTF-8" || p.AptSources == img.Distroless || p.Backports == img.Distroless || p.Database != database {
				t.Errorf("%s for %s: %+v", img.Name, arch, p)
			}
		}
	}
}

// A tmpfs over a session's /work is writable even where it takes the mode of
// the folder below it.
func TestSessionHome(t *testing.T) {
	g := graph(t, "amd64")
	img, err := g.Family.Image("loomcycle-sandbox-session")
	if err != nil {
		t.Fatal(err)
	}
	modes := map[string]string{}
	for _, d := range finished(t, g, img, "amd64").Dirs {
		modes[d.Path] = d.Mode
	}
	if modes["/work"] != "1777" || modes["/work/go"] != "0775" {
		t.Errorf("modes %v", modes)
	}
}

// What of the configuration an operator relies on: a row for each image.
func TestConfig(t *testing.T) {
	const system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	toolchain := func(home string) []string {
		return []string{
			"PATH=/usr/local/go/bin:/usr/local/cargo/bin:" + home + "/go/bin:" + home + "/.cargo/bin:" + home + "/.local/bin:" + system,
			"HOME=" + home, "GOPATH=" + home + "/go", "GOCACHE=" + home + "/.cache/go-build", "GOMODCACHE=" + home + "/go/pkg/mod", "GOTOOLCHAIN=local",
			"CARGO_HOME=" + home + "/.cargo", "npm_config_cache=" + home + "/.npm", "npm_config_prefix=" + home + "/.local",
			"PIP_CACHE_DIR=" + home + "/.cache/pip", "PYTHONUSERBASE=" + home + "/.local", "XDG_CACHE_HOME=" + home + "/.cache", "TMPDIR=/tmp", "LANG=C.UTF-8",
		}
	}
	plain := func(home string, more ...string) []string {
		return append([]string{"PATH=" + system, "HOME=" + home, "TMPDIR=/tmp", "LANG=C.UTF-8"}, more...)
	}
	const nonroot, authorities = "/home/nonroot", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"
	rows := map[string]struct {
		user, workdir, entrypoint, cmd, ports, stop, home string
		env                                               []string
	}{
		"loomcycle": {"65532:65532", "/", "[/usr/local/bin/loomcycle]", "[serve]", "8787/tcp", "SIGTERM", nonroot,
			plain(nonroot, authorities, "LOOMCYCLE_LISTEN_ADDR=0.0.0.0:8787")},
		"loomcycle-toolbox": {"65532:65532", nonroot, "[/usr/local/bin/loomcycle]", "[serve]", "8787/tcp", "SIGTERM", nonroot,
			append(toolchain(nonroot), "LOOMCYCLE_LISTEN_ADDR=0.0.0.0:8787")},
		"loomcycle-sandbox-session": {"1000:1000", "/work", "[]", "[sleep infinity]", "", "SIGKILL", "/work", toolchain("/work")},
		"loomcycle-builder": {"0:0", "/", "[/usr/local/bin/loomcycle-builder]", "[serve]", "9000/tcp", "SIGTERM", "/root",
			plain("/root", "SANDBOX_LISTEN_ADDR=0.0.0.0:9000", "SANDBOX_ENGINE=podman")},
		"loomcycle-builder-docker": {"65532:65532", "/", "[/usr/local/bin/loomcycle-builder]", "[serve]", "9000/tcp", "SIGTERM", nonroot,
			plain(nonroot, authorities, "SANDBOX_LISTEN_ADDR=0.0.0.0:9000", "SANDBOX_ENGINE=docker", "SANDBOX_STATE_DIR=/home/nonroot/.local/share/loomcycle-builder")},
	}
	f := family(t)
	if len(f.Images) != len(rows) {
		t.Errorf("%d images have %d rows", len(f.Images), len(rows))
	}
	b := Build{Version: "1.2.3", Revision: strings.Repeat("a", 40), Created: time.Unix(981173106, 0)}
	for _, img := range f.Images {
		want, ok := rows[img.Name]
		if !ok {
			t.Errorf("%s has no row", img.Name)
			continue
		}
		for _, arch := range lock.Arches() {
			c := f.OCIConfig(&img, arch, b)
			slices.Sort(want.env)
			got := want
			got.user, got.workdir, got.entrypoint, got.cmd = c.Config.User, c.Config.WorkingDir, bracket(c.Config.Entrypoint), bracket(c.Config.Cmd)
			got.ports, got.stop, got.home = strings.Join(slices.Sorted(maps.Keys(c.Config.ExposedPorts)), ","), c.Config.StopSignal, img.Home
			got.env = slices.Sorted(slices.Values(c.Config.Env))
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s for %s:\n got %+v\nwant %+v", img.Name, arch, got, want)
			}
			if len(c.Config.Volumes) > 0 || c.OS != "linux" || c.Architecture != arch || c.Created.Format(time.RFC3339) != "2001-02-03T04:05:06Z" {
				t.Errorf("%s: volumes %v, %s/%s, created %v", img.Name, c.Config.Volumes, c.OS, c.Architecture, c.Created)
			}
			for _, key := range strings.Fields("title description source url version revision created licenses vendor documentation base.name") {
				if c.Config.Labels["org.opencontainers.image."+key] == "" {
					t.Errorf("%s: label %s is missing", img.Name, key)
				}
			}
			if !maps.Equal(c.Config.Labels, f.Annotations(&img, b)) {
				t.Errorf("%s: the labels are not the annotations", img.Name)
			}
		}
	}
}

func bracket(s []string) string { return "[" + strings.Join(s, " ") + "]" }

// A wrong definition is refused with the file, the field and the rule.
func TestLoadRefuses(t *testing.T) {
	for wrong, want := range map[string]string{
		"name: x\nhomme: /x\n": "homme",
		"name: x\nhome: x\ngroups: [base]\nconfig: {user: '1:1'}\n":                "not an absolute path",
		"name: x\nhome: /x\ngroups: [base]\nconfig: {user: '1:1', env: [PATH]}\n":  "NAME=value",
		"name: x\nhome: /x\ngroups: [base]\ndirs: [../y]\nconfig: {user: '1:1'}\n": "not a path below home",
	} {
		dir := t.TempDir()
		write := func(name, text string) {
			os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755)
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		write("images/family.yaml", "images: [x]\n")
		write("x/image.yaml", wrong)
		_, err := Load(os.DirFS(dir))
		if err == nil || !strings.Contains(err.Error(), "x/image.yaml") || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v", wrong, err)
		}
	}
}

// Plans are read by another program: their JSON has to survive the trip.
func TestPlanRoundTrip(t *testing.T) {
	g := graph(t, "amd64")
	img, err := g.Family.Image("loomcycle-toolbox")
	if err != nil {
		t.Fatal(err)
	}
	users := finished(t, g, img, "amd64").Users
	if len(users) != 1 || users[0].Name != "nonroot" || users[0].UID != 65532 {
		t.Errorf("users: %+v", users)
	}
}

// The groups of every image with dpkg's database are compared by unpack:diff, and the document
// names them.
func TestInstalled(t *testing.T) {
	all, err := lock.LoadGroups(filepath.Join(root, "images", "groups.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	groups, err := family(t).Installed(all)
	if err != nil {
		t.Fatal(err)
	}
	document, err := os.ReadFile(filepath.Join(root, "docs", "DIFFERENTIAL.md"))
	if err != nil {
		t.Fatal(err)
	}
	last := len(groups) - 1
	if want := "the groups " + strings.Join(groups[:last], ", ") + " and " + groups[last] + ","; !strings.Contains(string(document), want) {
		t.Errorf("docs/DIFFERENTIAL.md does not say %q", want)
	}
	for _, name := range []string{"base", "rust", "engine"} {
		if !slices.Contains(groups, name) {
			t.Errorf("%q lacks %s", groups, name)
		}
	}
	if slices.Contains(groups, "static") || slices.Contains(groups, "cross") {
		t.Errorf("%q has groups of no image, or of distroless ones", groups)
	}
}
