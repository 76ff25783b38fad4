package differential

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/unpack"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// Job is one comparison.
type Job struct {
	Lock   *lock.Lock
	Arch   string
	Groups []string // in the order of the layers
	Debs   string   // folder that holds the locked packages, by File
	Work   string   // folder for the results; emptied first
	Log    io.Writer
}

// File is a package's name in Debs.
func File(p lock.Package) string {
	return fmt.Sprintf("%s_%s_%s.deb", p.Name, strings.ReplaceAll(p.Version, ":", "%3a"), p.Arch)
}

// layers are the packages of each group. What two branches of groups share, as
// the sidecar's and the toolbox's do, is in the first alone: this is one rootfs.
func (j *Job) layers() [][]lock.Package {
	seen := map[string]bool{}
	all := make([][]lock.Package, len(j.Groups))
	for i, g := range j.Groups {
		for _, pkg := range j.Lock.Packages(g, j.Arch) {
			if !seen[pkg.Name] {
				all[i] = append(all[i], pkg)
			}
			seen[pkg.Name] = true
		}
	}
	return all
}

func (j *Job) packages() []lock.Package { return slices.Concat(j.layers()...) }

// Packages is the number of packages compared.
func (j *Job) Packages() int { return len(j.packages()) }

// Unpacked lays the groups and finish's layer out below Work as the images
// have them and returns the folder of the merged rootfs.
func (j *Job) Unpacked(ctx context.Context) (string, error) {
	root := filepath.Join(j.Work, "unpacked")
	if err := os.RemoveAll(root); err != nil {
		return "", err
	}
	defer os.RemoveAll(filepath.Join(j.Work, "layers"))
	fin := plan.Finish{Epoch: j.Lock.Epoch, Arch: j.Arch, Database: plan.Dpkg, Paths: plan.Slim}
	var metas []string
	layer := func(name string) (string, error) {
		dir := filepath.Join(j.Work, "layers", name)
		return dir, errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755))
	}
	for i, packages := range j.layers() {
		g := j.Groups[i]
		p := plan.Group{Epoch: fin.Epoch, Arch: j.Arch, Database: fin.Database, Paths: fin.Paths}
		for _, pkg := range packages {
			p.Packages = append(p.Packages, plan.Package{
				Input: plan.Input{File: File(pkg), SHA256: pkg.SHA256}, Name: pkg.Name, Version: pkg.Version, Arch: pkg.Arch})
		}
		out, err := layer(g)
		if err != nil {
			return "", err
		}
		meta, err := layer(g + ".meta")
		if err != nil {
			return "", err
		}
		start := time.Now()
		if err := unpack.Group(ctx, p, j.Debs, out, meta, runtime.NumCPU()); err != nil {
			return "", fmt.Errorf("group %s: %w", g, err)
		}
		fmt.Fprintf(j.Log, "unpacked %s: %d packages in %.1f s\n", g, len(p.Packages), time.Since(start).Seconds())
		metas = append(metas, meta)
		if err := overlay(out, root); err != nil {
			return "", err
		}
	}
	out, err := layer("finish")
	if err != nil {
		return "", err
	}
	if err := unpack.Finish(ctx, fin, root, out, metas); err != nil {
		return "", fmt.Errorf("finish: %w", err)
	}
	return root, overlay(out, root)
}

// overlay moves a layer's files over a rootfs, as a merge of layers does.
func overlay(layer, root string) error {
	type folder struct {
		path string
		info fs.FileInfo
	}
	var dirs []folder
	err := filepath.WalkDir(layer, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(root, strings.TrimPrefix(p, layer))
		if !d.IsDir() {
			return os.Rename(p, to)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		dirs = append(dirs, folder{to, info})
		return os.MkdirAll(to, 0o755)
	})
	for i := len(dirs) - 1; err == nil && i >= 0; i-- {
		st := dirs[i].info.Sys().(*syscall.Stat_t)
		err = errors.Join(
			os.Chown(dirs[i].path, int(st.Uid), int(st.Gid)),
			syscall.Chmod(dirs[i].path, st.Mode&0o7777),
			os.Chtimes(dirs[i].path, dirs[i].info.ModTime(), dirs[i].info.ModTime()))
	}
	return err
}

// Reference makes the same packages a rootfs with mmdebstrap, from a local
// repository and without network, and returns the archive's name. For a
// foreign architecture the kernel must know how to run its programs. An
// archive of the same packages that is already there is taken as it is.
func (j *Job) Reference(ctx context.Context) (string, error) {
	out, keyFile := filepath.Join(j.Work, "reference.tar"), filepath.Join(j.Work, "reference.key")
	key, err := json.Marshal(struct {
		Packages []lock.Package
		Paths    []string
	}{j.packages(), plan.Slim})
	if err != nil {
		return "", err
	}
	if old, err := os.ReadFile(keyFile); err == nil && bytes.Equal(old, key) {
		fmt.Fprintln(j.Log, "taking the reference of the last run, "+out)
		return out, nil
	}
	if err := os.RemoveAll(keyFile); err != nil {
		return "", err
	}
	start := time.Now()
	if err := j.mmdebstrap(ctx, out); err != nil {
		return "", err
	}
	fmt.Fprintf(j.Log, "mmdebstrap took %.0f s\n", time.Since(start).Seconds())
	return out, os.WriteFile(keyFile, key, 0o644)
}

func (j *Job) mmdebstrap(ctx context.Context, out string) error {
	repo := filepath.Join(j.Work, "repo")
	if err := errors.Join(os.RemoveAll(repo), os.MkdirAll(repo, 0o755)); err != nil {
		return err
	}
	defer os.RemoveAll(repo)
	index, err := os.Create(filepath.Join(repo, "Packages"))
	if err != nil {
		return err
	}
	defer index.Close()
	var include []string
	for _, pkg := range j.packages() {
		b, err := os.ReadFile(filepath.Join(j.Debs, File(pkg)))
		if err != nil {
			return err
		}
		control, err := unpack.Control(b)
		if err != nil {
			return fmt.Errorf("%s: %w", File(pkg), err)
		}
		// apt decodes escapes in file names, so the copy has none.
		name := strings.ReplaceAll(File(pkg), "%3a", "")
		fmt.Fprintf(index, "%s\nFilename: ./%s\nSize: %d\nSHA256: %s\n\n", strings.TrimRight(control, "\n"), name, len(b), pkg.SHA256.Encoded())
		if err := os.Link(filepath.Join(j.Debs, File(pkg)), filepath.Join(repo, name)); err != nil {
			if err := os.WriteFile(filepath.Join(repo, name), b, 0o644); err != nil {
				return err
			}
		}
		include = append(include, pkg.Name+"="+pkg.Version)
	}
	if err := index.Close(); err != nil {
		return err
	}
	args := []string{"--mode=root", "--variant=custom", "--architectures=" + j.Arch, "--include=" + strings.Join(include, ","),
		"--aptopt=APT::Install-Recommends false", "--skip=check/empty",
		`--aptopt=APT::Sandbox::User "root"`} // the folder may be this user's alone
	for _, p := range plan.Slim {
		args = append(args, "--dpkgopt="+p)
	}
	cmd := host.Command(ctx, "mmdebstrap", append(args, "trixie", out, "deb [trusted=yes] copy:"+repo+" ./")...)
	// The system's own temporary folder is memory on Debian 13.
	cmd.Env = append(os.Environ(), "TMPDIR="+j.Work, "SOURCE_DATE_EPOCH="+strconv.FormatInt(j.Lock.Epoch, 10), "LC_ALL=C.UTF-8")
	cmd.Stdout, cmd.Stderr = j.Log, j.Log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("mmdebstrap: %w", err)
	}
	return nil
}
