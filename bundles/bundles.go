// Package bundles holds the runtime's configuration bundles for this family, made to
// be embedded by it: for each a folder with bundle.yaml, valid by bundle.schema.json,
// and its skills.
package bundles

import (
	"embed"
	"io/fs"
)

//go:embed bundle.schema.json */bundle.yaml */skills
var files embed.FS

// Files holds NAME/bundle.yaml of each bundle, the files that it names, and
// bundle.schema.json.
func Files() fs.FS { return files }
