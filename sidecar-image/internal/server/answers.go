package server

import (
	"context"
	"errors"
)

var (
	errNoOutput = errors.New("the commands that run may write as much as the sidecar has room for: try again when one of yours has ended, or ask for less (max_output_bytes)")
	errNoAnswer = errors.New("the sidecar holds all the answers that it has room for, until their clients take them: try again, or ask for less (max_bytes, max_output_bytes)")
)

// rooms are those for what one call makes.
type rooms struct {
	large, small *room
	full         error
}

// hold returns what waits for room for up to n bytes that a call makes, for as
// long as the server's timeout at most. The call says how much it has become, once;
// that much is kept until its request is over.
func (s *Server) hold(in rooms, principal string, over <-chan struct{}) func(ctx context.Context, n int64) (made func(n int64), err error) {
	return func(ctx context.Context, n int64) (func(int64), error) {
		r := in.large
		if n <= smallAnswer {
			r = in.small
		}
		waiting, cancel := context.WithTimeout(ctx, s.timeout)
		defer cancel()
		p, err := r.take(waiting, principal, n)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		default:
			return nil, in.full
		}
		return func(n int64) {
			p.keep(n)
			go func() { <-over; p.keep(0) }()
		}, nil
	}
}
