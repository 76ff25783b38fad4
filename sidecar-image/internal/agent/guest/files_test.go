package guest

import (
	"bytes"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"golang.org/x/sys/unix"
)

// A file's name does not make an error os.Root's refusal, nor hide one.
func TestEscapes(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	const name = "path escapes from parent"
	for path, want := range map[string]string{name: wire.CodeNotFound, "../" + name: wire.CodeDenied} {
		_, open := root.Open(path)
		rename := root.Rename(path, "x")
		for did, err := range map[string]error{"open": open, "rename": rename} {
			if got := fileError(err); got.Code != want || (got.Message == errOutside.Message) != (want == wire.CodeDenied) {
				t.Errorf("%s %s: %+v of %v", did, path, got, err)
			}
		}
	}
}

// What takes a directory's place is not waited for: a FIFO would be, for ever.
func TestParentIsADirectory(t *testing.T) {
	dir := t.TempDir()
	a, err := New(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600), os.WriteFile(filepath.Join(dir, "file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{"fifo/x": syscall.ENOTDIR, "file/x": syscall.ENOTDIR, "new/deep/x": nil} {
		got := make(chan error, 1)
		go func() {
			at, err := a.parent(name)
			if err == nil {
				at.Close()
			}
			got <- err
		}()
		select {
		case err := <-got:
			if !errors.Is(err, want) {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: it waits", name)
		}
	}
}

// Half a write has no name where the file system can do that, so that none stays in a
// durable workspace when the container dies under it. Elsewhere it goes by its own.
func TestHalfAWrite(t *testing.T) {
	dir := t.TempDir()
	a, err := New(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	defer ours.Close()
	go a.Serve(theirs)
	_ = ours.SetDeadline(time.Now().Add(30 * time.Second))
	w, r := wire.NewWriter(ours), wire.NewReader(ours)
	until := func(want wire.Type) {
		t.Helper()
		for {
			f, err := r.Read()
			if err != nil || f.Type == wire.TError {
				t.Fatalf("it answers %s, %v", f.Payload, err)
			}
			if f.Type == want {
				return
			}
		}
	}
	half := bytes.Repeat([]byte("x"), wire.MaxData)
	send := func(say func() error) { go func() { _ = say() }() }
	send(func() error { return w.WriteJSON(wire.THello, 0, wire.Hello{Version: wire.Version, Key: "k"}) })
	until(wire.THello)
	send(func() error {
		_ = w.WriteJSON(wire.TWrite, 1, wire.Write{Path: "d/f", Size: int64(2 * len(half)), Mode: 0o751})
		return w.Write(wire.TData, 1, half)
	})
	until(wire.TGrant) // it has been written
	names := 0
	if f, err := os.OpenFile(dir, os.O_WRONLY|unix.O_TMPFILE, 0o600); err == nil {
		f.Close()
	} else {
		t.Logf("files without a name: %v", err)
		names = 1
	}
	if left, err := os.ReadDir(filepath.Join(dir, "d")); err != nil || len(left) != names || names > 0 && !strings.HasPrefix(left[0].Name(), ".write-") {
		t.Errorf("under the write there are %v, %v", left, err)
	}
	send(func() error { _ = w.Write(wire.TData, 1, half); return w.Write(wire.TEnd, 1) })
	until(wire.TDone)
	st, err := os.Stat(filepath.Join(dir, "d", "f"))
	if left, _ := os.ReadDir(filepath.Join(dir, "d")); err != nil || st.Size() != int64(2*len(half)) || st.Mode() != 0o751 || len(left) != 1 {
		t.Errorf("after it there are %v: %v, %v", left, st, err)
	}
}
