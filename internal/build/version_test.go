package build

import (
	"strings"
	"testing"
	"time"
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

func TestCreated(t *testing.T) {
	commit := time.Unix(1750000000, 0)
	for _, tc := range []struct {
		epoch  string
		commit time.Time
		want   int64
	}{{"", commit, 1750000000}, {"", time.Time{}, 1700000000}, {"1600000000", commit, 1600000000}, {"0", time.Time{}, 0}} {
		if got, err := created(tc.epoch, tc.commit, 1700000000); err != nil || got.Unix() != tc.want {
			t.Errorf("%q, %v: %d, %v, want %d", tc.epoch, tc.commit, got.Unix(), err, tc.want)
		}
	}
	for _, given := range []string{"-1", "now", "1.5", " 1"} {
		if _, err := created(given, commit, 1); err == nil || !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH=") {
			t.Errorf("%q: %v", given, err)
		}
	}
}
