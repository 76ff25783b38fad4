package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

const binfmt = "/proc/sys/fs/binfmt_misc"

// foreign says by what QEMU runs an architecture's programs and how the
// kernel knows them: the head of an ELF file, and which of its bits count.
var foreign = map[string]struct{ program, magic, mask string }{
	"arm64": {"qemu-aarch64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00`,
		`\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
	"amd64": {"qemu-x86_64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x3e\x00`,
		`\xff\xff\xff\xff\xff\xfe\xfe\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
}

// Emulate makes the kernel run programs of a foreign architecture (amd64,
// arm64), also in containers and chroots, until the next boot. It installs
// QEMU's user emulation as Need does and needs root unless the kernel is
// already told.
func Emulate(ctx context.Context, w io.Writer, arch string) error {
	if arch == runtime.GOARCH {
		return nil
	}
	f, ok := foreign[arch]
	if !ok {
		return fmt.Errorf("host: no emulation is known for the architecture %q", arch)
	}
	name := strings.TrimSuffix(f.program, "-static")
	if b, err := os.ReadFile(filepath.Join(binfmt, name)); err == nil && strings.HasPrefix(string(b), "enabled") {
		return nil
	}
	if err := Need(ctx, w, f.program); err != nil {
		return err
	}
	program, err := exec.LookPath(f.program)
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(binfmt, "register")); err != nil {
		if err := unix.Mount("binfmt_misc", binfmt, "binfmt_misc", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("emulation of %s: mounting binfmt_misc at %s needs root and a kernel that has it: %w", arch, binfmt, err)
		}
	}
	// F opens QEMU now, so that it works in a chroot that lacks it.
	line := fmt.Sprintf(":%s:M:0:%s:%s:%s:F", name, f.magic, f.mask, program)
	if err := os.WriteFile(filepath.Join(binfmt, "register"), []byte(line), 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("emulation of %s: registering %s with the kernel: %w", arch, program, err)
	}
	return nil
}
