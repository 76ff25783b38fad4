package buildkit

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// socketPath is buildkitd.sock in the daemon's folder, or a short path when
// that one exceeds what a unix socket may have: 108 bytes with the final zero
// (unix(7)); a margin is left for the other socket beside it.
func socketPath(dir string, getenv func(string) string) (string, error) {
	const limit = 100
	if p := filepath.Join(dir, "buildkitd.sock"); len(p) < limit {
		return p, nil
	}
	base := getenv("XDG_RUNTIME_DIR")
	switch {
	case base != "":
	case os.Geteuid() == 0:
		base = "/run"
	default:
		base = os.TempDir()
	}
	sum := sha256.Sum256([]byte(dir))
	p := filepath.Join(base, fmt.Sprintf("loomcycle-%d-%s", os.Geteuid(), hex.EncodeToString(sum[:6])), "buildkitd.sock")
	if len(p) >= limit {
		return "", fmt.Errorf("the socket path %s is too long for a unix socket: set LOOMCYCLE_CACHE to a shorter folder", p)
	}
	return p, nil
}

// privateDir makes a folder for a socket that gives root, and refuses one that
// another user has made first.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("making the folder of the socket: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("the folder %s of the socket belongs to user %d: set LOOMCYCLE_CACHE or XDG_RUNTIME_DIR to a folder of your own", dir, st.Uid)
	}
	return nil
}
