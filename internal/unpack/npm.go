package unpack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// NPM lays out Node and npm below /usr/local of out: bin, include and the
// licence of Node; npm as the module and the commands that its package.json
// declares.
func NPM(ctx context.Context, p plan.NPM, in, out string) error {
	src, err := os.OpenRoot(in)
	if err != nil {
		return err
	}
	defer src.Close()
	t, err := newTree(out, p.Epoch)
	if err != nil {
		return err
	}
	const module = "usr/local/lib/node_modules/npm/"
	var bins map[string]string // command: file in the module
	commands := map[string]bool{}
	for _, pkg := range []struct {
		input plan.Input
		place func(name string) string // "" leaves the file out
	}{
		{p.Node, func(name string) string {
			switch {
			case strings.HasPrefix(name, "bin/"), strings.HasPrefix(name, "include/"):
				return "usr/local/" + name
			case name == "LICENSE":
				return "usr/local/share/doc/node/LICENSE"
			}
			return ""
		}},
		{p.NPM, func(name string) string {
			if top, _, _ := strings.Cut(name, "/"); top == "docs" || top == "man" {
				return ""
			}
			return module + name
		}},
	} {
		b, err := readInput(src, pkg.input)
		if err != nil {
			return err
		}
		isNPM := pkg.input == p.NPM
		if isNPM {
			if bins, err = npmBins(b); err != nil {
				return fmt.Errorf("%s: %w", pkg.input.File, err)
			}
			for _, file := range bins {
				commands[module+path.Clean(file)] = true
			}
		}
		err = tarball(b, func(name string, h *tar.Header, content io.Reader) error {
			to := pkg.place(name)
			if to == "" {
				return ctx.Err()
			}
			m := meta{mode: 0o644, mtime: p.Epoch}
			if h.Mode&0o111 != 0 || commands[to] {
				m.mode = 0o755
			}
			return t.file(to, path.Base(pkg.input.File), m, content)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", pkg.input.File, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bins)) {
		target := module + path.Clean(bins[name])
		if strings.ContainsAny(name, "/.") || !t.has(target) {
			return fmt.Errorf("%s: its command %q has no file %s", p.NPM.File, name, bins[name])
		}
		if err := t.symlink("usr/local/bin/"+name, "npm", "../"+strings.TrimPrefix(target, "usr/local/"), meta{mtime: p.Epoch}); err != nil {
			return err
		}
	}
	if !t.has("usr/local/bin/node") {
		return fmt.Errorf("%s holds no bin/node", p.Node.File)
	}
	return t.close()
}

// npmBins reads the commands that a package declares.
func npmBins(b []byte) (map[string]string, error) {
	var p struct {
		Bin map[string]string `json:"bin"`
	}
	err := tarball(b, func(name string, _ *tar.Header, content io.Reader) error {
		if name != "package.json" {
			return nil
		}
		return json.NewDecoder(content).Decode(&p)
	})
	return p.Bin, err
}

// tarball calls do for each file of an npm package: a gzipped tar archive of
// regular files below one folder, by convention named package.
func tarball(b []byte, do func(name string, h *tar.Header, content io.Reader) error) error {
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return err
	}
	total, members := int64(0), 0
	for tr := tar.NewReader(z); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		err = func() error {
			if total, members = total+h.Size, members+1; h.Size > maxFile || total > maxToolchain || members > maxMembers {
				return errBomb
			}
			name, err := memberPath("./" + h.Name)
			if err != nil {
				return err
			}
			_, name, _ = strings.Cut(name, "/")
			switch {
			case h.Typeflag == tar.TypeXGlobalHeader || h.Typeflag == tar.TypeDir:
				return nil
			case h.Typeflag != tar.TypeReg || name == "":
				return errors.New("it is not a regular file below one folder")
			}
			return do(name, h, tr)
		}()
		if err != nil {
			return fmt.Errorf("member %q: %w", h.Name, err)
		}
	}
}
