package build

import (
	"strings"
	"testing"
)

func TestVersion(t *testing.T) {
	for given, want := range map[string]string{"1.2.3": "1.2.3", "v1.2.3-rc.1": "1.2.3-rc.1", "0.0.0-g0123456789ab-dirty": "0.0.0-g0123456789ab-dirty"} {
		if got, err := version(given); got != want || err != nil {
			t.Errorf("%s: %q, %v", given, got, err)
		}
	}
	for _, given := range []string{"v", "a b", "1.2.3 -w", "../x", "-w", "1/2", "1.2.3+4", "'", strings.Repeat("1", 128)} {
		if _, err := version(given); err == nil || !strings.Contains(err.Error(), "VERSION=") {
			t.Errorf("%q: %v", given, err)
		}
	}
}
