package tools

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tracing"
	"github.com/modelcontextprotocol/go-sdk/mcp"
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

// Strings are parked for other answers of a batch while one is written.
func TestParkWhileWriting(t *testing.T) {
	var l Lifted
	long, names := strings.Repeat("a", LiftMin), []string(nil)
	for range 1000 {
		names = append(names, l.park(long))
	}
	b, err := json.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	var parks sync.WaitGroup
	written := make(chan struct{})
	parks.Go(func() {
		for {
			select {
			case <-written:
				return
			default:
				l.park(long)
			}
		}
	})
	for range 20 {
		if _, err := l.Writer(httptest.NewRecorder()).Write(b); err != nil {
			t.Error(err)
		}
	}
	close(written)
	parks.Wait()
}

// A batch's calls run side by side, and the answer of one goes out as an event while others
// are parked: each comes whole, under its own id.
func TestBatchOfLongAnswers(t *testing.T) {
	const calls, rounds = 100, 20
	tools := &Tools{Config: &config.Config{}, Metrics: metrics.New("1.0.0", func() (int, int) { return 0, 0 }), Tracing: tracing.Off(), Log: slog.New(slog.DiscardHandler)}
	srv := mcp.NewServer(&mcp.Implementation{Name: "sidecar"}, nil)
	type fill struct {
		With string `json:"with"`
	}
	add(tools, srv, &mcp.Tool{Name: "fill"}, nil, func(_ context.Context, c *call, in fill) (*result, fill, error) {
		text := strings.Repeat(in.With, LiftMin)
		return &result{text: text}, fill{c.http.park(text + "2")}, nil
	})
	h := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return srv }, &mcp.StreamableHTTPOptions{Stateless: true})
	var batch []string
	for id := range calls {
		batch = append(batch, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"fill","arguments":{"with":"%c"}}}`, id, 'a'+id%26))
	}
	for range rounds {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/mcp", strings.NewReader("["+strings.Join(batch, ",")+"]"))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Accept", "application/json, text/event-stream")
		req := &Request{Who: identity.Who{Known: true}}
		w := httptest.NewRecorder()
		h.ServeHTTP(req.Writer(w), r.WithContext(WithRequest(r.Context(), req)))
		answered := map[int]bool{}
		lines := bufio.NewScanner(w.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok {
				continue
			}
			var m struct {
				ID     int
				Result struct {
					Content           []struct{ Text string }
					StructuredContent fill
				}
			}
			if err := json.Unmarshal([]byte(data), &m); err != nil {
				t.Fatal(err)
			}
			text := strings.Repeat(string(rune('a'+m.ID%26)), LiftMin)
			if got := m.Result; len(got.Content) != 1 || got.Content[0].Text != text || got.StructuredContent.With != text+"2" {
				t.Fatalf("call %d was answered %.100s", m.ID, data)
			}
			answered[m.ID] = true
		}
		if len(answered) != calls {
			t.Fatalf("%d of %d calls were answered: %.200s", len(answered), calls, w.Body)
		}
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
