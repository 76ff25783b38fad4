package guest

import (
	"os"
	"testing"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
)

// A file's name does not make an error os.Root's refusal, nor hide one.
func TestEscapes(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	const name = "path escapes from parent"
	for path, want := range map[string]string{name: wire.CodeNotFound, "../" + name: wire.CodeDenied} {
		_, open := root.Open(path)
		rename := root.Rename(path, "x")
		for did, err := range map[string]error{"open": open, "rename": rename} {
			if got := fileError(err); got.Code != want || (got.Message == errOutside.Message) != (want == wire.CodeDenied) {
				t.Errorf("%s %s: %+v of %v", did, path, got, err)
			}
		}
	}
}
