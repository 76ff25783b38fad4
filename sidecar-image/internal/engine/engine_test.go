package engine_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

var runtimes = []string{"runc", "crun", "runsc"}

type container struct {
	*host.Conn
	t   *testing.T
	e   *engine.Engine
	id  string
	key string
}

func open(t *testing.T, e *engine.Engine, image string, change func(*engine.Spec)) *container {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	img, err := e.ResolveImage(ctx, image, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.PlaceAgent(ctx, img.ID); err != nil {
		t.Fatal(err)
	}
	spec := engine.Spec{Name: "loomcycle-test-" + strings.ToLower(rand.Text()), Image: img.ID,
		Labels:    map[string]string{engine.LabelManaged: "1", engine.LabelInstance: t.Name()},
		WorkBytes: 64 << 20, TmpBytes: 16 << 20, MemBytes: 256 << 20, CPUs: 1, Pids: 128}
	if change != nil {
		change(&spec)
	}
	c := &container{t: t, e: e, key: rand.Text()}
	began := time.Now()
	if c.id, err = e.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Podman 5 fails once where a container's monitor was killed.
		err := e.Remove(context.Background(), c.id)
		for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); err = e.Remove(context.Background(), c.id) {
			time.Sleep(100 * time.Millisecond)
		}
		if err != nil {
			t.Error(err)
		}
	})
	created := time.Now()
	if err := e.Start(ctx, c.id); err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	rw, err := e.Attach(ctx, c.id)
	if err != nil {
		t.Fatal(err)
	}
	if c.Conn, err = host.Dial(ctx, rw, c.key, map[string]string{"FROM_SESSION": "yes"}); err != nil {
		t.Fatal(err)
	}
	t.Logf("create %v, start %v, hello %v", created.Sub(began), started.Sub(created), time.Since(started))
	return c
}

func (c *container) sh(command string, timeout time.Duration) (string, wire.Exit) {
	c.t.Helper()
	out, exit, err := c.Exec(c.t.Context(), wire.Exec{Command: command, Timeout: timeout, MaxOutput: 64 << 10}, nil, nil)
	if err != nil {
		c.t.Fatalf("%s: %v", command, err)
	}
	return string(out.Bytes(host.Both, "[cut]")), exit
}

func TestSession(t *testing.T) {
	p := enginetest.New(t)
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			e := enginetest.Open(t, p.Options(t, rt))
			c := open(t, e, p.Image, nil)

			t.Run("exec", func(t *testing.T) {
				c := &container{Conn: c.Conn, t: t}
				for _, tc := range []struct {
					command, want string
					code          int
					signal        string
				}{
					{"echo out; echo err >&2; exit 3", "out\nerr\n", 3, ""},
					{"echo $FROM_SESSION $HOME; pwd; id -u; id -g", "yes /work\n/work\n1000\n1000\n", 0, ""},
					{"kill -KILL $$", "", 137, "SIGKILL"},
					{"ulimit -c; ulimit -n", "0\n4096\n", 0, ""},
					{"(sleep 300 &) ; echo left", "left\n", 0, ""},
					{"touch /root-is-writable 2>/dev/null || echo refused", "refused\n", 0, ""},
					{"grep ^CapEff /proc/self/status | tr -d '\\t'", "CapEff:0000000000000000\n", 0, ""},
					{"for f in /proc/1/fd/1 /proc/1/mem; do (echo x > $f) 2>/dev/null && echo open; done; echo tried", "tried\n", 0, ""},
				} {
					if rt == "runsc" && strings.Contains(tc.command, "/proc/1/") {
						continue // gVisor does not protect an undumpable process's descriptors
					}
					out, exit := c.sh(tc.command, 10*time.Second)
					if out != tc.want || exit.Code != tc.code || exit.Signal != tc.signal {
						t.Errorf("%s\n got %q, exit %d %s\nwant %q, exit %d %s", tc.command, out, exit.Code, exit.Signal, tc.want, tc.code, tc.signal)
					}
				}
			})
			t.Run("files without a name", func(t *testing.T) {
				c := &container{Conn: c.Conn, t: t}
				c.sh("exec 3>f; rm f; head -c 8M /dev/zero >&3; (sleep 4444 &)", 10*time.Second)
				if n, err := c.Unlinked(t.Context()); err != nil || n < 8<<20 || n > 9<<20 {
					t.Errorf("%d bytes, %v", n, err)
				}
				c.sh("pkill -f 'sleep 4444'; while pgrep -f 'sleep 444[4]' >/dev/null; do sleep 0.01; done", 10*time.Second)
				if n, err := c.Unlinked(t.Context()); err != nil || n > 0 {
					t.Errorf("%d bytes when it has ended, %v", n, err)
				}
			})
			t.Run("a timed-out exec leaves nothing", func(t *testing.T) {
				c := &container{Conn: c.Conn, t: t}
				_, exit := c.sh("sleep 1111 & setsid bash -c 'env -i setsid sleep 2222 & sleep 3333' & (ulimit -m 1000; setsid sleep 4444) & sleep 5555", 500*time.Millisecond)
				if !exit.TimedOut {
					t.Fatal("it did not time out")
				}
				if out, _ := c.sh("ps -eo args | grep -E '^sleep [1-5]{4}' || true", 5*time.Second); strings.TrimSpace(out) != "" {
					t.Errorf("left: %s", out)
				}
				if out, _ := c.sh("ps -eo args | grep -c '^sleep 300'", 5*time.Second); strings.TrimSpace(out) != "1" {
					t.Errorf("the background process of an earlier exec is gone: %q", out)
				}
			})
			// A command that is out of time has a process take the limits of a later command's,
			// as far as the kernel lets it.
			t.Run("a forged mark", func(t *testing.T) {
				if rt == "runsc" {
					t.Skip("gVisor has nobody traced by an undumpable process: the mark is one limit there")
				}
				c := &container{Conn: c.Conn, t: t}
				forger := `until [ -s marks ]; do sleep 0.01; done; read rss size < marks; prlimit --pid $$ --rss=$rss:$rss; prlimit --pid $$ --fsize=$size:$size; echo $? > forged; exec sleep 6666`
				ended := make(chan wire.Exit, 1)
				go func() {
					_, exit, _ := c.Exec(t.Context(), wire.Exec{Command: "touch begun; (setsid bash -c '" + forger + "' &); sleep 5555", Timeout: 3 * time.Second, MaxOutput: 100}, nil, nil)
					ended <- exit
				}()
				if out, _ := c.sh("until [ -e begun ]; do sleep 0.01; done", 10*time.Second); out != "" {
					t.Fatal(out)
				}
				if out, _ := c.sh("sleep 7777 & of() { prlimit --pid $$ --$1 --noheadings --output HARD; }; echo $(of rss) $(of fsize) > m; mv m marks; until [ -s forged ]; do sleep 0.01; done; cat forged marks", 10*time.Second); !strings.HasPrefix(out, "1\n") {
					t.Errorf("the forger was not refused: %q", out)
				}
				if exit := <-ended; !exit.TimedOut {
					t.Errorf("it did not time out: %+v", exit)
				}
				if out, _ := c.sh("ps -eo args | grep -E '^sleep [67]{4}' || true", 5*time.Second); out != "sleep 7777\n" {
					t.Errorf("left: %q", out)
				}
			})
			t.Run("files", func(t *testing.T) {
				content := make([]byte, 1<<20)
				_, _ = rand.Read(content)
				if err := c.WriteFile(t.Context(), "a/b/f", 0o755, content); err != nil {
					t.Fatal(err)
				}
				got, size, err := c.ReadFile(t.Context(), wire.Read{Path: "a/b/f", Max: 2 << 20})
				if err != nil || size != 1<<20 || !bytes.Equal(got, content) {
					t.Errorf("read back %d of %d bytes, %v", len(got), size, err)
				}
				// /tmp is the session's to write: nothing but the path stands in the way.
				inside := &container{Conn: c.Conn, t: t}
				inside.sh("echo secret > /tmp/x", 5*time.Second)
				for _, path := range []string{"../etc/passwd", "/etc/passwd", "link", "a/../../etc/passwd", "", ".", "fifo", "dev/null", "a\x00b", "../tmp/x", "/tmp/x", "a/../../tmp/x", "tmp/x", "tmp/new", "x", "new"} {
					inside.sh("ln -sfn /etc/passwd link; ln -sfn /dev dev; ln -sfn /tmp tmp; ln -sfn /tmp/x x; ln -sfn /tmp/new new; [ -p fifo ] || mkfifo fifo", 5*time.Second)
					if b, _, err := c.ReadFile(t.Context(), wire.Read{Path: path, Max: 100}); err == nil {
						t.Errorf("read %q gave %q", path, b)
					}
					if err := c.WriteFile(t.Context(), path, 0, []byte("x")); err == nil {
						t.Errorf("write %q was done", path)
					}
				}
				if out, _ := inside.sh("cd /tmp && ls -A && cat x", 5*time.Second); out != "x\nsecret\n" {
					t.Errorf("outside of /work there is now %q", out)
				}
				if err := c.WriteFile(t.Context(), "big", 0, make([]byte, 80<<20)); err == nil || !strings.Contains(err.Error(), "no space") {
					t.Errorf("a write above the tmpfs's size: %v", err)
				}
			})
			t.Run("output", func(t *testing.T) {
				out, exit, err := c.Exec(t.Context(), wire.Exec{Command: "echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last", MaxOutput: 1000, Timeout: time.Minute}, nil, nil)
				if err != nil {
					t.Fatal(err)
				}
				got := out.Bytes(host.Both, "[cut]")
				if len(got) != 1005 || !bytes.HasPrefix(got, []byte("first\nxxx")) || !bytes.HasSuffix(got, []byte("xxx\nlast\n")) || exit.Dropped != 30000012-1000 {
					t.Errorf("%d bytes kept, %d dropped: %.20q...%q", len(got), exit.Dropped, got, got[len(got)-20:])
				}
			})
			t.Run("stdin", func(t *testing.T) {
				in := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
				out, _, err := c.Exec(t.Context(), wire.Exec{Command: "sha256sum", MaxOutput: 1000, Timeout: 20 * time.Second}, bytes.NewReader(in), nil)
				if err != nil {
					t.Fatal(err)
				}
				if want := fmt.Sprintf("%x  -\n", sha256.Sum256(in)); string(out.Bytes(host.Stdout, "")) != want {
					t.Errorf("sha256sum of 1 MiB of stdin: %s instead of %s", out.Bytes(host.Both, ""), want)
				}
			})
			t.Run("a second connection after the first is lost", func(t *testing.T) {
				c.Conn.Close()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if rw, err := e.Connect(ctx, c.id); err != nil {
					t.Fatal(err)
				} else if _, err := host.Dial(ctx, rw, "wrong", nil); err == nil || !strings.Contains(err.Error(), "key") {
					t.Errorf("a wrong key was answered with %v", err)
				}
				rw, err := e.Connect(ctx, c.id)
				if err != nil {
					t.Fatal(err)
				}
				if c.Conn, err = host.Dial(ctx, rw, c.key, nil); err != nil {
					t.Fatal(err)
				}
				if out, _ := c.sh("echo $FROM_SESSION; [ -s a/b/f ] && echo kept", 5*time.Second); out != "yes\nkept\n" {
					t.Errorf("got %q", out)
				}
			})
			t.Run("speed", func(t *testing.T) {
				began := time.Now()
				const n = 50
				for range n {
					c.sh("true", time.Second)
				}
				t.Logf("exec of true: %v", time.Since(began)/n)
				content := make([]byte, 1<<20)
				began = time.Now()
				for range 10 {
					if err := c.WriteFile(t.Context(), "speed", 0, content); err != nil {
						t.Fatal(err)
					}
				}
				t.Logf("write of 1 MiB: %v", time.Since(began)/10)
				began = time.Now()
				for range 10 {
					if _, _, err := c.ReadFile(t.Context(), wire.Read{Path: "speed", Max: 1 << 20}); err != nil {
						t.Fatal(err)
					}
				}
				t.Logf("read of 1 MiB: %v", time.Since(began)/10)
			})
			t.Run("shutdown", func(t *testing.T) {
				began := time.Now()
				if err := c.Shutdown(t.Context()); err != nil {
					t.Fatal(err)
				}
				t.Logf("gone after %v", time.Since(began))
			})
		})
	}
}

// The agent runs under the session's uid, so a command may lower its limits, and
// with them what it knows a command's processes by and finds them with. They end all
// the same: alone, with all others of the session, or with the container.
func TestLimitsOfTheAgent(t *testing.T) {
	p := enginetest.New(t)
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			e := enginetest.Open(t, p.Options(t, rt))
			for _, first := range []string{"true", "prlimit --pid 1 --rss=5:5", "prlimit --pid 1 --rss=0:0"} {
				c := open(t, e, p.Image, nil)
				if _, exit := c.sh(first, 5*time.Second); exit.Code != 0 && rt != "runsc" {
					t.Errorf("%s: exit %d", first, exit.Code)
				}
				if _, exit := c.sh("(setsid env -i setsid sleep 2222 &); sleep 5555", 5*time.Second); !exit.TimedOut {
					t.Errorf("%s: it did not time out", first)
				}
				if out, _ := c.sh("ps -eo args | grep '^sleep' || true", 5*time.Second); out != "" {
					t.Errorf("%s: left: %s", first, out)
				}
			}
			c := open(t, e, p.Image, nil)
			_, exit, err := c.Exec(t.Context(), wire.Exec{Command: "(setsid sleep 2222 &); prlimit --pid 1 --nofile=3:3; echo; sleep 5555", Timeout: 5 * time.Second, MaxOutput: 100}, nil, nil)
			if err == nil && !exit.TimedOut || err != nil && !errors.Is(err, host.ErrLost) {
				t.Errorf("with few files: %+v, %v", exit, err)
			}
			if rt != "runsc" {
				stops(t, e, c.id, "an agent that cannot look for processes goes on, and they with it")
			}
		})
	}
}

// A session that has closed its workspace to itself is reached again.
func TestConnectToClosedWorkspace(t *testing.T) {
	p := enginetest.New(t)
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			e := enginetest.Open(t, p.Options(t, rt))
			dir := t.TempDir()
			for _, d := range []string{dir, filepath.Dir(dir)} {
				if err := os.Chmod(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Chown(dir, engine.SessionUser, engine.SessionUser); err != nil {
				t.Fatal(err)
			}
			c := open(t, e, p.Image, func(s *engine.Spec) { s.Workspace = dir })
			c.sh("chmod 0 /work", 5*time.Second)
			c.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			rw, err := e.Connect(ctx, c.id)
			if err != nil {
				t.Fatal(err)
			}
			if c.Conn, err = host.Dial(ctx, rw, c.key, nil); err != nil {
				t.Fatal(err)
			}
			if out, exit := c.sh("pwd", 5*time.Second); out != "/work\n" || exit.Code != 0 {
				t.Errorf("%q, %+v", out, exit)
			}
		})
	}
}

// stops waits for a container to end.
func stops(t *testing.T, e *engine.Engine, id, otherwise string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if state, ok, err := e.Inspect(t.Context(), id); err != nil {
			t.Fatal(err)
		} else if !ok || !state.Running {
			return
		}
		if time.Now().After(end) {
			t.Fatal(otherwise)
		}
	}
}

// An engine's stop is passed on to what runs in the session, which is given time; what does
// not end by itself does not hold up the engine. A removal waits for nothing.
func TestStop(t *testing.T) {
	p := enginetest.New(t)
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			e := enginetest.Open(t, p.Options(t, rt))
			const (
				listens = "trap 'echo heard; sleep 0.3; echo and ended; exit 3' TERM; touch ready; while :; do sleep 0.05; done"
				// More than is sent as it is written, and than is under way without an answer.
				tells = "trap 'head -c 1000000 /dev/zero | tr \"\\0\" x; exit 3' TERM; touch ready; while :; do sleep 0.05; done"
			)
			for name, tc := range map[string]struct {
				command, want string
				ends          bool // by itself, which its caller hears of
			}{
				"who listens, over a second connection":    {listens, "heard\nand ended\n", true},
				"who listens":                              {listens, "heard\nand ended\n", true},
				"who tells much":                           {tells, strings.Repeat("x", 1000000), true},
				"who tells much, over a second connection": {tells, strings.Repeat("x", 1000000), true},
				"who does not":                             {"trap '' TERM; touch ready; while :; do sleep 0.05; done", "", false},
				"a removal of it":                          {"trap 'echo heard' TERM; touch ready; while :; do sleep 0.05; done", "", false},
			} {
				var again func(tries int)
				again = func(tries int) {
					c := open(t, e, p.Image, nil)
					if strings.HasSuffix(name, "second connection") {
						c.Close()
						rw, err := e.Connect(t.Context(), c.id)
						if err != nil {
							t.Fatal(err)
						}
						if c.Conn, err = host.Dial(t.Context(), rw, c.key, nil); err != nil {
							t.Fatal(err)
						}
					}
					type result struct {
						out  *host.Output
						exit wire.Exit
						err  error
					}
					ran := make(chan result, 1)
					go func() {
						out, exit, err := c.Exec(t.Context(), wire.Exec{Command: tc.command, Timeout: time.Minute, MaxOutput: 1 << 20}, nil, nil)
						ran <- result{out, exit, err}
					}()
					c.sh("until [ -e ready ]; do sleep 0.05; done", 10*time.Second)
					began := time.Now()
					if strings.HasPrefix(name, "a removal") {
						if err := e.Remove(t.Context(), c.id); err != nil {
							t.Fatal(err)
						}
					} else if out, err := p.Command("stop", "--time", "30", c.id).CombinedOutput(); err != nil {
						t.Fatalf("%s: %v\n%s", name, err, out)
					}
					took := time.Since(began)
					t.Logf("%s: %v", name, took)
					if took > 15*time.Second { // of the engine's 30
						t.Errorf("%s: it took %v", name, took)
					}
					r := <-ran
					stops(t, e, c.id, "the container goes on")
					got := string(r.out.Bytes(host.Stdout, "")) // on stderr the shell may tell of a sleep that the signal met
					wrong := tc.ends && (r.err != nil || r.exit.Code != 3) || !tc.ends && r.err != nil && !errors.Is(r.err, host.ErrLost) || got != tc.want
					if wrong && tries > 1 && took > 2*time.Second {
						again(tries - 1) // a busy machine needed all of the grace
						return
					}
					if wrong {
						t.Errorf("%s: %+v, %v; the command wrote %d bytes, %.100q", name, r.exit, r.err, len(got), got)
					}
				}
				again(3)
			}
		})
	}
}

// cgroupLimit reads a limit that the kernel holds a container's processes to, from cgroup v2 or v1.
func cgroupLimit(t *testing.T, p *enginetest.Podman, id string, files ...string) string {
	t.Helper()
	pid, err := p.Command("inspect", "--format", "{{.State.Pid}}", id).Output()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		for ; len(path) > 1; path = filepath.Dir(path) { // runtimes may make a group of their own below
			for _, file := range files {
				if b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controllers, path, file)); err == nil && string(b) != "max\n" {
					return strings.TrimSpace(string(b))
				}
			}
		}
	}
	return "any number of"
}

func TestForkBombAndMemoryHog(t *testing.T) {
	const bomb, hog = "bomb() { bomb | bomb & }; bomb; sleep 100", "python3 -c 'x = bytearray(1<<30)'"
	p := enginetest.New(t)
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			e := enginetest.Open(t, p.Options(t, rt))
			c := open(t, e, p.Image, nil)
			pids := "128"
			if rt == "runsc" {
				pids = "2048" // with gVisor's own threads
			}
			if got := cgroupLimit(t, p, c.id, "pids.max"); got != pids {
				t.Errorf("it may have %s processes; %s were asked for", got, pids)
			}
			if got := cgroupLimit(t, p, c.id, "memory.max", "memory.limit_in_bytes"); got != strconv.Itoa(256<<20) {
				t.Errorf("it may have %s bytes of memory", got)
			}
			if rt == "runsc" {
				// gVisor's kernel is one host process. It ends as a whole when its limits
				// are reached, and the session with it, or the command does.
				for command, limit := range map[string]time.Duration{bomb: 2 * time.Second, hog: 30 * time.Second} {
					c := open(t, e, p.Image, nil)
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					_, exit, err := c.Exec(ctx, wire.Exec{Command: command, Timeout: limit, MaxOutput: 1000}, nil, nil)
					cancel()
					t.Logf("%s: %+v, %v", command, exit, err)
					if err != nil && !errors.Is(err, host.ErrLost) || err == nil && exit.Code == 0 || command == hog && exit.TimedOut {
						t.Errorf("%s: %+v, %v", command, exit, err)
					}
				}
				return
			}
			_, exit := c.sh(bomb, 2*time.Second)
			if !exit.TimedOut {
				t.Errorf("exit %+v", exit)
			}
			if out, exit := c.sh("echo alive", 10*time.Second); out != "alive\n" {
				t.Errorf("after the bomb: %q %+v", out, exit)
			}
			_, exit = c.sh(hog, 20*time.Second)
			if exit.Code == 0 || !exit.OOM {
				t.Errorf("a command above the memory limit ended with %+v", exit)
			}
			if out, _ := c.sh("echo alive", 10*time.Second); out != "alive\n" {
				t.Errorf("after the hog: %q", out)
			}
		})
	}
}
