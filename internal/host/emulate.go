package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

const binfmt = "/proc/sys/fs/binfmt_misc"

// emulators say by what QEMU runs an architecture's programs and how the
// kernel knows them: the head of a 64-bit little-endian ELF executable or shared
// object (type 2 or 3) for its machine, and which of its bits count.
var emulators = map[string]struct{ program, magic, mask string }{
	"arm64": {"qemu-aarch64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00`,
		`\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
	"amd64": {"qemu-x86_64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x3e\x00`,
		`\xff\xff\xff\xff\xff\xfe\xfe\xfc\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
}

// foreign is the architecture of a release that this machine is not.
var foreign = map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]

// Emulate makes the kernel run programs of an architecture (amd64 or arm64)
// that is not this machine's, also in containers and chroots, until the next
// boot: it installs QEMU's user emulation as Need does, and registers it with
// the flag F, which opens the emulator now, so that no root has to hold it.
// A registration that does the same already is left alone; else it takes root.
func Emulate(ctx context.Context, w io.Writer, arch string) error {
	if arch == runtime.GOARCH {
		return nil
	}
	e, ok := emulators[arch]
	if !ok {
		return fmt.Errorf("host: no emulation is known for the architecture %q", arch)
	}
	if ok, err := registered(e.magic); err != nil || ok {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("running %s programs here takes a binfmt registration: as root, apt-get install qemu-user-static binfmt-support", arch)
	}
	if err := Need(ctx, w, e.program); err != nil {
		return err
	}
	path, err := exec.LookPath(e.program)
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(binfmt, "register")); errors.Is(err, fs.ErrNotExist) {
		if err := unix.Mount("binfmt_misc", binfmt, "binfmt_misc", 0, ""); err != nil {
			return fmt.Errorf("mounting binfmt_misc at %s: %w; is the kernel's binfmt_misc there (modprobe binfmt_misc)?", binfmt, err)
		}
	}
	register, err := os.OpenFile(filepath.Join(binfmt, "register"), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("emulation of %s: %w", arch, err)
	}
	defer register.Close()
	// One process at a time, each with the kernel's own file for its lock.
	if err := unix.Flock(int(register.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("emulation of %s: locking %s: %w", arch, register.Name(), err)
	}
	// The mount, the package, or who had the lock may have brought one.
	if ok, err := registered(e.magic); err != nil || ok {
		return err
	}
	// A name of our own: the distribution's may be taken by a registration that
	// is disabled or lacks F. The newest one that fits is the one that counts. Our
	// own may be there and disabled, too.
	name := "loomcycle-" + arch
	if old, err := os.OpenFile(filepath.Join(binfmt, name), os.O_WRONLY, 0); err == nil {
		_, err := old.WriteString("-1")
		if err := errors.Join(err, old.Close()); err != nil {
			return fmt.Errorf("emulation of %s: removing the registration %s, which is disabled: %w", arch, name, err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("emulation of %s: %w", arch, err)
	}
	line := fmt.Sprintf(":%s:M::%s:%s:%s:POCF", name, e.magic, e.mask, path)
	if _, err := register.WriteString(line); err != nil {
		if ok, _ := registered(e.magic); ok && errors.Is(err, fs.ErrExist) { // by who knows no lock
			return nil
		}
		return fmt.Errorf("emulation of %s: registering %s with the kernel: %w", arch, path, err)
	}
	fmt.Fprintf(w, "registered %s for %s programs with the kernel\n", e.program, arch)
	return nil
}

// registered looks for an enabled registration with the flag F for the
// machine in the magic, whoever made it.
func registered(magic string) (bool, error) {
	machine := strings.ReplaceAll(magic[len(magic)-len(`\xb7\x00`):], `\x`, "")
	files, err := filepath.Glob(filepath.Join(binfmt, "*"))
	if err != nil {
		return false, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // register is write-only
		}
		var enabled, fixed, fits bool
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			switch name {
			case "enabled":
				enabled = true
			case "flags:":
				fixed = strings.Contains(value, "F")
			case "magic":
				fits = strings.HasPrefix(value, "7f454c46") && strings.HasSuffix(value, machine)
			}
		}
		if enabled && fixed && fits {
			return true, nil
		}
	}
	return false, nil
}
