// Package lint runs the linters of Go code over every module of the repository:
// the root's `./...` ends where another go.mod is.
package lint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/host"
)

// Go checks the form of every Go file below root, then has go vet and
// staticcheck read every module.
func Go(ctx context.Context, root string, out io.Writer) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	l := linter{ctx, root, out}
	if err := l.form(); err != nil {
		return err
	}
	modules, err := l.modules()
	if err != nil {
		return err
	}
	for _, check := range [][]string{
		{"vet"},
		{"tool", "-modfile=" + filepath.Join(root, "tools", "lint", "go.mod"), "staticcheck"},
	} {
		for _, module := range modules {
			for _, args := range module.args {
				if err := l.run(module.dir, append(slices.Clone(check), args...)...); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

type linter struct {
	ctx  context.Context
	root string
	out  io.Writer
}

type module struct {
	dir  string
	args [][]string // what go vet and staticcheck are asked for
}

// modules finds those with packages; others pin the tools in their go.mod.
func (l linter) modules() (found []module, err error) {
	err = filepath.WalkDir(l.root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		// Fixtures are what the images are tried with, some of them wrong.
		base := d.Name()
		if name != l.root && (strings.HasPrefix(base, ".") || slices.Contains([]string{"dist", "fixtures", "node_modules", "testdata"}, base)) {
			return fs.SkipDir
		}
		if _, err := os.Stat(filepath.Join(name, "go.mod")); err != nil {
			return nil
		}
		list := l.command(name, "list", "./...")
		list.Stderr = io.Discard // that nothing matches
		packages, err := list.Output()
		if err != nil {
			return fmt.Errorf("go list in %s: %w", name, err)
		}
		if len(bytes.TrimSpace(packages)) == 0 {
			return nil
		}
		// The containers' libraries need C libraries without these tags.
		m := module{name, [][]string{{"-tags=containers_image_openpgp,exclude_graphdriver_btrfs", "./..."}}}
		if _, err := os.Stat(filepath.Join(name, "magefiles")); err == nil {
			m.args = append(m.args, []string{"-tags=mage", "./magefiles"})
		}
		found = append(found, m)
		return nil
	})
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("there is no Go module with a package below %s", l.root)
	}
	return found, err
}

// form demands gofmt's own, of the go command that compiles the files.
func (l linter) form() error {
	goroot, err := l.command(l.root, "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	cmd := host.Command(l.ctx, filepath.Join(strings.TrimSpace(string(goroot)), "bin", "gofmt"), "-l", ".")
	cmd.Dir, cmd.Stderr = l.root, l.out
	wrong, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("gofmt -l: %w", err)
	}
	if files := strings.Fields(string(wrong)); len(files) > 0 {
		return fmt.Errorf("not as gofmt writes it: %s: run gofmt -w", strings.Join(files, ", "))
	}
	return nil
}

func (l linter) run(dir string, args ...string) error {
	cmd := l.command(dir, args...)
	cmd.Stdout, cmd.Stderr = l.out, l.out
	if err := cmd.Run(); err != nil {
		where, rerr := filepath.Rel(l.root, dir)
		return errors.Join(fmt.Errorf("go %s in %s: %w", strings.Join(args, " "), where, err), rerr)
	}
	return nil
}

func (l linter) command(dir string, args ...string) *exec.Cmd {
	cmd := host.Command(l.ctx, "go", args...)
	cmd.Dir = dir
	return cmd
}
