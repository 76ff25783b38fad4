package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	traces "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// otlp is a receiver of traces.
type otlp struct {
	*httptest.Server
	mu    sync.Mutex
	raw   bytes.Buffer
	spans []*traces.Span
	auth  string
}

func receiver(t *testing.T) *otlp {
	o := &otlp{}
	o.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in io.Reader = r.Body
		if r.Header.Get("Content-Encoding") == "gzip" {
			var err error
			if in, err = gzip.NewReader(r.Body); err != nil {
				t.Error(err)
				return
			}
		}
		b, err := io.ReadAll(in)
		var m collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(b, &m)
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.raw.Write(b)
		o.auth = r.Header.Get("X-Api-Key")
		for _, rs := range m.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				o.spans = append(o.spans, ss.Spans...)
			}
		}
	}))
	t.Cleanup(o.Close)
	return o
}

func (o *otlp) find(prefix string) (out []*traces.Span) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.spans {
		if strings.HasPrefix(s.Name, prefix) {
			out = append(out, s)
		}
	}
	return out
}

func attributes(s *traces.Span) map[string]string {
	out := map[string]string{}
	for _, a := range s.Attributes {
		out[a.Key] = a.Value.GetStringValue()
	}
	return out
}

// Traces go where the standard variables say: tool calls below the caller's
// span, the engine's calls below them, and nothing of what users sent.
func TestTraces(t *testing.T) {
	o := receiver(t)
	s := start(t, "runc", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": o.URL, "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=k1",
		"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test-of-traces", "SANDBOX_ALLOW_ENV_INJECTION": "1"})
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	c := s.as(map[string]string{"traceparent": "00-" + trace + "-00f067aa0ba902b7-01", "X-Loom-Root-Run": "run-7", "X-Loom-Sandbox-Env-Gh-Token": "secret-of-env"})
	id := c.open(m{})
	c.exec(id, "echo secret-of-command; echo $X >&2; false")
	c.call("sandbox_write", m{"session_id": id, "path": "secret-of-path", "content": "secret-of-content"})
	c.call("sandbox_read", m{"session_id": id, "path": "../secret-of-path"})
	c.call("sandbox_exec", m{"session_id": id, "command": "true", "env": m{"secret-of-name": "x"}, "stdin": "secret-of-stdin"})
	c.call("sandbox_close", m{"session_id": id})
	s.client().call("sandbox_list", m{})
	eventually(t, 30*time.Second, "the spans arrive", func() bool {
		return len(o.find("tools/call sandbox_close")) == 1 && len(o.find("tools/call sandbox_list")) == 1 && len(o.find("POST ")) > 0
	})
	open := o.find("tools/call sandbox_open")
	if len(open) != 1 {
		t.Fatalf("%d spans of one open", len(open))
	}
	a := attributes(open[0])
	if a["gen_ai.tool.name"] != "sandbox_open" || a["loomcycle.session"] != id || a["loomcycle.principal"] != "shared" || a["loomcycle.run"] != "run-7" || open[0].Kind != traces.Span_SPAN_KIND_SERVER {
		t.Errorf("the open's span: %v", open[0])
	}
	created := 0
	for _, call := range o.find("POST ") {
		if bytes.Equal(call.ParentSpanId, open[0].SpanId) && bytes.Equal(call.TraceId, open[0].TraceId) && strings.HasSuffix(call.Name, "/containers/create") {
			created++
		}
	}
	if created != 1 {
		t.Errorf("%d creations of a container below the open", created)
	}
	for i, want := range []string{"command", "wrong_argument"} {
		var got []string
		for _, x := range o.find("tools/call sandbox_exec") {
			got = append(got, attributes(x)["error.type"])
		}
		if i >= len(got) || got[i] != want {
			t.Errorf("the failures of the commands are %q", got)
		}
	}
	if x := o.find("tools/call sandbox_read"); len(x) != 1 || x[0].Status.GetCode() != traces.Status_STATUS_CODE_ERROR || x[0].Status.GetMessage() != "" {
		t.Errorf("the failed read: %v", x)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !strings.Contains(o.raw.String(), "test-of-traces") || !strings.Contains(o.raw.String(), "loomcycle-builder") || o.auth != "k1" {
		t.Error("the resource or the headers are not as the environment has them")
	}
	for _, secret := range []string{"secret-of", token} {
		if bytes.Contains(o.raw.Bytes(), []byte(secret)) {
			t.Errorf("%q is in the traces", secret)
		}
	}
	for _, span := range o.spans {
		if id := span.TraceId; span.Name != "tools/call sandbox_list" && hex.EncodeToString(id) != trace {
			t.Errorf("%s belongs to the trace %x, not to its caller's", span.Name, id)
		}
	}
}

// A collector that is away costs no call its answer, and no memory without end.
func TestTracesWithoutCollector(t *testing.T) {
	s := start(t, "runc", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://" + freePort(t), "OTEL_BSP_SCHEDULE_DELAY": "50"})
	c := s.client()
	id := c.open(m{})
	for range 50 {
		if a := c.exec(id, "echo fine"); a.Text != "fine\n" {
			t.Fatalf("%+v", a)
		}
	}
	began := time.Now()
	s.stop()
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the end took %v", took)
	}
}
