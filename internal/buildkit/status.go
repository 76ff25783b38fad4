package buildkit

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	controlapi "github.com/moby/buildkit/api/services/control"
	"github.com/moby/buildkit/client"
)

// Status is what buildkit:status prints.
type Status struct {
	// Nodes are those that a build would use now.
	Nodes []NodeStatus
	// Missing are the platforms for which one would have to be started.
	Missing []string
	// Private is the private daemon's folder, log and pid (0: none runs).
	Dir, Log string
	PID      int
	// Since is when the private daemon started.
	Since time.Time
	// CacheBytes is the disk space of the whole cache folder.
	CacheBytes int64
}

// NodeStatus is a node with its use.
type NodeStatus struct {
	*Node
	// Platforms are those of the image platforms that it builds.
	Platforms []string
	// Records and Bytes are BuildKit's cache records and their size.
	Records int
	Bytes   int64
	// Builds is the number of builds that run now.
	Builds int
}

// GetStatus looks at what a build would use. It starts nothing.
func GetStatus(ctx context.Context, opts Options) (Status, error) {
	d, err := NewDaemon(opts)
	if err != nil {
		return Status{}, err
	}
	s := Status{Dir: d.Dir(), Log: d.Log(), PID: d.PID(), CacheBytes: diskUsage(d.opts.CacheDir)}
	if info, err := os.Stat(d.recordPath()); err == nil && s.PID != 0 {
		s.Since = info.ModTime() // written right after the start
	}
	b, err := connect(ctx, d.opts, false)
	if errors.Is(err, errDown) {
		own := d.opts // the platforms with a node of their own alone
		own.Platforms = nil
		for _, p := range d.opts.Platforms {
			if name, err := hostVariable(p); err == nil && d.opts.Getenv(name) != "" && d.opts.Private == "" {
				own.Platforms = append(own.Platforms, p)
			} else {
				s.Missing = append(s.Missing, p)
			}
		}
		if len(own.Platforms) == 0 {
			return s, nil
		}
		b, err = connect(ctx, own, false)
	}
	if err != nil {
		return s, err
	}
	defer b.Close()
	for _, n := range b.Nodes() {
		ns := NodeStatus{Node: n, Builds: activeBuilds(ctx, n.Client)}
		for _, p := range b.opts.Platforms {
			if b.ForPlatform(p) == n {
				ns.Platforms = append(ns.Platforms, p)
			}
		}
		records, err := n.Client.DiskUsage(ctx)
		if err != nil {
			return s, err
		}
		for _, r := range records {
			ns.Records++
			ns.Bytes += r.Size
		}
		s.Nodes = append(s.Nodes, ns)
	}
	return s, nil
}

// activeBuilds counts the builds that run on a daemon.
func activeBuilds(ctx context.Context, c *client.Client) int {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// EarlyExit lists what is known now instead of following what comes.
	events, err := c.ControlClient().ListenBuildHistory(ctx, &controlapi.BuildHistoryRequest{ActiveOnly: true, EarlyExit: true})
	if err != nil {
		return 0
	}
	n := 0
	for {
		ev, err := events.Recv()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return 0
			}
			return n
		}
		if ev.Type == controlapi.BuildHistoryEventType_STARTED {
			n++
		}
	}
}

// diskUsage is the space below a folder in bytes, each file counted once however
// many links it has: BuildKit's merged layers are hard links. What can't be read (files
// of subordinate ids) is left out.
func diskUsage(dir string) (total int64) {
	type inode struct{ dev, ino uint64 }
	seen := map[inode]bool{}
	filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return nil
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			id := inode{uint64(st.Dev), uint64(st.Ino)}
			if st.Nlink > 1 && seen[id] {
				return nil
			}
			seen[id] = st.Nlink > 1
			total += st.Blocks * 512
		}
		return nil
	})
	return total
}
