package engine

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Processes leaves this process's own limit alone.
func TestProcesses(t *testing.T) {
	limit := func() (l syscall.Rlimit) {
		t.Helper()
		if err := syscall.Getrlimit(unix.RLIMIT_NPROC, &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	before := limit()
	for _, want := range []int64{64, 819200, 1 << 40} {
		got, err := Processes(want)
		if err != nil || got < 1 || got > want {
			t.Errorf("of %d it allows %d, %v", want, got, err)
		}
		if after := limit(); after != before {
			t.Errorf("the own limit was %+v and is %+v", before, after)
		}
	}
}

// Adoption removes what carries its instance's labels.
func TestCarrierIsFoundAgain(t *testing.T) {
	e := &Engine{opts: Options{Instance: "mine"}}
	cfg, _ := e.carrier("sha256:0")
	if cfg.Labels[LabelManaged] != "1" || cfg.Labels[LabelInstance] != "mine" || cfg.Labels[LabelSession] != "" {
		t.Errorf("%v", cfg.Labels)
	}
}
