package release

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestTagRules(t *testing.T) {
	c, err := Load(filepath.Join("..", "..", "release.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name     string
		version  string
		released []Version
		channels []string
	}{
		{"the first release", "1.0.0", nil, []string{"1.0", "1", "latest"}},
		{"a patch", "1.0.1", []Version{"1.0.0"}, []string{"1.0", "1", "latest"}},
		{"a minor release", "1.1.0", []Version{"1.0.0", "1.0.1"}, []string{"1.1", "1", "latest"}},
		{"a major release", "2.0.0", []Version{"1.9.9"}, []string{"2.0", "2", "latest"}},
		{"a back-port of the same major", "1.0.2", []Version{"1.0.1", "1.1.0"}, []string{"1.0"}},
		{"a back-port of an older major", "1.2.0", []Version{"1.1.0", "2.0.0"}, []string{"1.2", "1"}},
		{"a back-port of both", "1.0.9", []Version{"1.0.8", "1.2.0", "2.0.0"}, []string{"1.0"}},
		{"a pre-release", "2.0.0-rc.1", []Version{"1.9.9"}, nil},
		{"a pre-release before everything", "0.1.0-alpha.1", nil, nil},
		{"after its pre-release", "2.0.0", []Version{"1.9.9", "2.0.0-rc.1", "3.0.0-rc.1"}, []string{"2.0", "2", "latest"}},
		{"again", "1.0.1", []Version{"1.0.0", "1.0.1"}, []string{"1.0", "1", "latest"}},
		{"again, later", "1.0.1", []Version{"1.0.0", "1.0.1", "1.0.2"}, nil},
		{"numbers, not text", "1.10.0", []Version{"1.9.0"}, []string{"1.10", "1", "latest"}},
		{"zero", "0.3.1", []Version{"0.3.0", "0.2.9"}, []string{"0.3", "0", "latest"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			v, err := ParseVersion(x.version)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := c.VersionTags(v), []string{x.version, "v" + x.version}; !slices.Equal(got, want) {
				t.Errorf("version tags %v, want %v", got, want)
			}
			if got := c.ChannelTags(v, x.released); !slices.Equal(got, x.channels) {
				t.Errorf("channels %v, want %v", got, x.channels)
			}
		})
	}
}

func TestPrereleaseChannel(t *testing.T) {
	c := &Config{Channels: []Channel{{Tag: "next", Scope: "all", Prereleases: true}, {Tag: "latest", Scope: "all"}}}
	for v, want := range map[Version][]string{"2.0.0-rc.2": {"next"}, "1.5.0": {"latest"}, "2.0.0": {"next", "latest"}} {
		if got := c.ChannelTags(v, []Version{"1.4.0", "2.0.0-rc.1"}); !slices.Equal(got, want) {
			t.Errorf("%s moves %v, want %v", v, got, want)
		}
	}
}

func TestParseVersion(t *testing.T) {
	for in, want := range map[string]Version{"1.2.3": "1.2.3", "v1.2.3": "1.2.3", "1.2.3-rc.1": "1.2.3-rc.1", "1.2": "", "1": "", "latest": "", "1.2.3+build": "", "01.2.3": "", "": ""} {
		if got, err := ParseVersion(in); got != want || (err == nil) != (want != "") {
			t.Errorf("ParseVersion(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestConfigErrorsSayWhatAndWhere(t *testing.T) {
	for text, want := range map[string]string{
		"registries: []": "name at least one variable",
		"registrys: []":  "registrys",
		"registries: [{variable: registry.example}]\nreleases: r\nlocks: l\nversions: ['{version}']":                                         `"registry.example" is not the name of an environment variable`,
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: [latest]":                                                             `"latest" must be a tag with {version}`,
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['v{version}']":                                                       `"{version}" must be among them`,
		"registries: [{variable: R}]\nreleases: r\nlocks: l":                                                                                 `"{version}" must be among them`,
		"registries: [{variable: R}]\nreleases: r\nlocks: r\nversions: ['{version}']":                                                        "name two repositories",
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['{version}']\nchannels: [{tag: x, scope: week}]":                     `not "week"`,
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['{version}']\nchannels: [{tag: 'x y', scope: all}]":                  `"x y" must be a tag`,
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['{version}']\nchannels: [{tag: '{version}-edge', scope: all}]":       "without {version}",
		"registries: [{variable: R, immutableTags: true, legacySignatures: true}]\nreleases: r\nlocks: l\nversions: ['{version}']":           "choose one of immutableTags and legacySignatures",
		"registries: [{variable: R, host: x}]\nreleases: r\nlocks: l\nversions: ['{version}']\nchannels: [{tag: '{version}', scope: minor}]": "host",
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['{version}']\nrepositories: {a: x, b: x}":                            "a and b would both go to x",
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['{version}']\nrepositories: {a: l}":                                  "locks and a would both go to l",
		"registries: [{variable: R}]\nreleases: r\nlocks: l\nversions: ['{version}']\nrepositories: {a: }":                                   "a goes nowhere",
	} {
		file := filepath.Join(t.TempDir(), "release.yaml")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(file); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "release.yaml") {
			t.Errorf("%q gave %v; want %q", text, err, want)
		}
	}
}

func TestConfigFitsTheBuild(t *testing.T) {
	for _, x := range []struct {
		repositories map[string]string
		want         string
	}{
		{nil, ""},
		{map[string]string{"toolbox": "tools/box"}, ""},
		{map[string]string{"toolbox": "loomcycle", "loomcycle": "toolbox"}, ""},
		{map[string]string{"toolbx": "tools/box"}, "there is no image toolbx; the build has loomcycle, toolbox"},
		{map[string]string{"toolbox": "loomcycle"}, "loomcycle and toolbox would both go to loomcycle"},
	} {
		c := &Config{Repositories: x.repositories, Releases: "r", Locks: "l"}
		if err := c.fits([]string{"loomcycle", "toolbox"}); (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%v gave %v, want %q", x.repositories, err, x.want)
		}
	}
	c := &Config{Releases: "loomcycle", Locks: "l"}
	if err := c.fits([]string{"loomcycle"}); err == nil || !strings.Contains(err.Error(), "releases and loomcycle") {
		t.Errorf("releases in an image's repository: %v", err)
	}
}

func TestResolve(t *testing.T) {
	base := Config{Registries: []Registry{{Variable: "A"}, {Variable: "B", Optional: true}}}
	for _, x := range []struct{ a, b, want string }{
		{"", "", "set A to the registry"},
		{"r.example/x", "r.example/x/", "the same registry"},
		{"https://r.example", "", "without a scheme"},
		{"r.example", "", ""},
	} {
		c := base
		var notices []string
		err := c.Resolve(func(k string) string { return map[string]string{"A": x.a, "B": x.b}[k] }, func(f string, a ...any) { notices = append(notices, f) })
		if (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v gave %v", x, err)
		}
		if err == nil && (len(c.Registries) != 1 || len(notices) != 1) {
			t.Errorf("%+v: %d registries, notices %q", x, len(c.Registries), notices)
		}
	}
}
