package engine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"
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
	api, err := client.New(client.WithHost("tcp://"+srv.Listener.Addr().String()), client.WithAPIVersion("1.41"))
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
		case <-time.After(time.Minute):
			t.Errorf("%s hangs", name)
		}
	}
}

// An engine that never answers is named by its address, which is what the operator has to look
// at: one that is away, and one that takes the connection and says nothing.
func TestSilentEngine(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "mute.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, name := range []string{"mute.sock", "away.sock"} {
		host := "unix://" + filepath.Join(dir, name)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := Open(ctx, Options{Host: host, HostPath: "/agent"}); err == nil || !strings.Contains(err.Error(), "the engine at "+host+" has not answered") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A runtime that the engine does not use is refused with what it has instead, and
// what to do; Kata has no program that podman could start, whoever has started podman.
func TestRefusedRuntimes(t *testing.T) {
	for _, c := range []struct {
		name, want string // the runtime
		podman     bool
		info       string
		err        string // %s is the engine's address
	}{
		{"podman's own default", "runc", true, `"DefaultRuntime": "runc"`, ""},
		{"podman's own default by its path", "runsc", true, `"DefaultRuntime": "/usr/local/bin/runsc"`, ""},
		{"another default", "runsc", true, `"DefaultRuntime": "crun"`, "SANDBOX_RUNTIME=runsc, but the podman service at %s uses crun: start it as `podman --runtime runsc system service`"},
		{"kata in podman", "kata", true, `"DefaultRuntime": "kata"`, errKata.Error()},
		{"docker has it", "runsc", false, `"Runtimes": {"runc": {"path": "runc"}, "runsc": {"path": "/usr/bin/runsc"}}`, ""},
		{"docker has others", "crun", false, `"Runtimes": {"runsc": {}, "io.containerd.runc.v2": {}, "runc": {}}`, "SANDBOX_RUNTIME=crun is not configured in the engine, which has io.containerd.runc.v2, runc, runsc: add it to the engine's daemon.json and restart it"},
		{"kata, not in docker", "kata", false, `"Runtimes": {"runc": {}}`, "SANDBOX_RUNTIME=kata is not configured in the engine, which has runc: add it to the engine's daemon.json and restart it; " + kataNeeds},
		{"kata in docker", "kata", false, `"Runtimes": {"runc": {"path": "runc"}, "kata": {"runtimeType": "io.containerd.kata.v2"}}`, ""},
		{"kata in docker 20.10", "kata", false, `"Runtimes": {"runc": {"path": "runc"}, "kata": {"path": ""}}`, "SANDBOX_RUNTIME=kata is configured in the engine by nothing that this version of it reads, so it would run runc under that name: docker reads a runtimeType since version 23, and a path in all; " + kataNeeds},
	} {
		t.Run(c.name, func(t *testing.T) {
			component := "Engine"
			if c.podman {
				component = "Podman Engine"
			}
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprintf(w, `{"Components": [{"Name": %q}], "Arch": %q, "ApiVersion": "1.41", "NCPU": 3, %s}`, component, runtime.GOARCH, c.info)
			}))
			defer srv.Close()
			host := "tcp://" + srv.Listener.Addr().String()
			e, err := Open(t.Context(), Options{Host: host, Runtime: c.want, HostPath: "/agent"})
			if c.err == "" {
				if err != nil {
					t.Fatal(err)
				}
				if e.Close(); e.CPUs() != 3 {
					t.Errorf("it has %d CPUs", e.CPUs())
				}
				return
			}
			if want := strings.ReplaceAll(c.err, "%s", host); err == nil || err.Error() != want {
				t.Errorf("%v\nwant %s", err, want)
			}
		})
	}
	if _, err := Open(t.Context(), Options{Runtime: "kata"}); err == nil || err.Error() != errKata.Error() {
		t.Errorf("kata in an own podman: %v", err)
	}
}

// A network is refused that is not there, and one that is the host's own, or none, by its id:
// those docker has.
func TestRefusedNetworks(t *testing.T) {
	for _, c := range []struct{ name, engine, want string }{
		{"pasta", "Podman Engine", "=pasta is a mode of podman"}, {"private", "Podman Engine", "=private is a mode of podman"}, {"default", "Podman Engine", "=default is a mode of podman"},
		{"pasta", "Engine", ""}, {"default", "Engine", ""}, {"bridge", "Podman Engine", ""},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			if strings.HasSuffix(r.URL.Path, "/networks/default") {
				w.WriteHeader(http.StatusNotFound) // docker knows it as bridge
			}
			fmt.Fprintf(w, `{"Driver": "bridge", "Components": [{"Name": %q}], "Arch": %q, "ApiVersion": "1.41"}`, c.engine, runtime.GOARCH)
		}))
		e, err := Open(t.Context(), Options{Host: "tcp://" + srv.Listener.Addr().String(), Egress: c.name, HostPath: "/agent"})
		if err == nil {
			e.Close()
		}
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s of %s: %v", c.name, c.engine, err)
		}
		srv.Close()
	}
	for name, want := range map[string]string{
		"bridge": "", "macvlan": "",
		"host": "is the engine's network of the driver host", "null": "is the engine's network of the driver null", "": "the engine has no network of that name",
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			switch at := strings.Contains(r.URL.Path, "/networks/f00d"); {
			case at && name == "":
				w.WriteHeader(http.StatusNotFound)
				fmt.Fprint(w, `{"message": "network f00d not found"}`)
			case at:
				fmt.Fprintf(w, `{"Name": "n", "Driver": %q}`, name)
			default:
				fmt.Fprintf(w, `{"Components": [{"Name": "Engine"}], "Arch": %q, "ApiVersion": "1.41"}`, runtime.GOARCH)
			}
		}))
		e, err := Open(t.Context(), Options{Host: "tcp://" + srv.Listener.Addr().String(), Egress: "f00d", HostPath: "/agent"})
		if err == nil {
			e.Close()
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "SANDBOX_EGRESS_NETWORK=f00d")) {
			t.Errorf("driver %q: %v", name, err)
		}
		srv.Close()
	}
}

// The output of a process is asked for what was written after a moment, however much it was before.
func TestTail(t *testing.T) {
	out := &tailBuffer{max: 8}
	c := &child{out: out}
	fmt.Fprint(out, "before, and long")
	said := c.said("c0ffee")
	fmt.Fprint(out, "why\n")
	if got := said(); got != "why" {
		t.Errorf("%q", got)
	}
	fmt.Fprint(out, "a long answer")
	if got := said(); got != "g answer" {
		t.Errorf("%q", got)
	}
	for _, words := range []string{"container c0ffee: why\n", "cannot run in " + gvisorSays + "\n"} {
		out.max = 1 << 10
		said, other := c.said("c0ffee"), "of another request\n"
		fmt.Fprint(out, other)
		time.AfterFunc(30*time.Millisecond, func() { fmt.Fprint(out, words) })
		if got := said(); got != other+strings.TrimSpace(words) {
			t.Errorf("%q", got)
		}
	}
	if got := (*child)(nil).said("c0ffee")(); got != "" {
		t.Errorf("%q of no podman of ours", got)
	}
}

// What an engine says of a container that it does not make as asked.
func TestRefusedContainers(t *testing.T) {
	const kvm = "OCI runtime create failed: could not access KVM kernel module: No such file or directory"
	const hidden = "`/usr/bin/runsc start c` failed: exit status 128"
	var answer, reason string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/start") {
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprintf(w, `{"message": %q}`, reason)
			return
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, `{"Id": "c", "Warnings": %s}`, answer)
	}))
	defer srv.Close()
	host := "tcp://" + srv.Listener.Addr().String()
	api, err := client.New(client.WithHost(host), client.WithAPIVersion("1.41"))
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	e := &Engine{api: api, opts: Options{Host: host}}

	const memory, pids = "Your kernel does not support memory limit capabilities or the cgroup is not mounted. Limitation discarded", "Your kernel does not support PIDs limit capabilities or the cgroup is not mounted. PIDs limit discarded"
	const swap = "Your kernel does not support swap limit capabilities or the cgroup is not mounted. Memory limited without swap"
	for _, c := range []struct{ warnings, lost []string }{
		{nil, nil},
		{[]string{}, nil},
		{[]string{"IPv4 forwarding is disabled. Networking will not work.", "Published ports are discarded when using host network mode", "The requested image's platform (linux/arm64) does not match the detected host platform"}, nil},
		{[]string{memory + ".", "IPv4 forwarding is disabled.", pids + "."}, []string{memory, pids}},
		{[]string{swap + "."}, []string{swap}},
		{[]string{"Your kernel does not support CPU CFS scheduler. CPU period/quota discarded."}, []string{"Your kernel does not support CPU CFS scheduler. CPU period/quota discarded"}},
		{[]string{"Resource limits are not supported and ignored on cgroups V1 rootless systems"}, []string{"Resource limits are not supported and ignored on cgroups V1 rootless systems"}},
	} {
		text, err := json.Marshal(c.warnings)
		if err != nil {
			t.Fatal(err)
		}
		answer = string(text)
		id, err := e.Create(t.Context(), Spec{Name: "c", Image: "i"})
		if want := strings.Join(c.lost, "; "); want == "" && (err != nil || id != "c") || want != "" && (err == nil || !strings.Contains(err.Error(), "asked for: "+want+": ")) {
			t.Errorf("of %q: %q, %v", c.warnings, id, err)
		}
	}
	if lost := unlimited([]string{swap}, false); lost != nil {
		t.Errorf("where there is no swap: %q", lost)
	}
	for head, more := range map[string]bool{"": false, "/dev/vda2 partition 8388604 0 -2\n": true} {
		file := filepath.Join(t.TempDir(), "swaps")
		if err := os.WriteFile(file, []byte("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"+head), 0o644); err != nil {
			t.Fatal(err)
		}
		if swapping(file) != more {
			t.Errorf("swap is %v of %q", !more, head)
		}
	}

	e.podman = true
	for _, c := range []struct{ runtime, says, want string }{
		{"kata", kvm, kvm + "; " + kataNeeds}, {"runsc", kvm, kvm}, {"runc", hidden, hidden},
		{"runsc", "creating interfaces: cannot run with network enabled in root network namespace", "; " + gvisorNeeds},
		{"runsc", hidden, "for sessions without a network `podman --runtime runsc --runtime-flag network=none system service` will do"},
	} {
		runtime, want := c.runtime, c.want
		e.opts.Runtime, reason = runtime, c.says
		if err := e.Start(t.Context(), "c"); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: %v", runtime, err)
		}
	}
}

// What the shared podman wrote of whomever is for the log, and so is what it needs.
func TestWordsOfOthers(t *testing.T) {
	const others = "mounting /srv/ws/TENANT/PRINCIPAL: cannot run in " + gvisorSays
	out := &tailBuffer{max: 1 << 10}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(out, others)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, `{"message": "exit status 128"}`)
	}))
	defer srv.Close()
	api, err := client.New(client.WithHost("tcp://"+srv.Listener.Addr().String()), client.WithAPIVersion("1.41"))
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	err = (&Engine{api: api, child: &child{out: out}, podman: true, opts: Options{Runtime: "runsc"}}).Start(t.Context(), "c0ffee")
	var p interface{ Public() string }
	if !errors.As(err, &p) || !strings.Contains(err.Error(), others) || !strings.Contains(err.Error(), gvisorNeeds) {
		t.Fatal(err)
	}
	if text := p.Public(); strings.Contains(text, "ws") || !strings.Contains(text, "exit status 128") {
		t.Error(text)
	}
}

// No error that a session's owner is told names the engine's address, however the connection failed.
func TestAddressStaysInside(t *testing.T) {
	told := func(err error) string {
		if p := (interface{ Public() string })(nil); errors.As(err, &p) {
			return p.Public()
		}
		return fmt.Sprint(err)
	}
	dir := t.TempDir()
	socket := filepath.Join(dir, "engine.sock")
	api, err := client.New(client.WithHost("unix://"+socket), client.WithAPIVersion("1.41"))
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	e := &Engine{api: api, opts: Options{Log: slog.New(slog.DiscardHandler)}}
	check := func(name string, err error, unavailable bool) {
		t.Helper()
		if text := told(err); err == nil || errors.Is(err, ErrUnavailable) != unavailable || strings.Contains(text, "engine.sock") || strings.Contains(text, filepath.Base(dir)) {
			t.Errorf("%s: %q of %v", name, text, err)
		}
	}
	_, err = e.Attach(t.Context(), "c")
	check("attach without an engine", err, true)
	check("start without an engine", e.Start(t.Context(), "c"), true)

	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err = e.Start(ctx, "c") // nobody accepts
	if check("start, too late", err, false); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}

	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := newStdio(client.HijackedResponse{Conn: conn, Reader: bufio.NewReader(conn)}, e.opts.Log, "c")
	_ = conn.SetDeadline(time.Unix(1, 0))
	_, err = s.Read(make([]byte, 1))
	check("reading the agent's words", err, false)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	conn.Close()
	_, err = s.Write([]byte("x"))
	check("writing to the agent", err, false)
	if !errors.Is(err, net.ErrClosed) {
		t.Error(err)
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
