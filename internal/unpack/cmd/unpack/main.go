// Command unpack lays out the files of an image from locked inputs. It runs
// inside BuildKit as a static program; each subcommand takes one JSON plan.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/loomcycle/loomcycle-images/internal/unpack"
	"github.com/loomcycle/loomcycle-images/internal/unpack/plan"
)

const usage = `unpack lays out the files of an image from locked inputs.

  unpack group  -plan FILE -in DIR -out DIR -meta DIR           packages into one layer
  unpack finish -plan FILE -root DIR -meta DIR... -out DIR      what maintainer scripts do, and the plan's own files
  unpack go     -plan FILE -in FILE -out DIR                    the Go toolchain
  unpack npm    -plan FILE -in DIR -out DIR                     Node and npm

-out must be an empty folder; the plans are defined in internal/unpack/plan.
`

type flags struct {
	plan, in, out, root string
	meta                list
	parallel            int
}

type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "unpack:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || args[0] == "-h" || args[0] == "help" {
		fmt.Print(usage)
		return nil
	}
	var f flags
	set := flag.NewFlagSet("unpack "+args[0], flag.ContinueOnError)
	set.StringVar(&f.plan, "plan", "", "the plan's `FILE`")
	set.StringVar(&f.in, "in", "", "where the input files are")
	set.StringVar(&f.out, "out", "", "empty `DIR` to write to")
	set.StringVar(&f.root, "root", "", "finish: `DIR` with the merged groups")
	set.Var(&f.meta, "meta", "group: `DIR` for the packages' records; finish: each group's")
	set.IntVar(&f.parallel, "parallel", runtime.NumCPU(), "group: packages unpacked at once")
	if err := set.Parse(args[1:]); err != nil {
		return err
	}
	if set.NArg() > 0 || f.plan == "" || f.out == "" {
		return errors.New("-plan and -out are needed, other arguments are not; see unpack help")
	}
	switch args[0] {
	case "group":
		p, err := read[plan.Group](f.plan)
		if err != nil {
			return err
		}
		if len(f.meta) != 1 {
			return errors.New("group needs one -meta")
		}
		return unpack.Group(ctx, p, f.in, f.out, f.meta[0], f.parallel)
	case "finish":
		p, err := read[plan.Finish](f.plan)
		if err != nil {
			return err
		}
		return unpack.Finish(ctx, p, f.root, f.out, f.meta)
	case "go":
		p, err := read[plan.Go](f.plan)
		if err != nil {
			return err
		}
		return unpack.Go(ctx, p, f.in, f.out)
	case "npm":
		p, err := read[plan.NPM](f.plan)
		if err != nil {
			return err
		}
		return unpack.NPM(ctx, p, f.in, f.out)
	}
	return fmt.Errorf("there is no subcommand %q; see unpack help", args[0])
}

func read[T any](file string) (p T, err error) {
	r, err := os.Open(file)
	if err != nil {
		return p, err
	}
	defer r.Close()
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return p, fmt.Errorf("plan %s: %w", file, err)
	}
	return p, nil
}
