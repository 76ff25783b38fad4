package gocache

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Upper is the user's GOCACHE in the go command's own format
// (cmd/go/internal/cache), so that it can be used without this program, and
// `go clean -cache` cleans it. The go command makes its 256 folders before
// it starts a GOCACHEPROG.
type Upper struct{ Dir string }

// entryFormat is the content of a file for an action: action id, output id,
// size, nanoseconds since 1970.
const entryFormat = "v1 %x %x %20d %20d\n"

// Ages as the go command has them: a use is noted once an hour, and what was
// not used for five days is removed, looking once a day.
const (
	noteAge = time.Hour
	keepAge = 5 * 24 * time.Hour
	trimAge = 24 * time.Hour
)

func (u Upper) path(id []byte, kind string) string {
	name := hex.EncodeToString(id)
	return filepath.Join(u.Dir, name[:2], name+"-"+kind)
}

func (u Upper) get(action []byte) (Entry, bool) {
	if len(action) != HashSize {
		return Entry{}, false
	}
	name := u.path(action, "a")
	text, err := os.ReadFile(name)
	if err != nil {
		return Entry{}, false
	}
	fields := bytes.Fields(text)
	if len(fields) != 5 || string(fields[0]) != "v1" || string(fields[1]) != hex.EncodeToString(action) {
		return Entry{}, false
	}
	var e Entry
	if n, err := hex.Decode(e.Output[:], fields[2][:min(len(fields[2]), 2*HashSize)]); err != nil || n != HashSize {
		return Entry{}, false
	}
	size, err1 := strconv.ParseInt(string(fields[3]), 10, 64)
	nano, err2 := strconv.ParseInt(string(fields[4]), 10, 64)
	if err1 != nil || err2 != nil {
		return Entry{}, false
	}
	e.Size, e.Time, e.Path = size, time.Unix(0, nano), u.path(e.Output[:], "d")
	info, err := os.Stat(e.Path)
	if err != nil || !info.Mode().IsRegular() || info.Size() != size {
		return Entry{}, false
	}
	now := time.Now()
	for _, file := range []string{name, e.Path} {
		if info, err := os.Stat(file); err == nil && now.Sub(info.ModTime()) > noteAge {
			os.Chtimes(file, now, now) // best effort, as in the go command
		}
	}
	return e, true
}

// put stores a request's body. The body is read to its end even on an error,
// since the next request comes after it.
func (u Upper) put(req request, in *bufio.Reader) (Entry, error) {
	b := body(req, in)
	defer io.Copy(io.Discard, b)
	if len(req.ActionID) != HashSize || len(req.OutputID) != HashSize {
		return Entry{}, errors.New("an id of a put has the wrong length")
	}
	e := Entry{Output: ID(req.OutputID), Size: req.BodySize, Time: time.Now(), Path: u.path(req.OutputID, "d")}
	if info, err := os.Stat(e.Path); err != nil || info.Size() != e.Size {
		if err := write(e.Path, b, e.Size); err != nil {
			return e, err
		}
	}
	entry := fmt.Sprintf(entryFormat, req.ActionID, req.OutputID, e.Size, e.Time.UnixNano())
	return e, write(u.path(req.ActionID, "a"), strings.NewReader(entry), int64(len(entry)))
}

// write makes a file whole or not at all: several go commands share a cache.
func write(name string, from io.Reader, size int64) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".put-*")
	if err != nil {
		return err
	}
	n, err := io.Copy(f, from)
	if err == nil && n != size {
		err = fmt.Errorf("%s: %d bytes came and not %d", name, n, size)
	}
	// The go command makes its files 0666 before the umask; CreateTemp does not.
	err = errors.Join(err, f.Chmod(0o666&^umask()), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// trim removes what was not used for long, at most once a day. Like the go
// command it never fails a build over it.
func (u Upper) trim(now time.Time) {
	stamp := filepath.Join(u.Dir, "trim.txt")
	if text, err := os.ReadFile(stamp); err == nil {
		if t, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && now.Sub(time.Unix(t, 0)) < trimAge {
			return
		}
	}
	note := strconv.FormatInt(now.Unix(), 10)
	if write(stamp, strings.NewReader(note), int64(len(note))) != nil {
		return
	}
	for i := range 256 {
		folder := filepath.Join(u.Dir, fmt.Sprintf("%02x", i))
		entries, err := os.ReadDir(folder)
		if err != nil {
			continue
		}
		for _, e := range entries {
			if info, err := e.Info(); err == nil && now.Sub(info.ModTime()) > keepAge+noteAge {
				os.RemoveAll(filepath.Join(folder, e.Name()))
			}
		}
	}
}
