package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	cerrdefs "github.com/containerd/errdefs"
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
		e.mount = mount.Mount{Type: mount.TypeVolume, Source: volumeName(b), Target: agentDir, ReadOnly: true}
	}
	return nil
}

// volumeName is by content: an upgrade brings a new volume, and sessions of the old
// sidecar keep theirs.
func volumeName(agent []byte) string {
	sum := sha256.Sum256(agent)
	return "loomcycle-agent-" + hex.EncodeToString(sum[:8])
}

const (
	// placeTimeout is what an engine has to get the agent, which all wait for; more than
	// carrierPatience.
	placeTimeout = time.Minute
	// carrierRemoval is what it has to remove the container that carries the agent.
	carrierRemoval = 10 * time.Second
)

// placed is the volume that is known to hold the agent.
type placed struct {
	placing sync.Mutex   // it is filled by one
	at      atomic.Value // when the engine made it, in its own words; empty when nobody knows
}

// forget has the volume looked into before it is used again.
func (p *placed) forget() { p.at.Store("") }

// PlaceAgent brings the agent to where sessions get it from. An engine behind a socket
// does not see the sidecar's files, so the agent travels through the archive
// API into a volume; that call needs a container, never started, and any image
// will do. It costs little while the volume is the one that was filled: between two
// sessions an operator may prune it, and the engine then makes an empty one for the next.
func (e *Engine) PlaceAgent(ctx context.Context, imageID string) error {
	if e.mount.Type != mount.TypeVolume {
		return nil
	}
	e.placed.placing.Lock()
	defer e.placed.placing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, placeTimeout)
	defer cancel()
	found, err := e.api.VolumeInspect(ctx, e.mount.Source, client.VolumeInspectOptions{})
	switch has := found.Volume; {
	case cerrdefs.IsNotFound(err):
	case err != nil:
		return e.wrap("looking for the session agent's volume", err)
	case has.CreatedAt != "" && has.CreatedAt == e.placed.at.Load():
		return nil
	case has.Labels[LabelManaged] == "":
		// Made by the engine, so no operator would find it; refused while a container has it.
		_, _ = e.api.VolumeRemove(ctx, e.mount.Source, client.VolumeRemoveOptions{})
	}
	file, agent, err := e.agentFile()
	if err != nil {
		return err
	}
	if volumeName(agent) != e.mount.Source {
		return fmt.Errorf("the session agent %s (SANDBOX_AGENT) is another than when the sidecar started: restart the sidecar", file)
	}
	_, err = e.api.VolumeCreate(ctx, client.VolumeCreateOptions{Name: e.mount.Source, Labels: map[string]string{LabelManaged: "1"}})
	if err != nil {
		return e.wrap("making the session agent's volume", err)
	}
	if err := e.fillVolume(ctx, imageID, agent); err != nil {
		return err
	}
	// Asked last: docker tells the last change of the volume's directory.
	if found, err = e.api.VolumeInspect(ctx, e.mount.Source, client.VolumeInspectOptions{}); err != nil {
		return e.wrap("looking for the session agent's volume", err)
	}
	e.placed.at.Store(found.Volume.CreatedAt)
	return nil
}

// fillVolume copies the agent into its volume, unless it is there.
func (e *Engine) fillVolume(ctx context.Context, imageID string, agent []byte) error {
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
