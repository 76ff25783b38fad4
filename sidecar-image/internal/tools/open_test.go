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
		_, _, err := open(t.Context(), &call{Tools: &Tools{Config: c, Image: im.Resolve}}, openIn{})
		if !errors.Is(err, session.ErrSlow) || !strings.Contains(fmt.Sprint(err), "slow is not there yet") || time.Since(began) != session.OpenTimeout {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		time.Sleep(time.Hour) // the pull's own time
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
