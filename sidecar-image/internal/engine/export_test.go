package engine

import "time"

// SweepOnce is for tests with a real podman, which are outside this package.
var SweepOnce = (*Engine).sweepOnce

// SetPatience is how long e waits for another sidecar's carrier.
func SetPatience(e *Engine, d time.Duration) { e.patience = d }

// Forget has an engine look again for the agent in its volume.
func Forget(e *Engine) { e.placed.forget() }
