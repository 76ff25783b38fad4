// Package orphan ends what nobody waits for any more. `go run` and mage die of a
// SIGTERM, or of a kill -9, without passing it on to the program that they run,
// which would go on with all that it has started.
package orphan

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// every is how often a process looks whether it still has its parent: there is no
// signal for it but Linux's PR_SET_PDEATHSIG, which follows the parent's thread.
const every = 100 * time.Millisecond

// Parent returns a channel that closes when the parent of this process has ended. It is
// nil unless the parent is a program of that name: a shell may end before what it started.
func Parent(name string) <-chan struct{} {
	pid := os.Getppid()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil || filepath.Base(exe) != name {
		return nil
	}
	ended := make(chan struct{})
	go func() {
		for os.Getppid() == pid {
			time.Sleep(every)
		}
		close(ended)
	}()
	return ended
}

// Interrupt sends this process a SIGINT, which is all that mage heeds, at the first
// SIGTERM or SIGHUP, or when its parent of that name has ended. One is enough, from
// however many sides they come: at a second mage drops everything.
func Interrupt(parent string) {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // as below nohup
		signal.Notify(term, syscall.SIGHUP)
	}
	ended := Parent(parent)
	go func() {
		select {
		case <-term:
		case <-ended:
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
	}()
}

// PassOn sends this process's children a SIGTERM when it gets one itself, or when its
// parent of that name has ended: those of now, and those that it starts all the same.
func PassOn(parent string) {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	ended := Parent(parent)
	go func() {
		select {
		case <-term:
		case <-ended:
		}
		for told := map[int]bool{}; ; time.Sleep(every) {
			pids, err := children()
			if err != nil { // no Linux
				os.Exit(128 + int(syscall.SIGTERM))
			}
			for _, pid := range pids {
				if !told[pid] {
					told[pid] = true
					_ = syscall.Kill(pid, syscall.SIGTERM)
				}
			}
		}
	}()
}

// children are those of all of this process's threads.
func children() (pids []int, err error) {
	files, err := filepath.Glob("/proc/self/task/*/children")
	if err == nil && len(files) == 0 {
		err = os.ErrNotExist
	}
	for _, file := range files {
		text, rerr := os.ReadFile(file)
		if rerr != nil {
			continue // the thread has ended
		}
		for _, field := range strings.Fields(string(text)) {
			if pid, cerr := strconv.Atoi(field); cerr == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids, err
}
