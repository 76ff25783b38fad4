package differential

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

// Fetch downloads the job's packages to Debs, unless they are there.
func (j *Job) Fetch(ctx context.Context, m *mirror.Mirrors) error {
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(8)
	for _, pkg := range j.packages() {
		work.Go(func() error { return m.Fetch(ctx, j.Lock.Source(pkg), filepath.Join(j.Debs, File(pkg))) })
	}
	return work.Wait()
}

// Run makes both trees, compares them, and asks the unpacked system's own
// dpkg whether its database is consistent and true.
func (j *Job) Run(ctx context.Context) (*Report, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("the differential test makes files of other owners and needs root")
	}
	if err := os.MkdirAll(j.Work, 0o755); err != nil {
		return nil, err
	}
	root, err := j.Unpacked(ctx)
	if err != nil {
		return nil, err
	}
	archive, err := j.Reference(ctx)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	reference, err := Tar(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", archive, err)
	}
	ours, err := Dirs(root)
	if err != nil {
		return nil, err
	}
	list, err := Listed()
	if err != nil {
		return nil, err
	}
	r := Compare(ours, reference, list)
	return r, j.selfcheck(ctx, root)
}

// selfcheck runs the system's own tools in it.
func (j *Job) selfcheck(ctx context.Context, root string) error {
	for _, args := range [][]string{
		{"dpkg", "--audit"},
		{"dpkg", "--verify"},
		{"apt-get", "check", "-qq"},
		{"openssl", "verify", "-CApath", "/etc/ssl/certs", "/etc/ssl/certs/ISRG_Root_X1.pem"},
	} {
		if _, err := inside(ctx, root, args...); err != nil {
			return err
		}
	}
	selections, err := inside(ctx, root, "update-alternatives", "--get-selections")
	if err != nil {
		return err
	}
	names := alternatives(selections)
	if len(names) == 0 {
		return fmt.Errorf("the unpacked system has no alternatives:\n%s", selections)
	}
	for _, name := range names {
		out, err := inside(ctx, root, "update-alternatives", "--query", name)
		if err == nil && !strings.Contains(string(out), "\nStatus: auto\n") {
			err = fmt.Errorf("the alternative %s in the unpacked system is not automatic:\n%s", name, out)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inside runs a program of the unpacked system in it and returns what it printed.
func inside(ctx context.Context, root string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "chroot", append([]string{root}, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	return out, complaint(args, out, err)
}

// complaint is the error of a program that failed, or of a dpkg that printed
// anything: it has a complaint and may succeed nevertheless.
func complaint(args []string, out []byte, err error) error {
	switch {
	case err != nil:
		return fmt.Errorf("%s in the unpacked system: %w\n%s", strings.Join(args, " "), err, out)
	case args[0] == "dpkg" && len(out) > 0:
		return fmt.Errorf("%s in the unpacked system complains:\n%s", strings.Join(args, " "), out)
	}
	return nil
}

// alternatives are the names in the output of update-alternatives --get-selections.
func alternatives(selections []byte) []string {
	var names []string
	for line := range strings.Lines(string(selections)) {
		if fields := strings.Fields(line); len(fields) == 3 {
			names = append(names, fields[0])
		}
	}
	return names
}

// Text is the report for docs/DIFFERENTIAL.md.
func (r *Report) Text(arch string, packages int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d packages, %d paths compared, %d equal in type, mode, owner, link target and content.\n\n", packages, r.Paths, r.Equal)
	b.WriteString("| paths that differ | reason |\n| ---: | --- |\n")
	for _, reason := range slices.SortedFunc(maps.Keys(r.Listed), func(a, b string) int {
		if r.Listed[a] != r.Listed[b] {
			return r.Listed[b] - r.Listed[a]
		}
		return strings.Compare(a, b)
	}) {
		fmt.Fprintf(&b, "| %d | %s |\n", r.Listed[reason], reason)
	}
	return fmt.Sprintf("## linux/%s\n\n%s", arch, b.String())
}

// Record replaces an architecture's section of a document with the report's.
func Record(file, arch, section string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var kept []string
	placed := false
	for i, part := range strings.Split(string(b), "\n## ") {
		if i > 0 {
			part = "## " + part
		}
		if strings.HasPrefix(part, "## linux/"+arch+"\n") {
			part, placed = section, true
		}
		kept = append(kept, strings.TrimRight(part, "\n"))
	}
	if !placed {
		kept = append(kept, strings.TrimRight(section, "\n"))
	}
	return os.WriteFile(file, []byte(strings.Join(kept, "\n\n")+"\n"), 0o644)
}
