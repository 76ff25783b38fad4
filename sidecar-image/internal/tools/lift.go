package tools

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"
	"unsafe"
)

// The SDK goes over a message half a dozen times (batch, message, params,
// schema, arguments, and as often on the way back), which costs 30 ms for a
// file of 1 MiB. So long string literals are lifted out of a request before it
// sees them and set into the response after, each under a name that nobody can
// guess.

// LiftMin is the length from which a literal is lifted, in bytes, without its last quote.
const LiftMin = 16 << 10

// Lifted holds a request's long strings.
type Lifted struct {
	mu  sync.Mutex
	in  map[string][]byte // JSON literals by the value that stands for them
	out map[string]string // strings by the value that stands for them
}

// Lift returns the body with its long string literals replaced. It keeps parts of
// body, which must not be changed after.
func (l *Lifted) Lift(body []byte) []byte {
	if len(body) < LiftMin {
		return body
	}
	var small []byte
	copied := 0
	for at := 0; ; {
		i := bytes.IndexByte(body[at:], '"')
		if i < 0 {
			break
		}
		start := at + i
		end := closing(body, start+1)
		if end < 0 {
			break // not JSON; the SDK says so
		}
		at = end + 1
		if end-start < LiftMin {
			continue
		}
		// A NUL keeps the name out of any file system.
		name := "\x00lifted:" + rand.Text()
		literal, _ := json.Marshal(name)
		if l.in == nil {
			l.in = map[string][]byte{}
		}
		l.in[name] = body[start : end+1]
		small = append(append(small, body[copied:start]...), literal...)
		copied = end + 1
	}
	if copied == 0 {
		return body
	}
	return append(small, body[copied:]...)
}

// StandsIn tells whether a JSON literal stands for a string that was lifted.
func (l *Lifted) StandsIn(literal []byte) bool {
	var s string
	return len(l.in) > 0 && json.Unmarshal(literal, &s) == nil && l.in[s] != nil
}

// closing finds the quote that ends the string which begins before at.
func closing(b []byte, at int) int {
	for {
		i := bytes.IndexByte(b[at:], '"')
		if i < 0 {
			return -1
		}
		end, slashes := at+i, 0
		for k := end - 1; k >= at && b[k] == '\\'; k-- {
			slashes++
		}
		if slashes%2 == 0 {
			return end
		}
		at = end + 1
	}
}

// value returns the string that s stands for, which is mostly s.
func (l *Lifted) value(s string) (string, error) {
	literal, ok := l.in[s]
	if !ok {
		return s, nil
	}
	inner := literal[1 : len(literal)-1]
	if bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) && !hasControl(inner) {
		return unsafe.String(unsafe.SliceData(inner), len(inner)), nil // nobody changes the body
	}
	return unquote(literal)
}

// hasControl looks at eight bytes at a time: a byte below 0x20 has none of its
// three high bits, and borrows from bit 7 when 0x20 is taken from it (a byte
// above 0x7f is excepted by its own bit 7).
func hasControl[T ~string | ~[]byte](s T) bool {
	const ones = 0x0101010101010101
	i := 0
	for ; i+8 <= len(s); i += 8 {
		v := uint64(s[i]) | uint64(s[i+1])<<8 | uint64(s[i+2])<<16 | uint64(s[i+3])<<24 | uint64(s[i+4])<<32 | uint64(s[i+5])<<40 | uint64(s[i+6])<<48 | uint64(s[i+7])<<56
		if (v-ones*' ')&^v&(ones*0x80) != 0 {
			return true
		}
	}
	for ; i < len(s); i++ {
		if s[i] < ' ' {
			return true
		}
	}
	return false
}

// park returns what stands for a long string in the SDK's response.
func (l *Lifted) park(s string) string {
	if len(s) < LiftMin {
		return s
	}
	name := "lifted:" + rand.Text()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out == nil {
		l.out = map[string]string{}
	}
	l.out[name] = s
	return name
}

// parked tells whether any string is. Of a batch some are parked while an event with others
// is written.
func (l *Lifted) parked() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.out) > 0
}

// unpark returns the string that name stands for.
func (l *Lifted) unpark(name string) (s string, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, ok = l.out[name]
	return s, ok
}

// Writer sets the parked strings into what is written to w.
func (l *Lifted) Writer(w http.ResponseWriter) http.ResponseWriter { return &liftWriter{w, l} }

type liftWriter struct {
	http.ResponseWriter
	l *Lifted
}

// Unwrap is for http.ResponseController.
func (w *liftWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush is for the SDK, which asks for http.Flusher.
func (w *liftWriter) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// Write relies on the SDK writing a message, or an event, in one call.
func (w *liftWriter) Write(p []byte) (int, error) {
	rest := p
	for w.l.parked() {
		i := bytes.Index(rest, []byte(`"lifted:`))
		if i < 0 {
			break
		}
		j := bytes.IndexByte(rest[i+1:], '"')
		if j < 0 {
			break
		}
		end := i + 1 + j
		s, ok := w.l.unpark(string(rest[i+1 : end]))
		if !ok {
			if _, err := w.ResponseWriter.Write(rest[:end]); err != nil {
				return 0, err
			}
			rest = rest[end:]
			continue
		}
		if _, err := w.ResponseWriter.Write(rest[:i]); err != nil {
			return 0, err
		}
		if err := writeString(w.ResponseWriter, s); err != nil {
			return 0, err
		}
		rest = rest[end+1:]
	}
	if _, err := w.ResponseWriter.Write(rest); err != nil {
		return 0, err
	}
	return len(p), nil
}

var quote = []byte{'"'}

// escaped is how much of a string is escaped at once, in bytes.
const escaped = 64 << 10

// writeString writes s as a JSON string.
func writeString(w http.ResponseWriter, s string) error {
	if strings.IndexByte(s, '"') < 0 && strings.IndexByte(s, '\\') < 0 && !hasControl(s) && utf8.ValidString(s) {
		// Not copied, and not by WriteString, which net/http cuts into chunks of 2 KiB.
		// A Writer must not change what it is given (io.Writer).
		for _, part := range [][]byte{quote, unsafe.Slice(unsafe.StringData(s), len(s)), quote} {
			if _, err := w.Write(part); err != nil {
				return err
			}
		}
		return nil
	}
	// In pieces: what has to be escaped may take six times its length.
	_, err := w.Write(quote)
	for err == nil && s != "" {
		n := min(len(s), escaped)
		for n < len(s) && n > escaped-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		var b []byte
		if b, err = json.Marshal(s[:n]); err == nil {
			_, err = w.Write(b[1 : len(b)-1])
		}
		s = s[n:]
	}
	if err == nil {
		_, err = w.Write(quote)
	}
	return err
}
