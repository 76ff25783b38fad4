// Package release publishes a signed family to registries: everything by digest
// first, checked as a consumer would, and only then the tags, so that a release
// that stops half-way leaves no tag on anything unsigned, unsmoked or mixed, and
// running it again finishes it.
package release

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/mod/semver"
)

// Config is release.yaml.
type Config struct {
	Registries   []Registry        `yaml:"registries"`
	Repositories map[string]string `yaml:"repositories"`
	Releases     string            `yaml:"releases"`
	Locks        string            `yaml:"locks"`
	Versions     []string          `yaml:"versions"`
	Channels     []Channel         `yaml:"channels"`
	Hooks        Hooks             `yaml:"hooks"`
}

// Registry is a destination, named by an environment variable.
type Registry struct {
	Variable         string `yaml:"variable"`
	Optional         bool   `yaml:"optional"`
	ImmutableTags    bool   `yaml:"immutableTags"`
	LegacySignatures bool   `yaml:"legacySignatures"`
	// Address is the variable's value, set by Resolve.
	Address string `yaml:"-"`
}

// Channel is a tag that moves forward.
type Channel struct {
	Tag         string `yaml:"tag"`
	Scope       string `yaml:"scope"` // minor, major or all
	Prereleases bool   `yaml:"prereleases"`
}

// Hooks are commands run on what was pushed, before any tag moves.
type Hooks struct {
	Smoke  []string `yaml:"smoke"`
	Policy []string `yaml:"policy"`
}

var (
	tagText  = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$`) // distribution-spec 1.1, <reference> as a tag
	template = regexp.MustCompile(`\{(version|major|minor)\}`)
)

// Load reads and checks release.yaml.
func Load(file string) (*Config, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the release configuration: %w", err)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	var c Config
	if err := d.Decode(&c); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var wrong []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			wrong = append(wrong, fmt.Errorf(file+": "+format, args...))
		}
	}
	check(len(c.Registries) > 0, "registries: name at least one variable")
	check(c.Releases != "" && c.Locks != "" && c.Releases != c.Locks, "releases and locks: name two repositories")
	// What was released is read from the bare tags, and decides what the channels may do.
	check(slices.Contains(c.Versions, "{version}"), "versions: %q must be among them", "{version}")
	for _, r := range c.Registries {
		check(regexp.MustCompile(`^[A-Z][A-Z0-9_]*$`).MatchString(r.Variable), "registries: %q is not the name of an environment variable", r.Variable)
		check(!r.ImmutableTags || !r.LegacySignatures, "registries: %s: the older tag scheme adds to tags, which a registry of immutable tags refuses; choose one of immutableTags and legacySignatures", r.Variable)
	}
	for _, t := range c.Versions {
		check(strings.Contains(t, "{version}") && tagText.MatchString(template.ReplaceAllString(t, "1")), "versions: %q must be a tag with {version} in it", t)
	}
	for _, ch := range c.Channels {
		check(!strings.Contains(ch.Tag, "{version}") && tagText.MatchString(template.ReplaceAllString(ch.Tag, "1")), "channels: %q must be a tag without {version}", ch.Tag)
		check(ch.Scope == "minor" || ch.Scope == "major" || ch.Scope == "all", "channels: %s: the scope is minor, major or all, not %q", ch.Tag, ch.Scope)
	}
	for image, r := range c.Repositories {
		check(r != "", "repositories: %s goes nowhere; name its repository, or leave it out", image)
	}
	if err := c.apart(slices.Sorted(maps.Keys(c.Repositories))); err != nil {
		wrong = append(wrong, fmt.Errorf("%s: %w", file, err))
	}
	return &c, errors.Join(wrong...)
}

// apart fails when two of the images, or one of them and what releases need for
// themselves, would share a repository.
func (c *Config) apart(images []string) error {
	var wrong []error
	taken := map[string]string{c.Releases: "releases", c.Locks: "locks"}
	for _, i := range images {
		r := c.Repository(i)
		if other := taken[r]; other != "" {
			wrong = append(wrong, fmt.Errorf("repositories: %s and %s would both go to %s; give each its own", other, i, r))
		}
		taken[r] = i
	}
	return errors.Join(wrong...)
}

// fits fails when the images of a build can't go where the configuration says,
// or it names one that is not among them.
func (c *Config) fits(images []string) error {
	for _, i := range slices.Sorted(maps.Keys(c.Repositories)) {
		if !slices.Contains(images, i) {
			return fmt.Errorf("repositories: there is no image %s; the build has %s", i, strings.Join(images, ", "))
		}
	}
	return c.apart(images)
}

// Resolve fills the addresses from the environment. It fails when a registry
// that is not optional is missing, or two are the same.
func (c *Config) Resolve(getenv func(string) string, notice func(string, ...any)) error {
	var kept []Registry
	for _, r := range c.Registries {
		r.Address = strings.TrimSuffix(getenv(r.Variable), "/")
		switch {
		case r.Address == "" && r.Optional:
			notice("%s is not set: that registry is skipped", r.Variable)
			continue
		case r.Address == "":
			return fmt.Errorf("set %s to the registry to release to: HOST[:PORT][/PREFIX]", r.Variable)
		case strings.Contains(r.Address, "://"):
			return fmt.Errorf("%s: write HOST[:PORT][/PREFIX] without a scheme, not %q", r.Variable, r.Address)
		}
		for _, k := range kept {
			if k.Address == r.Address {
				return fmt.Errorf("%s and %s are the same registry, %s", k.Variable, r.Variable, r.Address)
			}
		}
		kept = append(kept, r)
	}
	c.Registries = kept
	return nil
}

// Repository is where an image goes, below a registry's prefix.
func (c *Config) Repository(image string) string {
	if r := c.Repositories[image]; r != "" {
		return r
	}
	return image
}

// Split takes REGISTRY[/PREFIX]/REPOSITORY apart, where a repository that the
// configuration names may have slashes of its own.
func (c *Config) Split(name string) (address, repository string, ok bool) {
	for _, r := range c.Repositories {
		if a, found := strings.CutSuffix(name, "/"+r); found && len(r) > len(repository) {
			address, repository = a, r
		}
	}
	if repository != "" {
		return address, repository, true
	}
	i := strings.LastIndex(name, "/")
	return name[:max(i, 0)], name[i+1:], i >= 0
}

// all lists the repositories of a release of these images.
func (c *Config) all(images []string) []string {
	repos := []string{c.Releases, c.Locks}
	for _, i := range images {
		repos = append(repos, c.Repository(i))
	}
	return repos
}

// Version is a checked semantic version without the leading v.
type Version string

// ParseVersion accepts 1.2.3, v1.2.3 and pre-releases; no build metadata,
// because a tag can't hold its plus sign.
func ParseVersion(s string) (Version, error) {
	v := "v" + strings.TrimPrefix(s, "v")
	if !semver.IsValid(v) || semver.Canonical(v) != v {
		return "", fmt.Errorf("%q is not a version to release: write X.Y.Z or X.Y.Z-PRE", s)
	}
	return Version(v[1:]), nil
}

func (v Version) sem() string      { return "v" + string(v) }
func (v Version) prerelease() bool { return semver.Prerelease(v.sem()) != "" }

// newer tells whether a is; any version is newer than none.
func newer(a, b Version) bool { return semver.Compare(a.sem(), b.sem()) > 0 }

func (v Version) expand(tag string) string {
	major := semver.Major(v.sem())[1:]
	minor := strings.TrimPrefix(semver.MajorMinor(v.sem())[1:], major+".")
	return strings.NewReplacer("{version}", string(v), "{major}", major, "{minor}", minor).Replace(tag)
}

// VersionTags are the tags that are written once.
func (c *Config) VersionTags(v Version) []string {
	var tags []string
	for _, t := range c.Versions {
		tags = append(tags, v.expand(t))
	}
	return tags
}

// ChannelTags are the tags that this version moves, given every version that
// was released: those whose scope holds no newer one.
func (c *Config) ChannelTags(v Version, released []Version) []string {
	var tags []string
	for _, ch := range c.Channels {
		if v.prerelease() && !ch.Prereleases {
			continue
		}
		newest := true
		for _, r := range released {
			counts := (!r.prerelease() || ch.Prereleases) && ch.same(v, r)
			newest = newest && !(counts && newer(r, v))
		}
		if newest {
			tags = append(tags, v.expand(ch.Tag))
		}
	}
	return tags
}

func (ch Channel) same(a, b Version) bool {
	switch ch.Scope {
	case "minor":
		return semver.MajorMinor(a.sem()) == semver.MajorMinor(b.sem())
	case "major":
		return semver.Major(a.sem()) == semver.Major(b.sem())
	}
	return true
}

// Channel tells whether a tag is a channel that the version may stand behind.
func (c *Config) Channel(tag string, v Version) error {
	for _, ch := range c.Channels {
		if v.expand(ch.Tag) == tag {
			if v.prerelease() && !ch.Prereleases {
				return fmt.Errorf("channel %s takes no pre-releases, and %s is one", tag, v)
			}
			return nil
		}
	}
	return fmt.Errorf("%s is not a channel of %s; release.yaml lists the channels", tag, v)
}
