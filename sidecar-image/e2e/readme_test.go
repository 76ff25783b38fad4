package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

var shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")

// section returns the shell blocks of a section of ../README.md.
func section(t *testing.T, title string) string {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "\n## "+title+"\n")
	if !ok {
		t.Fatalf("../README.md has no section %q", title)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	var blocks []string
	for _, m := range shellBlock.FindAllStringSubmatch(rest, -1) {
		blocks = append(blocks, m[1])
	}
	return strings.Join(blocks, "\n")
}

// guide returns the shell block of ../../docs/SANDBOX.md that holds text.
func guide(t *testing.T, text string) string {
	t.Helper()
	all, err := os.ReadFile("../../docs/SANDBOX.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range shellBlock.FindAllStringSubmatch(string(all), -1) {
		if strings.Contains(m[1], text) {
			return m[1]
		}
	}
	t.Fatalf("docs/SANDBOX.md has no commands with %q", text)
	return ""
}

// dist skips where `dist` has not built the family.
func dist(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("../../dist/release.json"); err != nil {
		citest.Skip(t, "there is no dist: run `go run mage.go dist` first")
	}
	for _, program := range []string{"podman", "jq", "curl", "openssl"} {
		citest.Program(t, program, "the README uses it")
	}
}

// outerConf makes podman's defaults fit a host without CAP_SYS_RESOURCE or with
// a hybrid cgroup layout, as the README says.
func outerConf(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "containers.conf")
	if err := os.WriteFile(path, []byte("[containers]\ndefault_ulimits = [\"nofile=4096:4096\", \"nproc=16384:16384\"]\n[engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// script runs shell commands as an operator types them, job control and all.
func script(t *testing.T, within time.Duration, text string, env ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", "set -m -e -o pipefail\ntrap 'for job in $(jobs -p); do kill -- -$job; done' EXIT\n"+text)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// Failed or out of time, it ends what it started, which has process groups of its own.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	t.Log(out.String())
	return out.String()
}

var (
	quoted  = regexp.MustCompile(`(?s)'[^']*'|"(?:\\.|[^"\\])*"`)
	started = regexp.MustCompile(`(?m)(?:^|[|;&({])[ \t]*([a-z][a-z0-9_.-]*)(?:[ \t)]|$)`)
	keyword = regexp.MustCompile(`\b(?:do|done|until|while|if|then|fi)\b`)
	defined = regexp.MustCompile(`(?m)^([a-z]+)\(\)`)
	// essential are programs that every Debian has, and what is of the shell.
	essential = strings.Fields("awk sleep export")
)

// programs are those that shell commands start, as far as the README's go.
func programs(commands string) []string {
	commands = keyword.ReplaceAllString(quoted.ReplaceAllString(strings.ReplaceAll(commands, "\\\n", " "), "Q"), ";")
	own := slices.Clone(essential)
	for _, m := range defined.FindAllStringSubmatch(commands, -1) {
		own = append(own, m[1])
	}
	var out []string
	for _, m := range started.FindAllStringSubmatch(commands, -1) {
		if !slices.Contains(own, m[1]) {
			out = append(out, m[1])
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Who reads a section's first lines has what its commands start.
func TestReadmeNamesItsPrograms(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for title, want := range map[string]string{"On this machine": "curl go jq openssl", "From the image": "curl go openssl podman"} {
		got := programs(section(t, title))
		if strings.Join(got, " ") != want { // else the look at them has to learn
			t.Errorf("%s starts %v", title, got)
		}
		_, rest, _ := strings.Cut(string(text), "\n## "+title+"\n")
		needs, _, _ := strings.Cut(rest, "```")
		for _, program := range got {
			if !strings.Contains(needs, "`"+program+"`") && !(program == "go" && strings.Contains(needs, " Go,")) {
				t.Errorf("%s starts %s, and does not say that it needs it", title, program)
			}
		}
	}
}

// inOrder checks that the loop's answers are those that the README promises.
func inOrder(t *testing.T, out string, want ...string) {
	t.Helper()
	for _, w := range want {
		_, rest, ok := strings.Cut(out, w)
		if !ok {
			t.Fatalf("there is no %q in\n%s", w, out)
		}
		out = rest
	}
}

// unload removes, after the test, what it loads of an image into the machine's
// engine: every commit's has another tag.
func unload(t *testing.T, image string) {
	for _, engine := range []string{"docker", "podman"} {
		tags := func() []string {
			out, _ := exec.Command(engine, "images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", "reference=localhost/"+image).Output()
			return strings.Fields(string(out))
		}
		before := tags()
		t.Cleanup(func() {
			for _, tag := range tags() {
				if !slices.Contains(before, tag) {
					_ = exec.Command(engine, "rmi", tag).Run()
				}
			}
		})
	}
}

var loopAnswers = []string{"ready", "wrote 11 bytes to /work/go.mod", "add_test.go:3: -1", "[exit: 1]", "ok  \tadd", "Hello, world!", "closed"}

// The README's first section, from nothing to a closed session, through mage.
func TestReadmeOnThisMachine(t *testing.T) {
	dist(t)
	unload(t, "loomcycle-sandbox-session")
	_, port, _ := net.SplitHostPort(freePort(t))
	commands := strings.ReplaceAll(section(t, "On this machine"), "127.0.0.1:9000", "127.0.0.1:"+port)
	out := script(t, 15*time.Minute, commands+"\nkill %1; wait || true\n", "SANDBOX_LISTEN_ADDR=127.0.0.1:"+port, "SANDBOX_IMAGE=", "CONTAINERS_CONF="+outerConf(t))
	inOrder(t, out, loopAnswers...)
	if !strings.Contains(out, "sessions stay for the next sidecar") {
		t.Errorf("kill %%1 did not end it in good order:\n%s", out)
	}
}

// outer is what the machine's podman says.
func outer(env []string, args ...string) string {
	cmd := exec.Command("podman", args...)
	cmd.Env = append(os.Environ(), env...)
	out, _ := cmd.Output()
	return string(out)
}

// began is when a process was started, in clock ticks since the boot (proc_pid_stat(5),
// field 22): its id alone is another's one day. It is empty for one that has ended.
func began(pid string) string {
	stat, _ := os.ReadFile("/proc/" + pid + "/stat")
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return ""
	}
	return fields[19]
}

var ofProcess = regexp.MustCompile(`^sandbox(?:-storage|-state)?-readme-([0-9]+)-([0-9]+)$`)

// removeLeft removes from the machine's podman what this test has left where it was
// killed: a privileged container that runs, and two volumes.
func removeLeft(env []string) {
	for _, args := range [][2]string{{"ps -a --format {{.Names}}", "rm -f -t 0"}, {"volume ls -q", "volume rm -f"}} {
		for _, name := range strings.Fields(outer(env, strings.Fields(args[0])...)) {
			if m := ofProcess.FindStringSubmatch(name); m != nil && began(m[1]) != m[2] {
				outer(env, append(strings.Fields(args[1]), name)...)
			}
		}
	}
}

// Its second section: the built image with its nested podman, and the loop.
func TestReadmeFromTheImage(t *testing.T) {
	dist(t)
	unload(t, "loomcycle-builder")
	port, env := freePort(t), []string{"CONTAINERS_CONF=" + outerConf(t)}
	removeLeft(env)
	suffix := fmt.Sprintf("-readme-%d-%s", os.Getpid(), began(strconv.Itoa(os.Getpid())))
	names := strings.NewReplacer("127.0.0.1:9000", port, "--name sandbox", "--name sandbox"+suffix, "rm -f sandbox", "rm -f sandbox"+suffix,
		"sandbox-storage", "sandbox-storage"+suffix, "sandbox-state", "sandbox-state"+suffix)
	commands := names.Replace(section(t, "From the image"))
	start, end, ok := strings.Cut(commands, "podman rm -f")
	if !ok {
		t.Fatal("the README does not end what it started")
	}
	_, loop, ok := strings.Cut(names.Replace(section(t, "On this machine")), "call() {")
	if !ok {
		t.Fatal("the README has no loop")
	}
	t.Cleanup(func() {
		outer(env, "rm", "-f", "-t", "0", "sandbox"+suffix)
		outer(env, "volume", "rm", "-f", "sandbox-storage"+suffix, "sandbox-state"+suffix)
	})
	inOrder(t, script(t, 15*time.Minute, start+"\ncall() {"+loop+"\npodman rm -f"+end, env...), loopAnswers...)
}

// Every command of the program that the README names in its text; mage's targets are
// internal/workflows' to look at.
func TestReadmeCommands(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	bin, err := builder()
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, "runc", map[string]string{"SANDBOX_WORKSPACE_ROOT": filepath.Join(t.TempDir(), "ws")})
	c := s.client()
	c.call("sandbox_close", m{"session_id": c.open(m{"workspace": "w1"})})
	want := map[string]string{"config": "SANDBOX_AUTH_TOKEN", "healthcheck": "", "workspaces list": "w1", "workspaces prune --older-than 720h [--dry-run]": "PRINCIPAL"}
	named := 0
	for _, span := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(regexp.MustCompile("(?s)```.*?```").ReplaceAllString(string(text), ""), -1) {
		args, ok := strings.CutPrefix(span[1], "loomcycle-builder ")
		if !ok {
			args = span[1]
			if !strings.HasPrefix(args, "workspaces ") {
				continue
			}
		}
		says, ok := want[args]
		if !ok {
			t.Errorf("`%s` is run by no test", span[1])
			continue
		}
		named++
		cmd := exec.Command(bin, strings.Fields(strings.NewReplacer("[", "", "]", "").Replace(args))...)
		cmd.Env = []string{"SANDBOX_LISTEN_ADDR=" + s.env["SANDBOX_LISTEN_ADDR"], "SANDBOX_WORKSPACE_ROOT=" + s.env["SANDBOX_WORKSPACE_ROOT"], "SANDBOX_STATE_DIR=" + s.env["SANDBOX_STATE_DIR"]}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), says) {
			t.Errorf("%s: %v\n%s", args, err, out)
		}
	}
	if named != len(want) {
		t.Errorf("%d of %d commands are named in the README", named, len(want))
	}
}

// A script that ends the `go run` it has started, which passes no signal on, ends the
// sidecar and its podman with it, and in good order.
func TestKilledGoRun(t *testing.T) {
	for _, how := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(how.String(), func(t *testing.T) {
			p := enginetest.New(t)
			p.Options(t, "runc")
			address := freePort(t)
			s := prepare(t, "runc", map[string]string{"SANDBOX_LISTEN_ADDR": address, "LOOMCYCLE_CACHE": t.TempDir()}, p)
			s.URL, s.ended = "http://"+address, make(chan struct{})
			s.cmd = exec.Command("go", "run", "mage.go", "sidecar:run")
			s.cmd.Dir, s.cmd.Env = "../..", os.Environ()
			for k, v := range s.env {
				s.cmd.Env = append(s.cmd.Env, k+"="+v)
			}
			s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
			s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			if err := s.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			go func() { _ = s.cmd.Wait(); close(s.ended) }() // with the last process that has its output
			t.Cleanup(func() {
				select {
				case <-s.ended:
				default: // what goes on would be waited for
					_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
				}
			})
			eventually(t, 10*time.Minute, "it is ready", func() bool {
				resp, err := http.Get(s.URL + "/readyz")
				if err != nil {
					return false
				}
				resp.Body.Close()
				return resp.StatusCode == http.StatusOK
			})
			s.client().open(m{}) // so its podman works
			if err := s.cmd.Process.Signal(how); err != nil {
				t.Fatal(err)
			}
			select {
			case <-s.ended:
			case <-time.After(30 * time.Second):
				t.Fatal("something of it goes on")
			}
			if !strings.Contains(s.log.String(), "sessions stay for the next sidecar") {
				t.Error("it did not end in good order")
			}
			lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range lines {
				if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(s.env["SANDBOX_STATE_DIR"])) {
					t.Errorf("%s goes on: %q", file, line)
				}
			}
		})
	}
}
