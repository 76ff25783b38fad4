// Package sbom says what an image is made of: an SPDX and a CycloneDX
// document per variant, in which every regular file belongs to a component
// and every component comes from the lock. Syft finds the packages; this
// package adds what syft can't see and checks that nothing is left over.
package sbom

import (
	"context"
	"crypto/md5" //nolint:gosec // dpkg records MD5; what it protects is checked by the lock's SHA-256
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/anchore/syft/syft"
	"github.com/anchore/syft/syft/artifact"
	"github.com/anchore/syft/syft/cataloging"
	"github.com/anchore/syft/syft/cataloging/pkgcataloging"
	"github.com/anchore/syft/syft/cpe"
	"github.com/anchore/syft/syft/file"
	"github.com/anchore/syft/syft/linux"
	"github.com/anchore/syft/syft/pkg"
	"github.com/anchore/syft/syft/pkg/cataloger/golang"
	syftsbom "github.com/anchore/syft/syft/sbom"
	"github.com/anchore/syft/syft/source"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
	"github.com/loomcycle/loomcycle-images/internal/lock"
	"github.com/loomcycle/loomcycle-images/internal/purl"
)

// Variant is one image for one platform, and what it was made of.
type Variant struct {
	Image    string // loomcycle-toolbox
	Platform string // linux/arm64
	Version  string // of the release
	Digest   digest.Digest
	// Namespace is the URI below which the documents are named; it need not
	// resolve (SPDX 2.3, 6.5).
	Namespace string
	// Groups has the group of each layer, in the manifest's order.
	Groups []string
	// Files are the paths that the image's definition adds to its packages;
	// they belong to the component that owns generated files.
	Files []string
	FS    *imagefs.FS
	Lock  *lock.Lock
	// ModuleCache is a folder like a GOMODCACHE that holds every module of
	// Modules under its name, for their licences, and no other: what a
	// machine happens to have must not be in its documents.
	ModuleCache string
	// Licences are those of the project's own programs.
	Licences []string
}

func (v Variant) arch() string { return path.Base(strings.TrimPrefix(v.Platform, "linux/")) }

func (v Variant) group(f *imagefs.File) string {
	if f.Layer < len(v.Groups) {
		return v.Groups[f.Layer]
	}
	return ""
}

// Catalog is the content of a variant with the owner of every file.
type Catalog struct {
	Variant Variant
	// Owner has the component of each regular file that has one.
	Owner map[string]artifact.ID
	// Unclaimed are the regular files without one, sorted.
	Unclaimed []Unclaimed
	// Missing and Extra are the lock's packages that the image lacks and the
	// image's that the lock lacks, sorted.
	Missing, Extra []string
	// Programs has the SHA-256 of each of the project's own programs.
	Programs map[string]digest.Digest

	sbom    syftsbom.SBOM
	sources map[artifact.ID]digest.Digest // of the locked archive that the component came in
	within  map[artifact.ID]artifact.ID   // the component whose file a module is linked into
	files   map[artifact.ID]int
}

// Unclaimed is a file that belongs to no component.
type Unclaimed struct {
	Path string `json:"path"`
	Why  string `json:"why"`
}

// Err names the files and packages that keep the catalog from being complete.
func (c *Catalog) Err() error {
	var errs []error
	for _, u := range c.Unclaimed {
		errs = append(errs, fmt.Errorf("/%s: %s", u.Path, u.Why))
	}
	for _, m := range c.Missing {
		errs = append(errs, fmt.Errorf("%s is in the lock for this image, but not in the image", m))
	}
	for _, e := range c.Extra {
		errs = append(errs, fmt.Errorf("%s is in the image, but not in the lock", e))
	}
	if len(errs) == 0 {
		return nil
	}
	const most = 40
	if more := len(errs) - most; more > 0 {
		errs = append(errs[:most], fmt.Errorf("and %d more", more))
	}
	return fmt.Errorf("the SBOM of %s for %s is not complete:\n%w", c.Variant.Image, c.Variant.Platform, errors.Join(errs...))
}

var catalogers = []string{"dpkg-db-cataloger", "go-module-binary-cataloger", "javascript-package-cataloger"}

// WithLicences gives a context in which several Inspects share one classifier
// of licence texts; to make it takes a second.
func WithLicences(ctx context.Context) (context.Context, error) {
	return syft.SetContextLicenseScanner(ctx, cataloging.DefaultLicenseConfig())
}

// Inspect finds the packages of a variant and the owner of every file. What
// is missing is in the result, for Err to say: an incomplete catalog can
// still be looked at.
func Inspect(ctx context.Context, v Variant, components Components) (*Catalog, error) {
	src := imageSource{resolver{v.FS}, source.Description{
		ID: v.Digest.String(), Name: v.Image, Version: v.Version, Supplier: "loomcycle",
		Metadata: source.ImageMetadata{
			UserInput: v.Image, ManifestDigest: v.Digest.String(), OS: "linux", Architecture: v.arch(),
		},
	}}
	cfg := syft.DefaultCreateSBOMConfig().
		WithoutFiles().
		WithRelationshipsConfig(cataloging.RelationshipsConfig{}).
		WithDataGenerationConfig(cataloging.DataGenerationConfig{}).
		WithCatalogerSelection(cataloging.NewSelectionRequest().WithDefaults(catalogers...)).
		// A version that is guessed from the bytes of a binary is no version.
		WithPackagesConfig(pkgcataloging.DefaultConfig().WithGolangConfig(
			golang.DefaultCatalogerConfig().
				WithMainModuleVersion(golang.MainModuleVersionConfig{FromLDFlags: true}).
				WithSearchLocalModCacheLicenses(v.ModuleCache != "").WithLocalModCacheDir(v.ModuleCache),
		))
	found, err := syft.CreateSBOM(ctx, src, cfg)
	if err != nil {
		return nil, fmt.Errorf("catalog the packages of %s for %s: %w", v.Image, v.Platform, err)
	}
	found.Artifacts.LinuxDistribution = linux.IdentifyRelease(src.resolver)
	c := &Catalog{
		Variant: v, sbom: *found,
		Owner: map[string]artifact.ID{}, Programs: map[string]digest.Digest{},
		sources: map[artifact.ID]digest.Digest{}, within: map[artifact.ID]artifact.ID{}, files: map[artifact.ID]int{},
	}
	if err := c.claim(ctx, components); err != nil {
		return nil, err
	}
	return c, nil
}

// claim gives every regular file its owner and settles which packages stay.
func (c *Catalog) claim(ctx context.Context, components Components) error {
	all := c.sbom.Artifacts.Packages.Sorted()
	c.sbom.Artifacts.Packages = pkg.NewCollection()
	f, err := c.claimPackages(ctx, all, components)
	if err != nil {
		return err
	}
	c.checkDebian(all)
	c.claimBytecode(components.Bytecode)
	own := c.claimComponents(ctx, components.Components)
	if err := c.claimRest(f, components); err != nil {
		return err
	}
	c.linkModules(f.modules, c.keep)
	for _, id := range c.Owner {
		c.files[id]++
	}
	c.describeOwnFiles(own)
	slices.Sort(c.Missing)
	slices.Sort(c.Extra)
	return nil
}

func (c *Catalog) keep(p pkg.Package) artifact.ID {
	c.sbom.Artifacts.Packages.Add(p)
	return p.ID()
}

// found are the packages that wait for their files.
type found struct {
	why      map[string]string      // a file is not its Debian package's
	modules  []pkg.Package          // but the main ones
	npm      map[string]pkg.Package // by folder
	programs map[string]pkg.Package
}

// claimPackages keeps Debian's packages, with their files, and sorts the others.
func (c *Catalog) claimPackages(ctx context.Context, all []pkg.Package, components Components) (found, error) {
	v := c.Variant
	f := found{why: map[string]string{}, npm: map[string]pkg.Package{}, programs: map[string]pkg.Package{}}
	for _, p := range all {
		switch p.Type {
		case pkg.DebPkg:
			if err := c.claimDebian(c.keep(p), p, f.why); err != nil {
				return f, err
			}
		case pkg.NpmPkg:
			for _, l := range p.Locations.ToSlice() {
				f.npm[path.Dir(strings.TrimPrefix(l.RealPath, "/"))] = p
			}
		case pkg.GoModulePkg:
			if m, ok := p.Metadata.(pkg.GolangBinaryBuildinfoEntry); ok && m.MainModule == p.Name {
				if components.ownsProgram(p) {
					p.Licenses.Add(pkg.NewLicensesFromValuesWithContext(ctx, v.Licences...)...)
				}
				if p.Version == "" || p.Version == "UNKNOWN" || p.Version == "(devel)" {
					p.Version, p.PURL = v.Version, "pkg:golang/"+p.Name+"@"+v.Version
				}
				p.SetID()
				for _, l := range p.Locations.ToSlice() {
					f.programs[strings.TrimPrefix(l.RealPath, "/")] = p
				}
				continue
			}
			f.modules = append(f.modules, p)
		}
	}
	return f, nil
}

// claimComponents gives the components their files, and returns the one that
// is the image's definition.
func (c *Catalog) claimComponents(ctx context.Context, components []Component) (own artifact.ID) {
	v := c.Variant
	for _, component := range components {
		p, sum, ok := component.describe(ctx, v)
		if !ok {
			continue
		}
		used := false
		for _, f := range v.FS.All() {
			name := f.Path
			if _, taken := c.Owner[name]; taken || !f.Regular() || !component.claims(v, f) {
				continue
			}
			c.Owner[name], used = p.ID(), true
		}
		if !used {
			if component.Source != "" && slices.Contains(v.Groups, component.Group) {
				c.Missing = append(c.Missing, p.Name+" "+p.Version)
			}
			continue
		}
		if component.Says.File != "" {
			if got := component.version(v.FS); got != p.Version {
				c.Missing = append(c.Missing, p.Name+" "+p.Version)
				c.Extra = append(c.Extra, fmt.Sprintf("%s %s (/%s)", p.Name, got, component.Says.File))
			}
		}
		id := c.keep(p)
		if component.Definition {
			own = id
		}
		if sum != "" {
			c.sources[p.ID()] = sum
		}
	}
	return own
}

// claimRest gives programs and npm packages what is left, and says why a file
// is nobody's.
func (c *Catalog) claimRest(found found, components Components) error {
	npmRoots := map[string]bool{}
	for _, f := range c.Variant.FS.All() {
		name := f.Path
		if _, taken := c.Owner[name]; taken || !f.Regular() {
			continue
		}
		if p, ok := found.programs[name]; ok && components.program(name) {
			c.Owner[name] = c.keep(p)
			sum := sha256.New()
			if err := f.Sum(sum); err != nil {
				return err
			}
			c.Programs[name] = digest.NewDigest(digest.SHA256, sum)
			continue
		}
		if p, root, ok := npmOwner(found.npm, components.NPM, name); ok {
			c.Owner[name] = c.keep(p)
			npmRoots[root] = true
			continue
		}
		reason := found.why[name]
		if reason == "" {
			reason = "no package lists it and components.yaml has no pattern for it"
		}
		c.Unclaimed = append(c.Unclaimed, Unclaimed{name, reason})
	}
	c.checkNPM(found.npm, npmRoots, components)
	return nil
}

// claimDebian claims the files that a package's database entry lists, where
// the content is what the package shipped: by its MD5, or, for one that has
// none, because the layer is the package's own.
func (c *Catalog) claimDebian(id artifact.ID, p pkg.Package, why map[string]string) error {
	entry, ok := p.Metadata.(pkg.DpkgDBEntry)
	if !ok {
		return nil
	}
	v := c.Variant
	listed := map[string]bool{}
	group := ""
	for _, l := range v.Lock.Debian[v.arch()] {
		if l.Name == p.Name && l.Version == p.Version && l.Arch == entry.Architecture && slices.Contains(v.Groups, l.Group) {
			group = l.Group
		}
	}
	inLayer := func(f *imagefs.File) {
		if v.group(f) == group {
			c.Owner[f.Path] = id
		} else if why[f.Path] == "" {
			why[f.Path] = fmt.Sprintf("%s %s lists it without a checksum, and it is in the layer %s, not in the package's own", p.Name, p.Version, v.group(f))
		}
	}
	for _, record := range entry.Files {
		f := v.FS.Stat(record.Path)
		if f == nil || !f.Regular() {
			continue
		}
		listed[f.Path] = true
		if record.Digest != nil && record.Digest.Algorithm == "md5" && record.Digest.Value != "" && record.Digest.Value != "newconffile" {
			sum := md5.New() //nolint:gosec // see the import
			if err := f.Sum(sum); err != nil {
				return err
			}
			if got := hex.EncodeToString(sum.Sum(nil)); got != record.Digest.Value {
				why[f.Path] = fmt.Sprintf("it differs from what %s %s shipped", p.Name, p.Version)
				continue
			}
			c.Owner[f.Path] = id
			continue
		}
		inLayer(f)
	}
	// A few packages ship no md5sums; their .list still says what is theirs.
	for _, base := range []string{entry.Package + ":" + entry.Architecture, entry.Package} {
		list, err := v.FS.ReadFile("var/lib/dpkg/info/" + base + ".list")
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(list)) {
			if f := v.FS.Stat(strings.TrimSpace(line)); f != nil && f.Regular() && !listed[f.Path] {
				inLayer(f)
			}
		}
		break
	}
	for _, db := range []string{"var/lib/dpkg/info/", "var/lib/dpkg/status.d/"} {
		for _, f := range v.FS.Below(db + entry.Package) {
			rest := strings.TrimPrefix(strings.TrimPrefix(f.Path, db+entry.Package), ":"+entry.Architecture)
			if f.Regular() && (rest == "" || strings.HasPrefix(rest, ".") && !strings.Contains(rest[1:], ".")) {
				inLayer(f)
			}
		}
	}
	return nil
}

// claimBytecode gives the compiled Python of a layer group to the packages of
// its sources (PEP 3147's layout).
func (c *Catalog) claimBytecode(group string) {
	for _, f := range c.Variant.FS.All() {
		dir, base := path.Split(f.Path)
		folder, inside := strings.CutSuffix(dir, "__pycache__/")
		module, _, _ := strings.Cut(base, ".cpython-")
		if !inside || !f.Regular() || group == "" || c.Variant.group(f) != group {
			continue
		}
		source := c.Variant.FS.Stat(folder + module + ".py") // a link to it will do
		if source == nil {
			continue
		}
		if id, ok := c.Owner[source.Path]; ok {
			c.Owner[f.Path] = id
		}
	}
}

// checkDebian compares the dpkg database with the lock for the image's groups.
func (c *Catalog) checkDebian(all []pkg.Package) {
	type key struct{ name, version, arch string }
	locked := map[key]lock.Package{}
	for _, p := range c.Variant.Lock.Debian[c.Variant.arch()] {
		if slices.Contains(c.Variant.Groups, p.Group) {
			locked[key{p.Name, p.Version, p.Arch}] = p
		}
	}
	for _, p := range all {
		entry, ok := p.Metadata.(pkg.DpkgDBEntry)
		if !ok {
			continue
		}
		k := key{p.Name, p.Version, entry.Architecture}
		l, ok := locked[k]
		if !ok {
			c.Extra = append(c.Extra, fmt.Sprintf("%s %s (%s)", k.name, k.version, k.arch))
			continue
		}
		c.sources[p.ID()] = l.SHA256
		delete(locked, k)
	}
	for k := range locked {
		c.Missing = append(c.Missing, fmt.Sprintf("%s %s (%s)", k.name, k.version, k.arch))
	}
}

// npmOwner finds the package of a file below the npm folder and the locked
// package (the outermost) that brought it.
func npmOwner(npm map[string]pkg.Package, base, name string) (p pkg.Package, root string, ok bool) {
	rest, below := strings.CutPrefix(name, base+"/")
	if !below {
		return p, "", false
	}
	root, more, _ := strings.Cut(rest, "/")
	if strings.HasPrefix(root, "@") {
		scoped, _, _ := strings.Cut(more, "/")
		root = path.Join(root, scoped)
	}
	for dir := path.Dir(name); strings.HasPrefix(dir, base+"/"); dir = path.Dir(dir) {
		if p, ok := npm[dir]; ok {
			return p, path.Join(base, root), true
		}
	}
	return p, "", false
}

func (c *Catalog) checkNPM(npm map[string]pkg.Package, roots map[string]bool, components Components) {
	locked := map[string]lock.NPMPackage{}
	for _, p := range c.Variant.Lock.NPM[c.Variant.arch()] {
		if p.Name != lock.NodePackage(c.Variant.arch()) {
			locked[p.Name] = p
		}
	}
	for root := range roots {
		p := npm[root]
		l, ok := locked[p.Name]
		if !ok || l.Version != p.Version {
			c.Extra = append(c.Extra, fmt.Sprintf("npm package %s %s (/%s)", p.Name, p.Version, root))
			continue
		}
		c.sources[p.ID()] = l.SHA256
		delete(locked, p.Name)
		for dir, bundled := range npm {
			if strings.HasPrefix(dir, root+"/") && bundled.ID() != p.ID() {
				c.within[bundled.ID()] = p.ID()
			}
		}
	}
	for _, component := range components.Components {
		if component.Source != "node" || !slices.Contains(c.Variant.Groups, component.Group) {
			continue
		}
		for _, l := range locked {
			c.Missing = append(c.Missing, fmt.Sprintf("npm package %s %s", l.Name, l.Version))
		}
	}
}

// linkModules keeps one package per Go module and version, and relates it to
// the component that owns the binary. Modules of a binary that nobody claims
// are left out: the file itself is reported.
func (c *Catalog) linkModules(modules []pkg.Package, keep func(pkg.Package) artifact.ID) {
	type key struct{ name, version string }
	kept := map[key]pkg.Package{}
	var relations []artifact.Relationship
	for _, r := range c.sbom.Relationships {
		from, ok1 := r.From.(pkg.Package)
		to, ok2 := r.To.(pkg.Package)
		if ok1 && ok2 && from.Type == to.Type && from.Type != pkg.GoModulePkg {
			relations = append(relations, r)
		}
	}
	seen := map[[2]artifact.ID]bool{}
	for _, m := range modules {
		for _, l := range m.Locations.ToSlice() {
			owner, ok := c.Owner[strings.TrimPrefix(l.RealPath, "/")]
			if !ok || m.Version == "" || m.Version == "UNKNOWN" {
				continue // of a program that Debian builds without modules: its package is the component
			}
			k := key{m.Name, m.Version}
			first, ok := kept[k]
			if !ok {
				first = m
				kept[k] = m
				keep(m)
			}
			if seen[[2]artifact.ID{first.ID(), owner}] {
				continue
			}
			seen[[2]artifact.ID{first.ID(), owner}] = true
			parent := c.sbom.Artifacts.Packages.Package(owner)
			relations = append(relations, artifact.Relationship{From: first, To: *parent, Type: artifact.DependencyOfRelationship})
			// A module that one of our programs links is ours to answer for, whoever else has it.
			if old, ok := c.within[first.ID()]; !ok || c.sbom.Artifacts.Packages.Package(old).Type != pkg.GoModulePkg {
				c.within[first.ID()] = owner
			}
		}
	}
	c.sbom.Relationships = relations
}

// Modules are the Go modules that the project's programs in an image are
// linked from, as path@version: by the name that the program requires, the
// one that its content comes from, which is another where it is replaced. A
// folder that replaces a module is part of the program's own source and has
// no version.
func Modules(fsys *imagefs.FS, components Components) (map[string]string, error) {
	out := map[string]string{}
	for _, f := range fsys.All() {
		if !f.ELF || !components.program(f.Path) {
			continue
		}
		info, err := buildinfo.Read(f.Open())
		if err != nil {
			return nil, fmt.Errorf("/%s is not a Go program with build information: %w", f.Path, err)
		}
		for _, m := range info.Deps {
			name := m.Path + "@" + m.Version
			if m.Replace != nil {
				m = m.Replace
			}
			if m.Version == "" || m.Version == "(devel)" {
				continue
			}
			out[name] = m.Path + "@" + m.Version
		}
	}
	return out, nil
}

// Summary is one line for a log.
func (c *Catalog) Summary() string {
	return fmt.Sprintf("%d components own %d files", c.sbom.Artifacts.Packages.PackageCount(), len(c.Owner))
}

// describe gives the component as a syft package; false when the lock has no
// such source for this variant.
func (c Component) describe(ctx context.Context, v Variant) (pkg.Package, digest.Digest, bool) {
	p := pkg.Package{
		Name: c.Name, Version: v.Version, Type: pkg.BinaryPkg, FoundBy: "loomcycle-images",
		Licenses: pkg.NewLicenseSet(pkg.NewLicensesFromValuesWithContext(ctx, c.Licences...)...),
		PURL:     fmt.Sprintf("pkg:generic/%s@%s", c.Name, v.Version),
	}
	var sum digest.Digest
	switch c.Source {
	case "go":
		m, ok := v.Lock.Go[v.arch()]
		if !ok || !slices.Contains(v.Groups, c.Group) {
			return p, "", false
		}
		p.Version, p.Type, p.Language = strings.TrimPrefix(m.Version, "go"), pkg.GoModulePkg, pkg.Go
		p.PURL, sum = purl.Go(m, v.arch()), m.SHA256
	case "node":
		i := slices.IndexFunc(v.Lock.NPM[v.arch()], func(n lock.NPMPackage) bool { return n.Name == lock.NodePackage(v.arch()) })
		if i < 0 || !slices.Contains(v.Groups, c.Group) {
			return p, "", false
		}
		n := v.Lock.NPM[v.arch()][i]
		p.Version, p.Type, p.Language = n.Version, pkg.NpmPkg, pkg.JavaScript
		p.PURL, sum = purl.NPM(n), n.SHA256
	}
	if c.CPE != "" {
		if parsed, err := cpe.New(strings.ReplaceAll(c.CPE, "VERSION", p.Version), cpe.DeclaredSource); err == nil {
			p.CPEs = []cpe.CPE{parsed}
		}
	}
	p.SetID()
	return p, sum, true
}

// describeOwnFiles lists the generated files one by one: no other database has them.
func (c *Catalog) describeOwnFiles(id artifact.ID) {
	p := c.sbom.Artifacts.Packages.Package(id)
	if p == nil {
		return
	}
	c.sbom.Artifacts.FileMetadata = map[file.Coordinates]file.Metadata{}
	c.sbom.Artifacts.FileDigests = map[file.Coordinates][]file.Digest{}
	for _, f := range c.Variant.FS.All() {
		name := f.Path
		if c.Owner[name] != id {
			continue
		}
		at := file.NewCoordinates("/"+name, "")
		c.sbom.Artifacts.FileMetadata[at] = metadata(f)
		c.sbom.Artifacts.FileDigests[at] = digests(f)
		c.sbom.Relationships = append(c.sbom.Relationships, artifact.Relationship{From: *p, To: at, Type: artifact.ContainsRelationship})
	}
}
