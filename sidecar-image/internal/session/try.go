package session

import (
	"context"
	"crypto/rand"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
)

// tryRemoval is what an engine has to remove the trial's container.
const tryRemoval = 5 * time.Second

// Try starts a session container, runs a command in it and removes it: the
// one check that finds a runtime, an image or a limit that does not work before
// a user does.
func Try(ctx context.Context, e Engine, instance string, spec engine.Spec) error {
	id := NewID()
	spec.Name = "loomcycle-" + id
	spec.Labels = map[string]string{engine.LabelManaged: "1", engine.LabelInstance: instance, engine.LabelSession: id}
	defer func() {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryRemoval)
		defer cancel()
		_ = e.Remove(rctx, spec.Name) // else adopt finds it
	}()
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
		return fmt.Errorf("/work or /tmp is not writable for the session (exit %d, %q): runc before 1.1.8 gives a tmpfs the mode of the image's directory, so /work has to have mode 1777 in the session image", exit.Code, out.Bytes(host.Both, ""))
	}
	return limited(ctx, conn, spec.MemBytes)
}

// limited asks the session's own cgroup for its limit, as some engines leave out
// what they may not set, and say nothing. gVisor shows none, or one of its own
// making without limits, which it writes in full, where Linux rounds to a page. An
// answer that is no limit at all tells nothing of the engine either.
func limited(ctx context.Context, conn *host.Conn, want int64) error {
	out, exit, err := conn.Exec(ctx, wire.Exec{Command: "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null", Timeout: helloTimeout, MaxOutput: 64}, nil, nil)
	if err != nil {
		return err
	}
	has := strings.TrimSpace(string(out.Bytes(host.Stdout, "")))
	const page = 4096 // to which the kernel rounds
	n, err := strconv.ParseInt(has, 10, 64)
	switch {
	case exit.Code != 0, err != nil && has != "max", n == math.MaxInt64, n <= want && n > want-page:
		return nil
	}
	return fmt.Errorf("the engine does not limit a session's memory (the limit is %s, not %d): a rootless podman needs cgroup v2 with the memory, cpu and pids controllers given to its user, and a nested one cgroups that it may write", has, want)
}
