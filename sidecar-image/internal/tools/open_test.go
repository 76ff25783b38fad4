package tools

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/images"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
)

// stuck is an engine whose store answers nothing.
type stuck struct{ images.Engine }

func (stuck) ResolveImage(ctx context.Context, _ string, _ bool) (engine.Image, error) {
	<-ctx.Done()
	return engine.Image{}, ctx.Err()
}

// An open is refused in its time when its image is not found in it: a pull that is
// slow, or an engine that hangs.
func TestOpenWithoutImage(t *testing.T) {
	c, err := config.Load(func(name string) string { return map[string]string{"SANDBOX_IMAGE": "slow"}[name] })
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		im := &images.Images{Engine: stuck{}, Pull: true}
		began := time.Now()
		_, _, err := open(t.Context(), &call{Tools: &Tools{Config: c, Image: im.Resolve, Sessions: &session.Manager{}}}, openIn{})
		if !errors.Is(err, session.ErrSlow) || !strings.Contains(fmt.Sprint(err), "slow is not there yet") || time.Since(began) != session.OpenTimeout {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		time.Sleep(time.Hour) // the pull's own time
	})
}

// A run that is closed while an open of it waits for its image gets no session after.
func TestRunClosedUnderAnOpen(t *testing.T) {
	c, err := config.Load(func(name string) string { return map[string]string{"SANDBOX_IMAGE": "slow"}[name] })
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		im := &images.Images{Engine: stuck{}, Pull: true}
		tools := &Tools{Config: c, Image: im.Resolve, Sessions: &session.Manager{}}
		ended := make(chan error, 3)
		for _, who := range []session.Caller{{Principal: "p", RootRun: "r"}, {Principal: "p", RootRun: "other"}, {Principal: "q", RootRun: "r"}} {
			go func() {
				_, _, err := open(t.Context(), &call{Tools: tools, who: who}, openIn{})
				ended <- fmt.Errorf("%s of %s: %w", who.RootRun, who.Principal, err)
			}()
		}
		synctest.Wait()
		tools.Sessions.CloseRun(session.Caller{Principal: "p"}, "r")
		synctest.Wait()
		if len(ended) != 1 {
			t.Errorf("%d opens have ended", len(ended))
		}
		if err := <-ended; kindOf(nil, err) != "session_ended" || !strings.HasPrefix(err.Error(), "r of p: the session was closed with sandbox_close_run") {
			t.Error(err)
		}
		time.Sleep(time.Hour)
	})
}

// A wrong image's refusal names those that there are, the default too.
func TestImageNames(t *testing.T) {
	for list, want := range map[string]string{"": "allowed: default", "b=registry.example/b,a=registry.example/a": "allowed: a, b, default"} {
		c, err := config.Load(func(name string) string { return map[string]string{"SANDBOX_IMAGE": "i", "SANDBOX_IMAGES": list}[name] })
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := (&Tools{Config: c}).spec(t.Context(), openIn{Image: "x"}, nil); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("of %q: %v", list, err)
		}
	}
}
