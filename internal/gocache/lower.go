package gocache

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"
)

// The lower cache is a folder with the file index and the outputs: files
// named by their hash. The index is a sorted list of records of fixed length
// (action id, output id, size as 64 bits big endian), so that it is read in
// one call, searched where it lies, and the same whenever it is made.
const (
	indexFile  = "index"
	recordSize = HashSize + HashSize + 8
)

// Lower is a read-only cache.
type Lower struct {
	dir   string
	index []byte
	time  time.Time
}

// OpenLower opens the cache in a folder. A folder without an index is no
// cache, and (nil, nil) is returned: the upper one then does all the work.
func OpenLower(dir string) (*Lower, error) {
	f, err := os.Open(filepath.Join(dir, indexFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	index, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	if len(index)%recordSize != 0 {
		return nil, fmt.Errorf("%s is not an index of a build cache: %d bytes", f.Name(), len(index))
	}
	return &Lower{dir: dir, index: index, time: info.ModTime()}, nil
}

func (l *Lower) get(action []byte) (Entry, bool) {
	if l == nil {
		return Entry{}, false
	}
	n := len(l.index) / recordSize
	i := sort.Search(n, func(i int) bool { return bytes.Compare(l.index[i*recordSize:][:HashSize], action) >= 0 })
	if i == n || !bytes.Equal(l.index[i*recordSize:][:HashSize], action) {
		return Entry{}, false
	}
	rec := l.index[i*recordSize:][:recordSize]
	e := Entry{Output: ID(rec[HashSize:]), Size: int64(binary.BigEndian.Uint64(rec[2*HashSize:])), Time: l.time}
	e.Path = l.path(e.Output)
	return e, true
}

func (l *Lower) path(output ID) string { return filepath.Join(l.dir, hex.EncodeToString(output[:])) }

// Pack makes a lower cache in the empty folder out of the go command's own
// cache, with every time set to the epoch.
func Pack(cache, out string, epoch time.Time) error {
	actions, err := filepath.Glob(filepath.Join(cache, "??", "*-a"))
	if err != nil {
		return err
	}
	if len(actions) == 0 {
		return fmt.Errorf("%s is no build cache of go, or an empty one", cache)
	}
	upper, lower := Upper{Dir: cache}, Lower{dir: out}
	var records [][]byte
	for _, name := range actions {
		action, err := hex.DecodeString(strings.TrimSuffix(filepath.Base(name), "-a"))
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		e, ok := upper.get(action)
		if !ok {
			continue // an executable, which is a folder
		}
		text, err := os.ReadFile(e.Path)
		if err != nil {
			return err
		}
		to := lower.path(e.Output)
		if err := os.WriteFile(to, text, 0o444); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
		if err := os.Chtimes(to, epoch, epoch); err != nil {
			return err
		}
		rec := append(action, e.Output[:]...)
		records = append(records, binary.BigEndian.AppendUint64(rec, uint64(e.Size)))
	}
	slices.SortFunc(records, bytes.Compare)
	index := filepath.Join(out, indexFile)
	if err := os.WriteFile(index, bytes.Join(records, nil), 0o444); err != nil {
		return err
	}
	return errors.Join(os.Chtimes(index, epoch, epoch), os.Chtimes(out, epoch, epoch))
}
