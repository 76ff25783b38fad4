package unlinked

import (
	"io"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// However a process keeps a file without a name, it is counted, once; and no other is.
func TestBytes(t *testing.T) {
	const size = 4 << 20
	for what, c := range map[string]struct {
		script string
		most   int64
	}{
		"named":             {"exec 3>f; head -c 4M /dev/zero >&3", 0},
		"unlinked":          {"exec 3>f; rm f; head -c 4M /dev/zero >&3", size},
		"twice":             {"exec 3>f 4>&3; rm f; head -c 4M /dev/zero >&3", size},
		"allocated":         {"exec 3>f; fallocate -l 4M f; rm f", size},
		"of another device": {"exec 3>/dev/shm/loomcycle-unlinked-$$; rm /dev/shm/loomcycle-unlinked-$$; head -c 4M /dev/zero >&3", 0},
		"another process's": {"exec 4>&1; (exec 3>f; rm f; head -c 4M /dev/zero >&3; echo >&4; read -r x)", 0},
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			var st unix.Stat_t
			if err := unix.Stat(dir, &st); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("bash", "-ec", c.script+"; echo; read -r x")
			cmd.Dir = dir
			in, _ := cmd.StdinPipe()
			out, _ := cmd.StdoutPipe()
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = in.Close(); _ = cmd.Wait() }()
			if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
				t.Fatalf("the script failed: %v", err)
			}
			if got := Bytes(st.Dev, []string{strconv.Itoa(cmd.Process.Pid)}); got > c.most+64<<10 || c.most >= size && got < c.most {
				t.Errorf("%d bytes, not about %d", got, c.most)
			}
		})
	}
	t.Run("mapped", func(t *testing.T) {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		_ = unix.Fstat(int(f.Fd()), &st)
		m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(m) }()
		f.Close()
		os.Remove(f.Name())
		want := int64(size)
		if os.Getuid() != 0 {
			want = 0 // only root follows /proc/PID/map_files
		}
		if got := Bytes(st.Dev, []string{strconv.Itoa(os.Getpid())}); got < want || got > want+64<<10 {
			t.Errorf("%d bytes of %d are seen", got, want)
		}
	})
}
