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

const binfmtDir = "/proc/sys/fs/binfmt_misc"

// emulators are the registrations for binaries of the other architecture:
// the ELF header of a 64-bit little-endian executable or shared object
// (type 2 or 3) for its machine, and the bytes of it that count.
var emulators = map[string]struct{ arch, program, magic, mask string }{
	"amd64": {"arm64", "qemu-aarch64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00`,
		`\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
	"arm64": {"amd64", "qemu-x86_64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x3e\x00`,
		`\xff\xff\xff\xff\xff\xfe\xfe\xfc\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
}

// Binfmt makes the kernel run binaries of the other architecture (amd64 or
// arm64) under QEMU, in containers too: the flag F opens the emulator once, at
// registration, so that it need not be in the container. A registration that
// is there already is left alone. It takes root unless one is.
func Binfmt(ctx context.Context, w io.Writer) error {
	e, ok := emulators[runtime.GOARCH]
	if !ok {
		return fmt.Errorf("no emulator is known for a machine of architecture %s", runtime.GOARCH)
	}
	if ok, err := registered(e.magic); err != nil || ok {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("running %s images here takes a binfmt registration: as root, apt-get install qemu-user-static binfmt-support", e.arch)
	}
	if err := Need(ctx, w, e.program); err != nil {
		return err
	}
	path, err := exec.LookPath(e.program)
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(binfmtDir, "register")); errors.Is(err, fs.ErrNotExist) {
		if err := unix.Mount("binfmt_misc", binfmtDir, "binfmt_misc", 0, ""); err != nil {
			return fmt.Errorf("mounting binfmt_misc at %s: %w; is the kernel's binfmt_misc there (modprobe binfmt_misc)?", binfmtDir, err)
		}
		// A mount shows what the kernel already has.
		if ok, err := registered(e.magic); err != nil || ok {
			return err
		}
	}
	line := fmt.Sprintf(":%s:M::%s:%s:%s:POCF", strings.TrimSuffix(e.program, "-static"), e.magic, e.mask, path)
	if err := os.WriteFile(filepath.Join(binfmtDir, "register"), []byte(line), 0o200); err != nil {
		return fmt.Errorf("registering %s with the kernel: %w", e.program, err)
	}
	fmt.Fprintf(w, "registered %s for %s binaries with the kernel\n", e.program, e.arch)
	return nil
}

// registered looks for an enabled registration with the flag F for the
// machine in the magic, whoever made it.
func registered(magic string) (bool, error) {
	machine := magic[len(magic)-len(`\xb7\x00`):]
	hex := strings.ReplaceAll(machine, `\x`, "")
	files, err := filepath.Glob(filepath.Join(binfmtDir, "*"))
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
				fits = strings.HasPrefix(value, "7f454c46") && strings.HasSuffix(value, hex)
			}
		}
		if enabled && fixed && fits {
			return true, nil
		}
	}
	return false, nil
}
