package session

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// Try starts a session container, runs a command in it and removes it: the
// one check that finds a runtime, an image or a limit that does not work before
// a user does.
func Try(ctx context.Context, e Engine, instance string, spec engine.Spec) error {
	id := NewID()
	spec.Name = "loomcycle-" + id
	spec.Labels = map[string]string{engine.LabelManaged: "1", engine.LabelInstance: instance, engine.LabelSession: id}
	defer e.Remove(context.WithoutCancel(ctx), spec.Name)
	c, err := e.Create(ctx, spec)
	if err != nil {
		return err
	}
	if err := e.Start(ctx, c); err != nil {
		return err
	}
	rw, err := e.Attach(ctx, c)
	if err != nil {
		return err
	}
	hctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	conn, err := host.Dial(hctx, rw, rand.Text(), nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	out, exit, err := conn.Exec(ctx, wire.Exec{Command: "[ -w /work ] && [ -w /tmp ]", Timeout: helloTimeout, MaxOutput: 1024}, nil, nil)
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		return fmt.Errorf("/work or /tmp is not writable for the session (exit %d, %q): runc before 1.2 gives a tmpfs the mode of the image's directory, so /work has to be mode 0777 in the session image", exit.Code, out.Bytes(host.Both, ""))
	}
	return nil
}
