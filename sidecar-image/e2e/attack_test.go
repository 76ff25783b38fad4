package e2e

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/sys/unix"
)

const otherToken = "other-token-0123456789abcdef"

// Another principal's sessions: by id, by list, by run and by time. By workspace is
// in TestDurableWorkspace.
func TestAnotherPrincipal(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_AUTH_TOKENS": "other=" + otherToken})
	mine := s.as(map[string]string{"X-Loom-Root-Run": "run-1"})
	other := s.as(map[string]string{"Authorization": "Bearer " + otherToken, "X-Loom-Root-Run": "run-1"})
	id := mine.open(m{})
	mine.exec(id, "echo secret > f")
	unknown := "sbx-" + strings.Repeat("a", len(id)-4)
	tools := map[string]m{
		"sandbox_exec": {"command": "cat f"}, "sandbox_read": {"path": "f"}, "sandbox_write": {"path": "f", "content": "x"}, "sandbox_touch": {}, "sandbox_close": {},
	}
	for tool, args := range tools {
		t.Run("by id/"+tool, func(t *testing.T) {
			args["session_id"] = id
			foreign := other.call(tool, args)
			args["session_id"] = unknown
			absent := other.call(tool, args)
			if strings.ReplaceAll(foreign.Body, id, unknown) != absent.Body {
				t.Errorf("another's session is answered\n%s\nand one that never was\n%s", foreign.Body, absent.Body)
			}
			if !foreign.IsError && foreign.Structured["closed"] != false {
				t.Errorf("another's session is answered as one's own: %s", foreign.Body)
			}
		})
	}
	t.Run("by list", func(t *testing.T) {
		if a := other.call("sandbox_list", m{}); a.Text != `{"sessions":[]}` {
			t.Error(a.Text)
		}
	})
	t.Run("by run", func(t *testing.T) {
		if a := other.call("sandbox_close_run", m{"root_run_id": "run-1"}); a.Text != "closed 0 sessions" {
			t.Error(a.Text)
		}
	})
	t.Run("by Mcp-Session-Id", func(t *testing.T) {
		const shared = "one-for-both"
		owner := s.as(map[string]string{"Mcp-Session-Id": shared})
		other := s.as(map[string]string{"Authorization": "Bearer " + otherToken, "Mcp-Session-Id": shared})
		ran := make(chan string, 1)
		go func() {
			a, err := owner.try(t.Context(), "sandbox_exec", m{"session_id": id, "command": "touch begun; sleep 1; echo over"})
			ran <- fmt.Sprint(a.Text, err)
		}()
		eventually(t, 30*time.Second, "the command runs", func() bool { return mine.exec(id, "ls begun").Text == "begun\n" })
		resp, err := other.post(t.Context(), []byte(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if a := other.exec(id, "cat f"); !a.IsError {
			t.Errorf("its session is answered: %+v", a)
		}
		if a := other.call("sandbox_list", m{}); a.Text != `{"sessions":[]}` {
			t.Errorf("its sessions are listed: %s", a.Text)
		}
		if a := <-ran; a != "over\n<nil>" {
			t.Errorf("its command was cancelled: %s", a)
		}
	})
	if a := mine.exec(id, "cat f"); a.Text != "secret\n" {
		t.Fatalf("the session was touched: %+v", a)
	}

	t.Run("by time", func(t *testing.T) {
		for tool, args := range tools {
			var a, b time.Duration
			for try := 0; try == 0 || try < 3 && (a-b).Abs() > max(a, b)/4; try++ { // what the machine does besides is no difference that stays
				var foreign, absent []time.Duration
				order := []struct {
					id   string
					into *[]time.Duration
				}{{id, &foreign}, {unknown, &absent}}
				for range 300 { // in turn, each first as often as second, so that the machine's moods hit both
					for _, x := range order {
						args["session_id"] = x.id
						began := time.Now()
						other.call(tool, args)
						*x.into = append(*x.into, time.Since(began))
					}
					slices.Reverse(order)
				}
				slices.Sort(foreign)
				slices.Sort(absent)
				a, b = p50(foreign), p50(absent)
			}
			if (a - b).Abs() > max(a, b)/4 {
				t.Errorf("%s: another's id takes %v, an unknown one %v", tool, a, b)
			}
		}
	})
	if a := mine.call("sandbox_close_run", m{"root_run_id": "run-1"}); a.Text != "closed 1 sessions" {
		t.Errorf("the owner's close_run: %s", a.Text)
	}
}

// gVisor's kernel follows some links by itself, for which the agent has rules of their own.
func TestPathTricks(t *testing.T) {
	for _, rt := range []string{"runc", "runsc"} {
		t.Run(rt, func(t *testing.T) { pathTricks(t, rt) })
	}
}

func pathTricks(t *testing.T, rt string) {
	s := start(t, rt, nil)
	c := s.client()
	id := c.open(m{})
	c.exec(id, "ln -s / root; ln -s /etc/passwd passwd; ln -s ../../etc up; mkfifo fifo; ln -s loop loop; mkdir d; ln -s /proc/self/environ environ")
	// /tmp is the session's to write: what stops a path there is the path alone.
	const outside, held = "cd /tmp && ls -A && cat hostname", "hostname\nsecret\n"
	c.exec(id, "echo secret > /tmp/hostname; ln -s /tmp tmp; ln -s ../tmp up.tmp; ln -s /tmp/hostname link; ln -s /tmp/new dangling")
	for _, path := range []string{
		"../tmp/hostname", "/tmp/hostname", "/work/../tmp/hostname", "d/../../tmp/hostname", "tmp/hostname", "up.tmp/hostname", "link", "root/tmp/hostname", "../tmp/new", "tmp/new", "tmp/d/new", "dangling",
		"../etc/passwd", "d/../../etc/passwd", "/etc/passwd", "//etc/passwd", "/work/../etc/passwd", "root/etc/passwd", "passwd", "up/passwd", "fifo", "loop", "environ", "a\x00b", ".", "", "/work", strings.Repeat("a/", 2000) + "b", strings.Repeat("n", 300),
	} {
		t.Run(fmt.Sprintf("%.40q", path), func(t *testing.T) {
			began := time.Now()
			if a := c.call("sandbox_read", m{"session_id": id, "path": path}); !a.IsError || strings.Contains(a.Text, "root:x:0") || strings.Contains(a.Text, "secret") {
				t.Errorf("read: %+v", a)
			}
			if path == "loop" || strings.HasPrefix(path, "a/") {
				return // may be made
			}
			if a := c.call("sandbox_write", m{"session_id": id, "path": path, "content": "x"}); !a.IsError {
				t.Errorf("write: %+v", a)
			}
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
	if a := c.exec(id, outside); a.Text != held {
		t.Errorf("outside of /work there is now %q", a.Text)
	}

	// Links within it are followed, whatever way their targets are written.
	c.exec(id, "mkdir -p in; echo -n there > in/f; ln -s /work/in/f lw; ln -s /work/in dw; ln -s /work/in/new nw")
	for _, path := range []string{"lw", "dw/f"} {
		if a := c.call("sandbox_read", m{"session_id": id, "path": path}); a.IsError || a.Text != "there" {
			t.Errorf("read of %s: %+v", path, a)
		}
	}
	c.call("sandbox_write", m{"session_id": id, "path": "nw", "content": "new"})
	c.call("sandbox_write", m{"session_id": id, "path": "lw", "content": "changed"})
	if a := c.exec(id, "cat in/new in/f; readlink lw"); a.Text != "newchanged/work/in/f\n" {
		t.Errorf("written through links: %q", a.Text)
	}

	// A directory and a link to /tmp change places as fast as they can. gVisor exchanges no two
	// names at once: there a write may meet neither, and makes a directory, which is put aside.
	t.Run("a link that changes places", func(t *testing.T) {
		c.exec(id, "mkdir x; echo fine > x/hostname; ln -s /tmp y")
		swap := fmt.Sprintf(`perl -e 'my ($x, $y) = ("x", "y"); 1 while syscall(%d, %d, $x, %[2]d, $y, %d) >= 0'`, unix.SYS_RENAMEAT2, unix.AT_FDCWD, unix.RENAME_EXCHANGE)
		if rt == "runsc" {
			swap = `perl -e 'sub to { my ($from) = @_; rename($from, "x") or rename("x", "aside" . $i++) && rename($from, "x") } for (;;) { rename("x", "z"); to("y"); rename("x", "y"); to("z") }'`
		}
		go c.call("sandbox_exec", m{"session_id": id, "command": swap, "timeout_seconds": 6})
		deadline := time.Now().Add(5 * time.Second)
		done, refused := 0, 0
		for n := 0; time.Now().Before(deadline); n++ {
			a := c.call("sandbox_read", m{"session_id": id, "path": "x/hostname"})
			if !a.IsError && a.Text != "fine\n" && a.Text != "mine" {
				t.Fatalf("after %d tries a swapped link was followed: %+v", n, a)
			}
			for _, a := range []answer{a, c.call("sandbox_write", m{"session_id": id, "path": "x/hostname", "content": "mine"})} {
				switch {
				case strings.Contains(a.Text, "it leads out of /work"):
					refused++
				case !a.IsError:
					done++
				}
			}
		}
		t.Logf("%d calls met the directory, %d the link", done, refused)
		if done == 0 || refused == 0 {
			t.Error("they did not change places")
		}
		if a := c.exec(id, outside); a.Text != held {
			t.Errorf("a swapped link was written through: %q", a.Text)
		}
	})
}

// Ways out of the container, each of which has to fail there, and to work in a
// container with what the cage takes away: flags of podman run.
func TestEscapes(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	// sys makes a system call: perl is in every Debian, mount and ctypes are not.
	const sys = `sys() { perl -e 'my @a = map { /^-?\d+$/ ? $_ + 0 : $_ } @ARGV; exit(syscall(shift @a, @a) < 0)' "$@"; }; `
	root, privileged := []string{"--user", "0"}, []string{"--user", "0", "--privileged"}
	mine := filepath.Join(t.TempDir(), "mine")
	if err := os.WriteFile(mine, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, command string
		without       []string // nil: what it takes, or what it is aimed at, is not to be had on every machine
	}{
		{"mount", fmt.Sprintf("sys %d none /tmp tmpfs 0 0", unix.SYS_MOUNT), privileged},
		{"root of a user namespace", "unshare -Ur touch /usr/bin/x", root},
		{"remount root", fmt.Sprintf("sys %d none / none %d 0", unix.SYS_MOUNT, unix.MS_REMOUNT), append(privileged, "--read-only")},
		{"write root", "touch /usr/bin/x", root},
		{"write the agent", "echo x >> /run/loomcycle-agent/session-agent", append(root, "-v", mine+":/run/loomcycle-agent/session-agent")},
		{"setuid", "(sleep 5 | su >/dev/null 2>&1 &); for i in {1..20}; do sleep 0.1; ps -o euid= -C su | grep -qw 0 && exit 0; done; exit 1", []string{}},
		{"device", "mknod dev c 1 1", append(root, "--cap-add", "MKNOD")},
		{"core pattern", "exec 3>>/proc/sys/kernel/core_pattern", privileged},
		{"sysrq", "exec 3>>/proc/sysrq-trigger", nil},
		{"cgroup", "mkdir /sys/fs/cgroup/x || mkdir /sys/fs/cgroup/memory/x", privileged},
		{"raw socket", "perl -e 'exit !socket(S, 2, 3, 1)'", append(root, "--cap-add", "NET_RAW")},
		{"packet socket", "perl -e 'exit !socket(S, 17, 3, 768)'", append(root, "--cap-add", "NET_RAW")},
		{"network", "ls /sys/class/net | grep -vx lo", []string{"--network", "host"}},
		{"other processes", "! grep -q session-agent /proc/1/cmdline", []string{"--pid", "host"}},
		{"the agent's stdio", "(echo x > /proc/1/fd/1) > /dev/null", []string{}},
		{"the agent's memory", "exec 3</proc/1/mem", []string{}},
		{"ptrace", fmt.Sprintf("sys %d %d 1 0 0", unix.SYS_PTRACE, unix.PTRACE_SEIZE), append(root, "--cap-add", "SYS_PTRACE")},
		{"kernel keys", fmt.Sprintf("sys %d user x y 1 -3", unix.SYS_ADD_KEY), []string{"--security-opt", "seccomp=unconfined"}},
		{"bpf", fmt.Sprintf(`perl -e 'my $map = pack("L4", 2, 4, 4, 1) . "\0" x 112; exit(syscall(%d, 0, $map, length $map) < 0)'`, unix.SYS_BPF), privileged},
		{"raise a limit", "ulimit -Hn 100000", nil},
		{"engine socket", "ls /run/podman /var/run/docker.sock /run/docker.sock 2>/dev/null | grep .", []string{"-v", filepath.Dir(mine) + ":/run/podman"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := c.exec(id, sys+tc.command)
			if !a.IsError || strings.Contains(a.Text, "timed out") {
				t.Errorf("%q succeeded: %q", tc.command, a.Text)
			}
			if code := a.Structured["exit_code"]; code == 126.0 || code == 127.0 {
				t.Errorf("%q was not tried: %q", tc.command, a.Text)
			}
			if tc.without == nil {
				return
			}
			args := append([]string{"--runtime", s.env["SANDBOX_RUNTIME"], "run", "--rm", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"}, tc.without...)
			if !slices.Contains(args, "--network") {
				args = append(args, "--network", "none")
			}
			if out, err := s.podman.Command(append(args, s.env["SANDBOX_IMAGE"], "bash", "-c", sys+tc.command)...).CombinedOutput(); err != nil {
				t.Errorf("%q cannot fail: with %v too it ends with %v: %s", tc.command, tc.without, err, out)
			}
		})
	}
	t.Run("kill the agent", func(t *testing.T) {
		c.exec(id, "kill -9 1; kill -STOP 1; kill -9 -1")
		if a := c.exec(id, "echo alive"); a.Text != "alive\n" {
			t.Errorf("after it: %+v", a)
		}
	})
}

// gVisor's kernel ends with what it runs when a limit is used up, and older ones tell no
// engine why: the session's owner hears of the limits all the same.
func TestLimitsOfGVisor(t *testing.T) {
	s := start(t, "runsc", map[string]string{"SANDBOX_MEM_MB": "256", "SANDBOX_TMPFS_MB": "64", "SANDBOX_PIDS": "128"})
	c := s.client()
	for name, command := range map[string]string{"memory": "python3 -c 'x = bytearray(1 << 30)'", "processes": "b() { b | b & }; b; sleep 30"} {
		id := c.open(m{})
		for _, command := range []string{command, "true"} {
			a := c.call("sandbox_exec", m{"session_id": id, "command": command, "timeout_seconds": 100})
			either := strings.Contains(a.Text, "256 MiB of memory (mem_mb)") && strings.Contains(a.Text, "(pids)")
			if !a.IsError || !either && !strings.Contains(a.Text, "ran out of its 256 MiB of memory") {
				t.Errorf("%s, %q: %.300s", name, command, a.Text)
			}
		}
	}
}

func TestResourceAttacks(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_MEM_MB": "256", "SANDBOX_TMPFS_MB": "64", "SANDBOX_PIDS": "128"})
	c := s.client()
	id, bystander := c.open(m{}), c.open(m{})
	before := s.rss(t)
	for _, tc := range []struct{ name, command, want string }{
		{"fork bomb", "b() { b | b & }; b; sleep 30", "[timed out after 3s]"},
		{"memory hog", "python3 -c 'x = bytearray(1 << 30)'", "[out of memory: a process was killed at the session's limit of 256 MiB]"},
		{"disk filler", "head -c 1G /dev/zero > big; rm -f big; exit 9", "No space left on device"},
		{"a gigabyte of output", "head -c 1G /dev/zero | tr '\\0' x", "bytes left out"},
		{"an outliving process", "(setsid env -i bash -c 'trap \"\" TERM HUP; while :; do sleep 1; done' &) ; sleep 30", "[timed out after 3s]"},
		{"output like frames", `printf '\0\0\0\2\13\0\0\0\1{}\0\0\0\4\6\0\0\0\0' ; printf '\1\0\0\0\0\0\0\5'; echo; echo after`, "after\n"},
		{"endless stderr", "yes >&2", "[timed out after 3s]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			began := time.Now()
			seconds := 60
			if strings.Contains(tc.want, "timed out after 3s") {
				seconds = 3
			}
			a := c.call("sandbox_exec", m{"session_id": id, "command": tc.command, "timeout_seconds": seconds})
			if !strings.Contains(a.Text, tc.want) {
				t.Errorf("%.300q does not say %q", a.Text, tc.want)
			}
			if want := strings.Contains(tc.want, "out of memory"); a.Structured["oom"] != want {
				t.Errorf("oom is %v", a.Structured["oom"])
			}
			if len(a.Text) > 70<<10 {
				t.Errorf("%d bytes of answer", len(a.Text))
			}
			if b := c.exec(bystander, "echo fine"); b.Text != "fine\n" {
				t.Errorf("another session answers %+v", b)
			}
			eventually(t, 30*time.Second, "no process is left", func() bool {
				// But the agent, and the session of the command that looks.
				return c.exec(id, "ps -eo pid=,sid=,args= | while read pid sid args; do [ $pid = 1 ] || [ $sid = $$ ] || echo $args; done").Text == ""
			})
			t.Logf("%v", time.Since(began))
		})
	}
	if after := s.rss(t); after > before+25 {
		t.Errorf("the sidecar's memory grew from %d to %d MiB", before, after)
	}
}

// A session full of processes that never end says what there is to do, which works.
func TestFullOfProcesses(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_PIDS": "64"})
	c := s.client()
	id := c.open(m{})
	c.exec(id, `perl -e 'while (1) { defined(fork) or sleep 1 }' >/dev/null 2>&1 &`)
	eventually(t, 30*time.Second, "a command is refused with what to do", func() bool {
		a := c.exec(id, "true")
		return a.IsError && strings.HasPrefix(a.Text, "the session is at its limit of processes") && strings.Contains(a.Text, "sandbox_close")
	})
	if a := c.call("sandbox_close", m{"session_id": id}); a.Text != "closed" {
		t.Errorf("close: %+v", a)
	}
	if a := c.exec(c.open(m{}), "echo fine"); a.Text != "fine\n" {
		t.Errorf("in another: %+v", a)
	}
}

func TestHTTPAttacks(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	before := s.rss(t)

	t.Run("64 MiB bodies", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				body := io.LimitReader(zeros{}, 64<<20)
				req, _ := http.NewRequest(http.MethodPost, s.URL+"/mcp", body)
				if i%2 == 0 {
					req.ContentLength = 64 << 20
				}
				req.Header.Set("Authorization", "Bearer "+token)
				req.Header.Set("Content-Type", "application/json")
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					return // closed under the upload
				}
				defer resp.Body.Close()
				if resp.StatusCode != http.StatusRequestEntityTooLarge {
					t.Errorf("answered %s", resp.Status)
				}
			})
		}
		wg.Wait()
	})
	t.Run("10,000 malformed messages", func(t *testing.T) {
		seeds := []string{`{`, `[]`, `[[[[`, `null`, `{"jsonrpc":"1.0"}`, `{"jsonrpc":"2.0","id":{},"method":"tools/call"}`, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":7}`,
			`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_exec","arguments":[1]}}`, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"nope"}}`,
			`{"jsonrpc":"2.0","id":1,"result":{}}`, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":null}}`, `{"jsonrpc":"2.0","id":1,"method":"initialize"}`, strings.Repeat("[", 100000), "\xff\xfe"}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 1250 {
					b := []byte(seeds[mrand.IntN(len(seeds))])
					if len(b) > 0 && mrand.IntN(2) == 0 {
						b[mrand.IntN(len(b))] ^= byte(1 + mrand.IntN(255))
					}
					resp, err := c.post(t.Context(), b)
					if err != nil {
						t.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if resp.StatusCode >= 500 {
						t.Errorf("%.80q was answered %s", b, resp.Status)
					}
				}
			})
		}
		wg.Wait()
	})
	t.Run("slow loris", func(t *testing.T) {
		host := strings.TrimPrefix(s.URL, "http://")
		var conns []net.Conn
		for range 200 {
			conn, err := net.Dial("tcp", host)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\nX-A: ", host)
			conns = append(conns, conn)
		}
		if a := c.exec(id, "echo served"); a.Text != "served\n" {
			t.Errorf("meanwhile: %+v", a)
		}
		_ = conns[0].SetReadDeadline(time.Now().Add(60 * time.Second))
		if _, err := bufio.NewReader(conns[0]).ReadByte(); err != nil {
			if ne, ok := err.(net.Error); ok && ne.Timeout() {
				t.Error("a header that never ends is waited for")
			}
		}
	})
	t.Run("a flood of connections", func(t *testing.T) {
		var conns []net.Conn
		for range 2100 { // the sidecar's limit is 2048, or less
			conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conns = append(conns, conn)
		}
		if a := s.client().exec(id, "echo served"); a.Text != "served\n" {
			t.Errorf("meanwhile: %+v", a)
		}
		_ = conns[0].SetReadDeadline(time.Now().Add(5 * time.Second)) // half of what a header has to arrive
		if _, err := conns[0].Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the first of them is kept")
		}
	})
	t.Run("header injection", func(t *testing.T) {
		host := strings.TrimPrefix(s.URL, "http://")
		for _, tc := range []struct{ header, want string }{
			{"X-Loom-Root-Run: a\r\nX-Loom-Tenant: b", "HTTP/1.1 200"}, // the same request, as it should be
			{"Authorization: Bearer " + token, "HTTP/1.1 200"},
			{"X-Loom-Root-Run: a\r\nX-Loom-Root-Run: b", "HTTP/1.1 4"},
			{"X-Loom-Tenant: a\x01b", "HTTP/1.1 4"},
			{"Authorization: Bearer " + token + "\r\nAuthorization: Bearer x", "HTTP/1.1 4"},
			{"X-Loom-Root-Run: " + strings.Repeat("r", 300), "HTTP/1.1 4"},
		} {
			conn, err := net.Dial("tcp", host)
			if err != nil {
				t.Fatal(err)
			}
			auth := "Authorization: Bearer " + token + "\r\n"
			if strings.HasPrefix(tc.header, "Auth") {
				auth = ""
			}
			body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_open","arguments":{}}}`
			fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\n%s%s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", host, auth, tc.header, len(body), body)
			_ = conn.SetReadDeadline(time.Now().Add(60 * time.Second))
			got, _ := io.ReadAll(conn)
			conn.Close()
			if opened := bytes.Contains(got, []byte(`"session_id"`)); !bytes.HasPrefix(got, []byte(tc.want)) || opened != strings.HasSuffix(tc.want, "200") {
				t.Errorf("%.40q was answered %.60q", tc.header, got)
			}
		}
	})
	t.Run("another site's page", func(t *testing.T) {
		for _, h := range []map[string]string{{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}} {
			if a := s.as(h).call("sandbox_list", m{}); a.Status != http.StatusForbidden {
				t.Errorf("%v: %d", h, a.Status)
			}
		}
	})
	if a := c.exec(id, "echo alive"); a.Text != "alive\n" {
		t.Errorf("after it all: %+v", a)
	}
	eventually(t, 60*time.Second, "the sidecar's memory is flat again", func() bool { return s.rss(t) < before+40 })
}

// Many readers of a large file who take no answer: what they hold is bounded, and
// another principal is answered meanwhile.
func TestUntakenFiles(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_AUTH_TOKENS": "other=" + otherToken})
	c, other := s.client(), s.as(map[string]string{"Authorization": "Bearer " + otherToken})
	id, theirs := c.open(m{}), other.open(m{})
	make16 := "head -c 16M /dev/zero | tr '\\0' x > f"
	c.exec(id, make16)
	other.exec(theirs, make16)
	before := s.rss(t)
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": "sandbox_read", "arguments": m{"session_id": id, "path": "f", "encoding": "base64"}}})
	if err != nil {
		t.Fatal(err)
	}
	const readers = 60 // of 22 MiB each
	most := before
	for range readers {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nAccept: application/json\r\nContent-Length: %d\r\n\r\n%s", conn.RemoteAddr(), token, len(body), body)
	}
	for began := time.Now(); time.Since(began) < 12*time.Second; { // what all of them would have come in
		if a := other.call("sandbox_read", m{"session_id": theirs, "path": "f"}); a.IsError || len(a.Text) != 16<<20 {
			t.Fatalf("another principal's read: %d bytes, %.200s", len(a.Text), a.Text)
		}
		most = max(most, s.rss(t))
	}
	if a := c.exec(id, "echo served"); a.Text != "served\n" {
		t.Errorf("a small answer meanwhile: %+v", a)
	}
	t.Logf("the sidecar's memory: %d MiB, then up to %d MiB", before, most)
	if most > before+768 {
		t.Errorf("the sidecar's memory grew from %d to %d MiB", before, most)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A leaked bearer token opens nothing where identities are signed.
func TestSignedIdentity(t *testing.T) {
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	jwks := filepath.Join(t.TempDir(), "jwks.json")
	set, _ := json.Marshal(map[string]any{"keys": []any{map[string]any{"kty": "EC", "crv": "P-256", "kid": "k", "x": b64(key.X), "y": b64(key.Y)}}})
	if err := os.WriteFile(jwks, set, 0o644); err != nil {
		t.Fatal(err)
	}
	s := start(t, "runc", map[string]string{"SANDBOX_IDENTITY_JWKS": jwks, "SANDBOX_MAX_SESSIONS_PER_TENANT": "2"})
	sign := func(principal string, change jwt.MapClaims) *client {
		claims := jwt.MapClaims{"aud": "sandbox", "exp": time.Now().Add(time.Minute).Unix(), "tenant": "acme", "principal": principal, "root_run": "r1"}
		for k, v := range change {
			claims[k] = v
		}
		tok := jwt.NewWithClaims(jwt.SigningMethodES256, claims)
		tok.Header["kid"] = "k"
		text, err := tok.SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return s.as(map[string]string{"X-Loom-Identity": text})
	}
	if a := s.client().call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "requires a signed identity") {
		t.Errorf("the bearer alone: %+v", a)
	}
	id := sign("p1", nil).open(m{})
	if a := sign("p1", nil).exec(id, "echo mine"); a.Text != "mine\n" {
		t.Errorf("the owner: %+v", a)
	}
	if a := sign("p2", nil).exec(id, "echo mine"); !a.IsError {
		t.Errorf("another principal: %+v", a)
	}
	if a := sign("p1", jwt.MapClaims{"tenant": "evil"}).exec(id, "echo mine"); !a.IsError {
		t.Errorf("the same principal of another tenant: %+v", a)
	}
	sign("p2", nil).open(m{})
	full := func() {
		t.Helper()
		if a := sign("p3", nil).call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "SANDBOX_MAX_SESSIONS_PER_TENANT is 2") {
			t.Errorf("a third principal of a tenant that has its sessions: %+v", a)
		}
	}
	full()
	sign("p3", jwt.MapClaims{"tenant": "other"}).open(m{})
	s.kill()
	s.run()
	full()
	if a := sign("p1", jwt.MapClaims{"exp": time.Now().Add(-time.Hour).Unix()}).call("sandbox_list", m{}); a.Status != 401 {
		t.Errorf("an expired identity: %+v", a)
	}
	once := sign("p1", jwt.MapClaims{"jti": "x"})
	// Turned away before it is served, as one for which there is no room: it may come again.
	if resp, err := once.post(t.Context(), make([]byte, 32<<20)); err == nil { // else it was hung up on
		resp.Body.Close()
		if resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("too long a body: %s", resp.Status)
		}
	}
	if a := once.call("sandbox_list", m{}); a.IsError || a.Status != 200 {
		t.Errorf("a fresh jti: %+v", a)
	}
	if a := once.call("sandbox_list", m{}); a.Status != 401 {
		t.Errorf("a replayed jti: %+v", a)
	}
}

func b64(n *big.Int) string {
	return strings.TrimRight(jwtEncode(n.FillBytes(make([]byte, 32))), "=")
}

func jwtEncode(b []byte) string { return (&jwt.Token{}).EncodeSegment(b) }
