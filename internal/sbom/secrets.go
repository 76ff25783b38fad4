package sbom

import (
	"bytes"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/anchore/syft/syft/pkg"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Finding is content that looks like a secret. The secret itself is never in it.
type Finding struct {
	Path      string `json:"path"` // of a file, or config:FIELD
	Kind      string `json:"kind"`
	Component string `json:"component,omitempty"`
}

// secretKinds look for a literal first, so that a gigabyte is searched at
// memory speed, and for the whole pattern only around it.
var secretKinds = []struct {
	kind    string
	literal string
	pattern *regexp.Regexp
}{
	{"private key", "PRIVATE KEY-----", regexp.MustCompile(`-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----\s*\n[A-Za-z0-9+/=:,. \r\n-]{64}`)},
	{"AWS access key", "AKIA", regexp.MustCompile(`\bAKIA[0-9A-Z]{16}\b`)},
	{"GitHub token", "ghp_", regexp.MustCompile(`\bghp_[A-Za-z0-9]{36,}\b`)},
	{"GitHub token", "gho_", regexp.MustCompile(`\bgho_[A-Za-z0-9]{36,}\b`)},
	{"GitHub token", "ghs_", regexp.MustCompile(`\bghs_[A-Za-z0-9]{36,}\b`)},
	{"GitHub token", "github_pat_", regexp.MustCompile(`\bgithub_pat_[A-Za-z0-9_]{60,}\b`)},
	{"GitLab token", "glpat-", regexp.MustCompile(`\bglpat-[A-Za-z0-9_-]{20,}\b`)},
	{"npm token", "npm_", regexp.MustCompile(`\bnpm_[A-Za-z0-9]{36}\b`)},
	{"npm credential", "_authToken", regexp.MustCompile(`_authToken\s*=\s*[A-Za-z0-9_-]{8,}`)},
	{"Slack token", "xox", regexp.MustCompile(`\bxox[abprs]-[0-9A-Za-z-]{20,}\b`)},
	{"Google API key", "AIza", regexp.MustCompile(`\bAIza[0-9A-Za-z_-]{35}\b`)},
	{"JSON web token", "eyJhbGciOi", regexp.MustCompile(`\beyJhbGciOi[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}`)},
}

// secretNames are files that hold credentials whatever is in them.
var secretNames = map[string]string{
	".netrc": "credential file", ".npmrc": "credential file", ".pypirc": "credential file", ".git-credentials": "credential file",
	"id_rsa": "private key", "id_ecdsa": "private key", "id_ed25519": "private key",
	".env": "environment file", "cosign.key": "private key",
}

// secretEnv are variables whose value is a secret by their name.
var secretEnv = regexp.MustCompile(`(?i)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY)`)

// secrets searches every file but those that are byte for byte what a Debian
// package shipped, and the image's configuration.
func (c *Catalog) secrets(config *v1.ConfigFile) ([]Finding, error) {
	out := []Finding{}
	for _, f := range c.Variant.FS.All() {
		name := f.Path
		owner := c.sbom.Artifacts.Packages.Package(c.Owner[name])
		if !f.Regular() || f.Size == 0 || owner != nil && owner.Type == pkg.DebPkg {
			continue
		}
		if kind, ok := secretNames[path.Base(name)]; ok {
			out = append(out, Finding{name, kind, c.name(c.Owner[name])})
		}
		data, err := io.ReadAll(f.Open())
		if err != nil {
			return nil, fmt.Errorf("search /%s for secrets: %w", name, err)
		}
		for _, kind := range search(data) {
			out = append(out, Finding{name, kind, c.name(c.Owner[name])})
		}
	}
	if config == nil {
		return out, nil
	}
	add := func(field, text string) {
		for _, kind := range search([]byte(text)) {
			out = append(out, Finding{"config:" + field, kind, ""})
		}
	}
	for _, env := range config.Config.Env {
		name, value, _ := strings.Cut(env, "=")
		if secretEnv.MatchString(name) && value != "" {
			out = append(out, Finding{"config:Env:" + name, "secret by its name", ""})
		}
		add("Env:"+name, value)
	}
	for key, value := range config.Config.Labels {
		add("Labels:"+key, value)
	}
	for i, h := range config.History {
		add(fmt.Sprintf("History:%d", i), h.CreatedBy+"\n"+h.Comment)
	}
	slices.SortFunc(out, func(a, b Finding) int { return strings.Compare(a.Path+"\x00"+a.Kind, b.Path+"\x00"+b.Kind) })
	return slices.Compact(out), nil
}

func search(data []byte) []string {
	var out []string
	for _, s := range secretKinds {
		for rest, from := data, 0; !slices.Contains(out, s.kind); {
			i := bytes.Index(rest, []byte(s.literal))
			if i < 0 {
				break
			}
			at := from + i
			if s.pattern.Match(data[max(0, at-48):min(len(data), at+512)]) {
				out = append(out, s.kind)
			}
			from = at + len(s.literal)
			rest = data[from:]
		}
	}
	return out
}
