package host

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// TestEmulate runs in a user namespace, which has a binfmt_misc of its own
// (since Linux 6.7): nothing is registered there, and nothing of it stays.
func TestEmulate(t *testing.T) {
	if os.Getenv("TEST_EMULATE_PROGRAM") != "" {
		emulateAlone(t)
		return
	}
	citest.Program(t, emulators[foreign].program, "apt-get install qemu-user-static")
	dir := t.TempDir()
	source := filepath.Join(dir, "hello.go")
	if err := os.WriteFile(source, []byte("package main\n\nimport \"runtime\"\n\nfunc main() { println(runtime.GOARCH) }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "hello")
	build := exec.Command("go", "build", "-o", program, source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+foreign, "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	self := exec.Command("/proc/self/exe", "-test.run=^TestEmulate$", "-test.v")
	self.Env = append(os.Environ(), "TEST_EMULATE_PROGRAM="+program)
	self.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := self.CombinedOutput()
	switch {
	case err == nil && bytes.Contains(out, []byte("--- SKIP")):
		t.Skipf("%s", out) // in CI too: no package brings another kernel
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// emulateAlone is the test inside the namespace.
func emulateAlone(t *testing.T) {
	if err := unix.Mount("binfmt_misc", binfmt, "binfmt_misc", 0, ""); err != nil {
		var u unix.Utsname
		var major, minor int
		if uerr := unix.Uname(&u); uerr != nil {
			t.Fatal(uerr)
		}
		release := unix.ByteSliceToString(u.Release[:])
		fmt.Sscanf(release, "%d.%d", &major, &minor)
		if errors.Is(err, unix.EPERM) && (major < 6 || major == 6 && minor < 7) {
			t.Skipf("Linux %s has no binfmt_misc for a user namespace: %v", release, err)
		}
		citest.Skip(t, "Linux %s mounts no binfmt_misc in a user namespace: %v", release, err)
	}
	program, e := os.Getenv("TEST_EMULATE_PROGRAM"), emulators[foreign]
	run := func() (string, error) {
		out, err := exec.Command(program).CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	if out, err := run(); err == nil {
		t.Fatalf("the program runs before anything is registered: %s", out)
	}
	// A registration without F is of no use in a container.
	path, err := exec.LookPath(e.program)
	if err != nil {
		t.Fatal(err)
	}
	line := ":" + strings.TrimSuffix(e.program, "-static") + ":M::" + e.magic + ":" + e.mask + ":" + path + ":"
	if err := os.WriteFile(filepath.Join(binfmt, "register"), []byte(line), 0o200); err != nil {
		t.Fatal(err)
	}
	if ok, err := registered(e.magic); ok || err != nil {
		t.Errorf("a registration without F counts: %v, %v", ok, err)
	}
	var log bytes.Buffer
	if err := Emulate(t.Context(), &log, foreign); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "registered "+e.program+" for "+foreign) {
		t.Errorf("it says %q", &log)
	}
	if out, err := run(); err != nil || out != foreign {
		t.Errorf("the program says %q, %v", out, err)
	}
	log.Reset()
	if err := Emulate(t.Context(), &log, foreign); err != nil || log.Len() > 0 {
		t.Errorf("a second call says %q, %v", &log, err)
	}
	if ok, err := registered(emulators[runtime.GOARCH].magic); ok || err != nil {
		t.Errorf("the other machine's programs are taken for registered: %v, %v", ok, err)
	}
	// A registration that somebody disabled does not count, and is no obstacle.
	ours := filepath.Join(binfmt, "loomcycle-"+foreign)
	if err := os.WriteFile(ours, []byte("0"), 0o200); err != nil {
		t.Fatal(err)
	}
	if ok, err := registered(e.magic); ok || err != nil {
		t.Errorf("a disabled registration counts: %v, %v", ok, err)
	}
	var all sync.WaitGroup
	for range 8 { // processes that start together
		all.Go(func() {
			if err := Emulate(t.Context(), io.Discard, foreign); err != nil {
				t.Errorf("after it was disabled: %v", err)
			}
		})
	}
	all.Wait()
	if out, err := run(); err != nil || out != foreign {
		t.Errorf("registered anew, the program says %q, %v", out, err)
	}
}

func TestEmulateRefuses(t *testing.T) {
	if err := Emulate(t.Context(), t.Output(), runtime.GOARCH); err != nil {
		t.Errorf("this machine's own architecture: %v", err)
	}
	if err := Emulate(t.Context(), t.Output(), "mips"); err == nil || !strings.Contains(err.Error(), `"mips"`) {
		t.Errorf("mips: %v", err)
	}
}

func TestNeed(t *testing.T) {
	if err := Need(t.Context(), t.Output(), "git"); err != nil {
		t.Errorf("git is here: %v", err)
	}
	if err := Need(t.Context(), t.Output(), "gti"); err == nil || !strings.Contains(err.Error(), `no Debian package is known for "gti"`) {
		t.Errorf("%v", err)
	}
	t.Setenv("PATH", t.TempDir())
	err := Need(t.Context(), t.Output(), "skopeo", "runsc")
	if err == nil || !strings.Contains(err.Error(), "apt-get install runsc skopeo") {
		t.Errorf("without apt-get the error is: %v", err)
	}
	// What podman starts itself, wherever it looks for that.
	companions["git"] = []string{"xz", "ldconfig"}
	packages["ldconfig"] = "libc-bin"
	defer func() { delete(companions, "git"); delete(packages, "ldconfig") }()
	err = Need(t.Context(), t.Output(), "git")
	if err == nil || !strings.Contains(err.Error(), "apt-get install git xz-utils") || strings.Contains(err.Error(), "libc-bin") {
		t.Errorf("with companions the error is: %v", err)
	}
}
