package server

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
)

// room bounds the request bodies, or the answers, that are held at once, in bytes: all of it is
// for everyone together, half of it for any one tenant that is attested, with a quarter for each
// of its principals, and half for any other principal.
type room struct {
	size int64
	all  *semaphore.Weighted

	mu     sync.Mutex
	shares map[string]*share
}

type share struct {
	*semaphore.Weighted
	owner string
	users int // places, and those who wait for one
}

func newRoom(size int64) *room {
	return &room{size: size, all: semaphore.NewWeighted(size), shares: map[string]*share{}}
}

// place is what one of them takes of a room.
type place struct {
	room   *room
	shares []*share // the narrowest first
	n      int64
}

// take waits for n bytes, from 1 to a quarter of the room's size, until ctx ends.
func (r *room) take(ctx context.Context, principal string, n int64) (*place, error) {
	p := &place{r, r.enter(principal), n}
	// All's last: who waits in a share holds nothing of the others'.
	in := p.semaphores()
	for i, s := range in {
		if err := s.Acquire(ctx, n); err != nil {
			for _, s := range in[:i] {
				s.Release(n)
			}
			r.leave(p)
			return nil, err
		}
	}
	return p, nil
}

func (p *place) semaphores() (all []*semaphore.Weighted) {
	for _, s := range p.shares {
		all = append(all, s.Weighted)
	}
	return append(all, p.room.all)
}

// enter finds the shares that a principal's place is part of.
func (r *room) enter(principal string) (shares []*share) {
	r.mu.Lock()
	defer r.mu.Unlock()
	owners, part := session.Owners(principal), r.size/2
	for i, owner := range owners {
		s := r.shares[owner]
		if s == nil {
			s = &share{Weighted: semaphore.NewWeighted(part >> (len(owners) - 1 - i)), owner: owner}
			r.shares[owner] = s
		}
		s.users++
		shares = append(shares, s)
	}
	return shares
}

func (r *room) leave(p *place) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range p.shares {
		if s.users--; s.users == 0 {
			delete(r.shares, s.owner)
		}
	}
}

// keep gives back what is above n bytes. One caller at a time.
func (p *place) keep(n int64) {
	spare := p.n - n
	if spare <= 0 {
		return
	}
	p.n = n
	for _, s := range p.semaphores() {
		s.Release(spare)
	}
	if n == 0 {
		p.room.leave(p)
	}
}
