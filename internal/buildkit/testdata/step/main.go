// Command step is what the tests' build steps run.
package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

func main() {
	var err error
	switch args := os.Args[2:]; os.Args[1] {
	case "write": // PATH TEXT; a few megabytes, so that compressors have to agree on more than a block
		var b bytes.Buffer
		for i := range 200_000 {
			fmt.Fprintln(&b, args[1], i*i)
		}
		if err = os.WriteFile(args[0], b.Bytes(), 0o644); err == nil {
			epoch := time.Unix(1700000000, 0)
			err = os.Chtimes(args[0], epoch, epoch)
		}
	case "sleep":
		fmt.Println("step is asleep")
		time.Sleep(time.Hour)
	case "fail":
		fmt.Println("last words")
		os.Exit(3)
	case "get": // URL
		var res *http.Response
		if res, err = http.Get(args[0]); err == nil && res.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s", res.Status)
		}
	case "offline": // fails when there is an interface besides the loopback
		var ifs []net.Interface
		ifs, err = net.Interfaces()
		for _, i := range ifs {
			if i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagUp != 0 {
				err = fmt.Errorf("interface %s is up", i.Name)
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
