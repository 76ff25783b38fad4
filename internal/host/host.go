// Package host gets the programs that the pipeline needs from the machine:
// installed with apt where it may be, named in one sentence where not.
package host

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// packages says which Debian package holds a program.
var packages = map[string]string{
	"crun":                "crun",
	"curl":                "curl",
	"docker-registry":     "docker-registry",
	"git":                 "git",
	"iptables":            "iptables",
	"jq":                  "jq",
	"mmdebstrap":          "mmdebstrap",
	"newgidmap":           "uidmap",
	"newuidmap":           "uidmap",
	"nft":                 "nftables",
	"npm":                 "npm",
	"openssl":             "openssl",
	"podman":              "podman",
	"qemu-aarch64-static": "qemu-user-static",
	"qemu-x86_64-static":  "qemu-user-static",
	"rootlesskit":         "rootlesskit",
	"runc":                "runc",
	"runsc":               "runsc",
	"skopeo":              "skopeo",
	"slirp4netns":         "slirp4netns",
	"xz":                  "xz-utils",
}

// companions are what a program starts itself, also where a user's PATH does not
// lead, and Debian only recommends with it.
var companions = map[string][]string{
	"podman": {"nft", "iptables"}, // netavark, for bridges: nft since 1.12, iptables before
}

// Tests are the programs that the project's tests run beside the engines'
// libraries. Docker's are not among them (internal/dockertest).
var Tests = []string{"crun", "curl", "docker-registry", "git", "jq", "mmdebstrap", "newuidmap", "npm", "openssl", "podman", emulators[foreign].program, "rootlesskit", "runc", "runsc", "skopeo", "slirp4netns", "xz"}

// MissingError names the Debian packages that this machine lacks.
type MissingError struct{ Packages []string }

func (e *MissingError) Error() string {
	list := strings.Join(e.Packages, " ")
	return fmt.Sprintf("missing on this machine: %s; install with: apt-get install %s (as root)", list, list)
}

// Need makes the programs available: those that are missing are installed
// with apt when this process is root on Debian, saying so on w; otherwise the
// MissingError says what to install.
func Need(ctx context.Context, w io.Writer, programs ...string) error {
	missing := map[string]bool{}
	for _, p := range programs {
		for _, c := range companions[p] {
			if !found("/usr/sbin/"+c) && !found(c) {
				missing[packages[c]] = true
			}
		}
		pkg := packages[p]
		if pkg == "" {
			return fmt.Errorf("host: no Debian package is known for %q", p)
		}
		if !found(p) {
			missing[pkg] = true
		}
	}
	if len(missing) == 0 {
		return nil
	}
	names := slices.Sorted(maps.Keys(missing))
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return &MissingError{names}
	}
	fmt.Fprintf(w, "installing Debian packages: %s\n", strings.Join(names, " "))
	install := append([]string{"install", "-y", "-q", "--no-install-recommends"}, names...)
	if out, err := apt(ctx, install...); err == nil {
		return nil
	} else if _, uerr := apt(ctx, "update", "-q"); uerr != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(install, " "), err, out)
	}
	if out, err := apt(ctx, install...); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(install, " "), err, out)
	}
	return nil
}

func found(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

func apt(ctx context.Context, args ...string) ([]byte, error) {
	return Apt(ctx, args...).CombinedOutput()
}

// unused is how long Sweep lets lie what nobody asks for.
const unused = 7 * 24 * time.Hour

// Sweep removes what is in a folder of a cache and has not been used in a week.
// Who uses an entry tells by Used. What can't be removed, another user's say, is
// no reason to stop what is to be done now.
func Sweep(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > unused {
			_ = os.RemoveAll(filepath.Join(dir, e.Name()))
		}
	}
}

// Used keeps an entry from Sweep for another week.
func Used(name string) {
	now := time.Now()
	_ = os.Chtimes(name, now, now)
}

// Discard removes a temporary folder. When the work was interrupted another
// process does it: mage ends this one five seconds after an interrupt, and
// gigabytes of small files take longer.
func Discard(ctx context.Context, dir string) error {
	if ctx.Err() == nil {
		return os.RemoveAll(dir)
	}
	rm := exec.Command("rm", "-rf", "--", dir)
	rm.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return rm.Start()
}
