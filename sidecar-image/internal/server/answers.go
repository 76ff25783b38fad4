package server

import (
	"context"
	"errors"
)

var errNoRoom = errors.New("the sidecar holds all the answers that it has room for, until their clients take them: try again, or ask for less (max_bytes, max_output_bytes)")

// hold returns what takes room for a call's answer of up to n bytes, for as
// long as the server's timeout at most. The call says how large the answer has
// become, once; that much is kept until its request is over.
func (s *Server) hold(principal string, over <-chan struct{}) func(ctx context.Context, n int64) (made func(n int64), err error) {
	return func(ctx context.Context, n int64) (func(int64), error) {
		r := s.answers.large
		if n <= smallAnswer {
			r = s.answers.small
		}
		waiting, cancel := context.WithTimeout(ctx, s.timeout)
		defer cancel()
		p, err := r.take(waiting, principal, n)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		default:
			return nil, errNoRoom
		}
		return func(n int64) {
			p.keep(n)
			go func() { <-over; p.keep(0) }()
		}, nil
	}
}
