// Package host gets the programs that the pipeline needs from the machine:
// installed with apt where it may be, named in one sentence where not.
package host

import (
	"context"
	"errors"
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

	"github.com/gofrs/flock"
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
	return install(ctx, w, append([]string{"install", "-y", "-q", "--no-install-recommends"}, names...)...)
}

// install runs apt-get, and once more with new lists when it fails: those that
// are there may be of before an update of the archive. A lock is held with new
// ones too.
func install(ctx context.Context, w io.Writer, args ...string) error {
	err := apt(ctx, w, args...)
	if err == nil || errors.Is(err, errLocked) || Update(ctx, w) != nil {
		return err
	}
	return apt(ctx, w, args...)
}

// Update gets apt's lists anew, as root, and shows on w what apt says. For the
// lists apt waits for nobody, so that two of the pipeline's processes do it one
// after the other.
func Update(ctx context.Context, w io.Writer) error {
	done, err := Turn(ctx, "/run/loomcycle-images-apt.lock")
	if err != nil {
		return err
	}
	defer done()
	return apt(ctx, w, "update", "-q")
}

func found(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

// errLocked says that apt gave up waiting for another program.
var errLocked = errors.New("dpkg's lock was not to be had: let that program end, or end it, and try again")

// apt runs apt-get and shows on w what it says, as it comes: a wait for the lock
// above all. Its complaints are in the error too.
func apt(ctx context.Context, w io.Writer, args ...string) error {
	cmd := Apt(ctx, args...)
	out := &aptOutput{w: w}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	if len(out.rest) > 0 {
		_, _ = out.Write([]byte("\n"))
	}
	if err == nil {
		return nil
	}
	complaints := strings.Join(out.complaints, "\n")
	if strings.Contains(complaints, "dpkg frontend lock") {
		err = fmt.Errorf("%w: %w", err, errLocked)
	}
	return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, complaints)
}

// aptOutput passes apt's lines on, one that is said again and again only once.
type aptOutput struct {
	w          io.Writer
	rest       []byte // the line that has not ended
	last       string
	complaints []string // errors, and whom apt waits for
}

func (o *aptOutput) Write(p []byte) (int, error) {
	o.rest = append(o.rest, p...)
	for {
		line, rest, ended := strings.Cut(string(o.rest), "\n")
		if !ended {
			return len(p), nil
		}
		o.rest = []byte(rest)
		if line == o.last {
			continue
		}
		o.last = line
		if slices.ContainsFunc([]string{"E: ", "dpkg: ", "Waiting for cache lock: "}, func(p string) bool { return strings.HasPrefix(line, p) }) {
			o.complaints = append(o.complaints, line)
		}
		fmt.Fprintln(o.w, line) // apt goes on when nobody can read it: dpkg must not end half way
	}
}

// Turn waits until no other process has the lock of a file, which it makes, and
// holds it until done is called or the process ends.
func Turn(ctx context.Context, file string) (done func(), err error) {
	l := flock.New(file, flock.SetPermissions(0o644))
	if _, err := l.TryLockContext(ctx, 20*time.Millisecond); err != nil {
		return nil, fmt.Errorf("locking %s: %w", file, err)
	}
	return func() { _ = l.Close() }, nil
}

// unused is how long Sweep lets lie what nobody asks for.
const unused = 7 * 24 * time.Hour

// turnFile is the lock of a folder that Sweep sweeps.
const turnFile = ".lock"

// TurnIn is the Turn of a folder of a cache. Who takes an entry of it for his own
// tells by Used before the turn is over, and sweeps in it: no other process then
// removes the entry, or finds half of it.
func TurnIn(ctx context.Context, dir string) (done func(), err error) {
	return Turn(ctx, filepath.Join(dir, turnFile))
}

// Sweep removes what is in a folder of a cache and has not been used in a week.
// Who uses an entry tells by Used. The caller has the folder's turn (TurnIn). What
// can't be removed, another user's say, is no reason to stop what is to be done now.
func Sweep(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.Name() != turnFile && time.Since(info.ModTime()) > unused {
			_ = os.RemoveAll(filepath.Join(dir, e.Name()))
		}
	}
}

// Used keeps an entry from Sweep for another week.
func Used(name string) {
	now := time.Now()
	_ = os.Chtimes(name, now, now)
}

// Keep keeps entries from Sweep for as long as the context lives.
func Keep(ctx context.Context, names ...string) {
	go func() {
		for tick := time.NewTicker(unused / 7); ; {
			for _, name := range names {
				Used(name)
			}
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
		}
	}()
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
