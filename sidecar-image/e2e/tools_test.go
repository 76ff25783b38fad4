package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// The text forms are what existing runtimes parse.
func TestTextForms(t *testing.T) {
	for _, rt := range []string{"runc", "crun", "runsc"} {
		t.Run(rt, func(t *testing.T) {
			env := maps.Clone(caged)
			env["SANDBOX_IDLE_TTL_SECONDS"], env["SANDBOX_MAX_FILE_BYTES"] = "900", "65536"
			s := start(t, rt, env)
			c := s.client()
			// expires says that an answer's session ends an idle time after the call.
			expires := func(a answer, called time.Time) {
				t.Helper()
				text, _ := a.Structured["expires_at"].(string)
				at, err := time.Parse(time.RFC3339, text)
				if early, late := at.Sub(called.Add(900*time.Second)), at.Sub(time.Now().Add(900*time.Second)); err != nil || early < -time.Second || late > 0 {
					t.Errorf("%s ends %v after the first and %v before the last moment that it may, %v", a.Text, early, -late, err)
				}
			}
			called := time.Now()
			opened := c.call("sandbox_open", m{})
			id, _ := opened.Structured["session_id"].(string)
			if want := fmt.Sprintf(`{"expires_at":%q,"network":"none","session_id":%q,"workspace_path":"/work"}`, opened.Structured["expires_at"], id); opened.Text != want || opened.IsError {
				t.Fatalf("sandbox_open answers\n%s%s instead of\n%s", opened.Text, opened.Body, want)
			}
			expires(opened, called)
			inCage(t, s, c, id)
			for _, tc := range []struct {
				tool       string
				args       m
				want       string
				isErr      bool
				structured m // some of it
			}{
				{"sandbox_exec", m{"command": "echo out; echo err >&2"}, "out\nerr\n", false, m{"exit_code": 0.0, "stdout": "out\n", "stderr": "err\n", "timed_out": false, "truncated": false, "dropped_bytes": 0.0, "oom": false, "signal": nil}},
				{"sandbox_exec", m{"command": "true"}, "", false, nil},
				{"sandbox_exec", m{"command": "printf x; exit 7"}, "x\n[exit: 7]", true, m{"exit_code": 7.0, "stdout": "x", "stderr": "", "signal": nil}},
				{"sandbox_exec", m{"command": "kill -9 $$"}, "[exit: 137]", true, m{"exit_code": 137.0, "signal": "SIGKILL", "timed_out": false, "oom": false}},
				{"sandbox_exec", m{"command": "echo a; sleep 60", "timeout_seconds": 5}, "a\n[timed out after 5s]", true, m{"stdout": "a\n", "timed_out": true, "truncated": false, "oom": false}},
				// A process that its shell did not live to wait for: tail holds what it cannot write.
				{"sandbox_exec", m{"command": "head -c 100M /dev/zero | tail -c 100M | sleep 60", "timeout_seconds": 8}, "[timed out after 8s]", true, m{"timed_out": true, "oom": false}},
				{"sandbox_exec", m{"command": "head -c 100M /dev/zero | tail -c 100M | tail -c 1 | wc -c"}, "1\n", false, m{"exit_code": 0.0}},
				{"sandbox_exec", m{"command": "cat; echo $A", "stdin": "in\n", "env": m{"A": "b c"}}, "in\nb c\n", false, nil},
				{"sandbox_exec", m{"command": "printf 0123456789abcdef", "max_output_bytes": 8}, "0123\n[... 8 bytes left out ...]\ncdef\n[output truncated: 8 of 16 bytes left out of the middle]", false, m{"exit_code": 0.0, "truncated": true, "dropped_bytes": 8.0, "timed_out": false, "stdout": "0123\n[... 8 bytes left out ...]\ncdef", "stderr": ""}},
				{"sandbox_exec", m{"command": "printf ab; printf 0123456789abcdef >&2", "max_output_bytes": 8}, "ab01\n[... 10 bytes left out ...]\ncdef\n[output truncated: 10 of 18 bytes left out of the middle]", false, m{"truncated": true, "dropped_bytes": 10.0, "stdout": "ab", "stderr": "01\n[... 10 bytes left out ...]\ncdef"}},
				{"sandbox_exec", m{"command": "printf 'a\\xffb'"}, "a\uFFFDb", false, nil},
				{"sandbox_exec", m{"command": "echo ok", "timeout_seconds": 99999}, "ok\n[note: timeout_seconds 99999 was cut to 1800, the operator's limit]", false, nil},
				{"sandbox_exec", m{"command": " "}, "command: is empty; it has to be a bash command", true, nil},
				{"sandbox_exec", m{"command": "true", "timeout_seconds": -1}, "timeout_seconds: -1 is too small, 0.001 to 1800 are allowed", true, nil},
				{"sandbox_write", m{"path": "d/f.txt", "content": "héllo"}, "wrote 6 bytes to /work/d/f.txt", false, nil},
				{"sandbox_write", m{"path": "/work/bin", "content": base64.StdEncoding.EncodeToString([]byte{0, 255}), "encoding": "base64", "mode": "0755"}, "wrote 2 bytes to /work/bin", false, nil},
				{"sandbox_write", m{"path": "x", "content": "a", "mode": "4755"}, `mode: "4755" is not allowed; octal permissions from 0001 to 0777 are, with all their digits`, true, nil},
				{"sandbox_write", m{"path": "newdir/", "content": "a"}, `path: "newdir/" names a directory; it has to name a file`, true, nil},
				{"sandbox_write", m{"path": "a//b/../c", "content": "a"}, "wrote 1 bytes to /work/a/c", false, nil},
				{"sandbox_read", m{"path": "/work/a/./b/../c"}, "a", false, nil},
				{"sandbox_exec", m{"command": "[ -e newdir ] || [ -e a/b ] || echo neither"}, "neither\n", false, nil},
				{"sandbox_exec", m{"command": "echo ok", "timeout_seconds": json.Number("1e400")}, "ok\n[note: timeout_seconds 1e400 was cut to 1800, the operator's limit]", false, nil},
				{"sandbox_exec", m{"command": 7}, "command: has to be a string, not a number", true, nil},
				{"sandbox_write", m{"path": "d", "content": "a"}, "path: d: d is a directory", true, nil},
				{"sandbox_write", m{"path": "x", "content": "*", "encoding": "base64"}, "content: is not base64: illegal base64 data at input byte 0", true, nil},
				{"sandbox_read", m{"path": "d/f.txt"}, "héllo", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "max_bytes": 2}, "h\n[read truncated: bytes 0 to 1 of 6; go on with offset 1]", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "max_bytes": 2, "offset": 1}, "é\n[read truncated: bytes 1 to 3 of 6; go on with offset 3]", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "max_bytes": 1, "offset": 1}, "max_bytes: 1 does not hold the character at offset 1: ask for 4 or more", true, nil},
				{"sandbox_read", m{"path": "d/f.txt", "max_bytes": 1, "offset": 2}, "é\n[read truncated: bytes 1 to 3 of 6; go on with offset 3]\n[note: offset 2 is within a character, which begins at 1]", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "offset": 2}, "éllo", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "offset": 2, "encoding": "base64"}, base64.StdEncoding.EncodeToString([]byte("héllo")[2:]), false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "offset": 7}, "", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "offset": -1}, "offset: -1 is too small, 0 to 9007199254740992 are allowed", true, nil},
				{"sandbox_read", m{"path": "d/f.txt", "max_bytes": 1 << 40}, "héllo", false, nil}, // cut to the operator's limit, which does not matter
				{"sandbox_read", m{"path": "bin", "max_bytes": 1 << 40, "encoding": "base64"}, "AP8=", false, nil},
				{"sandbox_read", m{"path": "d/f.txt", "offset": 9}, "", false, nil},
				{"sandbox_read", m{"path": "bin"}, "encoding: bin is not UTF-8 text; read it with encoding base64", true, nil},
				{"sandbox_read", m{"path": "bin", "encoding": "base64"}, "AP8=", false, nil},
				{"sandbox_read", m{"path": "nothing"}, "path: nothing: no such file or directory", true, nil},
				{"sandbox_exec", m{"command": "ln -s /work/d/f.txt lw; ln -s /work/d dw; ln -s /tmp out"}, "", false, nil},
				{"sandbox_read", m{"path": "lw"}, "héllo", false, nil},
				{"sandbox_write", m{"path": "dw/new", "content": "new"}, "wrote 3 bytes to /work/dw/new", false, nil},
				{"sandbox_read", m{"path": "d/new"}, "new", false, nil},
				{"sandbox_write", m{"path": "out/new", "content": "new"}, "path: out/new: it leads out of /work, through a symbolic link or ..", true, nil},
				{"sandbox_read", m{"path": "out/new"}, "path: out/new: it leads out of /work, through a symbolic link or ..", true, nil},
				{"sandbox_exec", m{"command": "[ -x bin ] && [ ! -x d/f.txt ] && echo modes"}, "modes\n", false, nil},
				{"sandbox_exec", m{"command": "shopt -q login_shell || echo no login; [[ $- = *i* ]] || echo no prompt"}, "no login\nno prompt\n", false, nil},
				{"sandbox_exec", m{"command": "head -c 65537 /dev/zero | tr '\\0' x > large"}, "", false, nil},
				{"sandbox_read", m{"path": "large"}, strings.Repeat("x", 65536) + "\n[read truncated: bytes 0 to 65536 of 65537; go on with offset 65536]", false, nil},
				{"sandbox_read", m{"path": "large", "offset": 1}, strings.Repeat("x", 65536), false, nil},
				{"sandbox_write", m{"path": "large", "content": strings.Repeat("y", 65537)}, "content: has 65537 bytes, 65536 are allowed in one call", true, nil},
				{"sandbox_write", m{"path": "large", "content": strings.Repeat("y", 65536)}, "wrote 65536 bytes to /work/large", false, nil},
				{"sandbox_close_run", m{"root_run_id": ""}, "closed 0 sessions", false, nil},
			} {
				if tc.tool != "sandbox_close_run" {
					tc.args["session_id"] = id
				}
				began := time.Now()
				got := c.call(tc.tool, tc.args)
				if got.Text != tc.want || got.IsError != tc.isErr {
					t.Errorf("%s %.200v\n got %.200q (error %v) %.200s\nwant %.200q (error %v)", tc.tool, tc.args, got.Text, got.IsError, got.Body, tc.want, tc.isErr)
				}
				for name, want := range tc.structured {
					if got.Structured[name] != want {
						t.Errorf("%v: %s is %v instead of %v", tc.args, name, got.Structured[name], want)
					}
				}
				if tc.structured != nil {
					took, _ := got.Structured["duration_ms"].(float64)
					if most := time.Since(began).Milliseconds(); took < 0 || took > float64(most) || tc.structured["timed_out"] == true && took < 5000 {
						t.Errorf("%v took %v of %d ms", tc.args, took, most)
					}
					least, most := 1<<20, 16<<20 // the agent's own counts
					if rt == "runsc" {
						most = 64 << 20
					}
					if strings.Contains(tc.args["command"].(string), "100M") {
						least, most = 100<<20, 200<<20
					}
					if peak, _ := got.Structured["peak_memory_bytes"].(float64); peak < float64(least) || peak > float64(most) {
						t.Errorf("%v took %v bytes of memory; %d to %d were expected", tc.args, peak, least, most)
					}
				}
			}
			called = time.Now()
			touched := c.call("sandbox_touch", m{"session_id": id})
			if want := fmt.Sprintf(`{"expires_at":%q,"session_id":%q}`, touched.Structured["expires_at"], id); touched.Text != want || touched.IsError {
				t.Errorf("sandbox_touch answers\n%s instead of\n%s", touched.Text, want)
			}
			expires(touched, called)
			if a := c.call("sandbox_list", m{}); !strings.Contains(a.Text, `"session_id":"`+id+`"`) || !strings.Contains(a.Text, `"network":"none"`) {
				t.Errorf("list: %s", a.Text)
			}
			before := time.Now()
			for _, want := range []string{"closed", "nothing was closed: there is no such session, or not any more"} { // idempotent
				if a := c.call("sandbox_close", m{"session_id": id}); a.Text != want || a.IsError || a.Structured["closed"] != (want == "closed") || a.Structured["session_id"] != id {
					t.Errorf("close: %+v", a)
				}
			}
			if a := c.call("sandbox_close_run", m{"root_run_id": "nobody's"}); a.Text != "closed 0 sessions" || a.IsError || a.Structured["closed"] != 0.0 {
				t.Errorf("close of an unknown run: %+v", a)
			}
			t.Logf("close took %v", time.Since(before))
			if a := c.exec(id, "true"); !a.IsError || !strings.Contains(a.Text, "there is no such session") {
				t.Errorf("exec after close: %+v", a)
			}
			eventually(t, 30*time.Second, "the closed session's container is removed", func() bool { return len(s.containers()) == 0 })
		})
	}
}

// The limits of what a command is started with are said as they are.
func TestLongCommands(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	pair := func(char string) m { // as long as two variables may be
		return m{"A": strings.Repeat(char, 131000), "B": strings.Repeat(char, 131000)}
	}
	for name, tc := range map[string]struct {
		args m
		want string
	}{
		"the longest":        {m{"command": "#" + strings.Repeat("x", 131070)}, ""},
		"one byte more":      {m{"command": "#" + strings.Repeat("x", 131071)}, "command: has 131072 bytes, 131071 are allowed: write it to a file with sandbox_write and run that"},
		"3 MB":               {m{"command": strings.Repeat("x", 3_000_000)}, "command: has 3000000 bytes, 131071 are allowed: write it to a file with sandbox_write and run that"},
		"markup":             {m{"command": "#" + strings.Repeat("<", 131070), "env": pair("&")}, ""},
		"control characters": {m{"command": "true", "env": pair("\x01")}, "env: has too many control characters, with the command's, to be sent with it: hand them over in stdin or in a file"},
		"a long variable":    {m{"command": "true", "env": m{"A": strings.Repeat("x", 131070)}}, "env: A has 131072 bytes with its name, 131071 are allowed: hand it over in stdin or in a file"},
		"a long input":       {m{"command": "wc -c", "stdin": strings.Repeat("x", 3_000_000)}, "3000000\n"},
	} {
		tc.args["session_id"] = id
		if a := c.call("sandbox_exec", tc.args); a.Text != tc.want || a.IsError != strings.Contains(tc.want, ": ") {
			t.Errorf("%s: %.300q %.300q", name, a.Text, a.Body)
		}
	}
}

func TestOpenArguments(t *testing.T) {
	cpus := runtime.NumCPU() // docker refuses a container that asks for more
	s := start(t, "runc", map[string]string{"SANDBOX_MAX_CPU": "1024", "SANDBOX_MAX_MEM_MB": "600", "SANDBOX_MAX_PIDS": "700", "SANDBOX_MAX_TMPFS_MB": "256", "SANDBOX_MAX_TTL_SECONDS": "20000", "SANDBOX_MAX_OUTPUT_BYTES": "65536", "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL": "3", "SANDBOX_MAX_SESSIONS": "4", "SANDBOX_AUTH_TOKENS": "other=" + otherToken})
	c := s.client()
	for _, tc := range []struct {
		args m
		want string
	}{
		{m{"network": "host"}, `network: "host" is not allowed; none and egress are`},
		{m{"network": "egress"}, "network: egress is not allowed by the operator"},
		{m{"mem_mb": 1}, "mem_mb: 1 is too small, 16 to 600 are allowed"},
		{m{"mem_mb": 0}, "mem_mb: 0 is too small, 16 to 600 are allowed"},
		{m{"mem_mb": "512"}, "mem_mb: has to be a whole number, not a string"},
		{m{"network": strings.Repeat("n", 20000)}, `network: "nnnn`},
		{m{"pids": 1}, "pids: 1 is too small, 16 to 700 are allowed"},
		{m{"image": "other"}, `image: "other" is not on the operator's list (SANDBOX_IMAGES); allowed: default`},
		{m{"workspace": "ws"}, "SANDBOX_WORKSPACE_ROOT"},
		{m{"workspace": "../up"}, "workspace: a name has 1 to 64 characters"},
		{m{"privileged": true}, `arguments: "privileged" is none of this tool's; it takes cpu, image,`},
		{m{"ttl_seconds": 0}, "ttl_seconds: 0 is too small, 1 to 20000 are allowed"},
		{m{"cpu": "many"}, "cpu: has to be a number, not a string"},
	} {
		if a := c.call("sandbox_open", tc.args); !a.IsError || !strings.Contains(a.Text, tc.want) {
			t.Errorf("%v: %q does not say %q", tc.args, a.Text, tc.want)
		}
	}
	a := c.call("sandbox_open", m{"cpu": 1024, "mem_mb": json.Number("99999999999999999999"), "pids": 9999, "tmpfs_mb": 9999, "ttl_seconds": 99999})
	want := []any{"tmpfs_mb 9999 was cut to 256, the operator's limit", "mem_mb 99999999999999999999 was cut to 600, the operator's limit", "pids 9999 was cut to 700, the operator's limit", "ttl_seconds 99999 was cut to 20000, the operator's limit", fmt.Sprintf("cpu 1024 was cut to %d, the operator's limit", cpus)}
	if got, _ := a.Structured["notes"].([]any); !slices.Equal(got, want) {
		t.Errorf("of what was cut it tells\n%q instead of\n%q", got, want)
	}
	most, _ := a.Structured["session_id"].(string)
	const limits = "{{.HostConfig.Memory}} {{.HostConfig.MemorySwap}} {{.HostConfig.PidsLimit}} {{.HostConfig.NanoCpus}} "
	if got, want := s.podmanOut("inspect", "loomcycle-"+most, "--format", limits), fmt.Sprintf("629145600 629145600 700 %d", cpus*1e9); got != want {
		t.Errorf("the container that was cut is %s instead of %s", got, want)
	}
	const note = "\n268435456\n[output truncated: 34473 of 100009 bytes left out of the middle]\n[note: max_output_bytes 999999 was cut to 65536, the operator's limit]"
	if a := c.call("sandbox_exec", m{"session_id": most, "command": "head -c 99998 /dev/zero | tr '\\0' x; echo; df -B1 --output=size /work | tail -n 1 | tr -d ' '", "max_output_bytes": 999999}); !strings.HasSuffix(a.Text, note) {
		t.Errorf("output above the limit: ...%s", a.Text[max(0, len(a.Text)-2*len(note)):])
	}
	c.call("sandbox_close", m{"session_id": most})
	a = c.call("sandbox_open", m{"mem_mb": 600, "cpu": 0.5, "pids": 64, "tmpfs_mb": 8, "ttl_seconds": 600})
	if a.Structured["notes"] != nil {
		t.Errorf("nothing was cut, and it tells %v", a.Structured["notes"])
	}
	id, _ := a.Structured["session_id"].(string)
	in := s.podmanOut("inspect", "loomcycle-"+id, "--format", limits+"{{.HostConfig.NetworkMode}} {{.HostConfig.ReadonlyRootfs}} {{.Config.User}} {{.EffectiveCaps}} {{.HostConfig.SecurityOpt}}")
	if want := "629145600 629145600 64 500000000 none true 1000:1000 [] [no-new-privileges]"; in != want {
		t.Errorf("the container is\n%s instead of\n%s", in, want)
	}
	if a := c.exec(id, "df -B1 --output=size /work | tail -n 1 | tr -d ' '; stat -c %a /work; cat /proc/self/status | grep Seccomp: | tr -d '\\t'"); strings.Replace(a.Text, "\n1777\n", "\n777\n", 1) != "8388608\n777\nSeccomp:2\n" { // runc before 1.1.8 keeps the sticky bit of the image's folder
		t.Errorf("inside: %q", a.Text)
	}
	a = s.as(map[string]string{"X-Loom-Sandbox-Env-Gh-Token": "s3cret"}).call("sandbox_open", m{})
	if got, _ := a.Structured["notes"].([]any); !slices.Equal(got, []any{"environment headers were ignored: the operator has not set SANDBOX_ALLOW_ENV_INJECTION"}) {
		t.Errorf("of environment that is not allowed it tells %q", got)
	}
	plain, _ := a.Structured["session_id"].(string)
	if a := c.exec(plain, "env | grep -c s3cret"); a.Text != "0\n[exit: 1]" {
		t.Errorf("environment that is not allowed is there: %+v", a)
	}
	c.open(m{})
	if a := c.call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL is 3") {
		t.Errorf("a session above the cap: %+v", a)
	}
	other := s.as(map[string]string{"Authorization": "Bearer " + otherToken})
	other.open(m{})
	if a := other.call("sandbox_open", m{}); !a.IsError || !strings.Contains(a.Text, "SANDBOX_MAX_SESSIONS is 4") {
		t.Errorf("a session above the cap of all: %+v", a)
	}
	c.call("sandbox_close", m{"session_id": id})
	other.open(m{})
}
