package release

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// journal is what a run must leave for the next: its claims and where each
// channel pointed before it moved. A version's journal is held by one process.
type journal struct {
	Version string            `json:"version"`
	Claims  map[string]string `json:"claims,omitempty"` // registry to claim id
	Moves   []move            `json:"moves,omitempty"`  // channels, in the order they are moved
	file    string
	hold    *os.File
	fresh   bool // no earlier run left it
}

// move is a channel tag of one image.
type move struct {
	Registry   string `json:"registry"`
	Repository string `json:"repository"`
	Tag        string `json:"tag"`
	From       string `json:"from,omitempty"` // digest; empty: there was no such tag
	To         string `json:"to"`
}

// openJournal reads a version's journal or starts one. It fails when another
// process on this machine has it.
func openJournal(dir string, v Version) (*journal, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("open the release journal: %w", err)
	}
	j := &journal{Version: string(v), Claims: map[string]string{}, file: filepath.Join(dir, string(v)+".json")}
	hold, err := os.OpenFile(j.file+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the release journal: %w", err)
	}
	if err := unix.Flock(int(hold.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		hold.Close()
		return nil, fmt.Errorf("release %s already runs on this machine (%s is locked): %w", v, hold.Name(), err)
	}
	j.hold = hold
	text, err := os.ReadFile(j.file)
	if errors.Is(err, fs.ErrNotExist) {
		j.fresh = true
		return j, nil
	}
	if err == nil {
		err = json.Unmarshal(text, j)
	}
	if err != nil {
		j.close()
		return nil, fmt.Errorf("read the release journal %s: %w", j.file, err)
	}
	return j, nil
}

// save writes the journal through to the disk: it must outlive a kill and a power cut.
func (j *journal) save() error {
	text, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(j.file, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the release journal: %w", err)
	}
	return nil
}

// fits fails when the journal speaks of a registry that is not configured: to
// finish without it would leave it half released, and forget that.
func (j *journal) fits(registries []Registry) error {
	var known, missing []string
	for _, r := range registries {
		known = append(known, r.Address)
	}
	for _, a := range slices.Sorted(maps.Keys(j.Claims)) {
		if !slices.Contains(known, a) {
			missing = append(missing, a)
		}
	}
	for _, m := range j.Moves {
		if !slices.Contains(known, m.Registry) && !slices.Contains(missing, m.Registry) {
			missing = append(missing, m.Registry)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("an earlier run of %s also released to %s, which is not configured now: configure it again to finish, or delete %s to leave it as it is", j.Version, strings.Join(missing, ", "), j.file)
	}
	return nil
}

// remember adds a move. Where an earlier run has moved the same tag, its From
// stays; where the tag was elsewhere since, it goes back to there.
func (j *journal) remember(m move) {
	for i, old := range j.Moves {
		if old.Registry == m.Registry && old.Repository == m.Repository && old.Tag == m.Tag {
			if m.From != old.To {
				j.Moves[i].From = m.From
			}
			j.Moves[i].To = m.To
			return
		}
	}
	j.Moves = append(j.Moves, m)
}

// finish removes the journal; one that was never saved is no error.
func (j *journal) finish() error {
	if err := os.Remove(j.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (j *journal) close() { j.hold.Close() }
