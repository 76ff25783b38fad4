package sbom

import (
	"bytes"
	"cmp"
	"crypto/sha1" //nolint:gosec // SPDX 2.3, 8.4 asks for SHA-1 of each file
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
	"github.com/anchore/syft/syft/file"
	"github.com/anchore/syft/syft/format/common/cyclonedxhelpers"
	"github.com/anchore/syft/syft/format/common/spdxhelpers"
	"github.com/google/uuid"
	"github.com/opencontainers/go-digest"
	"github.com/spdx/tools-golang/spdx"

	"github.com/loomcycle/loomcycle-images/internal/imagefs"
)

func digests(f *imagefs.File) []file.Digest {
	one, two := sha1.New(), sha256.New() //nolint:gosec // see the import
	if err := f.Sum(one, two); err != nil {
		return nil
	}
	return []file.Digest{
		{Algorithm: "sha1", Value: hex.EncodeToString(one.Sum(nil))},
		{Algorithm: "sha256", Value: hex.EncodeToString(two.Sum(nil))},
	}
}

// purls has the digest of the locked archive of each component by its purl.
func (c *Catalog) purls() map[string]digest.Digest {
	out := map[string]digest.Digest{}
	for id, sum := range c.sources {
		if p := c.sbom.Artifacts.Packages.Package(id); p != nil && p.PURL != "" {
			out[p.PURL] = sum
		}
	}
	return out
}

// SPDX gives the SPDX 2.3 JSON document. The same image gives the same bytes:
// its time is the image's own, its namespace comes from the digest.
func (c *Catalog) SPDX(created time.Time) ([]byte, error) {
	doc := spdxhelpers.ToFormatModel(c.sbom)
	doc.DocumentName = c.Variant.Image + " " + c.Variant.Platform
	doc.DocumentNamespace = fmt.Sprintf("%s/sbom/%s/%s/%s", strings.TrimSuffix(c.Variant.Namespace, "/"), c.Variant.Image, c.Variant.Platform, c.Variant.Digest.Encoded())
	doc.CreationInfo.Created = created.UTC().Format(time.RFC3339)
	doc.CreationInfo.Creators = []spdx.Creator{
		{CreatorType: "Tool", Creator: "loomcycle-images"},
		{CreatorType: "Tool", Creator: c.sbom.Descriptor.Name + "-" + c.sbom.Descriptor.Version},
	}
	sums := c.purls()
	for _, p := range doc.Packages {
		for _, ref := range p.PackageExternalReferences {
			if sum, ok := sums[ref.Locator]; ok {
				p.PackageChecksums = []spdx.Checksum{{Algorithm: spdx.SHA256, Value: sum.Encoded()}}
			}
		}
	}
	slices.SortFunc(doc.Packages, func(a, b *spdx.Package) int {
		return cmp.Compare(a.PackageSPDXIdentifier, b.PackageSPDXIdentifier)
	})
	slices.SortFunc(doc.Files, func(a, b *spdx.File) int { return cmp.Compare(a.FileName, b.FileName) })
	slices.SortFunc(doc.Relationships, func(a, b *spdx.Relationship) int {
		return cmp.Or(
			cmp.Compare(a.RefA.ElementRefID, b.RefA.ElementRefID),
			cmp.Compare(a.Relationship, b.Relationship),
			cmp.Compare(a.RefB.ElementRefID, b.RefB.ElementRefID),
		)
	})
	slices.SortFunc(doc.OtherLicenses, func(a, b *spdx.OtherLicense) int {
		return cmp.Compare(a.LicenseIdentifier, b.LicenseIdentifier)
	})
	return indent(doc)
}

// CycloneDX gives the CycloneDX 1.6 JSON document; see SPDX for what makes it
// the same each time. The serial number is a UUID version 5 of the digest.
func (c *Catalog) CycloneDX(created time.Time) ([]byte, error) {
	bom := cyclonedxhelpers.ToFormatModel(c.sbom)
	name := strings.Join([]string{c.Variant.Namespace, c.Variant.Image, c.Variant.Platform, c.Variant.Digest.String()}, "/")
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceURL, []byte(name)).URN()
	bom.Metadata.Timestamp = created.UTC().Format(time.RFC3339)
	sums := c.purls()
	for i := range *bom.Components {
		part := &(*bom.Components)[i]
		if sum, ok := sums[part.PackageURL]; ok {
			part.Hashes = &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: sum.Encoded()}}
		}
	}
	slices.SortFunc(*bom.Components, func(a, b cyclonedx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	if bom.Dependencies != nil {
		for _, d := range *bom.Dependencies {
			if d.Dependencies != nil {
				slices.Sort(*d.Dependencies)
			}
		}
		slices.SortFunc(*bom.Dependencies, func(a, b cyclonedx.Dependency) int { return cmp.Compare(a.Ref, b.Ref) })
	}
	var buf bytes.Buffer
	if err := cyclonedx.NewBOMEncoder(&buf, cyclonedx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).EncodeVersion(bom, cyclonedx.SpecVersion1_6); err != nil {
		return nil, fmt.Errorf("encode CycloneDX: %w", err)
	}
	return buf.Bytes(), nil
}

func indent(v any) ([]byte, error) {
	var buf bytes.Buffer
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
