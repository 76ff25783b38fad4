// Package smoke proves that built images do what the contract says: cases are
// data (cases/*.yaml), run by an engine on each image and platform that they
// concern, and reported as one table.
package smoke

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/loomcycle/loomcycle-images/images"
)

// Suite is all cases and the profiles that they name.
type Suite struct {
	Profiles map[string]Profile
	Cases    []Case
}

// Case is one thing that images must do.
type Case struct {
	Name  string `yaml:"name"`
	Title string `yaml:"title"`
	// Fault is the number of the reported fault that it rules out: cases/faults.yaml.
	Fault  int      `yaml:"fault"`
	Images []string `yaml:"images"` // patterns as of path.Match
	// Emulate says that it runs under QEMU too, where that is asked for.
	Emulate bool `yaml:"emulate"`
	// Profiles are ways to start a container: the case runs once in each.
	Profiles  []string  `yaml:"profiles"`
	Container Container `yaml:"container"`
	Fixture   string    `yaml:"fixture"` // folder of fixtures/, copied into the container
	Timeout   duration  `yaml:"timeout"` // for each phase; DefaultTimeout when not given
	// Same demands the same standard output from every image of the case.
	Same bool `yaml:"same"`
	// Structure checks the image's configuration and files without an engine.
	Structure bool    `yaml:"structure"`
	Steps     []Step  `yaml:"steps"`
	Phases    []Phase `yaml:"phases"`

	File string `yaml:"-"`
}

// DefaultTimeout is how long a phase may take, start of the container
// included; under emulation it is EmulationFactor times longer.
const (
	DefaultTimeout  = 60 * time.Second
	EmulationFactor = 12
)

// Profile is a way to start a container.
type Profile struct {
	Title     string    `yaml:"title"`
	Images    []string  `yaml:"images"` // the only images that it makes sense for
	Container Container `yaml:"container"`
}

// Container is how a container is started.
type Container struct {
	User            string            `yaml:"user"`
	Workdir         string            `yaml:"workdir"`
	Env             map[string]string `yaml:"env"`
	Network         string            `yaml:"network"` // none, or the engine's default
	ReadOnly        *bool             `yaml:"readonly"`
	DropCaps        *bool             `yaml:"drop_caps"`
	NoNewPrivileges *bool             `yaml:"no_new_privileges"`
	Pids            int               `yaml:"pids"`
	Memory          string            `yaml:"memory"`
	Runtime         string            `yaml:"runtime"`
	Hosts           []string          `yaml:"hosts"` // NAME:ADDRESS
	// Ports are published on this machine's loopback, each at one that is free.
	Ports  []int   `yaml:"ports"`
	Mounts []Mount `yaml:"mounts"`
}

// Mount is one of three: a tmpfs with its mode, a folder of the host, or a
// named volume. Folders and volumes live as long as the case: phases share
// them by name.
type Mount struct {
	Path     string `yaml:"path"`
	Tmpfs    string `yaml:"tmpfs"`
	Bind     string `yaml:"bind"`
	Volume   string `yaml:"volume"`
	Owner    string `yaml:"owner"` // of a Bind: uid:gid
	ReadOnly bool   `yaml:"readonly"`
}

// Phase is one container of a case.
type Phase struct {
	Name      string    `yaml:"name"`
	Container Container `yaml:"container"`
	Fixture   string    `yaml:"fixture"`
	Steps     []Step    `yaml:"steps"`
	Service   *Service  `yaml:"service"`
}

// Service runs the image as it is meant to be run, with its own entrypoint.
// Its steps are run by the engine's exec, so they have no environment, folder,
// input or files of their own.
type Service struct {
	// Ready comes before the steps. `probe http` waits, for 20 s, while the service's
	// port is closed; another command has to wait by itself.
	Ready Step   `yaml:"ready"`
	Steps []Step `yaml:"steps"`
	// StopWithin is how long the engine's stop may take.
	StopWithin duration `yaml:"stop_within"`
	Exit       []int    `yaml:"exit"` // allowed exit codes; any when empty
}

// Step is a command and what must come of it.
type Step struct {
	Run   string   `yaml:"run"`   // text for the shell
	Shell string   `yaml:"shell"` // bash (-c), sh (-c) or login (bash -lc)
	Exec  []string `yaml:"exec"`
	Probe []string `yaml:"probe"` // a command of smoke/probe
	// Outside runs the probe of a service's step on this machine. In its
	// arguments ${8787} is where the container's port is published.
	Outside bool `yaml:"outside"`

	Env     map[string]string `yaml:"env"`
	OnlyEnv []string          `yaml:"only_env"` // all that is kept of the environment
	Dir     string            `yaml:"dir"`
	Stdin   string            `yaml:"stdin"`

	Exit     int      `yaml:"exit"`
	Fails    bool     `yaml:"fails"`  // any exit code but 0
	Stdout   patterns `yaml:"stdout"` // each must match
	Stderr   patterns `yaml:"stderr"`
	Output   patterns `yaml:"output"` // stdout and stderr
	NoOutput patterns `yaml:"no_output"`
	Files    []File   `yaml:"files"`
	Within   duration `yaml:"within"`
}

// File is what must be there after a step.
type File struct {
	Path    string `yaml:"path"`
	Missing bool   `yaml:"missing"`
	Owner   string `yaml:"owner"`
	Mode    string `yaml:"mode"`
	Content string `yaml:"content"`
}

type duration time.Duration

// UnmarshalText reads what time.ParseDuration does.
func (d *duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = duration(v)
	return err
}

type patterns []*regexp.Regexp

// UnmarshalYAML compiles regular expressions, with ^ and $ at line ends.
func (p *patterns) UnmarshalYAML(unmarshal func(any) error) error {
	var texts []string
	if err := unmarshal(&texts); err != nil {
		return err
	}
	for _, t := range texts {
		re, err := pattern(t)
		if err != nil {
			return err
		}
		*p = append(*p, re)
	}
	return nil
}

func pattern(text string) (*regexp.Regexp, error) {
	if text == "^$" {
		return nil, errors.New(`"^$" matches whatever ends its line; \A\z matches no output`)
	}
	return regexp.Compile("(?m)" + text)
}

// over is the container with what another one says on top of it.
func (c Container) over(top Container) Container {
	pick := func(a, b string) string {
		if b != "" {
			return b
		}
		return a
	}
	flag := func(a, b *bool) *bool {
		if b != nil {
			return b
		}
		return a
	}
	out := Container{
		User: pick(c.User, top.User), Workdir: pick(c.Workdir, top.Workdir),
		Network: pick(c.Network, top.Network), Memory: pick(c.Memory, top.Memory), Runtime: pick(c.Runtime, top.Runtime),
		ReadOnly: flag(c.ReadOnly, top.ReadOnly), DropCaps: flag(c.DropCaps, top.DropCaps),
		NoNewPrivileges: flag(c.NoNewPrivileges, top.NoNewPrivileges),
		Pids:            max(c.Pids, top.Pids), Env: maps.Clone(c.Env),
		Hosts: slices.Concat(c.Hosts, top.Hosts), Ports: slices.Concat(c.Ports, top.Ports),
	}
	if top.Pids > 0 {
		out.Pids = top.Pids
	}
	if out.Env == nil {
		out.Env = map[string]string{}
	}
	maps.Copy(out.Env, top.Env)
	for _, m := range c.Mounts {
		if !slices.ContainsFunc(top.Mounts, func(t Mount) bool { return t.Path == m.Path }) {
			out.Mounts = append(out.Mounts, m)
		}
	}
	out.Mounts = append(out.Mounts, top.Mounts...)
	return out
}

// concerns tells whether one of the patterns matches the image's name.
func concerns(images []string, name string) bool {
	return slices.ContainsFunc(images, func(pattern string) bool {
		ok, err := path.Match(pattern, name)
		return ok && err == nil
	})
}

// phases are the case's phases; one that has steps alone is one phase.
func (c *Case) phases() []Phase {
	if len(c.Phases) > 0 {
		return c.Phases
	}
	return []Phase{{Steps: c.Steps}}
}

// argv is the command of a step.
func (s *Step) argv() []string {
	switch {
	case len(s.Exec) > 0:
		return s.Exec
	case len(s.Probe) > 0:
		return append([]string{probePath}, s.Probe...)
	case s.Shell == "login":
		return []string{"bash", "-lc", s.Run}
	case s.Shell == "sh":
		return []string{"sh", "-ec", s.Run}
	}
	return []string{"bash", "-ec", s.Run}
}

func (s *Step) String() string {
	if s.Run != "" && s.Shell != "login" {
		return strings.TrimSpace(s.Run)
	}
	return strings.Join(s.argv(), " ")
}

// checkImages finds names and patterns of images that match none of the
// family, so that a misspelt one is not simply never run.
func (s *Suite) checkImages(f *images.Family) error {
	var names []string
	for _, img := range f.Images {
		names = append(names, img.Name)
	}
	for _, c := range s.Cases {
		for _, pattern := range c.Images {
			if !slices.ContainsFunc(names, func(name string) bool { return concerns([]string{pattern}, name) }) {
				return fmt.Errorf("%s: case %s: no image is called %q; there are %s", c.File, c.Name, pattern, strings.Join(names, ", "))
			}
		}
	}
	return nil
}

// check finds what the schema cannot: names that lead nowhere.
func (s *Suite) check(fixtures fs.FS) error {
	var errs []error
	seen := map[string]string{}
	for _, c := range s.Cases {
		fail := func(format string, a ...any) {
			errs = append(errs, fmt.Errorf("%s: case %s: %w", c.File, c.Name, fmt.Errorf(format, a...)))
		}
		if other, ok := seen[c.Name]; ok {
			fail("%s has a case of the same name", other)
		}
		seen[c.Name] = c.File
		for _, p := range c.Profiles {
			if _, ok := s.Profiles[p]; !ok {
				fail("no profile is called %q; there are %s", p, strings.Join(slices.Sorted(maps.Keys(s.Profiles)), ", "))
			}
		}
		if err := s.checkOutside(&c); err != nil {
			fail("%w", err)
		}
		if c.Fixture != "" && !slices.ContainsFunc(c.phases(), func(p Phase) bool { return p.Service == nil }) {
			fail("a service gets no fixture, and the case has no other phase")
		}
		names := []string{c.Fixture}
		for _, p := range c.Phases {
			names = append(names, p.Fixture)
		}
		for _, f := range names {
			if f == "" {
				continue
			}
			if info, err := fs.Stat(fixtures, f); err != nil || !info.IsDir() {
				fail("smoke/fixtures has no folder %q", f)
			}
		}
	}
	return errors.Join(errs...)
}

// checkOutside demands that a step outside asks at ports that are published.
func (s *Suite) checkOutside(c *Case) error {
	for _, p := range c.phases() {
		if p.Service == nil {
			continue
		}
		for _, step := range append(p.Service.Steps[:len(p.Service.Steps):len(p.Service.Steps)], p.Service.Ready) {
			if !step.Outside {
				continue
			}
			profiles := c.Profiles
			if len(profiles) == 0 {
				profiles = []string{""}
			}
			for _, profile := range profiles {
				ports := s.Profiles[profile].Container.over(c.Container).over(p.Container).Ports
				if len(ports) == 0 {
					return errors.New("a step is outside, and the container publishes no ports: add `ports: [N]`")
				}
				for _, arg := range step.Probe {
					for _, m := range published.FindAllStringSubmatch(arg, -1) {
						if port, _ := strconv.Atoi(m[1]); !slices.Contains(ports, port) {
							return fmt.Errorf("${%s} is none of the ports that the container publishes: %v", m[1], ports)
						}
					}
				}
			}
		}
	}
	return nil
}

var published = regexp.MustCompile(`\$\{([^}]*)\}`)
