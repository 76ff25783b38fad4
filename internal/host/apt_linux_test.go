package host

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// aptWorld gives apt-get folders of its own for the test, and holds the lock that
// dpkg has there until release is called.
func aptWorld(t *testing.T) (release func()) {
	t.Helper()
	citest.Program(t, "apt-get", "the test is of Debian")
	dir := t.TempDir()
	for _, name := range []string{"etc/apt.conf.d", "etc/sources.list.d", "etc/preferences.d", "state/lists/partial", "cache/archives/partial", "dpkg"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	conf := fmt.Sprintf("Dir \"%[1]s\"; Dir::Etc \"etc\"; Dir::State \"state\"; Dir::State::status \"%[1]s/dpkg/status\"; Dir::Cache \"cache\";\n", dir)
	for name, text := range map[string]string{"apt.conf": conf, "dpkg/status": "", "etc/sources.list": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("APT_CONFIG", filepath.Join(dir, "apt.conf"))
	lock, err := os.OpenFile(filepath.Join(dir, "dpkg", "lock-frontend"), os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := syscall.FcntlFlock(lock.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	return func() { lock.Close() }
}

// A lock that stays is waited for once, and the waiting told.
func TestInstallEndsAtTheLock(t *testing.T) {
	aptWorld(t)
	var out bytes.Buffer
	err := install(t.Context(), &out, "-o", "DPkg::Lock::Timeout=3", "install", "-y", "-q", "no-such-package")
	holder := fmt.Sprintf("held by process %d", os.Getpid())
	if !errors.Is(err, errLocked) || !strings.Contains(err.Error(), holder) {
		t.Errorf("error %v, which does not say that the lock is %s", err, holder)
	}
	if strings.Count(out.String(), "Waiting for cache lock") != 1 || !strings.Contains(out.String(), holder) {
		t.Errorf("the wait is not told once:\n%s", &out)
	}
}

// The waiting is told while it lasts; who has the lock then gets on, and what
// fails for another reason is tried again with new lists.
func TestInstallWaits(t *testing.T) {
	release := aptWorld(t)
	var out bytes.Buffer
	err := install(t.Context(), io.MultiWriter(&out, writerFunc(func(p []byte) {
		if strings.Contains(string(p), "Waiting for cache lock") {
			release()
		}
	})), "install", "-y", "-q", "no-such-package")
	if err == nil || errors.Is(err, errLocked) || !strings.Contains(err.Error(), "Unable to locate package no-such-package") {
		t.Errorf("error %v", err)
	}
	want := 1
	if os.Geteuid() == 0 { // who may get lists
		want = 2
	}
	if n := strings.Count(out.String(), "Unable to locate package"); n != want {
		t.Errorf("tried %d times, not %d:\n%s", n, want, &out)
	}
}

type writerFunc func(p []byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }
