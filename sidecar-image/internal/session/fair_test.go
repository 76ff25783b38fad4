package session

import "testing"

// A principal's sessions count for itself, for its tenant where that is attested, and
// for all.
func TestFairness(t *testing.T) {
	m := &Manager{cfg: Config{Limits: Limits{Sessions: 6, PerPrincipal: 2, PerTenant: 3}}, count: map[string]int{}}
	const each, tenant, all = "SANDBOX_MAX_SESSIONS_PER_PRINCIPAL", "SANDBOX_MAX_SESSIONS_PER_TENANT", "SANDBOX_MAX_SESSIONS"
	var open []string
	for _, c := range []struct{ principal, refused string }{
		{"acme/a", ""}, {"acme/a", ""}, {"acme/a", each}, {"acme/b", ""}, {"acme/b", tenant}, {"acme/c", tenant},
		{"acme", ""}, {"acme", ""}, {"acme", each}, // the name of a token
		{"other/a", ""}, {"other/a", all}, {"acme/c", tenant},
	} {
		err := m.reserve(c.principal)
		l, _ := err.(*LimitError)
		if c.refused == "" && err != nil || c.refused != "" && (l == nil || l.Name != c.refused) {
			t.Errorf("%s: %v; want %q", c.principal, err, c.refused)
		}
		if err == nil {
			open = append(open, c.principal)
		}
	}
	m.release("acme/b")
	if err := m.reserve("acme/c"); err != nil {
		t.Errorf("when one of its tenant has closed: %v", err)
	}
	m.release("acme/c")
	for _, principal := range open {
		if principal != "acme/b" {
			m.release(principal)
		}
	}
	if m.total != 0 || len(m.count) != 0 {
		t.Errorf("when all have closed: %d, %v", m.total, m.count)
	}
}
