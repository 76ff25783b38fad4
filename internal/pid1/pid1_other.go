//go:build !linux

package pid1

// Run does nothing where there are no Linux containers.
func Run() (exit int, first bool) { return 0, false }
