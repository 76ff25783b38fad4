package dist

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// Made says when and on what an image was built. It differs from build to
// build, so it stands in build.json, beside release.json, which does not.
type Made struct {
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished"`
	// Workers are the architectures of the nodes by platform: their locked Go
	// toolchain compiled the programs.
	Workers map[string]string `json:"workers"`
}

const madeFile = "build.json"

// ReadMade reads what a dist folder says of the making of its images, by name.
func ReadMade(folder string) (map[string]Made, error) {
	name := filepath.Join(folder, madeFile)
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("%s does not say how its images were made; build again: %w", folder, err)
	}
	var made map[string]Made
	if err := json.Unmarshal(text, &made); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return made, nil
}

// WriteMade writes it.
func WriteMade(folder string, made map[string]Made) error {
	text, err := json.MarshalIndent(made, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(folder, madeFile), append(text, '\n'), 0o644)
}
