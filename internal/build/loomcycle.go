package build

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/loomcycle/loomcycle-images/internal/vcs"
)

// loomcycle is where the runtime's binary comes from (LOOMCYCLE_SOURCE).
type loomcycle struct {
	bin     string // folder of prebuilt binaries
	dir     string // a module's folder; empty for this repository's own
	pkg     string
	ldflags []string
	web     bool   // the module has a user interface in web/
	label   string // for release.json and people; no credentials
	// LOOMCYCLE_PACKAGE and LOOMCYCLE_LDFLAGS, where they apply.
	asked struct{ pkg, ldflags string }
}

// resolveLoomcycle reads LOOMCYCLE_SOURCE, LOOMCYCLE_PACKAGE and
// LOOMCYCLE_LDFLAGS, and brings a git source onto this machine. The binary is
// stamped with the version and commit of the repository that it comes from;
// own are this one's.
func resolveLoomcycle(ctx context.Context, getenv func(string) string, cache string, own []string) (loomcycle, error) {
	value := getenv("LOOMCYCLE_SOURCE")
	kind, rest, _ := strings.Cut(value, ":")
	l := loomcycle{pkg: "./cmd/loomcycle", ldflags: own}
	if p := getenv("LOOMCYCLE_PACKAGE"); p != "" {
		l.pkg = p
	}
	switch {
	case value == "":
		l.pkg = ""
	case kind == "git" && strings.Contains(rest, "#"):
		i := strings.LastIndex(rest, "#")
		url, ref := rest[:i], rest[i+1:]
		dir, commit, err := vcs.Checkout(ctx, filepath.Join(cache, "loomcycle"), url, ref)
		if err != nil {
			return l, fmt.Errorf("LOOMCYCLE_SOURCE: %w", err)
		}
		version := "0.0.0-g" + commit[:12]
		if releaseTag.MatchString(ref) {
			version = strings.TrimPrefix(ref, "v")
		}
		l.dir, l.label, l.ldflags = dir, "git:"+vcs.Redact(url)+"#"+commit, stamp(version, commit)
	case kind == "dir" && rest != "":
		dir, err := filepath.Abs(rest)
		if err != nil {
			return l, err
		}
		state, err := vcs.Describe(ctx, dir)
		if err != nil {
			return l, fmt.Errorf("LOOMCYCLE_SOURCE: %w", err)
		}
		l.dir, l.label, l.ldflags = dir, "dir:"+filepath.Base(dir)+"#"+state.Commit, stamp(state.Version, state.Commit)
	case kind == "bin" && rest != "":
		l.bin, l.label = rest, "bin:"+filepath.Base(rest)
		return l, nil
	default:
		return l, fmt.Errorf("LOOMCYCLE_SOURCE=%s is none of git:URL#REF, dir:PATH, bin:DIR", vcs.Redact(value))
	}
	if f := strings.Fields(getenv("LOOMCYCLE_LDFLAGS")); len(f) > 0 {
		l.ldflags, l.asked.ldflags = f, strings.Join(f, " ")
	}
	if l.dir == "" {
		return l, nil
	}
	l.asked.pkg = getenv("LOOMCYCLE_PACKAGE")
	if _, err := os.Stat(filepath.Join(l.dir, "go.mod")); err != nil {
		return l, fmt.Errorf("LOOMCYCLE_SOURCE: %s is not a Go module: %w", l.label, err)
	}
	_, err := os.Stat(filepath.Join(l.dir, "web", "package-lock.json"))
	l.web = err == nil
	return l, nil
}

// stamp sets what the program prints as its version.
func stamp(version, commit string) []string {
	return []string{"-X main.version=" + version, "-X main.commit=" + commit}
}

var releaseTag = regexp.MustCompile(`^v?[0-9]+\.[0-9]+\.[0-9]+`)

// checkBinary demands a static Linux executable of the architecture.
func checkBinary(file, arch string) error {
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("LOOMCYCLE_SOURCE: %s: %w", file, err)
	}
	defer f.Close()
	want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]
	if f.Machine != want {
		return fmt.Errorf("LOOMCYCLE_SOURCE: %s is for %v, not for %s (%v)", file, f.Machine, arch, want)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP { // a static position-independent one has PT_DYNAMIC, too
			return fmt.Errorf("LOOMCYCLE_SOURCE: %s is dynamically linked; the distroless image has no loader: build it with CGO_ENABLED=0", file)
		}
	}
	return nil
}
