package engine

import "time"

// SweepOnce is for tests with a real podman, which are outside this package.
var SweepOnce = (*Engine).sweepOnce

// SetPatience is how long e waits for another sidecar's carrier.
func SetPatience(e *Engine, d time.Duration) { e.patience = d }
