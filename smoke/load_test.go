package smoke

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/loomcycle/loomcycle-images/images"
)

// Every case of the repository loads, concerns an image of the family and,
// all together, they cover each reported fault.
func TestCases(t *testing.T) {
	s, err := Load(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	f, err := images.Load(os.DirFS(".."))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.checkImages(f); err != nil {
		t.Error(err)
	}
	faults := map[int]bool{}
	for _, c := range s.Cases {
		faults[c.Fault] = true
	}
	// 4 and 6 are profiles of the case of fault 3.
	for n := 1; n <= 13; n++ {
		if !faults[n] && n != 4 && n != 6 {
			t.Errorf("no case rules out fault %d", n)
		}
	}
	for _, p := range []string{"root-tmpfs", "arbitrary-uid"} {
		if _, ok := s.Profiles[p]; !ok {
			t.Errorf("the profile %s is missing", p)
		}
	}
}

func TestLoadErrors(t *testing.T) {
	head := "cases:\n  - name: one\n    title: A case of a test\n    images: [loomcycle]\n"
	service := head + "    phases:\n      - name: p\n        service: {stop_within: 3s, "
	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		{"unknown field", head + "    steps:\n      - {run: 'true', exitcode: 1}\n", []string{"cases/x.yaml:6", "case one steps 0", "exitcode"}},
		{"no output", head + "    steps:\n      - {run: 'true', stdout: ['^$']}\n", []string{"cases/x.yaml", `\A\z`}},
		{"wrong type", head + "    steps:\n      - {run: 'true', exit: many}\n", []string{"cases/x.yaml:6", "case one steps 0 exit", "got string, want integer"}},
		{"bad duration", head + "    timeout: soon\n    steps: [{run: 'true'}]\n", []string{"cases/x.yaml:5", "case one timeout", "soon"}},
		{"no steps", head, []string{"cases/x.yaml:2", "case one", "steps"}},
		{"missing title", "cases:\n  - name: one\n    images: [x]\n    steps: [{run: x}]\n", []string{"cases/x.yaml:2", "case one", "title"}},
		{"bad pattern", head + "    steps:\n      - {run: 'true', stdout: ['(']}\n", []string{"cases/x.yaml", "missing closing )"}},
		{"unknown profile", head + "    profiles: [gone]\n    steps: [{run: 'true'}]\n", []string{"cases/x.yaml: case one", `no profile is called "gone"`}},
		{"unknown fixture", head + "    fixture: gone\n    steps: [{run: 'true'}]\n", []string{"case one", `smoke/fixtures has no folder "gone"`}},
		{"two of a name", head + "    steps: [{run: 'true'}]\n" + strings.TrimPrefix(head, "cases:\n") + "    steps: [{run: 'true'}]\n", []string{"case one", "same name"}},
		{"wrong runtime", head + "    container: {runtime: kata}\n    steps: [{run: 'true'}]\n", []string{"cases/x.yaml:5", "case one container runtime", "runsc"}},
		{"a mount of nothing", head + "    container: {mounts: [{path: /x}]}\n    steps: [{run: 'true'}]\n", []string{"cases/x.yaml:5", "case one container mounts 0", "tmpfs"}},
		{"a mount of two kinds", head + "    container:\n      mounts:\n        - {path: /x, bind: a, volume: b}\n    steps: [{run: 'true'}]\n", []string{"cases/x.yaml:7", "case one container mounts 0: give one of tmpfs, bind, volume"}},
		{"two commands", head + "    steps:\n      - {run: 'true', exec: [x]}\n", []string{"cases/x.yaml:6", "case one steps 0: give one of run, exec, probe"}},
		{"no command", head + "    steps:\n      - {stdout: [a]}\n", []string{"cases/x.yaml:6: case one steps 0: give one of run, exec, probe"}},
		{"no regular expression", head + "    steps:\n      - run: 'true'\n        stdout: [a]\n        stderr:\n          - 'a('\n          - '^$'\n", []string{"cases/x.yaml:9: case one steps 0 stderr 0: error parsing regexp: missing closing )", "cases/x.yaml:10: case one steps 0 stderr 1: \"^$\" matches"}},
		{"several at once", head + "    steps: [{run: 'true'}]\n    profiles: [odd]\n    fixture: none\n", []string{`no profile is called "odd"`, `no folder "none"`}},
		{"a field of a phase", head + "    phases:\n      - name: p\n        step: [{run: 'true'}]\n", []string{"cases/x.yaml:6", "case one phases 0", "step"}},
		{"a field of a profile", "profiles:\n  odd:\n    container: {readonly: sometimes}\n", []string{"cases/x.yaml:3", "profiles odd container readonly", "want boolean"}},
		{"a field beside the cases", "case: []\n", []string{"cases/x.yaml:1", "'case'"}},
		{"outside of no service", head + "    steps: [{outside: true, probe: [http, GET, 'http://${80}/']}]\n", []string{"cases/x.yaml:5", "case one steps 0", "outside"}},
		{"files of a service's step", service + "steps: [{probe: [uid], files: [{path: /x}]}]}\n", []string{"cases/x.yaml:7", "service steps 0", "'files' not allowed"}},
		{"surroundings of a service's step", service + "ready: {run: 'true', env: {A: b}, only_env: [A], dir: /x, stdin: x}}\n", []string{"cases/x.yaml:7", "service ready", "'dir'", "'env'", "'only_env'", "'stdin'"}},
		{"fixture of a service", service + "steps: [{probe: [uid]}]}\n        fixture: there\n", []string{"cases/x.yaml:6", "case one phases 0", "fixture"}},
		{"fixture for services alone", strings.Replace(service, "    phases", "    fixture: there\n    phases", 1) + "steps: [{probe: [uid]}]}\n", []string{"case one", "a service gets no fixture"}},
		{"outside without ports", head + "    phases:\n      - name: p\n        service: {ready: {probe: [uid]}, stop_within: 3s, steps: [{outside: true, probe: [http, GET, 'http://${80}/']}]}\n", []string{"cases/x.yaml: case one", "ports: [N]"}},
		{"outside at another port", head + "    container: {ports: [8080]}\n    phases:\n      - name: p\n        service: {ready: {probe: [uid]}, stop_within: 3s, steps: [{outside: true, probe: [http, GET, 'http://${80}/']}]}\n", []string{"cases/x.yaml: case one", "${80}", "[8080]"}},
		{"no YAML", "cases: [", []string{"cases/x.yaml", "line 1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Load(fstest.MapFS{
				"cases/x.yaml":   {Data: []byte(tc.text)},
				"fixtures/there": {Mode: os.ModeDir},
			})
			if err == nil {
				t.Fatal("it was accepted")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in the error:\n%v", w, err)
				}
			}
		})
	}
}

// A probe that the context ended has no exit code that a case could want.
func TestOutsideEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "probe"), []byte("#!/bin/sh\nexec sleep 60\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	late := errors.New("the phase took more than that")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, late)
	defer cancel()
	r := &runner{probes: map[string]string{runtime.GOARCH: dir}}
	if out, err := r.outside(ctx, nil, []string{"probe", "http"}); !errors.Is(err, late) {
		t.Errorf("%+v, %v", out, err)
	}
}

// A profile's container, with what the case and the phase change of it.
func TestOver(t *testing.T) {
	yes, no := true, false
	base := Container{Network: "none", ReadOnly: &yes, Pids: 100, Env: map[string]string{"A": "1", "B": "1"},
		Mounts: []Mount{{Path: "/work", Tmpfs: "0777"}, {Path: "/tmp", Tmpfs: "01777"}}}
	got := base.over(Container{ReadOnly: &no, Pids: 10, User: "7", Env: map[string]string{"B": "2"}, Mounts: []Mount{{Path: "/work", Bind: "w"}}})
	if *got.ReadOnly || got.Pids != 10 || got.User != "7" || got.Network != "none" || got.Env["A"]+got.Env["B"] != "12" {
		t.Errorf("%+v", got)
	}
	if len(got.Mounts) != 2 || got.Mounts[0].Path != "/tmp" || got.Mounts[1].Bind != "w" {
		t.Errorf("mounts %+v", got.Mounts)
	}
	if base.Env["B"] != "1" {
		t.Error("the profile was changed")
	}
}

// A misspelt image is an error, not a case that never runs.
func TestUnknownImage(t *testing.T) {
	f := &images.Family{Images: []images.Image{{Name: "loomcycle"}, {Name: "loomcycle-toolbox"}}}
	s := &Suite{Cases: []Case{{Name: "one", File: "cases/x.yaml", Images: []string{"loomcycle*", "loomcycle-toolbx"}}}}
	err := s.checkImages(f)
	if err == nil || err.Error() != `cases/x.yaml: case one: no image is called "loomcycle-toolbx"; there are loomcycle, loomcycle-toolbox` {
		t.Error(err)
	}
	s.Cases[0].Images = []string{"loomcycle*"}
	if err := s.checkImages(f); err != nil {
		t.Error(err)
	}
}

// An image named without its registry is refused before any registry is asked.
func TestReferenceNeedsRegistry(t *testing.T) {
	for _, ref := range []string{"loomcycle", "team/loomcycle:1.2.3", "registry.example/loomcycle"} {
		_, err := (&runner{}).remoteTargets(t.Context(), ref)
		if err == nil || !strings.Contains(err.Error(), "could not parse reference: "+ref) || !strings.Contains(err.Error(), "write REGISTRY/REPOSITORY") {
			t.Errorf("%s: %v", ref, err)
		}
	}
}
