package engine

// SweepOnce is for tests with a real podman, which are outside this package.
var SweepOnce = (*Engine).sweepOnce
