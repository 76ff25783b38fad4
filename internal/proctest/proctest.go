// Package proctest runs other programs for tests: servers, and commands that are
// interrupted. None outlives its test.
package proctest

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// Serve runs a server program until the test ends, waits until a URL answers
// with 200 and returns that answer. What the program printed is shown when the test fails.
func Serve(t testing.TB, ready, program string, args ...string) []byte {
	t.Helper()
	var out syncbuf.Buffer
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = &out, &out, t.TempDir()
	// Ends with the test program, when that runs into its timeout and nothing
	// cleans up. (The thread that forked lives as long: Go ends only locked ones.)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("%s:\n%.4000s", filepath.Base(program), out.String())
		}
	})
	for deadline := time.Now().Add(time.Minute); ; {
		resp, err := http.Get(ready) //nolint:noctx // polls until the deadline
		if err == nil {
			body, rerr := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err = rerr; err == nil && resp.StatusCode == http.StatusOK {
				return body
			}
			err = errors.Join(err, fmt.Errorf("%s: %s", resp.Status, body))
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not answer: %v", program, err)
		}
		select {
		case <-ended:
			t.Fatalf("%s ended: %s", program, cmd.ProcessState)
		case <-time.After(20 * time.Millisecond): // polling a process of another program
		}
	}
}
