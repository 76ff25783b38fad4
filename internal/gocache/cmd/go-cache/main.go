// Command go-cache is the GOCACHEPROG of images that ship a compiled standard
// library: `go-cache DIR` serves DIR below the user's GOCACHE;
// `go-cache pack GOCACHE DIR EPOCH` makes such a DIR.
package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/gocache"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "go-cache:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 4 && args[0] == "pack":
		epoch, err := strconv.ParseInt(args[3], 10, 64)
		if err != nil {
			return fmt.Errorf("the epoch %q is not a number of seconds", args[3])
		}
		return gocache.Pack(args[1], args[2], time.Unix(epoch, 0))
	case len(args) == 1:
		dir := os.Getenv("GOCACHE") // the go command always sets it
		if dir == "" {
			return errors.New("GOCACHE is not set; the go command starts this program (go help environment, GOCACHEPROG)")
		}
		lower, err := gocache.OpenLower(args[0])
		if err != nil {
			// A build without it is slow, and right.
			fmt.Fprintln(os.Stderr, "go-cache:", err)
		}
		return gocache.Serve(os.Stdin, os.Stdout, lower, gocache.Upper{Dir: dir})
	}
	return errors.New("usage: go-cache DIR | go-cache pack GOCACHE DIR EPOCH")
}
