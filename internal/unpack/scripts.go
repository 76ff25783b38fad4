package unpack

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"go.yaml.in/yaml/v3"
)

//go:embed scripts.yaml
var scriptsYAML []byte

// script says what is done in place of one package's maintainer scripts.
type script struct {
	// Seen holds the fingerprints of the scripts that someone has read; they
	// differ between architectures where a script names its own.
	Seen []string `yaml:"seen"`
	Note string   `yaml:"note"`

	// Done while the package is unpacked, because it changes its own files.
	Replace map[string]string            `yaml:"replace"` // folder: target of the link in its place
	Mode    map[string]ownedMode         `yaml:"mode"`    // its file: mode and owner
	Divert  map[string]map[string]string `yaml:"divert"`  // architecture or any; another package's file: where it goes

	// Done when all packages are there. Nothing that exists is replaced.
	Copy         map[string]string    `yaml:"copy"` // new file: existing one
	Dirs         map[string]ownedMode `yaml:"dirs"`
	Links        map[string]string    `yaml:"links"`
	Files        map[string]newFile   `yaml:"files"`
	Template     map[string]template  `yaml:"template"`
	Alternatives []string             `yaml:"alternatives"` // as update-alternatives --install takes them
	Groups       map[string]int       `yaml:"groups"`       // name: id, of system groups
	Native       []string             `yaml:"native"`       // see natives
}

// diverts returns the diversions on an architecture.
func (s script) diverts(arch string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, s.Divert["any"])
	maps.Copy(all, s.Divert[arch])
	return all
}

type ownedMode struct {
	Mode string `yaml:"mode"`
	UID  int    `yaml:"uid"`
	GID  int    `yaml:"gid"`
}

type newFile struct {
	ownedMode `yaml:",inline"`
	Content   string `yaml:"content"`
}

// template is a file of a package with placeholders, each a line of its own.
type template struct {
	From string            `yaml:"from"`
	Set  map[string]string `yaml:"set"`
}

// loadScripts reads the table of maintainer scripts.
func loadScripts() (map[string]script, error) {
	var table map[string]script
	dec := yaml.NewDecoder(bytes.NewReader(scriptsYAML))
	dec.KnownFields(true)
	if err := dec.Decode(&table); err != nil {
		return nil, fmt.Errorf("scripts.yaml: %w", err)
	}
	return table, nil
}

// fingerprint identifies a package's preinst and postinst. prerm and postrm
// never run for a package that is only ever installed.
func (d *deb) fingerprint() string {
	h := sha256.New()
	n := 0
	for _, name := range []string{"preinst", "postinst"} {
		if f, ok := d.control[name]; ok {
			fmt.Fprintf(h, "%s %d\n", name, len(f.data))
			h.Write(f.data)
			n++
		}
	}
	if n == 0 {
		return ""
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// lookup returns what is to be done for the package and fails when it has a
// script that nobody has looked at.
func lookup(table map[string]script, d *deb) (script, error) {
	name, print := d.stanza.get("Package"), d.fingerprint()
	s, listed := table[name]
	switch {
	case print == "":
		if len(s.Seen) > 0 {
			return script{}, nil // the scripts are gone; so is their effect
		}
	case !listed:
		return s, fmt.Errorf("its maintainer scripts (%s) are not listed: read its preinst and postinst, then add to internal/unpack/scripts.yaml the key %q with what is to be done and \"seen: [%s]\"", print, name, print)
	case !slices.Contains(s.Seen, print):
		return s, fmt.Errorf("its maintainer scripts changed: read its preinst and postinst, then correct the key %q in internal/unpack/scripts.yaml and add %s to its seen", name, print)
	}
	return s, nil
}
