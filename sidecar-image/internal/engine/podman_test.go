package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"
)

// An engine that takes a container's stdio, or an exec's, and does not answer is
// waited for as long as the caller likes.
func TestHungAttach(t *testing.T) {
	var asked atomic.Int32
	over := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/exec") {
			_, _ = io.WriteString(w, `{"Id":"x"}`)
			return
		}
		asked.Add(1)
		<-over
	}))
	defer srv.Close()
	defer close(over)
	api, err := client.NewClientWithOpts(client.WithHost("tcp://"+srv.Listener.Addr().String()), client.WithVersion("1.41"))
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	e := &Engine{api: api}
	for name, reach := range map[string]func(context.Context, string) (io.ReadWriteCloser, error){"attach": e.Attach, "connect": e.Connect} {
		asked.Store(0)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { _, err := reach(ctx, "c"); ended <- err }()
		for asked.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
		select {
		case err := <-ended:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s hangs", name)
		}
	}
}

// Kata has no program that podman could start, whoever has started podman.
func TestKataNeedsDocker(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"Components": [{"Name": "Podman Engine"}], "Arch": %q, "ApiVersion": "1.41", "DefaultRuntime": "kata"}`, runtime.GOARCH)
	}))
	defer srv.Close()
	for _, host := range []string{"", "tcp://" + srv.Listener.Addr().String()} {
		if _, err := Open(t.Context(), Options{Host: host, Runtime: "kata"}); err != errKata {
			t.Errorf("at %q: %v", host, err)
		}
	}
}

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
