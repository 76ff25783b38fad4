package session

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	_ "modernc.org/sqlite" // the database driver
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

// Store keeps records in SQLite.
type Store struct {
	db       *sql.DB
	lock     *os.File
	Instance string // this sidecar's id, as in its containers' labels
}

// OpenStore opens, or makes, the database in dir, which is then this process's
// alone until Close. instance overrides the id that is otherwise made once and kept
// there.
func OpenStore(ctx context.Context, dir, instance string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the state directory (SANDBOX_STATE_DIR): %w", err)
	}
	// The kernel lets go of it when the process ends, however it does.
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		if err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == syscall.EWOULDBLOCK {
			err = errors.New("another sidecar that runs has it; give each a SANDBOX_STATE_DIR of its own")
		}
	}
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("locking the state directory %s: %w", dir, err)
	}
	// WAL with synchronous=NORMAL survives a kill -9 of the sidecar; a power cut,
	// which may lose the last writes, takes the containers with it.
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "sessions.db")+"?_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_pragma=busy_timeout(5000)&_pragma=cache_size(-512)")
	if err != nil {
		lock.Close()
		return nil, err
	}
	db.SetMaxOpenConns(1)
	s := &Store{db: db, lock: lock}
	if _, err := db.ExecContext(ctx, `
		CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, last_used INTEGER NOT NULL, record TEXT NOT NULL);
		CREATE TABLE IF NOT EXISTS sidecar (instance TEXT NOT NULL)`); err != nil {
		s.Close()
		return nil, fmt.Errorf("opening the session records in %s: %w", dir, err)
	}
	err = db.QueryRowContext(ctx, `SELECT instance FROM sidecar`).Scan(&s.Instance)
	if errors.Is(err, sql.ErrNoRows) {
		s.Instance = strings.ToLower(rand.Text())
		_, err = db.ExecContext(ctx, `INSERT INTO sidecar VALUES (?)`, s.Instance)
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("reading the sidecar's id: %w", err)
	}
	if instance != "" {
		s.Instance = instance
	}
	return s, nil
}

// Close closes the database and lets another have it.
func (s *Store) Close() error { return errors.Join(s.db.Close(), s.lock.Close()) }

// Put writes a record.
func (s *Store) Put(ctx context.Context, r Record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if _, err = s.db.ExecContext(ctx, `INSERT OR REPLACE INTO sessions VALUES (?,?,?)`, r.ID, r.LastUsed.UnixNano(), string(b)); err != nil {
		return fmt.Errorf("writing the session's record to SANDBOX_STATE_DIR: %w", err)
	}
	return nil
}

// Touch writes when a session was last used.
func (s *Store) Touch(ctx context.Context, id string, at time.Time) error {
	_, err := s.db.ExecContext(ctx, `UPDATE sessions SET last_used=? WHERE id=?`, at.UnixNano(), id)
	return err
}

// Delete removes a record.
func (s *Store) Delete(ctx context.Context, id string) error {
	_, err := s.db.ExecContext(ctx, `DELETE FROM sessions WHERE id=?`, id)
	return err
}

// All returns every record.
func (s *Store) All(ctx context.Context) ([]Record, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT last_used, record FROM sessions ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("reading the session records: %w", err)
	}
	defer rows.Close()
	var out []Record
	for rows.Next() {
		var used int64
		var text string
		if err := rows.Scan(&used, &text); err != nil {
			return nil, err
		}
		var r Record
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return nil, fmt.Errorf("a session record is damaged: %w", err)
		}
		r.LastUsed = time.Unix(0, used)
		out = append(out, r)
	}
	return out, rows.Err()
}
