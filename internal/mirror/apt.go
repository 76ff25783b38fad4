package mirror

import (
	"errors"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"pault.ag/go/debian/control"

	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// aptMirrors holds the URLs of each Debian archive in apt's order.
type aptMirrors map[lock.Kind][]string

// debianSuite is what Debian's own suites are called. Third parties use the
// bare codenames too, so it is not proof enough: see classify.
var debianSuite = regexp.MustCompile(`^(stable|oldstable|testing|unstable|sid|[a-z]+)(-updates|-proposed-updates|-backports|-security|/updates)?$`)

// readAptSources reads the files that apt itself reads (sources.list(5)).
func readAptSources(dir string) (aptMirrors, error) {
	files := []string{filepath.Join(dir, "sources.list")}
	for _, pattern := range []string{"*.list", "*.sources"} {
		more, err := filepath.Glob(filepath.Join(dir, "sources.list.d", pattern))
		if err != nil {
			return nil, err
		}
		files = append(files, more...)
	}
	slices.Sort(files[1:])
	mirrors := aptMirrors{}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if strings.HasSuffix(name, ".sources") {
			err = mirrors.readDeb822(string(text))
		} else {
			mirrors.readOneLine(string(text))
		}
		if err != nil {
			return nil, errors.New(name + ": " + err.Error())
		}
	}
	return mirrors, nil
}

// readOneLine reads "deb [options] URI suite component..." lines.
func (m aptMirrors) readOneLine(text string) {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "#")
		rest, ok := strings.CutPrefix(line, "deb ")
		if !ok {
			continue
		}
		rest = strings.TrimSpace(rest)
		options := ""
		if strings.HasPrefix(rest, "[") {
			options, rest, _ = strings.Cut(rest[1:], "]")
		}
		if fields := strings.Fields(rest); len(fields) >= 3 {
			m.add(fields[:1], fields[1:2], fields[2:], options)
		}
	}
}

// readDeb822 reads the paragraphs of a .sources file.
func (m aptMirrors) readDeb822(text string) error {
	r, err := control.NewParagraphReader(strings.NewReader(text), nil)
	if err != nil {
		return err
	}
	paragraphs, err := r.All()
	if err != nil {
		return err
	}
	for _, p := range paragraphs {
		// Field names are case-insensitive (deb822(5)).
		v := map[string]string{}
		for name, value := range p.Values {
			v[strings.ToLower(name)] = value
		}
		off := strings.ToLower(strings.TrimSpace(v["enabled"]))
		if !slices.Contains(strings.Fields(v["types"]), "deb") || slices.Contains([]string{"no", "false", "without", "off", "disable"}, off) {
			continue
		}
		m.add(strings.Fields(v["uris"]), strings.Fields(v["suites"]), strings.Fields(v["components"]), v["signed-by"])
	}
	return nil
}

// add records the URIs that serve component main of a Debian suite.
func (m aptMirrors) add(uris, suites, components []string, signedBy string) {
	if !slices.Contains(components, "main") {
		return
	}
	for _, uri := range uris {
		for _, real := range expand(uri) {
			for _, suite := range suites {
				kind, ok := classify(real, suite, signedBy)
				if ok && !slices.Contains(m[kind], real) {
					m[kind] = append(m[kind], real)
				}
			}
		}
	}
}

// classify tells which Debian archive an entry is of. A third party's
// repository may use Debian's suite names, so the entry must also be signed
// by Debian's keyring or lie in a folder named as Debian's archives are.
func classify(uri, suite, signedBy string) (lock.Kind, bool) {
	u, err := url.Parse(uri)
	if err != nil || !debianSuite.MatchString(suite) {
		return "", false
	}
	folder := path.Base(strings.TrimSuffix(u.Path, "/"))
	if !strings.Contains(signedBy, "debian-archive-") && folder != string(lock.Main) && folder != string(lock.Security) {
		return "", false
	}
	if strings.HasSuffix(suite, "-security") || strings.HasSuffix(suite, "/updates") {
		return lock.KindSecurity, true
	}
	return lock.KindDebian, true
}

// expand replaces apt's mirror+file:LIST method, which Debian's cloud images
// use, by the mirrors that the list holds (apt-transport-mirror(1)).
func expand(uri string) []string {
	name, ok := strings.CutPrefix(uri, "mirror+file:")
	if !ok {
		return []string{uri}
	}
	text, err := os.ReadFile(filepath.Clean("/" + strings.TrimLeft(name, "/")))
	if err != nil {
		return nil
	}
	var uris []string
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 0 && !strings.HasPrefix(fields[0], "#") {
			uris = append(uris, fields[0])
		}
	}
	return uris
}
