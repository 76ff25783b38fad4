package buildkit

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/util/progress/progressui"
	digest "github.com/opencontainers/go-digest"
)

// view merges the status of several solves into one BuildKit display.
type view struct {
	manyNodes bool
	out       chan *client.SolveStatus
	shown     chan struct{}

	mu     sync.Mutex
	closed bool
	names  map[digest.Digest]string
	// logOwner is the track whose copy of a step's log is shown: a step that
	// several solves share reports to each of them.
	logOwner map[digest.Digest]*track
}

func newView(mode string, w io.Writer, manyNodes bool) (*view, error) {
	display, err := progressui.NewDisplay(w, progressui.DisplayMode(mode))
	if err != nil {
		return nil, fmt.Errorf("BUILDKIT_PROGRESS=%s: %w (use auto, plain, tty, quiet or rawjson)", mode, err)
	}
	v := &view{
		manyNodes: manyNodes,
		out:       make(chan *client.SolveStatus),
		shown:     make(chan struct{}),
		names:     map[digest.Digest]string{},
		logOwner:  map[digest.Digest]*track{},
	}
	go func() {
		defer close(v.shown)
		// The display outlives a cancelled build by the lines that say so.
		display.UpdateFrom(context.Background(), v.out)
		for range v.out { // a display that gave up must not stop the build
		}
	}()
	return v, nil
}

func (v *view) close() {
	v.mu.Lock()
	v.closed = true
	close(v.out)
	v.mu.Unlock()
	<-v.shown
}

// track is one solve's part of a view.
type track struct {
	view *view
	job  string
	node *Node
	// named are the custom names of the job's steps.
	named map[string]bool

	mu     sync.Mutex
	failed []FailedStep
	logs   map[digest.Digest][]byte
}

func (v *view) track(job Job, node *Node) *track {
	t := &track{view: v, job: job.Name, node: node, named: map[string]bool{}, logs: map[digest.Digest][]byte{}}
	if job.Definition != nil {
		for _, step := range job.Definition.Metadata {
			t.named[step.Description["llb.customname"]] = true
		}
	}
	return t
}

// keepLog is how much of a failed step's output an Error carries, in bytes.
const keepLog = 4 << 10

func (t *track) update(s *client.SolveStatus) {
	t.remember(s)
	v := t.view
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return
	}
	for _, x := range s.Vertexes {
		x.Digest = t.key(x.Digest)
		for i := range x.Inputs {
			x.Inputs[i] = t.key(x.Inputs[i])
		}
		if v.names[x.Digest] == "" {
			v.names[x.Digest] = t.label(x.Name)
		}
		x.Name = v.names[x.Digest]
	}
	for _, x := range s.Statuses {
		x.Vertex = t.key(x.Vertex)
	}
	for _, x := range s.Warnings {
		x.Vertex = t.key(x.Vertex)
	}
	s.Logs = slices.DeleteFunc(s.Logs, func(l *client.VertexLog) bool {
		l.Vertex = t.key(l.Vertex)
		if v.logOwner[l.Vertex] == nil {
			v.logOwner[l.Vertex] = t
		}
		return v.logOwner[l.Vertex] != t
	})
	v.out <- s
}

// key keeps the same step on two nodes apart: it runs twice.
func (t *track) key(d digest.Digest) digest.Digest {
	if !t.view.manyNodes {
		return d
	}
	return digest.FromString(t.node.Address + string(d))
}

// label adds the job to names that BuildKit gave ("exporting to oci image
// format"). A step with a name of its own may be shared by several jobs: it needs
// only the node.
func (t *track) label(name string) string {
	switch {
	case !t.named[name]:
		return "[" + t.job + "] " + name
	case t.view.manyNodes:
		return "[" + t.node.Platform + "] " + name
	}
	return name
}

func (t *track) remember(s *client.SolveStatus) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range s.Logs {
		log := append(t.logs[l.Vertex], l.Data...)
		t.logs[l.Vertex] = log[max(0, len(log)-keepLog):]
	}
	for _, x := range s.Vertexes {
		t.failed = slices.DeleteFunc(t.failed, func(f FailedStep) bool { return f.Digest == x.Digest })
		if x.Error != "" && !strings.Contains(x.Error, context.Canceled.Error()) {
			t.failed = append(t.failed, FailedStep{Digest: x.Digest, Name: x.Name, Message: x.Error})
		}
	}
}

func (t *track) failures(def *llb.Definition) []FailedStep {
	t.mu.Lock()
	defer t.mu.Unlock()
	failed := slices.Clone(t.failed)
	for i := range failed {
		failed[i].Source = source(def, failed[i].Digest)
		failed[i].Log = string(t.logs[failed[i].Digest])
	}
	return failed
}
