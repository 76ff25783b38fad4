package jsonlog

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"testing"
	"time"
)

func TestDurations(t *testing.T) {
	var b bytes.Buffer
	log := New(&b, slog.LevelInfo)
	log.Debug("not this")
	log.With("age", 90*time.Minute).Info("said", "took", 1_933_272_899*time.Nanosecond, "n", 3, slog.Group("g", "grace", time.Second))
	var got map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatalf("%v: %s", err, &b)
	}
	group, _ := got["g"].(map[string]any)
	if got["age_seconds"] != 5400.0 || got["took_seconds"] != 1.933273 || group["grace_seconds"] != 1.0 || got["n"] != 3.0 || got["took"] != nil || got["age"] != nil {
		t.Errorf("%s", &b)
	}
}
