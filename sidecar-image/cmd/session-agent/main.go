// Command session-agent is PID 1 of a session container. With the argument
// connect it bridges its stdio to the agent that already runs there.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"runtime/debug"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/guest"
)

// version is set by the linker.
var version = "dev"

func main() {
	log.SetFlags(0)
	log.SetPrefix("session-agent: ")
	// It shares the session's memory limit, so it stays small.
	debug.SetGCPercent(30)
	debug.SetMemoryLimit(32 << 20)
	var err error
	switch {
	case len(os.Args) == 2 && os.Args[1] == "connect":
		err = guest.Connect(os.Stdin, os.Stdout)
	case len(os.Args) == 2 && os.Args[1] == "version":
		fmt.Println(version)
	case len(os.Args) == 1:
		err = guest.Main(context.Background(), "/work", version)
	default:
		err = fmt.Errorf("it takes no arguments, or connect, or version; got %q", os.Args[1:])
	}
	if err != nil {
		log.Fatal(err)
	}
}
