package engine

import (
	"context"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
)

// carrierPatience is how long another sidecar's carrier is waited for, which has copied long
// before unless its sidecar was killed.
const carrierPatience = 40 * time.Second

// onlyCarrier makes the carrier of an agent, of which an engine has one at a time: a sidecar
// that looks while another one copies would copy again, and take the file from the session
// that the other has started meanwhile. A carrier that was left is no obstacle for long.
func (e *Engine) onlyCarrier(ctx context.Context, cfg *container.Config, host *container.HostConfig) (client.ContainerCreateResult, error) {
	name := e.mount.Source + "-carrier"
	for began := time.Now(); ; {
		c, err := e.api.ContainerCreate(ctx, client.ContainerCreateOptions{Config: cfg, HostConfig: host, Name: name})
		if err == nil || name == "" || !cerrdefs.IsConflict(err) && !strings.Contains(err.Error(), "already in use") { // podman has no status for it
			return c, err
		}
		late := time.Since(began) > e.patience
		if other, err := e.api.ContainerInspect(ctx, name, client.ContainerInspectOptions{}); err == nil {
			instance := other.Container.Config.Labels[LabelInstance]
			if late || instance == e.opts.Instance && instance != "" { // its own, of before it was killed
				_ = e.Remove(ctx, other.Container.ID)
			}
		}
		if late {
			name = "" // which an engine may keep of a container that it has lost
			continue
		}
		select {
		case <-ctx.Done():
			return c, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// carrier is the container that the agent travels in. It has no session: a
// sidecar that is killed here finds it by its own label, and removes it, when it
// is back.
func (e *Engine) carrier(imageID string) (*container.Config, *container.HostConfig) {
	return &container.Config{
			Image: imageID, Entrypoint: []string{"/bin/true"},
			Labels: map[string]string{LabelManaged: "1", LabelInstance: e.opts.Instance, LabelPool: "agent-copy"},
		}, &container.HostConfig{
			NetworkMode: "none", LogConfig: container.LogConfig{Type: "none"},
			Mounts: []mount.Mount{{Type: mount.TypeVolume, Source: e.mount.Source, Target: agentDir}},
		}
}
