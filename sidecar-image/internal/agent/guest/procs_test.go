package guest

import "testing"

// Who dies with an exec: its own, and who has the mark of none. There are three
// execs; a process of any of them may lower its limits, and raise none.
func TestMarks(t *testing.T) {
	const base, no = 1 << 62, ^uint64(0)
	for _, tc := range []struct {
		what      string
		rss, size uint64
		pairs     bool
		dies      [3]bool // with the first, the second, the third
	}{
		{"the agent's, or one that the engine started", no, no, true, [3]bool{}},
		{"of the first", base - 1, sizeBase + 1, true, [3]bool{true, false, false}},
		{"of the third", base - 3, sizeBase + 3, true, [3]bool{false, false, true}},
		{"of the first, which lowers one to that of the third", base - 3, sizeBase + 1, true, [3]bool{true, true, true}},
		{"of the second, which lowers both", base - 3, sizeBase + 1, true, [3]bool{true, true, true}},
		{"of one that is to come", base - 4, sizeBase + 2, true, [3]bool{true, true, true}},
		{"without any", 0, 0, true, [3]bool{true, true, true}},
		{"of the first, by one limit", base - 1, no, false, [3]bool{true, false, false}},
		{"of the first, which lowers it to that of the third", base - 3, no, false, [3]bool{false, false, true}},
		{"of the first, which lowers it to none's", base - 9, 0, false, [3]bool{true, true, true}},
	} {
		p := &procs{base: base, last: 3, marks: true, pairs: tc.pairs}
		for i, dies := range tc.dies {
			if got := p.mine(tc.rss, tc.size, uint64(i+1)); got != dies {
				t.Errorf("%s: it dies with exec %d: %v", tc.what, i+1, got)
			}
		}
		p.lost = true
		if got := p.mine(tc.rss, tc.size, 1); got != (tc.rss != no) {
			t.Errorf("%s: it dies when the marks are lost: %v", tc.what, got)
		}
	}
}
