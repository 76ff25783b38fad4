package server

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// room bounds the request bodies, or the answers, that are held at once, in bytes: all of it is
// for everyone together, half of it for any one principal.
type room struct {
	size int64
	all  *semaphore.Weighted

	mu     sync.Mutex
	shares map[string]*share
}

type share struct {
	*semaphore.Weighted
	users int // places, and those who wait for one
}

func newRoom(size int64) *room {
	return &room{size: size, all: semaphore.NewWeighted(size), shares: map[string]*share{}}
}

// place is what one of them takes of a room.
type place struct {
	room      *room
	principal string
	share     *share
	n         int64
}

// take waits for n bytes, from 1 to half the room's size, until ctx ends.
func (r *room) take(ctx context.Context, principal string, n int64) (*place, error) {
	r.mu.Lock()
	own := r.shares[principal]
	if own == nil {
		own = &share{Weighted: semaphore.NewWeighted(r.size / 2)}
		r.shares[principal] = own
	}
	own.users++
	r.mu.Unlock()
	p := &place{r, principal, own, n}
	// The own share first: who waits in it holds nothing of the others'.
	if err := own.Acquire(ctx, n); err != nil {
		r.leave(p)
		return nil, err
	}
	if err := r.all.Acquire(ctx, n); err != nil {
		own.Release(n)
		r.leave(p)
		return nil, err
	}
	return p, nil
}

func (r *room) leave(p *place) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.share.users--; p.share.users == 0 {
		delete(r.shares, p.principal)
	}
}

// keep gives back what is above n bytes. One caller at a time.
func (p *place) keep(n int64) {
	spare := p.n - n
	if spare <= 0 {
		return
	}
	p.n = n
	p.room.all.Release(spare)
	p.share.Release(spare)
	if n == 0 {
		p.room.leave(p)
	}
}
