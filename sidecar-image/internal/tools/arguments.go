package tools

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
)

// The SDK would check arguments too, but says what is wrong with them in words of
// JSON Schema and of Go. Those who read that are models.

// wrongArgument names its field and what is allowed.
type wrongArgument struct{ field, reason string }

func (e *wrongArgument) Error() string { return e.field + ": " + e.reason }

func fieldError(field, format string, args ...any) error {
	return &wrongArgument{field, fmt.Sprintf(format, args...)}
}

// shownMax is how much of a wrong value is shown, in bytes.
const shownMax = 64

// shown shortens a caller's text for a message.
func shown(s string) string {
	if len(s) <= shownMax {
		return s
	}
	n := shownMax
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "..."
}

// number is a number as it was sent, of any size, and its value; whole is one
// whose schema says integer.
type (
	number struct {
		text  string
		value float64 // infinite above what a float64 holds
	}
	whole number
)

var numberSchemas = map[reflect.Type]*jsonschema.Schema{
	reflect.TypeFor[number](): {Type: "number"},
	reflect.TypeFor[whole]():  {Type: "integer"},
}

func (n *number) UnmarshalJSON(b []byte) error {
	n.text = string(b)
	n.value, _ = strconv.ParseFloat(n.text, 64) // its one error is of what is infinite
	return nil
}

func (n *whole) UnmarshalJSON(b []byte) error { return (*number)(n).UnmarshalJSON(b) }

// bound is what is allowed of a number.
type bound struct {
	least, def, most float64
	hard             bool // above most it is refused, not cut
}

func (b bound) String() string { return plain(b.least) + " to " + plain(b.most) }

func plain(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// bounds are those of every number that a tool takes, by its name.
func bounds(c *config.Config) map[string]bound {
	return map[string]bound{
		"tmpfs_mb":         {least: 1, def: float64(c.TmpfsMB.Default), most: float64(c.TmpfsMB.Max)},
		"mem_mb":           {least: config.LeastMemMB, def: float64(c.MemMB.Default), most: float64(c.MemMB.Max)},
		"cpu":              {least: config.LeastCPU, def: c.CPU, most: c.MaxCPU},
		"pids":             {least: config.LeastPids, def: float64(c.Pids.Default), most: float64(c.Pids.Max)},
		"ttl_seconds":      {least: 1, def: c.TTL.Seconds(), most: c.MaxTTL.Seconds()},
		"timeout_seconds":  {least: 0.001, def: c.Timeout.Seconds(), most: c.MaxTimeout.Seconds()},
		"max_output_bytes": {least: 1, def: float64(c.Output.Default), most: float64(c.Output.Max)},
		"max_bytes":        {least: 1, def: float64(c.MaxFile), most: float64(c.MaxFile)},
		"offset":           {most: 1 << 53, hard: true}, // as large as a number is exact in JSON (RFC 8259, section 6)
	}
}

// clamp returns a wanted number within its bounds and notes when it was cut. A nil
// want is the default.
func (t *Tools) clamp(notes *[]string, field string, want *number) (float64, error) {
	b := bounds(t.Config)[field]
	switch {
	case want == nil:
		return b.def, nil
	case want.value < b.least:
		return 0, fieldError(field, "%s is too small, %s are allowed", shown(want.text), b)
	case want.value > b.most && b.hard:
		return 0, fieldError(field, "%s is too large, %s are allowed", shown(want.text), b)
	case want.value > b.most:
		*notes = append(*notes, fmt.Sprintf("%s %s was cut to %s, the operator's limit", field, shown(want.text), plain(b.most)))
		return b.most, nil
	}
	return want.value, nil
}

// clampWhole is clamp for what has no fractions.
func (t *Tools) clampWhole(notes *[]string, field string, want *whole) (int64, error) {
	if want != nil && want.value != math.Trunc(want.value) {
		return 0, fieldError(field, "%s is not a whole number, %s are allowed", shown(want.text), bounds(t.Config)[field])
	}
	v, err := t.clamp(notes, field, (*number)(want))
	return int64(v), err
}

// inputSchema is the schema of a tool's arguments, with the bounds of its numbers.
func (t *Tools) inputSchema(in reflect.Type) (*jsonschema.Schema, error) {
	s, err := jsonschema.ForType(in, &jsonschema.ForOptions{TypeSchemas: numberSchemas})
	if err != nil {
		return nil, err
	}
	for field, b := range bounds(t.Config) {
		p := s.Properties[field]
		if p == nil {
			continue
		}
		p.Minimum = &b.least
		if b.hard {
			p.Maximum = &b.most
			continue
		}
		p.Description += fmt.Sprintf("; %s (more is cut), %s by default", b, plain(b.def))
	}
	return s, nil
}

// decode reads a call's arguments into the struct that in points to, whose schema
// is given. value returns the string that another stands for.
func decode(raw json.RawMessage, schema *jsonschema.Schema, value func(string) (string, error), in any) error {
	var args map[string]json.RawMessage
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &args); err != nil {
			return fieldError("arguments", "have to be a JSON object, not %s", KindOfJSON(raw))
		}
	}
	for name := range args {
		if schema.Properties[name] == nil {
			name, _ = value(name) // a long one was lifted
			return fieldError("arguments", "%q is none of this tool's; it takes %s", shown(name), names(schema))
		}
	}
	v := reflect.ValueOf(in).Elem()
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		arg := args[name]
		if len(arg) == 0 || string(arg) == "null" {
			if slices.Contains(schema.Required, name) {
				return fieldError(name, "is missing")
			}
			continue
		}
		if err := decodeField(name, arg, schema.Properties[name], value, v.Field(i)); err != nil {
			return err
		}
	}
	return nil
}

func names(schema *jsonschema.Schema) string {
	if len(schema.Properties) == 0 {
		return "none"
	}
	return strings.Join(slices.Sorted(maps.Keys(schema.Properties)), ", ")
}

func decodeField(name string, arg json.RawMessage, schema *jsonschema.Schema, value func(string) (string, error), into reflect.Value) error {
	has := KindOfJSON(arg)
	var err error
	switch at := into.Addr().Interface().(type) {
	case *string:
		if has != aString {
			return fieldError(name, "has to be a string, not %s", has)
		}
		*at, err = stringOf(arg, value)
	case *map[string]string:
		if has != anObject {
			return fieldError(name, "has to be an object of strings, not %s", has)
		}
		var members map[string]json.RawMessage
		if err := json.Unmarshal(arg, &members); err != nil {
			return fieldError(name, "has to be an object of strings: %v", err)
		}
		*at = make(map[string]string, len(members))
		for k, m := range members {
			if k, err = value(k); err != nil {
				break
			}
			if has := KindOfJSON(m); has != aString {
				return fieldError(name, "the value of %q has to be a string, not %s", shown(k), has)
			}
			if (*at)[k], err = stringOf(m, value); err != nil {
				break
			}
		}
	default: // of a number
		if has != aNumber {
			want := "a number"
			if slices.Contains(schema.Types, "integer") {
				want = "a whole number"
			}
			return fieldError(name, "has to be %s, not %s", want, has)
		}
		err = json.Unmarshal(arg, at)
	}
	if err != nil {
		return fieldError(name, "%v", err)
	}
	return nil
}

func stringOf(literal json.RawMessage, value func(string) (string, error)) (s string, err error) {
	if s, err = unquote(literal); err != nil {
		return "", err
	}
	return value(s)
}

// unquote reads a JSON string. One with half of a surrogate pair is refused: it has no UTF-8, and
// would become U+FFFD without a word.
func unquote(literal []byte) (s string, err error) {
	if err := json.Unmarshal(literal, &s); err != nil {
		return "", errors.New("is no valid JSON string")
	}
	for rest := literal; ; {
		i := bytes.IndexByte(rest, '\\')
		if i < 0 {
			return s, nil
		}
		if rest = rest[i+1:]; rest[0] != 'u' { // the text is valid: something follows, and here four digits
			rest = rest[1:]
			continue
		}
		r := unit(rest[1:])
		if rest = rest[5:]; !utf16.IsSurrogate(r) {
			continue
		}
		if len(rest) < 6 || rest[0] != '\\' || rest[1] != 'u' || utf16.DecodeRune(r, unit(rest[2:])) == utf8.RuneError {
			return "", fmt.Errorf("holds \\u%04x, half of a surrogate pair, which is no character: send bytes that are no text with encoding base64, where the tool has one", r)
		}
		rest = rest[6:]
	}
}

// unit is the UTF-16 code unit of four hexadecimal digits.
func unit(digits []byte) rune {
	n, _ := strconv.ParseUint(string(digits[:4]), 16, 16)
	return rune(n)
}

const (
	aString  = "a string"
	aNumber  = "a number"
	anObject = "an object"
)

// KindOfJSON says what a valid JSON text is.
func KindOfJSON(b []byte) string {
	switch b = bytes.TrimLeft(b, " \t\r\n"); b[0] {
	case '"':
		return aString
	case '{':
		return anObject
	case '[':
		return "an array"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return aNumber
}
