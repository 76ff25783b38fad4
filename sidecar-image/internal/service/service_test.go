package service

import "testing"

// No operator is told that sessions stay which do not.
func TestFate(t *testing.T) {
	const stay, end = "sessions stay for the next sidecar", "its sessions end with this container, workspaces stay"
	for _, c := range []struct {
		where     string
		outside   bool
		parent    int
		namespace string
		want      string
	}{
		{"nested podman below our PID 1", false, 1, "pid:[4026532201]", end},
		{"a host's engine", true, 1, "pid:[4026532201]", stay},
		{"a host's own service", false, 1, hostNamespace, stay},
		{"a shell in a container", false, 7, "pid:[4026532201]", stay},
	} {
		if got := fate(c.outside, c.parent, c.namespace); got != c.want {
			t.Errorf("%s: %s", c.where, got)
		}
	}
}
