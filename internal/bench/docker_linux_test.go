package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/dockertest"
)

// The row of docker build is measured where an engine answers and docker has
// buildx, says why where not, and leaves no image behind.
func TestDockerBuild(t *testing.T) {
	host := dockertest.Start(t)
	t.Setenv("DOCKER_HOST", host)
	b := &bench{dir: t.TempDir(), log: t.Output()}
	folder := filepath.Join(b.dir, "dockerfile")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, "Dockerfile"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dockertest.Buildx(t)
	label := fmt.Sprintf("test=%d-%d", os.Getpid(), time.Now().UnixNano())
	write("FROM scratch\nLABEL " + label + "\nCOPY Dockerfile /\n")
	row, err := b.docker(t.Context())
	if err != nil || !regexp.MustCompile(`^[0-9.]+ s$`).MatchString(row) {
		t.Errorf("the row is %q, %v", row, err)
	}
	if left, err := exec.CommandContext(t.Context(), "docker", "images", "--all", "--quiet", "--filter", "label="+label).Output(); err != nil || len(left) > 0 {
		t.Errorf("images are left: %q, %v", left, err)
	}
	write("FROM nothing-of-this-name\nWRONG\n")
	if row, err = b.docker(t.Context()); err != nil || !strings.HasPrefix(row, "not measured: ") || !strings.Contains(row, "WRONG") {
		t.Errorf("a build that fails: %q, %v", row, err)
	}
	t.Setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
	if row, err = b.docker(t.Context()); err != nil || row != "not measured: no docker engine answers" {
		t.Errorf("without an engine: %q, %v", row, err)
	}
}
