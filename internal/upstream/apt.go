package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// apt resolves package names with the host's apt-get in a tree of its own:
// no file of the host's apt configuration or dpkg database is read. The
// archive is the folder into which the verified indexes were fetched, so apt
// sees exactly what the lock pins, and checks the signatures once more.
type apt struct {
	program, config string
}

// newApt prepares the tree for one architecture under dir and reads the
// indexes that lie under archives. keys is the folder of archive keys.
func newApt(ctx context.Context, dir, archives, keys, arch string, suites []lock.Suite) (*apt, error) {
	program, err := exec.LookPath("apt-get")
	if err != nil {
		return nil, fmt.Errorf("lock:update resolves packages with apt-get, which is not on this machine: run it on Debian or a derivative: %w", err)
	}
	for _, sub := range []string{"etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d", "var/lib/dpkg", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, err
		}
	}
	signers, err := filepath.Glob(filepath.Join(keys, "*.asc"))
	if err != nil {
		return nil, err
	}
	var sources strings.Builder
	for _, s := range suites {
		fmt.Fprintf(&sources, "Types: deb\nURIs: file:%s\nSuites: %s\nComponents: %s\nSigned-By:\n", filepath.Join(archives, string(s.Archive)), s.Name, strings.Join(s.Components, " "))
		for _, name := range signers {
			key, err := os.ReadFile(name)
			if err != nil {
				return nil, err
			}
			for line := range strings.Lines(string(key)) {
				if line = strings.TrimSpace(line); line == "" {
					line = "." // deb822's way to write an empty line
				}
				fmt.Fprintf(&sources, " %s\n", line)
			}
		}
		sources.WriteString("\n")
	}
	config := fmt.Sprintf(`Dir %q;
Dir::State::status %q;
Dir::Etc::sourcelist "/dev/null";
APT::Architecture %q;
APT::Architectures { %q; };
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false"; // checked already, against our own clock
Acquire::Check-Date "false";
`, dir, filepath.Join(dir, "var/lib/dpkg/status"), arch, arch)
	a := &apt{program: program, config: filepath.Join(dir, "apt.conf")}
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "etc/apt/sources.list.d/lock.sources"), []byte(sources.String()), 0o644),
		os.WriteFile(filepath.Join(dir, "var/lib/dpkg/status"), nil, 0o644),
		os.WriteFile(a.config, []byte(config), 0o644),
	)
	if err != nil {
		return nil, err
	}
	// Any error makes update print a warning and go on with what it has.
	_, err = a.run(ctx, "update", "-o", "APT::Update::Error-Mode=any")
	return a, err
}

// run runs apt-get and returns its standard output.
func (a *apt) run(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, a.program, append([]string{"-q"}, args...)...)
	cmd.Env = append(os.Environ(), "APT_CONFIG="+a.config, "LC_ALL=C.UTF-8")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("apt-get %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stdout.String()+stderr.String()))
	}
	return stdout.String(), nil
}

// installed is a line of a simulated installation: a package that was not
// there before, with its version.
var installed = regexp.MustCompile(`^Inst (\S+) (\[\S+\] )?\((\S+) `)

// resolve returns name and version of every package that apt would install
// on an empty system, sorted by name.
func (a *apt) resolve(ctx context.Context, names []string) ([][2]string, error) {
	out, err := a.run(ctx, append([]string{"install", "--simulate", "--no-remove"}, names...)...)
	if err != nil {
		return nil, err
	}
	var result [][2]string
	for line := range strings.Lines(out) {
		if m := installed.FindStringSubmatch(line); m != nil {
			name, _, _ := strings.Cut(m[1], ":")
			result = append(result, [2]string{name, m[3]})
		}
	}
	if len(result) == 0 {
		return nil, fmt.Errorf("apt-get finds nothing to install for %s", strings.Join(names, " "))
	}
	slices.SortFunc(result, func(a, b [2]string) int { return strings.Compare(a[0], b[0]) })
	return result, nil
}

// group resolves a group for the architecture of a. below holds the closures
// of the groups that it comes after, resolved before.
func (a *apt) group(ctx context.Context, g lock.Group, below [][2]string) ([][2]string, error) {
	names := slices.Clone(g.Debian)
	// Pinning what lies below to the very versions keeps a package of a lower
	// layer from changing in a higher one.
	for _, p := range below {
		names = append(names, p[0]+"="+p[1])
	}
	all, err := a.resolve(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("group %s: %w", g.Name, err)
	}
	for _, p := range below {
		if !slices.Contains(all, p) {
			return nil, fmt.Errorf("group %s: apt does not keep %s %s of the groups below it", g.Name, p[0], p[1])
		}
	}
	return slices.DeleteFunc(all, func(p [2]string) bool {
		if g.Closure != nil && !*g.Closure {
			return !slices.ContainsFunc(g.Debian, func(name string) bool {
				name, _, _ = strings.Cut(name, "/")
				return name == p[0]
			})
		}
		return slices.Contains(below, p)
	}), nil
}
