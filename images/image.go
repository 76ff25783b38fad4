// Package images turns the family's data into LLB: what each image is
// (image.yaml), the groups of locked sources that become its layers, and its
// OCI configuration. Everything here is a pure function; nothing connects
// to a builder.
package images

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"text/template"

	"go.yaml.in/yaml/v3"
)

// Family is all images of one release, in the order of family.yaml.
type Family struct {
	Vendor   string `yaml:"vendor"`
	Licenses string `yaml:"licenses"` // SPDX expression of our own files
	Source   string `yaml:"source"`
	URL      string `yaml:"url"`
	// Programs are the programs of this repository that images carry.
	Programs []ProgramSource `yaml:"programs"`
	Folders  []string        `yaml:"images"`
	Images   []Image         `yaml:"-"`
}

// ProgramSource is where a program of this repository is compiled from.
type ProgramSource struct {
	Name    string   `yaml:"name"`
	Package string   `yaml:"package"` // as `go build` takes it
	Include []string `yaml:"include"` // paths of the repository
}

// Image is one image's definition.
type Image struct {
	Name          string    `yaml:"name"`
	Title         string    `yaml:"title"`
	Description   string    `yaml:"description"`
	Documentation string    `yaml:"documentation"` // path in the source repository
	Groups        []string  `yaml:"groups"`        // the groups' `after` chains are implied
	Programs      []string  `yaml:"programs"`      // our own, in /usr/local/bin
	Distroless    bool      `yaml:"distroless"`    // no dpkg, no shell: nothing but files
	FileSets      []string  `yaml:"files"`         // folders with a files.yaml, relative to the definition
	Accounts      []Account `yaml:"accounts"`
	Home          string    `yaml:"home"`
	HomeMode      string    `yaml:"home_mode"` // octal; as Dirs when not given
	Dirs          []string  `yaml:"dirs"`      // below Home
	Config        Config    `yaml:"config"`
	// Budget is the largest compressed size of each platform's layers.
	Budget map[string]string `yaml:"budget"`
	// Files are the FileSets' files, rendered for this image.
	Files []File `yaml:"-"`
}

// Account is a line of passwd and group that no package makes.
type Account struct {
	Name  string `yaml:"name"`
	UID   int    `yaml:"uid"`
	GID   int    `yaml:"gid"`
	Home  string `yaml:"home"`
	Shell string `yaml:"shell"`
	// MakeHome makes Home a private folder of the account's own.
	MakeHome bool `yaml:"makehome"`
	// SubIDs is the account's range in /etc/subuid and /etc/subgid.
	SubIDs struct {
		First int `yaml:"first"`
		Count int `yaml:"count"`
	} `yaml:"subids"`
}

// Config is the part of the OCI image configuration that differs by image.
type Config struct {
	User       string   `yaml:"user"`
	Workdir    string   `yaml:"workdir"`
	Entrypoint []string `yaml:"entrypoint"`
	Cmd        []string `yaml:"cmd"`
	Ports      []string `yaml:"ports"`
	StopSignal string   `yaml:"stopsignal"`
	Env        []string `yaml:"env"` // NAME=value
}

// File is a file or link that an image adds to its packages.
type File struct {
	Path    string `yaml:"path"`
	Content string `yaml:"content"`
	Link    string `yaml:"link"`    // makes a symbolic link of it
	Prepend bool   `yaml:"prepend"` // before what a package put there
	Mode    string `yaml:"mode"`    // octal; 0644 when not given
}

// Load reads the family from the repository's root.
func Load(repo fs.FS) (*Family, error) {
	var f Family
	if err := decode(repo, "images/family.yaml", &f); err != nil {
		return nil, err
	}
	for _, folder := range f.Folders {
		img, err := loadImage(repo, folder)
		if err != nil {
			return nil, err
		}
		f.Images = append(f.Images, *img)
	}
	return &f, nil
}

// Image finds an image by name.
func (f *Family) Image(name string) (*Image, error) {
	var names []string
	for i := range f.Images {
		if f.Images[i].Name == name {
			return &f.Images[i], nil
		}
		names = append(names, f.Images[i].Name)
	}
	return nil, fmt.Errorf("no image is called %q; the family has %s", name, strings.Join(names, ", "))
}

func loadImage(repo fs.FS, folder string) (*Image, error) {
	file := path.Join(folder, "image.yaml")
	var img Image
	if err := decode(repo, file, &img); err != nil {
		return nil, err
	}
	if err := img.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for _, set := range img.FileSets {
		name := path.Join(folder, set, "files.yaml")
		var files []File
		if err := decode(repo, name, &files); err != nil {
			return nil, err
		}
		for _, f := range files {
			if err := img.render(&f); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", name, f.Path, err)
			}
			img.Files = append(img.Files, f)
		}
	}
	return &img, nil
}

func (img *Image) check() error {
	var errs []error
	need := func(ok bool, format string, a ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, a...))
		}
	}
	need(img.Name != "", "name is missing")
	need(len(img.Groups) > 0, "groups is empty: an image is made of groups of groups.yaml")
	need(path.IsAbs(img.Home), "home %q is not an absolute path", img.Home)
	need(img.Config.User != "", "config.user is missing; say 0:0 if it must be root")
	for _, kv := range img.Config.Env {
		need(strings.Contains(kv, "="), "config.env: %q is not NAME=value", kv)
	}
	for _, d := range img.Dirs {
		need(fs.ValidPath(d), "dirs: %q is not a path below home", d)
	}
	return errors.Join(errs...)
}

// Env returns the value of a variable of the image's configuration.
func (img *Image) Env(name string) (string, error) {
	for _, kv := range img.Config.Env {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v, nil
		}
	}
	return "", fmt.Errorf("config.env of %s has no %s", img.Name, name)
}

func (img *Image) render(f *File) error {
	if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path {
		return fmt.Errorf("path is not absolute and clean")
	}
	if (f.Link == "") == (f.Content == "") {
		return fmt.Errorf("a file has either content or link")
	}
	t, err := template.New(f.Path).Option("missingkey=error").
		Funcs(template.FuncMap{"env": img.Env}).Parse(f.Content)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, img); err != nil {
		return err
	}
	f.Content = b.String()
	if f.Mode == "" {
		f.Mode = "0644"
	}
	return nil
}

// decode reads a YAML file strictly: a field that nothing reads is an error.
func decode(repo fs.FS, name string, into any) error {
	b, err := fs.ReadFile(repo, name)
	if err != nil {
		return err
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
