package e2e

import (
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stopWithin is below the ten seconds that engines give a container to end; where nothing answers
// the sidecar's own timeouts take nine of them.
const stopWithin = 9800 * time.Millisecond

// ends waits for the program's end after a SIGTERM, and says how long it took.
func (s *sidecar) ends(began time.Time) {
	s.t.Helper()
	select {
	case <-s.ended:
		s.t.Logf("it ended after %v", time.Since(began))
	case <-time.After(time.Until(began.Add(stopWithin))):
		s.t.Errorf("it has not ended within %v", stopWithin)
		<-s.ended
	}
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		s.t.Errorf("it ended with %d", code)
	}
}

// A call that is under way when the sidecar is told to end is answered: with its result
// if it ends soon, else with what ended it. Its session lives on.
func TestStopAnswersCalls(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	c.exec(id, "echo kept > f")
	post := func(accept, command string) chan string {
		got := make(chan string, 1)
		body := `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"sandbox_exec","arguments":{"session_id":"` + id + `","command":"` + command + `"}}}`
		go func() {
			resp, err := s.as(map[string]string{"Accept": accept}).post(t.Context(), []byte(body))
			if err != nil {
				got <- err.Error()
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if err != nil {
				text = append(text, err.Error()...)
			}
			got <- resp.Header.Get("Content-Type") + " " + string(text)
		}()
		return got
	}
	const sentence = `"the call was ended: the sidecar is being stopped; try again when the next one runs"`
	calls := []struct {
		name, want string
		got        chan string
	}{
		{"in JSON", "application/json " + sentence, post("application/json", "sleep 91")},
		{"as an event", "text/event-stream " + sentence, post("application/json, text/event-stream", "sleep 92")},
		{"short", `application/json "well\n"`, post("application/json", "touch begun; until [ -f go ]; do sleep 0.05; done; echo well")},
	}
	eventually(t, 30*time.Second, "the commands run", func() bool {
		running := c.exec(id, "ps -eo args; ls").Text
		return strings.Contains(running, "sleep 91") && strings.Contains(running, "sleep 92") && strings.Contains(running, "begun")
	})
	c.exec(id, "(sleep 1; touch go) & disown")
	http.DefaultClient.CloseIdleConnections()
	began := time.Now()
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	for _, call := range calls {
		kind, text, _ := strings.Cut(call.want, " ")
		if got := <-call.got; !strings.HasPrefix(got, kind) || !strings.Contains(got, `"text":`+text) {
			t.Errorf("%s: %s", call.name, got)
		}
	}
	s.ends(began)
	s.run()
	if a := c.exec(id, "cat f; ps -eo args | grep -c '^sleep 9'"); a.Text != "kept\n0\n[exit: 1]" {
		t.Errorf("the session after it: %+v", a)
	}
}

// Neither an agent nor an engine that hangs keeps the sidecar, or who waits for it.
func TestStopWhenNothingAnswers(t *testing.T) {
	s := start(t, "runc", nil)
	c := s.client()
	id := c.open(m{})
	got := make(chan answer, 1)
	go func() {
		a, err := c.try(t.Context(), "sandbox_exec", m{"session_id": id, "command": "touch begun; sleep 90"})
		if err != nil {
			a.Text = err.Error()
		}
		got <- a
	}()
	eventually(t, 30*time.Second, "the command runs", func() bool { return c.exec(id, "ls").Text == "begun\n" })
	stop := func(text string) {
		pid := process(t, text)
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	}
	stop(s.podmanOut("inspect", "--format", "{{.State.Pid}}", "loomcycle-"+id))
	stop(s.processes("system service"))
	http.DefaultClient.CloseIdleConnections()
	began := time.Now()
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	if a := <-got; a.Text != "the call was ended: the sidecar is being stopped; try again when the next one runs" {
		t.Errorf("%+v", a)
	}
	s.ends(began)
}

// A sidecar that is told to end while it fills its pool removes what it made of it,
// and what calls have closed; one open session stays.
func TestStopEmptiesPool(t *testing.T) {
	s := start(t, "runc", map[string]string{"SANDBOX_WARM_POOL": "8", "SANDBOX_MEM_MB": "64"})
	c := s.client()
	kept, closed := c.open(m{"mem_mb": 32}), c.open(m{"mem_mb": 32})
	eventually(t, time.Minute, "the pool begins to fill", func() bool { return len(s.containers()) >= 6 })
	c.call("sandbox_close", m{"session_id": closed})
	began := time.Now()
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	s.ends(began)
	run := s.podmanOut("ps", "--filter", "label=loomcycle.instance="+s.env["SANDBOX_INSTANCE"], "--format", "{{.Names}}")
	if run != "loomcycle-"+kept {
		t.Errorf("these run: %s", run)
	}
	s.env["SANDBOX_WARM_POOL"] = "0"
	s.run()
	eventually(t, time.Minute, "the next sidecar removes what is left", func() bool { return len(s.containers()) == 1 })
	if a := c.exec(kept, "echo alive"); a.Text != "alive\n" {
		t.Errorf("the session: %+v", a)
	}
}
