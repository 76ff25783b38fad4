package tools

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

const workPath = "/work"

type openIn struct {
	Network   string  `json:"network,omitempty" jsonschema:"none (the default) or egress"`
	TmpfsMB   *whole  `json:"tmpfs_mb,omitempty" jsonschema:"size of /work in MiB"`
	CPU       *number `json:"cpu,omitempty" jsonschema:"CPUs"`
	MemMB     *whole  `json:"mem_mb,omitempty" jsonschema:"memory in MiB; /work and /tmp count"`
	Pids      *whole  `json:"pids,omitempty" jsonschema:"processes and threads"`
	Workspace string  `json:"workspace,omitempty" jsonschema:"name of a durable /work that outlives the session: a-z, 0-9, _ and -"`
	Image     string  `json:"image,omitempty" jsonschema:"name of an image from the operator's list"`
	TTL       *whole  `json:"ttl_seconds,omitempty" jsonschema:"lifetime in seconds"`
}

type openOut struct {
	SessionID     string   `json:"session_id"`
	WorkspacePath string   `json:"workspace_path"`
	Network       string   `json:"network"`
	ExpiresAt     string   `json:"expires_at" jsonschema:"when the session ends if it is not used again (RFC 3339)"`
	Workspace     string   `json:"workspace,omitempty"`
	Persistent    bool     `json:"persistent,omitempty"`
	Notes         []string `json:"notes,omitempty" jsonschema:"what was changed of the request"`
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// DefaultSpec is the shape of a session that asks for nothing.
func (t *Tools) DefaultSpec(ctx context.Context) (engine.Spec, error) {
	spec, _, err := t.spec(ctx, openIn{}, nil)
	return spec, err
}

// imageNames is what sandbox_open may be asked for.
func (t *Tools) imageNames() []string {
	names := slices.AppendSeq([]string{config.DefaultImage}, maps.Keys(t.Config.Images))
	slices.Sort(names)
	return slices.Compact(names)
}

func (t *Tools) spec(ctx context.Context, in openIn, notes *[]string) (spec engine.Spec, ttl time.Duration, err error) {
	c := t.Config
	var discard []string
	if notes == nil {
		notes = &discard
	}
	clamped := func(field string, want *whole) (n int64) {
		if err == nil {
			n, err = t.clampWhole(notes, field, want)
		}
		return n
	}
	spec.WorkBytes = clamped("tmpfs_mb", in.TmpfsMB) << 20
	spec.MemBytes = clamped("mem_mb", in.MemMB) << 20
	spec.TmpBytes = c.TmpMB << 20
	spec.Pids = clamped("pids", in.Pids)
	ttl = time.Duration(clamped("ttl_seconds", in.TTL)) * time.Second
	if err == nil {
		spec.CPUs, err = t.clamp(notes, "cpu", in.CPU)
	}
	if err != nil {
		return spec, 0, err
	}
	switch in.Network {
	case "", "none":
	case "egress":
		if !c.AllowEgress {
			return spec, 0, fieldError("network", "egress is not allowed by the operator (SANDBOX_ALLOW_EGRESS); none is")
		}
		spec.Egress = true
	default:
		return spec, 0, fieldError("network", "%q is not allowed; none and egress are", shown(in.Network))
	}
	ref := c.Image
	if in.Image != "" && in.Image != config.DefaultImage {
		var ok bool
		if ref, ok = c.Images[in.Image]; !ok {
			return spec, 0, fieldError("image", "%q is not on the operator's list (SANDBOX_IMAGES); allowed: %s", shown(in.Image), strings.Join(t.imageNames(), ", "))
		}
	}
	if spec.Image, err = t.Image(ctx, ref); err != nil {
		return spec, 0, err
	}
	return spec, ttl, nil
}

func open(ctx context.Context, c *call, in openIn) (_ *result, out openOut, err error) {
	if in.Workspace != "" && !workspace.Name.MatchString(in.Workspace) {
		return nil, out, fieldError("workspace", "a name has 1 to 64 characters of a-z, 0-9, _ and -, and starts with a letter or digit")
	}
	ctx, done := c.Sessions.Begin(ctx, c.who)
	defer func() { err = done(err) }()
	// Over both: an engine that hangs holds up the look-up of the image as well.
	ctx, cancel := context.WithTimeoutCause(ctx, session.OpenTimeout, session.ErrSlow)
	defer cancel()
	spec, ttl, err := c.spec(ctx, in, &out.Notes)
	if err != nil {
		return nil, out, err
	}
	env, err := identity.Env(c.req.Extra.Header)
	if !c.Config.InjectEnv {
		if len(env) > 0 || err != nil {
			out.Notes = append(out.Notes, "environment headers were ignored: the operator has not set SANDBOX_ALLOW_ENV_INJECTION")
		}
		env, err = nil, nil
	}
	if err != nil {
		return nil, out, err
	}
	plain := in
	plain.TTL = nil
	if plain.Network == "none" {
		plain.Network = ""
	}
	if plain.Image == config.DefaultImage {
		plain.Image = ""
	}
	s, err := c.Sessions.Open(ctx, c.who, session.Request{Spec: spec, ImageName: in.Image, Workspace: in.Workspace, TTL: ttl, Env: env, Pooled: plain == openIn{}})
	if err != nil {
		return nil, out, err
	}
	c.session = s.ID
	out.SessionID, out.WorkspacePath, out.Network, out.ExpiresAt = s.ID, workPath, s.Network, stamp(s.Expires())
	out.Workspace, out.Persistent = s.Workspace, s.Workspace != ""
	return nil, out, nil
}

type idIn struct {
	SessionID string `json:"session_id" jsonschema:"from sandbox_open"`
}

type closeOut struct {
	SessionID string `json:"session_id"`
	Closed    bool   `json:"closed" jsonschema:"whether this call closed it; false when there was no such session of the caller's, or not any more"`
}

// closeOne answers the same whether the session was closed before, is another's
// or never was; and it is no error to want it gone.
func closeOne(_ context.Context, c *call, in idIn) (*result, closeOut, error) {
	if s, err := c.get(in.SessionID); err == nil && c.Sessions.CloseSession(s, session.ByClose) {
		return &result{text: "closed"}, closeOut{in.SessionID, true}, nil
	}
	return &result{text: "nothing was closed: there is no such session, or not any more"}, closeOut{shown(in.SessionID), false}, nil
}

type listed struct {
	SessionID string `json:"session_id"`
	Network   string `json:"network"`
	CreatedAt string `json:"created_at"`
	LastUsed  string `json:"last_used"`
	ExpiresAt string `json:"expires_at"`
	Workspace string `json:"workspace,omitempty"`
	Image     string `json:"image,omitempty"`
	RootRunID string `json:"root_run_id,omitempty"`
	Tenant    string `json:"tenant,omitempty"`
}

type listOut struct {
	Sessions []listed `json:"sessions"`
}

func list(_ context.Context, c *call, _ struct{}) (*result, listOut, error) {
	out := listOut{Sessions: []listed{}}
	for _, s := range c.Sessions.List(c.who) {
		out.Sessions = append(out.Sessions, listed{s.ID, s.Network, stamp(s.Created), stamp(s.LastUsed()), stamp(s.Expires()), s.Workspace, s.Image, s.RootRun, s.Tenant})
	}
	return nil, out, nil
}

type touchOut struct {
	SessionID string `json:"session_id"`
	ExpiresAt string `json:"expires_at"`
}

func touch(_ context.Context, c *call, in idIn) (*result, touchOut, error) {
	s, err := c.get(in.SessionID)
	if err != nil {
		return nil, touchOut{}, err
	}
	if err := c.Sessions.Touch(s); err != nil {
		return nil, touchOut{}, err
	}
	return nil, touchOut{s.ID, stamp(s.Expires())}, nil
}

type runIn struct {
	RootRunID string `json:"root_run_id" jsonschema:"the run tree's id"`
}

type runOut struct {
	Closed int `json:"closed" jsonschema:"how many sessions were closed"`
}

func closeRun(_ context.Context, c *call, in runIn) (*result, runOut, error) {
	n := c.Sessions.CloseRun(c.who, in.RootRunID)
	return &result{text: fmt.Sprintf("closed %d sessions", n)}, runOut{n}, nil
}
