package session

import (
	"context"
	"fmt"
	"sync"
)

// departures are the containers that are being removed, counted for each of the Owners of
// what was in them; those of the pool, and strays, are of the owner "". Its zero value has
// none.
type departures struct {
	mu    sync.Mutex
	ids   map[string]bool // of their records
	count map[string]int
	less  chan struct{} // closed when the next has gone; nil when nobody waits
}

// add counts a record's container until it is gone, however often it is tried.
func (d *departures) add(rec Record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ids == nil {
		d.ids, d.count = map[string]bool{}, map[string]int{}
	}
	if !d.ids[rec.ID] {
		d.ids[rec.ID] = true
		d.counted(rec, 1)
	}
}

func (d *departures) gone(rec Record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.ids, rec.ID)
	d.counted(rec, -1)
	if d.less != nil {
		close(d.less)
		d.less = nil
	}
}

func (d *departures) counted(rec Record, n int) {
	for _, owner := range Owners(rec.Principal) {
		if d.count[owner] += n; d.count[owner] <= 0 {
			delete(d.count, owner)
		}
	}
}

func (d *departures) has(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ids[id]
}

// until waits for containers to go until enough have.
func (d *departures) until(ctx context.Context, enough func(*departures) bool) error {
	for {
		d.mu.Lock()
		if enough(d) {
			d.mu.Unlock()
			return nil
		}
		if d.less == nil {
			d.less = make(chan struct{})
		}
		less := d.less
		d.mu.Unlock()
		select {
		case <-less:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// wait keeps whoever opens and closes sessions faster than the engine removes them from
// filling it: of no owner, nor of all, are more containers being removed than there may be
// sessions, or containers in the pool.
func (d *departures) wait(ctx context.Context, principal string, l Limits) error {
	most := []int{l.PerPrincipal, l.PerTenant}
	if principal == "" {
		most[0] = l.WarmPool
	}
	err := d.until(ctx, func(d *departures) bool {
		if len(d.ids) > l.Sessions {
			return false
		}
		for i, owner := range Owners(principal) {
			if d.count[owner] > most[i] {
				return false
			}
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("waiting for the containers of closed sessions to be removed: %w", err)
	}
	return nil
}
