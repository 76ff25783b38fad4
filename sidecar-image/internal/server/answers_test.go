package server

import (
	"context"
	"errors"
	"testing"
	"time"
)

// One whose client takes no answers gets no more of them, and another principal
// does. What a request held is free when it is over and its call has ended,
// whichever comes last.
func TestHold(t *testing.T) {
	const large = smallAnswer + 1
	s, _ := serve(t, 200*time.Millisecond)
	s.answers.large = newRoom(4 * large)
	over := make(chan struct{})
	mine, other := s.hold(s.answers, "mine", over), s.hold(s.answers, "other", over)
	hold := func(f func(context.Context, int64) (func(int64), error), n int64) func(int64) {
		t.Helper()
		made, err := f(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		return made
	}
	a, b := hold(mine, large), hold(mine, large)
	if _, err := mine(t.Context(), large); !errors.Is(err, errNoAnswer) {
		t.Errorf("a third of two: %v", err)
	}
	ran, err := s.hold(s.outputs, "mine", over)(t.Context(), large)
	if err != nil {
		t.Fatalf("a command beside answers that are not taken: %v", err)
	}
	ran(0)
	gone, cancel := context.WithCancelCause(t.Context())
	hungUp := errors.New("hung up")
	cancel(hungUp)
	if _, err := mine(gone, large); !errors.Is(err, hungUp) {
		t.Errorf("one that has gone: %v", err)
	}
	hold(other, large)(0)
	hold(mine, smallAnswer)(smallAnswer)

	a(1) // made, and smaller than it might have been
	c := hold(mine, large-1)
	b(large)
	if _, err := mine(t.Context(), large); !errors.Is(err, errNoAnswer) {
		t.Errorf("while the client has not taken what was made: %v", err)
	}
	close(over)
	if r := s.answers.large; r.all.TryAcquire(r.size) {
		t.Error("the room of a call that is still at work is free")
	}
	c(large - 1)
	empty(t, s.answers.large, s.answers.small, s.outputs.large, s.outputs.small)
}
