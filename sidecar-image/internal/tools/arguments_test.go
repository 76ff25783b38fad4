package tools

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// defaults are the tools of an operator who sets nothing.
func defaults(t *testing.T) *Tools {
	t.Helper()
	c, err := config.Load(func(name string) string { return map[string]string{"SANDBOX_IMAGE": "i"}[name] })
	if err != nil {
		t.Fatal(err)
	}
	return &Tools{Config: c}
}

func asSent(s string) (string, error) { return s, nil }

// Each argument of each tool is refused in its own name when it is of another kind,
// and in nobody's Go.
func TestArgumentsOfAnotherKind(t *testing.T) {
	tl := defaults(t)
	kinds := map[string]string{"a string": `"x"`, "a number": `12`, "a boolean": `true`, "an array": `[1]`, "an object": `{"A":"b"}`}
	for _, in := range []any{&openIn{}, &execIn{}, &writeIn{}, &readIn{}, &idIn{}, &runIn{}} {
		s, err := tl.inputSchema(reflect.TypeOf(in).Elem())
		if err != nil {
			t.Fatal(err)
		}
		args := map[string]json.RawMessage{}
		for _, name := range s.Required {
			args[name] = json.RawMessage(`"x"`)
		}
		for name, p := range s.Properties {
			right := map[string]string{"string": "a string", "object": "an object", "number": "a number", "integer": "a number"}[typeOf(p)]
			for kind, text := range kinds {
				sent := with(args, name, text)
				err := decode(sent, s, asSent, in)
				if kind == right {
					if err != nil {
						t.Errorf("%s: %v", sent, err)
					}
					continue
				}
				if err == nil || !strings.HasPrefix(err.Error(), name+": has to be ") || !strings.HasSuffix(err.Error(), ", not "+kind) {
					t.Errorf("%s: %v", sent, err)
				}
			}
			err := decode(with(args, name, "null"), s, asSent, in)
			if _, required := args[name]; required != (err != nil) || err != nil && err.Error() != name+": is missing" {
				t.Errorf("%T without %s: %v", in, name, err)
			}
		}
		for sent, want := range map[string]string{
			`[1]`:                           "arguments: have to be a JSON object, not an array",
			string(with(args, "Nope", `1`)): `arguments: "Nope" is none of this tool's; it takes ` + names(s),
		} {
			if err := decode(json.RawMessage(sent), s, asSent, in); err == nil || err.Error() != want {
				t.Errorf("%s: %v instead of %s", sent, err, want)
			}
		}
	}
	exec, err := tl.inputSchema(reflect.TypeFor[execIn]())
	if err != nil {
		t.Fatal(err)
	}
	if err := decode(json.RawMessage(`{"session_id":"x","command":"x","env":{"A":1}}`), exec, asSent, &execIn{}); err == nil || err.Error() != `env: the value of "A" has to be a string, not a number` {
		t.Error(err)
	}
}

// FuzzDecode reads arguments of any kind. What is wrong with them is told in a few words,
// and long ones in those that were sent, not in what stands for them.
func FuzzDecode(f *testing.F) {
	long := strings.Repeat("x", LiftMin)
	for _, seed := range []string{`{}`, `null`, `[]`, `{"session_id":"s","command":"c","env":{"A":"b"},"timeout_seconds":1e400,"max_output_bytes":-1.5}`,
		`{"session_id":"s","command":"c","env":{"` + long + `":1}}`, `{"` + long + `":1}`, `{"command":{"a":[1,{"b":null}]}}`, `{"command":"\ud800"}`} {
		f.Add([]byte(seed))
	}
	s, err := (&Tools{Config: &config.Config{}}).inputSchema(reflect.TypeFor[execIn]())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var l Lifted
		var in execIn
		err := decode(l.Lift(b), s, l.value, &in)
		if err == nil {
			return
		}
		if text := err.Error(); len(text) > 500 || strings.Contains(text, "lifted") && !strings.Contains(string(b), "lifted") || strings.Contains(text, "Go ") {
			t.Errorf("%.100q is told %.1000q", b, text)
		}
	})
}

// typeOf is what a value is that is not null.
func typeOf(s *jsonschema.Schema) string {
	if len(s.Types) == 2 {
		return s.Types[1]
	}
	return s.Type
}

func with(args map[string]json.RawMessage, name, value string) json.RawMessage {
	sent := map[string]json.RawMessage{name: json.RawMessage(value)}
	for k, v := range args {
		if k != name {
			sent[k] = v
		}
	}
	b, _ := json.Marshal(sent)
	return b
}

// One range for each number: in its schema, in what refuses and in what cuts, for
// numbers of any size.
func TestNumbers(t *testing.T) {
	tl := defaults(t)
	type args struct {
		TmpfsMB   *whole  `json:"tmpfs_mb,omitempty"`
		MemMB     *whole  `json:"mem_mb,omitempty"`
		CPU       *number `json:"cpu,omitempty"`
		Pids      *whole  `json:"pids,omitempty"`
		TTL       *whole  `json:"ttl_seconds,omitempty"`
		Timeout   *number `json:"timeout_seconds,omitempty"`
		MaxOutput *whole  `json:"max_output_bytes,omitempty"`
		MaxBytes  *whole  `json:"max_bytes,omitempty"`
		Offset    *whole  `json:"offset,omitempty"`
	}
	s, err := tl.inputSchema(reflect.TypeFor[args]())
	if err != nil {
		t.Fatal(err)
	}
	all := reflect.TypeFor[args]()
	if all.NumField() != len(bounds(tl.Config)) {
		t.Errorf("%d numbers of %d are tried", all.NumField(), len(bounds(tl.Config)))
	}
	for i := range all.NumField() {
		field, _, _ := strings.Cut(all.Field(i).Tag.Get("json"), ",")
		b := bounds(tl.Config)[field]
		if p := s.Properties[field]; *p.Minimum != b.least || !b.hard && !strings.Contains(p.Description, b.String()) || b.hard && *p.Maximum != b.most {
			t.Errorf("%s: the schema says %v, %q", field, *p.Minimum, p.Description)
		}
		for sent, want := range map[string]string{
			"0":                      "0 is too small, " + b.String() + " are allowed",
			"-1":                     "-1 is too small, " + b.String() + " are allowed",
			"-1e400":                 "-1e400 is too small, " + b.String() + " are allowed",
			"-99999999999999999999":  "-99999999999999999999 is too small, " + b.String() + " are allowed",
			plain(b.least):           "",
			plain(b.most):            "",
			"99999999999999999999":   "99999999999999999999",
			"1e400":                  "1e400",
			strings.Repeat("9", 500): strings.Repeat("9", shownMax) + "...",
			"20.5":                   "20.5 is not a whole number, " + b.String() + " are allowed",
		} {
			var in args
			if err := decode(json.RawMessage(fmt.Sprintf(`{%q:%s}`, field, sent)), s, asSent, &in); err != nil {
				t.Fatal(err)
			}
			var notes []string
			var got float64
			var err error
			integer := typeOf(s.Properties[field]) == "integer"
			if at := reflect.ValueOf(in).Field(i).Interface(); integer {
				var n int64
				n, err = tl.clampWhole(&notes, field, at.(*whole))
				got = float64(n)
			} else {
				got, err = tl.clamp(&notes, field, at.(*number))
			}
			switch {
			case b.least == 0 && sent == "0", sent == plain(b.least), sent == plain(b.most), !integer && sent == "20.5" && b.most >= 20.5:
				if err != nil || len(notes) > 0 || plain(got) != sent {
					t.Errorf("%s %s became %v, %q, %v", field, sent, got, notes, err)
				}
			case strings.Contains(want, " ") && (integer || sent != "20.5"):
				if err == nil || err.Error() != field+": "+want {
					t.Errorf("%s %s: %v", field, sent, err)
				}
			case b.hard:
				if err == nil || err.Error() != field+": "+want+" is too large, "+b.String()+" are allowed" {
					t.Errorf("%s %.70s: %v", field, sent, err)
				}
			default:
				if sent == "20.5" {
					want = sent
				}
				if err != nil || got != b.most || len(notes) != 1 || notes[0] != field+" "+want+" was cut to "+plain(b.most)+", the operator's limit" {
					t.Errorf("%s %.70s became %v, %q, %v", field, sent, got, notes, err)
				}
			}
		}
		var none *whole
		if got, err := tl.clampWhole(nil, field, none); err != nil || got != int64(b.def) {
			t.Errorf("%s left out is %v, %v", field, got, err)
		}
	}
}

func TestCommandLimits(t *testing.T) {
	c := &call{Tools: defaults(t), req: plainRequest()}
	c.http = &Request{}
	long := strings.Repeat("x", wire.MaxArgument)
	many := map[string]string{}
	for i := range maxEnv + 1 {
		many[fmt.Sprintf("V%d", i)] = ""
	}
	for _, tc := range []struct {
		in   execIn
		want string
	}{
		{execIn{Command: long}, ""},
		{execIn{Command: long + "x"}, "command: has 131072 bytes, 131071 are allowed: write it to a file with sandbox_write and run that"},
		{execIn{Command: strings.Repeat("x", 3<<20)}, "command: has 3145728 bytes, 131071 are allowed: write it to a file with sandbox_write and run that"},
		{execIn{Command: "a\x00b"}, "command: holds a NUL byte, which no command can"},
		{execIn{Command: "x", Env: map[string]string{"A": long[:len(long)-2]}}, ""},
		{execIn{Command: "x", Env: map[string]string{"A": long}}, "env: A has 131073 bytes with its name, 131071 are allowed: hand it over in stdin or in a file"},
		{execIn{Command: "x", Env: map[string]string{"A": long[:100000], "B": long[:100000], "C": long[:100000]}}, "env: has 300006 bytes, 262144 are allowed: hand large values over in stdin or in files"},
		{execIn{Command: "x", Env: many}, "env: has 257 variables, 256 are allowed"},
		{execIn{Command: "x", Env: map[string]string{"A-B": ""}}, `env: "A-B" is no name of a variable: up to 128 letters, digits and _, and no digit at first`},
		{execIn{Command: "x", Env: map[string]string{"A": "\x00"}}, "env: the value of A holds a NUL byte, which none can"},
	} {
		var notes []string
		_, _, err := c.command(tc.in, &notes)
		if got := fmt.Sprint(err); got != tc.want && (tc.want != "" || err != nil) {
			t.Errorf("%.20q %.20v: %s instead of %s", tc.in.Command, tc.in.Env, got, tc.want)
		}
	}
}

func TestInWork(t *testing.T) {
	for p, want := range map[string]string{
		"f": "f", "d/f": "d/f", "/work/f": "f", "/work//d/f": "d/f", "a//b/../c": "a/c", "./f": "f", "a/./b": "a/b", "d/../f": "f", "..f": "..f", "/work/work/f": "work/f", "...": "...",
		"": "!is empty", "/work": "!is empty", "/work/": "!is empty", "newdir/": "!names a directory", "a/b//": "!names a directory", ".": "!names a directory", "a/.": "!names a directory", "a/..": "!names a directory",
		"..": "!names a directory", "../f": "!leaves /work", "a/../../f": "!leaves /work", "/work/../f": "!leaves /work", "/etc/passwd": "!is absolute", "//f": "!is absolute", "/workx": "!is absolute",
		"a\x00b": "!NUL", strings.Repeat("a/", 2048) + "b": "!has 4097 bytes, 4095 are allowed",
	} {
		got, err := inWork(p)
		if refused, ok := strings.CutPrefix(want, "!"); ok {
			if err == nil || !strings.Contains(err.Error(), refused) {
				t.Errorf("%.50q is %q, %v", p, got, err)
			}
		} else if err != nil || got != want {
			t.Errorf("%q is %q instead of %q, %v", p, got, want, err)
		}
	}
}

func TestParseMode(t *testing.T) {
	for s, want := range map[string]uint32{"": 0, "755": 0o755, "0755": 0o755, "0o755": 0o755, "001": 1, "777": 0o777} {
		if got, err := parseMode(s); err != nil || got != want {
			t.Errorf("%q is %o, %v", s, got, err)
		}
	}
	for _, s := range []string{"7", "0o7", "07", "75", "00755", "0o0755", "o755", "4755", "1777", "0", "000", "0o000", "888", "+755", "7_5", " 755", "rwx", strings.Repeat("7", 1000)} {
		if got, err := parseMode(s); err == nil || len(err.Error()) > 200 {
			t.Errorf("%.20q is taken for %o: %v", s, got, err)
		}
	}
}

// Whatever the offsets and lengths of the parts, they join to the text: by the
// offsets that answers name, and at fixed distances too.
func TestPartsOfText(t *testing.T) {
	text := []byte("aé☃😀b\u0000z😀😀é")
	// part is what read makes of the bytes from offset on, most at most.
	part := func(offset, most int) (from, to int) {
		lead := min(offset, maxLead)
		b, begun := textPart(text[offset-lead:min(offset+most, len(text))], lead, offset+most < len(text))
		return offset - begun, offset - begun + len(b)
	}
	for stride := 4; stride <= len(text); stride++ {
		var fixed, named []byte
		for at := 0; at < len(text); at += stride {
			from, to := part(at, stride)
			fixed = append(fixed, text[from:to]...)
		}
		for at := 0; at < len(text); {
			from, to := part(at, stride)
			if from != at || to <= from {
				t.Fatalf("of %d bytes: %d goes on from %d to %d", stride, at, from, to)
			}
			named = append(named, text[from:to]...)
			at = to
		}
		if string(fixed) != string(text) || string(named) != string(text) {
			t.Errorf("in parts of %d bytes it is %q and %q", stride, fixed, named)
		}
	}
	for name, tc := range map[string]struct {
		b     string
		lead  int
		begun int
	}{
		"no character": {"\x80\x80\x80\x80", 3, 0}, "a broken one": {"a\xe2\x28\xa1", 3, 0}, "all behind": {"☃", 3, 0}, "one of four": {"😀", 3, 3}, "short": {"a", 2, 0}, "too short a part": {"\xf0\x9f\x98", 2, 2}, "a letter before": {"abcd", 3, 0},
	} {
		if b, begun := textPart([]byte(tc.b), tc.lead, false); begun != tc.begun || len(b) != max(len(tc.b)-tc.lead, 0)+begun {
			t.Errorf("%s: %q from %d bytes before", name, b, begun)
		}
	}
}

// plainRequest is one without a progress token.
func plainRequest() *mcp.CallToolRequest {
	return &mcp.CallToolRequest{Params: &mcp.CallToolParamsRaw{}}
}

// Half of a surrogate pair is no character; what it would silently become is refused, lifted
// out of the request or not.
func TestHalfACharacter(t *testing.T) {
	tl := defaults(t)
	schema, err := tl.inputSchema(reflect.TypeFor[writeIn]())
	if err != nil {
		t.Fatal(err)
	}
	for _, padding := range []string{"", strings.Repeat("x", LiftMin)} {
		for text, want := range map[string]string{
			`\ud83d\ude00`: "😀", `\\ud800`: `\ud800`, `\u005cud800`: `\ud800`, `\ufffd`: "\uFFFD", `\\\ud83d\ude00\n`: "\\😀\n", `\u0441\u043B`: "сл",
			`\ud800`: "", `\uDFFF`: "", `\ud83d\ud83d\ude00`: "", `\ude00\ud83d`: "", `\ud83dx`: "", `\ud83d\n`: "", `\\\ud800`: "", `\ud83d\u0041`: "",
		} {
			body := `{"session_id":"s","path":"p","content":"` + padding + text + `"}`
			l := Lifted{}
			var in writeIn
			err := decode(l.Lift([]byte(body)), schema, l.value, &in)
			if want == "" {
				if err == nil || !strings.HasPrefix(err.Error(), `content: holds \u`) || !strings.Contains(err.Error(), "base64") {
					t.Errorf("%s after %d bytes: %v", text, len(padding), err)
				}
			} else if err != nil || in.Content != padding+want {
				t.Errorf("%s after %d bytes: %q, %v", text, len(padding), in.Content[len(padding):], err)
			}
		}
	}
}
