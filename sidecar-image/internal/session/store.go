package session

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/reason"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// State of a record. A record is written before its container exists and goes
// only after it is gone, so a container without one is nobody's.
type State string

// States.
const (
	Opening State = "opening"
	Pooled  State = "pooled"
	Open    State = "open"
	Closing State = "closing"
)

// Record is what outlives the sidecar. It holds no injected environment: that
// stays in the session's agent.
type Record struct {
	ID        string    `json:"id"`
	State     State     `json:"state"`
	Container string    `json:"container,omitempty"`
	Key       string    `json:"key"` // opens the agent's second connection
	Principal string    `json:"principal,omitempty"`
	Tenant    string    `json:"tenant,omitempty"`
	RootRun   string    `json:"root_run,omitempty"`
	Network   string    `json:"network"`
	Workspace string    `json:"workspace,omitempty"`
	Image     string    `json:"image,omitempty"`
	MemMB     int64     `json:"mem_mb,omitempty"`
	Created   time.Time `json:"created"`
	Deadline  time.Time `json:"deadline"`
	LastUsed  time.Time `json:"-"`
}

// Store keeps each record in a file of its own, which is replaced whole; the
// file's time of modification is when the session was last used. That survives a
// kill -9 of the sidecar. A power cut may lose the last writes, so only the id, by
// which the next sidecar finds its containers, is synced: those it has no record of,
// where the engine is on another machine and they run on, it removes.
type Store struct {
	dir      string
	lock     *os.File
	Instance string // this sidecar's id, as in its containers' labels
}

const recordSuffix = ".json"

// OpenStore opens, or makes, the records in dir, which is this process's alone
// until Close. instance overrides the id that is otherwise made once and kept there.
func OpenStore(dir, instance string) (_ *Store, err error) {
	s := &Store{dir: filepath.Join(dir, "sessions"), Instance: instance}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the state directory (SANDBOX_STATE_DIR): %w", err)
	}
	// The kernel lets go of it when the process ends, however it does.
	if s.lock, err = os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, fmt.Errorf("locking the state directory: %w", err)
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	err = syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == syscall.EWOULDBLOCK {
		err = errors.New("another sidecar that runs has it; give each a SANDBOX_STATE_DIR of its own")
	}
	if err != nil {
		return nil, fmt.Errorf("locking the state directory %s: %w", dir, err)
	}
	left, err := filepath.Glob(filepath.Join(s.dir, ".*"))
	if err != nil {
		return nil, err
	}
	for _, name := range left { // of writes that a kill ended
		if err := os.Remove(name); err != nil {
			return nil, fmt.Errorf("opening the session records: %w", err)
		}
	}
	if s.Instance != "" {
		return s, nil
	}
	name := filepath.Join(dir, "instance")
	id, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		id = []byte(strings.ToLower(rand.Text()))
		err = atomicfile.Write(name, id, 0o600)
	}
	if err == nil && len(id) == 0 {
		err = fmt.Errorf("%s is empty", name)
	}
	if err != nil {
		return nil, fmt.Errorf("the sidecar's id in SANDBOX_STATE_DIR: %w", err)
	}
	s.Instance = string(id)
	return s, nil
}

// Close lets another have the records.
func (s *Store) Close() { s.lock.Close() }

func (s *Store) file(id string) string { return filepath.Join(s.dir, id+recordSuffix) }

// Put writes a record: whole or not at all, and with the time of its last use. Power
// that is cut may lose it, as it does the session.
func (s *Store) Put(r Record) error {
	b, err := json.Marshal(r)
	if err == nil {
		err = s.replace(s.file(r.ID), b, r.LastUsed)
	}
	if err != nil {
		return fmt.Errorf("writing the session's record to SANDBOX_STATE_DIR: %w", reason.Of(err))
	}
	return nil
}

func (s *Store) replace(name string, content []byte, modified time.Time) error {
	f, err := os.CreateTemp(s.dir, ".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails harmlessly once renamed
	_, err = f.Write(content)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Chtimes(f.Name(), modified, modified); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

// Touch writes when a session was last used.
func (s *Store) Touch(id string, at time.Time) error { return os.Chtimes(s.file(id), at, at) }

// Delete removes a record. One that is not there is no error.
func (s *Store) Delete(id string) error {
	if err := os.Remove(s.file(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the session's record: %w", err)
	}
	return nil
}

// Recorded tells which workspaces the records in a state directory name, by their
// workspace.Key: those of sessions that run, or ran until their sidecar ended. It locks
// nothing, so the directory's sidecar may run. One that never was a sidecar's is an error.
func Recorded(dir string) (map[string]bool, error) {
	all, err := (&Store{dir: filepath.Join(dir, "sessions")}).All()
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, r := range all {
		if r.Workspace != "" {
			out[workspace.Key(r.Principal, r.Workspace)] = true
		}
	}
	return out, nil
}

// All returns every record. One that a power cut has damaged is that of a session
// which never came up.
func (s *Store) All() ([]Record, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("reading the session records: %w", err)
	}
	var out []Record
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok || strings.HasPrefix(id, ".") {
			continue
		}
		b, err := os.ReadFile(s.file(id))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		info, serr := e.Info()
		if errors.Is(serr, fs.ErrNotExist) {
			continue
		}
		if err = errors.Join(err, serr); err != nil {
			return nil, fmt.Errorf("reading the session records: %w", err)
		}
		r := Record{ID: id, State: Opening}
		if json.Unmarshal(b, &r) != nil || r.ID != id {
			r = Record{ID: id, State: Opening}
		}
		r.LastUsed = info.ModTime()
		out = append(out, r)
	}
	return out, nil
}
