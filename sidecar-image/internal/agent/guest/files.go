package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/reason"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/unlinked"
	"golang.org/x/sys/unix"
)

// Paths are confined by os.Root, which resolves each step with openat and
// refuses whatever leaves the directory, also when a symbolic link is swapped
// under way.

func (c *conn) read(stream uint32, o *op, m wire.Read) {
	size, err := c.readFile(stream, o, m)
	if err != nil {
		c.finish(stream, o, wire.TError, fileError(err))
		return
	}
	c.finish(stream, o, wire.TDone, wire.File{Size: size})
}

func (c *conn) readFile(stream uint32, o *op, m wire.Read) (int64, error) {
	if m.Offset < 0 || m.Max < 0 {
		return 0, &wire.Error{Code: wire.CodeBad, Message: "offset and max must not be negative"}
	}
	// Non-blocking, because opening a FIFO would wait for its writer.
	name, err := c.a.follow(m.Path)
	if err != nil {
		return 0, err
	}
	f, err := c.a.work.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if err := regular(st, m.Path); err != nil {
		return 0, err
	}
	if err := c.a.beneath(f); err != nil {
		return 0, err
	}
	r := io.NewSectionReader(f, m.Offset, m.Max)
	buf := make([]byte, wire.MaxData)
	for {
		k := o.credit.Take(len(buf))
		if k == 0 {
			return 0, &wire.Error{Code: wire.CodeFailed, Message: "the read was cancelled"}
		}
		n, err := io.ReadFull(r, buf[:k])
		o.credit.Add(k - n)
		if n > 0 {
			if err := c.w.Write(wire.TData, stream, buf[:n]); err != nil {
				return 0, err
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return st.Size(), nil
		}
		if err != nil {
			return 0, err
		}
	}
}

func (c *conn) write(stream uint32, o *op, m wire.Write) {
	err := c.writeFile(stream, o, m)
	if err != nil {
		c.finish(stream, o, wire.TError, fileError(err))
		return
	}
	c.finish(stream, o, wire.TDone, wire.File{Size: m.Size})
}

// writeFile replaces the file in one step, so that a full disk, a cancelled
// call or a reader at the same moment never sees half of it. Of a symbolic link
// it replaces the target.
func (c *conn) writeFile(stream uint32, o *op, m wire.Write) (err error) {
	if m.Mode&^0o777 != 0 {
		return &wire.Error{Code: wire.CodeBad, Message: fmt.Sprintf("mode %#o is not allowed, only the bits of 0777 are", m.Mode)}
	}
	name, err := c.a.follow(m.Path)
	if err != nil {
		return err
	}
	dir, err := c.a.parent(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	name = path.Base(name)
	mode := os.FileMode(m.Mode)
	if mode == 0 {
		mode = 0o644
	}
	switch st, err := dir.Lstat(name); {
	case err == nil:
		if err := regular(st, m.Path); err != nil {
			return err
		}
		if m.Mode == 0 {
			mode = st.Mode().Perm()
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	target := ".write-" + rand.Text()
	f, nameless, err := scratch(dir, target, mode)
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			_ = dir.Remove(target)
		}
	}()
	if err := f.Chmod(mode); err != nil { // whatever the umask
		return err
	}
	var got int64
	for {
		select {
		case b, ok := <-o.in:
			if !ok {
				if got != m.Size {
					return &wire.Error{Code: wire.CodeBad, Message: fmt.Sprintf("%d bytes came, %d were announced", got, m.Size)}
				}
				if nameless {
					if err := link(f, dir, target); err != nil {
						return err
					}
				}
				return dir.Rename(target, name)
			}
			if got += int64(len(b)); got > m.Size {
				return &wire.Error{Code: wire.CodeBad, Message: fmt.Sprintf("more than the %d announced bytes came", m.Size)}
			}
			if _, err := f.Write(b); err != nil {
				return err
			}
			c.consumed(stream, o, b)
		case <-o.ctx.Done():
			return &wire.Error{Code: wire.CodeFailed, Message: "the write was cancelled"}
		}
	}
}

// parent opens the directory of a path that follow has returned, and makes what is missing
// of it. Whatever changes places meanwhile, what is then made in it, by a name alone, is in
// the session's directory.
func (a *Agent) parent(name string) (*os.Root, error) {
	at, err := a.work.OpenRoot(".")
	if err != nil {
		return nil, err
	}
	for _, step := range steps(path.Dir(name)) {
		const dir = "/." // opens nothing but a directory: a FIFO would wait for its other end
		next, err := at.OpenRoot(step + dir)
		if errors.Is(err, fs.ErrNotExist) {
			if err = a.within(at); err == nil {
				err = at.Mkdir(step, 0o755)
			}
			if err == nil || errors.Is(err, fs.ErrExist) { // another write has made it
				next, err = at.OpenRoot(step + dir)
			}
		}
		at.Close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	if err := a.within(at); err != nil {
		at.Close()
		return nil, err
	}
	return at, nil
}

// within is beneath for a directory.
func (a *Agent) within(dir *os.Root) error {
	f, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	return a.beneath(f)
}

// scratch makes the file that is to replace another. It has no name where that is possible,
// so that nothing of it stays when the container dies under the write; gVisor and some file
// systems cannot do that.
func scratch(dir *os.Root, name string, mode os.FileMode) (f *os.File, nameless bool, err error) {
	if f, err = dir.OpenFile(".", os.O_WRONLY|unix.O_TMPFILE, mode); err == nil {
		return f, true, nil
	}
	f, err = dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NONBLOCK, mode)
	return f, false, err
}

// link names a file that has none.
func link(f *os.File, dir *os.Root, name string) error {
	in, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer in.Close()
	// By /proc, as linking an empty path needs a capability.
	return unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), int(in.Fd()), name, unix.AT_SYMLINK_FOLLOW)
}

// beneath refuses a file or directory that os.Root has opened outside of the session's
// directory: gVisor's kernel of 2022 follows a link in spite of O_NOFOLLOW when
// O_DIRECTORY is asked for too, as for each directory on the way.
func (a *Agent) beneath(f *os.File) error {
	at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err == nil && at != a.dir && !strings.HasPrefix(at, a.dir+"/") {
		err = errOutside
	}
	return err
}

// scanFor is how long the agent looks for files without a name: less than the second that
// the sidecar waits.
const scanFor = 700 * time.Millisecond

// unlinked tells what of the session's directory no walk through it finds.
func (c *conn) unlinked(stream uint32, o *op) {
	var st syscall.Stat_t
	if err := syscall.Stat(c.a.dir, &st); err != nil {
		c.finish(stream, o, wire.TError, fileError(err))
		return
	}
	ctx, cancel := context.WithTimeout(o.ctx, scanFor)
	defer cancel()
	c.finish(stream, o, wire.TDone, wire.File{Size: unlinked.Bytes(ctx, st.Dev, unlinked.Processes())})
}

// errOutside is the kernel's, or os.Root's, refusal of a path.
var errOutside = &wire.Error{Code: wire.CodeDenied, Message: "it leads out of /work, through a symbolic link or .."}

// escapes tells os.Root's refusal, which has no value of its own, from other errors.
func escapes(err error) bool {
	err = reason.Of(err)
	return err != nil && strings.HasPrefix(err.Error(), "path escapes")
}

// maxLinks is how many symbolic links a path may lead through, as in Linux.
const maxLinks = 40

// maxFollow is to what depth of directories links are followed here; each step opens all those
// above it.
const maxFollow = 256

// follow returns the path without symbolic links to which name leads. os.Root alone refuses
// absolute links, also those within the directory, and gVisor's kernel follows some before it
// is asked. What follow returns is text, and no promise: os.Root judges it when it is opened.
func (a *Agent) follow(name string) (string, error) {
	if path.IsAbs(name) {
		return "", errOutside
	}
	var done []string
	links := 0
	for todo := steps(name); len(todo) > 0; {
		if len(done) == maxFollow {
			return path.Join(append(done, todo...)...), nil
		}
		step := todo[0]
		todo = todo[1:]
		if step == ".." {
			if len(done) == 0 {
				return "", errOutside
			}
			done = done[:len(done)-1]
			continue
		}
		at := path.Join(append(slices.Clone(done), step)...)
		st, err := a.work.Lstat(at)
		switch {
		case errors.Is(err, fs.ErrNotExist) && !slices.Contains(todo, ".."):
			return path.Join(append([]string{at}, todo...)...), nil // may be made
		case err != nil:
			return "", err
		case st.Mode()&fs.ModeSymlink == 0:
			done = append(done, step)
			continue
		}
		if links++; links > maxLinks {
			return "", syscall.ELOOP
		}
		to, err := a.work.Readlink(at)
		if err != nil {
			return "", err
		}
		next := steps(to)
		if path.IsAbs(to) {
			top := steps(a.dir)
			if len(next) < len(top) || !slices.Equal(next[:len(top)], top) {
				return "", errOutside
			}
			done, next = nil, next[len(top):]
		}
		todo = append(next, todo...)
	}
	return path.Join(append([]string{"."}, done...)...), nil
}

// steps are the names in a path, and its "..".
func steps(p string) []string {
	return slices.DeleteFunc(strings.Split(p, "/"), func(s string) bool { return s == "" || s == "." })
}

func regular(st fs.FileInfo, name string) error {
	switch {
	case st.IsDir():
		return &wire.Error{Code: wire.CodeIsDir, Message: fmt.Sprintf("%s is a directory", name)}
	case !st.Mode().IsRegular():
		return &wire.Error{Code: wire.CodeDenied, Message: fmt.Sprintf("%s is not a regular file (%s)", name, st.Mode().Type())}
	}
	return nil
}

// fileError gives an error its code, in the kernel's words.
func fileError(err error) *wire.Error {
	var we *wire.Error
	if errors.As(err, &we) {
		return we
	}
	if escapes(err) {
		return errOutside
	}
	code := wire.CodeFailed
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = wire.CodeNotFound
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code = wire.CodeFull
	case errors.Is(err, syscall.EISDIR):
		code = wire.CodeIsDir
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		code = wire.CodeDenied
	}
	return &wire.Error{Code: code, Message: reason.Of(err).Error()}
}
