package dist

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Where several engines answer, the one that the guides and the sidecar use gets the image.
func TestFindEngine(t *testing.T) {
	for _, tc := range []struct{ answer, silent, dockerHost, want string }{
		{"podman docker", "", "", "podman"},
		{"podman docker", "", "unix:///run/docker.sock", "docker"},
		{"podman", "docker", "unix:///run/docker.sock", "podman"},
		{"docker", "podman", "", "docker"},
		{"docker", "", "", "docker"},
		{"", "podman docker", "", ""},
	} {
		path := t.TempDir()
		for exit, names := range map[string]string{"0": tc.answer, "1": tc.silent} {
			for name := range strings.FieldsSeq(names) {
				if err := os.WriteFile(filepath.Join(path, name), []byte("#!/bin/sh\nexit "+exit+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
		t.Setenv("PATH", path)
		if got, err := findEngine(t.Context(), tc.dockerHost); got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("%+v: %q, %v", tc, got, err)
		}
	}
}
