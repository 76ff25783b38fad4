package sbom

import (
	"fmt"
	"strings"
	"testing"
)

func TestAlternatives(t *testing.T) {
	for text, want := range map[string]string{
		"MIT":                                   "[]",
		"(MIT)":                                 "[]",
		"MIT OR GPL-3.0-only":                   "[[MIT] [GPL-3.0-only]]",
		"Proprietary AND (GPL-3.0-only OR MIT)": "[[Proprietary GPL-3.0-only] [Proprietary MIT]]",
		"A AND B OR C":                          "[[A B] [C]]",
		"(A OR B) AND (C OR D)":                 "[[A C] [A D] [B C] [B D]]",
		"GPL-2.0-only WITH Classpath-exception-2.0 OR ((MIT))": "[[GPL-2.0-only WITH Classpath-exception-2.0] [MIT]]",
		"Apache 2.0":        "[]", // no expression: a name that holds a blank
		"MIT OR Apache 2.0": "[[MIT] [Apache 2.0]]",
		"(MIT OR":           "[]",
		"MIT OR":            "[]",
		"MIT) OR (A":        "[]",
		"OR MIT":            "[]",
		"":                  "[]",
	} {
		if got := fmt.Sprint(alternatives(text)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	if got := alternatives(strings.Repeat("(A OR B) AND ", 40) + "C"); got != nil {
		t.Errorf("%d alternatives of forty choices", len(got))
	}
	long := strings.Repeat("(A OR B) AND ", 3) + "C"
	if got := alternatives(long); len(got) != 8 {
		t.Errorf("%s: %d alternatives", long, len(got))
	}
}
