package tools

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
)

// A message means the same whether its strings were lifted or not.
func TestLift(t *testing.T) {
	long := strings.Repeat("a", LiftMin)
	for name, content := range map[string]string{
		"short": "x", "plain": long, "quotes": strings.Repeat(`say "a\b\"`, LiftMin), "lines": strings.Repeat("a\n\t", LiftMin), "unicode": strings.Repeat("é☃😀", LiftMin),
		"slashes at the end": long + `\\\`, "json": `{"content":"` + long + `"}`, "the mark": long + "\x00lifted:" + long,
	} {
		body, err := json.Marshal(map[string]any{"params": map[string]any{"arguments": map[string]any{"content": content, "other": long + content, "n": 1}}})
		if err != nil {
			t.Fatal(err)
		}
		var l Lifted
		small := l.Lift(body)
		if len(small) > 2000 {
			t.Errorf("%s: %d bytes are left", name, len(small))
		}
		var v struct {
			Params struct {
				Arguments struct {
					Content, Other string
					N              int
				}
			}
		}
		if err := json.Unmarshal(small, &v); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		args := v.Params.Arguments
		for got, want := range map[string]string{args.Content: content, args.Other: long + content} {
			if got, err := l.value(got); err != nil || got != want {
				t.Errorf("%s: %d bytes instead of %d, %v", name, len(got), len(want), err)
			}
		}
	}
}

func TestLiftMalformed(t *testing.T) {
	long := strings.Repeat("a", LiftMin)
	for _, body := range []string{`{"a":"` + long, long, `"` + long + `\"`, `{"a` + long + `":1}`} {
		var l Lifted
		small := l.Lift([]byte(body))
		if json.Valid(small) != json.Valid([]byte(body)) {
			t.Errorf("%.20s became %q", body, small)
		}
	}
	for _, inner := range []string{long + "\n", long + `\q`, long + "\xff\\u12"} {
		var l Lifted
		var v string
		if err := json.Unmarshal(l.Lift([]byte(`"`+inner+`"`)), &v); err != nil {
			t.Fatal(err)
		}
		if got, err := l.value(v); err == nil {
			t.Errorf("an invalid literal gave %d bytes", len(got))
		}
	}
}

func TestParked(t *testing.T) {
	var l Lifted
	want := map[string]string{"a": "short", "b": strings.Repeat("base64+/", LiftMin), "c": strings.Repeat("quote\" and\nline \\ é\x01", LiftMin), "d": `"lifted:x"`, "e": "lifted:nobody"}
	out := map[string]string{}
	want["f"], want["g"] = strings.Repeat("é☃😀\x01", escaped), "\x01"+strings.Repeat("😀", escaped) // characters across the pieces
	for k, v := range want {
		out[k] = l.park(v)
	}
	b, err := json.Marshal(out)
	if err != nil {
		t.Fatal(err)
	}
	rec := httptest.NewRecorder()
	w := l.Writer(rec)
	if n, err := w.Write(b); n != len(b) || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	var got map[string]string
	if err := json.Unmarshal(rec.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s: %d bytes instead of %d", k, len(got[k]), len(v))
		}
	}
	if strings.ContainsAny(rec.Body.String(), "\n\r") {
		t.Error("a raw line break would end an event")
	}
}

func TestHasControl(t *testing.T) {
	for n := range 20 {
		for at := range n {
			for c := range 256 {
				b := []byte(strings.Repeat("~", n))
				b[at] = byte(c)
				b[(at+1)%n] |= 0x80 // a neighbour to borrow from
				if got := hasControl(b); got != (c < ' ' && b[at] < ' ') || hasControl(string(b)) != got {
					t.Fatalf("%d bytes, %#x at %d: %v", n, c, at, got)
				}
			}
		}
	}
}

func FuzzLift(f *testing.F) {
	f.Add(strings.Repeat(`\"`, LiftMin))
	f.Fuzz(func(t *testing.T, content string) {
		content = strings.ToValidUTF8(strings.Repeat(content, LiftMin/max(len(content), 1)+1), "")
		body, _ := json.Marshal(content)
		var l Lifted
		var v string
		if err := json.Unmarshal(l.Lift(body), &v); err != nil {
			t.Fatal(err)
		}
		if got, err := l.value(v); err != nil || got != content {
			t.Fatalf("%q, %v", got, err)
		}
	})
}
