// Package jsonlog makes the log of the programs that run in containers: JSON
// lines in which each number says its unit.
package jsonlog

import (
	"io"
	"log/slog"
	"time"
)

// New writes to w what is at level or above. A duration is a number of seconds under
// its name and _seconds, as Prometheus has it, to the microsecond; slog alone writes bare nanoseconds.
func New(w io.Writer, level slog.Level) *slog.Logger {
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration {
			return slog.Float64(a.Key+"_seconds", float64(a.Value.Duration().Round(time.Microsecond).Microseconds())/1e6)
		}
		return a
	}}))
}
