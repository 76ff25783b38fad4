package unlinked

import (
	"context"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

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
		"unlinked":          {"exec 3>f; rm f; fallocate -l 4M /dev/fd/3", size},
		"twice":             {"exec 3>f 4>&3; rm f; fallocate -l 4M /dev/fd/3", size},
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
			if got := Bytes(t.Context(), st.Dev, []string{strconv.Itoa(cmd.Process.Pid)}); got > c.most+size/2 || // file systems take more blocks than they need
				c.most >= size && got < c.most {
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
		if got := Bytes(t.Context(), st.Dev, []string{strconv.Itoa(os.Getpid())}); got < want || got > want+size/2 {
			t.Errorf("%d bytes of %d are seen", got, want)
		}
	})
}

// A look that is out of time ends, and so does a large one.
func TestBytesInTime(t *testing.T) {
	var files []*os.File
	for range 500 {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), 0, 0, 4096); err != nil {
			t.Fatal(err)
		}
		os.Remove(f.Name())
		files = append(files, f)
	}
	var st unix.Stat_t
	_ = unix.Fstat(int(files[0].Fd()), &st)
	me := strconv.Itoa(os.Getpid())
	if got := Bytes(t.Context(), st.Dev, []string{me}); got < int64(len(files))*4096 {
		t.Errorf("%d bytes of %d files", got, len(files))
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if got := Bytes(ended, st.Dev, []string{me}); got != 0 {
		t.Errorf("%d bytes are found out of time", got)
	}
	many := make([]string, 1<<20)
	for i := range many {
		many[i] = me
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	began := time.Now()
	if got := Bytes(ctx, st.Dev, many); got < int64(len(files))*4096 {
		t.Errorf("%d bytes of %d files, when it was out of time", got, len(files))
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
}

// A thread may have descriptors of its own.
func TestBytesOfAThread(t *testing.T) {
	dir := t.TempDir()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	const size = 4 << 20
	ready, done := make(chan error), make(chan struct{})
	defer close(done)
	go func() {
		runtime.LockOSThread() // and ends with the thread
		if err := unix.Unshare(unix.CLONE_FILES); err != nil {
			ready <- err
			return
		}
		fd, err := unix.Open(dir+"/f", unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err == nil {
			err = unix.Fallocate(fd, 0, 0, size)
		}
		_ = unix.Unlink(dir + "/f")
		ready <- err
		<-done
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	if got := Bytes(t.Context(), st.Dev, []string{strconv.Itoa(os.Getpid())}); got < size {
		t.Errorf("%d bytes of %d", got, size)
	}
}
