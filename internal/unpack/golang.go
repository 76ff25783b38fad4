package unpack

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

// Limits for toolchains: Go's zip has about 15,000 files and 250 MB, Node's
// program 130 MB.
const (
	maxToolchain = 2 << 30
	maxFile      = 512 << 20
)

// Go lays out a golang.org/toolchain module zip as /usr/local/go below out.
// The zip carries no execute bits and calls each go.mod _go.mod; the go
// command undoes both after it downloads a toolchain, by the same rules as
// here (cmd/go/internal/toolchain).
func Go(ctx context.Context, p plan.Go, in, out string) error {
	dirname, base := filepath.Split(in)
	src, err := os.OpenRoot(filepath.Join(dirname, "."))
	if err != nil {
		return err
	}
	defer src.Close()
	b, err := readInput(src, plan.Input{File: base, SHA256: p.SHA256})
	if err != nil {
		return err
	}
	z, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return fmt.Errorf("%s: %w", base, err)
	}
	t, err := newTree(out, p.Epoch)
	if err != nil {
		return err
	}
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(runtime.NumCPU())
	total := uint64(0)
	for _, file := range z.File {
		if total += file.UncompressedSize64; file.UncompressedSize64 > maxFile || total > maxToolchain {
			return fmt.Errorf("%s: member %q: %w", base, file.Name, errBomb)
		}
		work.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err := goMember(t, p, file); err != nil {
				return fmt.Errorf("%s: member %q: %w", base, file.Name, err)
			}
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		return err
	}
	if !t.has("usr/local/go/bin/go") {
		return fmt.Errorf("%s holds no bin/go: it is not a Go toolchain for Linux", base)
	}
	return t.close()
}

func goMember(t *tree, p plan.Go, file *zip.File) error {
	prefix := "golang.org/toolchain@" + p.Version + "/"
	name, ok := strings.CutPrefix(file.Name, prefix)
	if !ok {
		return fmt.Errorf("it is not below %s", prefix)
	}
	name, err := memberPath("./" + name)
	if err != nil {
		return err
	}
	if strings.HasSuffix(file.Name, "/") {
		return nil
	}
	if !file.Mode().IsRegular() {
		return errors.New("it is not a regular file")
	}
	if path.Base(name) == "_go.mod" {
		name = path.Join(path.Dir(name), "go.mod")
	}
	r, err := file.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	m := meta{mode: 0o644, mtime: p.Epoch}
	if goExecutable(name) {
		m.mode = 0o755
	}
	// The reader fails when the file is not as long as the zip says.
	return t.file("usr/local/go/"+name, "go", m, io.LimitReader(r, maxFile))
}

// goExecutable says which files of a toolchain the go command makes executable.
func goExecutable(name string) bool {
	if strings.HasPrefix(name, "bin/") || strings.HasPrefix(name, "pkg/tool/") {
		return true
	}
	wrapper, _ := path.Match("go_?*_?*_exec", path.Base(name))
	return wrapper && strings.HasPrefix(name, "lib/")
}
