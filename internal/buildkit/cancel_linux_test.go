package buildkit

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	controlapi "github.com/moby/buildkit/api/services/control"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/client/llb"
	"google.golang.org/grpc"
)

// busy is a daemon that takes every call and comes to none.
type busy struct {
	controlapi.UnimplementedControlServer
}

func (busy) Solve(ctx context.Context, _ *controlapi.SolveRequest) (*controlapi.SolveResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (busy) Status(_ *controlapi.StatusRequest, s grpc.ServerStreamingServer[controlapi.StatusResponse]) error {
	<-s.Context().Done()
	return s.Context().Err()
}

func (busy) Session(s grpc.BidiStreamingServer[controlapi.BytesMessage, controlapi.BytesMessage]) error {
	for {
		if _, err := s.Recv(); err != nil {
			return err
		}
	}
}

// single is a listener of one connection.
type single struct {
	conn chan net.Conn
	over chan struct{}
}

func (l single) Accept() (net.Conn, error) {
	select {
	case c := <-l.conn:
		return c, nil
	case <-l.over:
		return nil, net.ErrClosed
	}
}
func (l single) Close() error { close(l.over); return nil }
func (single) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

// A daemon that does not answer holds a cancelled build for less than two
// seconds, by a clock that no other work on the machine slows down.
func TestCancelledBeforeTheDaemonAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := single{make(chan net.Conn, 1), make(chan struct{})}
		s := grpc.NewServer()
		controlapi.RegisterControlServer(s, busy{})
		go s.Serve(l)
		defer s.Stop()
		c, err := client.New(t.Context(), "", client.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			l.conn <- theirs
			return ours, nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		b := &Builder{opts: Options{Getenv: env(nil), Log: io.Discard}, def: &Node{Client: c}, auth: dockerAuth}
		def := marshal(t, llb.Scratch().File(llb.Mkfile("/f", 0o644, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := b.Solve(ctx, Job{Name: "waits", Definition: def})
			done <- err
		}()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("the build does not wait for the daemon: %v", err)
		default:
		}
		start := time.Now()
		cancel()
		err = <-done
		took := time.Since(start)
		t.Logf("cancelled after %s: %v", took, err)
		if took >= 2*time.Second || !errors.Is(err, context.Canceled) {
			t.Error("that is too late, or not what happened")
		}
	})
}
