package smoke

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/docker/go-units"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// structure checks an image without running it: its configuration against
// its definition, its files' times, its size against its budget, and, when it is distroless, every
// file against the golden list.
func (r *runner) structure(t *target) error {
	f := &failure{command: "structure of " + t.Name + " " + t.Platform}
	config, err := t.Content.ConfigFile()
	if err != nil {
		return err
	}
	f.what = append(f.what, configProblems(t, config, r.family)...)
	layers, err := r.layerProblems(t, config)
	if err != nil {
		return err
	}
	f.what = append(f.what, layers...)
	newer, err := r.newer(t, config)
	if err != nil {
		return err
	}
	f.what = append(f.what, newer...)
	over, detail, err := r.budget(t)
	if err != nil {
		return err
	}
	f.what = append(f.what, over...)
	f.output = detail
	if t.def.Distroless {
		problems, err := r.distroless(t)
		if err != nil {
			return err
		}
		f.what = append(f.what, problems...)
	}
	if len(f.what) > 0 {
		return f
	}
	return nil
}

func configProblems(t *target, config *v1.ConfigFile, family *images.Family) (out []string) {
	c, want := config.Config, t.def.Config
	equal := func(what string, got, want []string) {
		if !slices.Equal(got, want) {
			out = append(out, fmt.Sprintf("%s is %q, not %q", what, got, want))
		}
	}
	equal("user", []string{c.User}, []string{want.User})
	equal("workdir", []string{c.WorkingDir}, []string{want.Workdir})
	equal("stop signal", []string{c.StopSignal}, []string{want.StopSignal})
	equal("entrypoint", c.Entrypoint, want.Entrypoint)
	equal("cmd", c.Cmd, want.Cmd)
	equal("env", c.Env, want.Env)
	equal("ports", slices.Sorted(maps.Keys(c.ExposedPorts)), slices.Sorted(slices.Values(want.Ports)))
	equal("architecture", []string{config.OS + "/" + config.Architecture}, []string{t.Platform})
	for _, key := range []string{"title", "description", "source", "url", "version", "revision", "created", "licenses", "vendor", "documentation", "base.name"} {
		if c.Labels["org.opencontainers.image."+key] == "" {
			out = append(out, "the label org.opencontainers.image."+key+" is missing")
		}
	}
	fixed := map[string]string{"title": t.def.Title, "description": t.def.Description, "vendor": family.Vendor, "licenses": family.Licenses, "base.name": "scratch"}
	for _, key := range slices.Sorted(maps.Keys(fixed)) {
		if got := c.Labels["org.opencontainers.image."+key]; got != fixed[key] {
			out = append(out, fmt.Sprintf("the label org.opencontainers.image.%s is %q, not %q", key, got, fixed[key]))
		}
	}
	return out
}

// layerProblems compares the layers with the definition's groups: one each,
// then its files and its programs.
func (r *runner) layerProblems(t *target, config *v1.ConfigFile) (out []string, err error) {
	groups, err := lock.LoadGroups(filepath.Join(r.Root, "images", "groups.yaml"))
	if err != nil {
		return nil, err
	}
	closure, err := (&images.Graph{Groups: groups}).Closure(t.def)
	if err != nil {
		return nil, err
	}
	var want []string
	for _, g := range closure {
		want = append(want, g.Name)
	}
	want = append(want, images.Files)
	if len(t.def.Programs) > 0 {
		want = append(want, images.Programs)
	}
	if !slices.Equal(t.groups, want) {
		out = append(out, fmt.Sprintf("its layers are the groups %q, not %q", t.groups, want))
	}
	if n := len(config.RootFS.DiffIDs); n != len(t.groups) {
		out = append(out, fmt.Sprintf("it has %d layers for %d groups", n, len(t.groups)))
	}
	return out, nil
}

// newer names the layers with a file that is newer than the file epoch: a clock
// was read, and the next build has another digest. Of a registry's images the
// layers are not fetched for it: the checkout's lock may be another than theirs.
func (r *runner) newer(t *target, config *v1.ConfigFile) (problems []string, err error) {
	if t.Layout == "" {
		return nil, nil
	}
	l, err := lock.Load(filepath.Join(r.Root, "images", "lock"))
	if err != nil {
		return nil, err
	}
	epoch := time.Unix(min(l.Epoch, config.Created.Unix()), 0)
	layers, err := t.Content.Layers()
	if err != nil {
		return nil, err
	}
	for i, l := range layers {
		id, err := l.Digest()
		if err != nil {
			return nil, err
		}
		// Images share layers.
		look, _ := r.looked.LoadOrStore(id, sync.OnceValues(func() (string, error) { return newest(l, epoch) }))
		found, err := look.(func() (string, error))()
		if err != nil {
			return nil, fmt.Errorf("layer %d (%s): %w", i, id, err)
		}
		if found != "" {
			problems = append(problems, fmt.Sprintf("in layer %d of %q %s, after %s, the earlier of the lock's and the image's time",
				i, t.groups, found, epoch.UTC().Format(time.RFC3339)))
		}
	}
	return problems, nil
}

// newest tells of the newest entry of a layer that is newer than the epoch.
func newest(l v1.Layer, epoch time.Time) (found string, err error) {
	compressed, err := l.Compressed()
	if err != nil {
		return "", err
	}
	defer compressed.Close()
	content, err := imagefs.Decompress(compressed)
	if err != nil {
		return "", err
	}
	defer content.Close()
	for tr := tar.NewReader(content); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return "", err
		}
		if h.ModTime.After(epoch) {
			found, epoch = fmt.Sprintf("%s is of %s", h.Name, h.ModTime.UTC().Format(time.RFC3339Nano)), h.ModTime
		}
	}
}

// budget compares the compressed size with the definition's. What grew is
// told against smoke/golden/sizes.json: the layer, and the packages in it.
func (r *runner) budget(t *target) (problems []string, detail string, err error) {
	limit, err := units.FromHumanSize(t.def.Budget[t.arch()])
	if err != nil {
		return nil, "", fmt.Errorf("%s: budget for %s: %w", t.Name, t.arch(), err)
	}
	layers, err := t.Content.Layers()
	if err != nil {
		return nil, "", err
	}
	var total int64
	sizes := map[string]int64{}
	for i, l := range layers {
		n, err := l.Size()
		if err != nil {
			return nil, "", err
		}
		total += n
		if i < len(t.groups) {
			sizes[t.groups[i]] += n
		}
	}
	if r.Getenv("SMOKE_UPDATE") == "1" {
		if err := r.recordSizes(t, sizes); err != nil {
			return nil, "", err
		}
	}
	if total <= limit {
		return nil, "", nil
	}
	golden, err := readSizes(r.Root)
	if err != nil {
		return nil, "", err
	}
	problems = []string{fmt.Sprintf("its layers are %.1f MB compressed, over the budget of %.1f MB", mb(total), mb(limit))}
	var lines []string
	for _, l := range golden.grown(t.Name, t.arch(), sizes) {
		lines = append(lines, fmt.Sprintf("layer %s: %.1f MB, was %.1f MB", l.name, mb(l.now), mb(l.was)))
		packages, err := r.packages(t, l.name)
		if err != nil {
			return nil, "", err
		}
		for _, p := range golden.grownPackages(l.name, t.arch(), packages) {
			lines = append(lines, fmt.Sprintf("  package %s: %.1f MB, was %.1f MB", p.name, mb(p.now), mb(p.was)))
		}
	}
	if len(lines) > 0 {
		problems = append(problems, lines[0])
	}
	return problems, strings.Join(lines, "\n"), nil
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// distroless checks every file of an image that must hold nothing but what
// it is for.
func (r *runner) distroless(t *target) (problems []string, err error) {
	files, err := listFiles(t.Content)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		say := func(format string, a ...any) { problems = append(problems, f.Path+" "+fmt.Sprintf(format, a...)) }
		base := filepath.Base(f.Path)
		switch {
		case slices.Contains([]string{"sh", "bash", "dash", "busybox", "ash", "zsh"}, base) && f.Kind == tar.TypeReg:
			say("is a shell")
		case slices.Contains([]string{"apt", "apt-get", "dpkg", "apk", "rpm", "npm", "pip"}, base) && f.Kind == tar.TypeReg:
			say("is a package manager")
		}
		if f.Kind == tar.TypeReg && f.Mode&0o111 != 0 && !slices.Contains(t.def.Programs, base) {
			say("can be executed, and is no program of the image")
		}
		if f.Mode&0o6000 != 0 {
			say("has a set-id bit: %#o", f.Mode)
		}
		if f.Mode&0o002 != 0 && f.Kind != tar.TypeSymlink && f.Path != "/tmp" {
			say("is world-writable: %#o", f.Mode)
		}
		if f.UID != 0 && f.UID != 65532 || f.GID != 0 && f.GID != 65532 {
			say("belongs to %d:%d, neither root nor nonroot", f.UID, f.GID)
		}
	}
	return append(problems, r.golden(t, files)...), nil
}

// golden compares files with the list that a reviewer agreed to.
func (r *runner) golden(t *target, files []fileEntry) []string {
	var lines []string
	for _, f := range files {
		lines = append(lines, f.String())
	}
	file := filepath.Join(r.Root, "smoke", "golden", t.Name+"-"+t.arch()+".txt")
	if r.Getenv("SMOKE_UPDATE") == "1" {
		if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
			return []string{err.Error()}
		}
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return []string{"there is no golden list (make one with SMOKE_UPDATE=1 and review it): " + err.Error()}
	}
	want := strings.Split(strings.TrimSpace(string(text)), "\n")
	var out []string
	for _, l := range lines {
		if _, ok := slices.BinarySearch(want, l); !ok {
			out = append(out, "not in the golden list: "+l)
		}
	}
	for _, l := range want {
		if _, ok := slices.BinarySearch(lines, l); !ok {
			out = append(out, "only in the golden list: "+l)
		}
	}
	return out
}

// fileEntry is a file of an image's root.
type fileEntry struct {
	Path     string
	Kind     byte
	Mode     int64
	UID, GID int
	Link     string
}

func (f fileEntry) String() string {
	kind := map[byte]string{tar.TypeDir: "d", tar.TypeReg: "f", tar.TypeSymlink: "l", tar.TypeLink: "f"}[f.Kind]
	s := fmt.Sprintf("%s %s %04o %d:%d", f.Path, kind, f.Mode, f.UID, f.GID)
	if f.Kind == tar.TypeSymlink {
		s += " -> " + f.Link
	}
	return s
}

// listFiles are the files of an image, its layers on top of each other,
// sorted by their lines in the golden list.
func listFiles(img v1.Image) ([]fileEntry, error) {
	content := mutate.Extract(img)
	defer content.Close()
	var files []fileEntry
	for tr := tar.NewReader(content); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		files = append(files, fileEntry{
			Path: "/" + strings.Trim(strings.TrimPrefix(h.Name, "./"), "/"), Kind: h.Typeflag, Mode: h.Mode & 0o7777, UID: h.Uid, GID: h.Gid, Link: h.Linkname,
		})
	}
	slices.SortFunc(files, func(a, b fileEntry) int { return strings.Compare(a.String(), b.String()) })
	// A folder that several layers have comes once.
	return slices.CompactFunc(files, func(a, b fileEntry) bool { return a.Path == b.Path }), nil
}
