package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
)

// provideAgent decides how sessions get the agent: as a bind mount where the
// engine sees the file, else from a volume that is filled in PlaceAgent.
func (e *Engine) provideAgent() error {
	target := agentDir + "/" + agentName
	switch {
	case e.opts.HostPath != "":
		e.mount = mount.Mount{Type: mount.TypeBind, Source: e.opts.HostPath, Target: target, ReadOnly: true}
	case e.child != nil:
		p, _, err := e.agentFile()
		if err != nil {
			return err
		}
		e.mount = mount.Mount{Type: mount.TypeBind, Source: p, Target: target, ReadOnly: true}
	default:
		_, b, err := e.agentFile()
		if err != nil {
			return err
		}
		sum := sha256.Sum256(b)
		// Named by content: an upgrade brings a new volume, and sessions of the old
		// sidecar keep theirs.
		e.mount = mount.Mount{Type: mount.TypeVolume, Source: "loomcycle-agent-" + hex.EncodeToString(sum[:8]), Target: agentDir, ReadOnly: true}
	}
	return nil
}

// carrierRemoval is what an engine has to remove the container that carries the agent.
const carrierRemoval = 10 * time.Second

// PlaceAgent brings the agent to where sessions get it from. An engine behind a socket
// does not see the sidecar's files, so the agent travels through the archive
// API into a volume; that call needs a container, never started, and any image
// will do.
func (e *Engine) PlaceAgent(ctx context.Context, imageID string) error {
	if e.mount.Type != mount.TypeVolume {
		return nil
	}
	_, agent, err := e.agentFile()
	if err != nil {
		return err
	}
	if _, err := e.api.VolumeCreate(ctx, client.VolumeCreateOptions{Name: e.mount.Source, Labels: map[string]string{LabelManaged: "1"}}); err != nil {
		return e.wrap("making the session agent's volume", err)
	}
	cfg, host := e.carrier(imageID)
	c, err := e.onlyCarrier(ctx, cfg, host)
	if err != nil {
		return e.wrap("making the container that carries the session agent", err)
	}
	defer func() {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), carrierRemoval)
		defer cancel()
		_ = e.Remove(rctx, c.ID)
	}()
	st, err := e.api.ContainerStatPath(ctx, c.ID, client.ContainerStatPathOptions{Path: agentDir + "/" + agentName})
	if err == nil && st.Stat.Size == int64(len(agent)) {
		return nil
	}
	if err != nil && !cerrdefs.IsNotFound(err) {
		return e.wrap("looking for the session agent in its volume", err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Name: agentName, Mode: 0o555, Size: int64(len(agent)), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	if _, err := w.Write(agent); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	if _, err := e.api.CopyToContainer(ctx, c.ID, client.CopyToContainerOptions{DestinationPath: agentDir, Content: &buf}); err != nil {
		return e.wrap(fmt.Sprintf("copying the session agent into the volume %s", e.mount.Source), err)
	}
	return nil
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
