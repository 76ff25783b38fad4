package tools

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tracing"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A fault of one call ends that call, is told to the operator, and quotes nobody.
func TestPanic(t *testing.T) {
	var log bytes.Buffer
	tools := &Tools{Config: &config.Config{}, Metrics: metrics.New("1.0.0", func() (int, int) { return 0, 0 }), Tracing: tracing.Off(), Log: slog.New(slog.NewTextHandler(&log, nil))}
	srv := mcp.NewServer(&mcp.Implementation{Name: "sidecar"}, nil)
	type none struct{}
	for name, fault := range map[string]func(){"runtime": func() { _ = []int{}[log.Len()] }, "own": func() { panic("s3cret") }} {
		add(tools, srv, &mcp.Tool{Name: name}, nil, func(context.Context, *call, none) (*result, none, error) { fault(); return nil, none{}, nil })
	}
	h := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return srv }, &mcp.StreamableHTTPOptions{Stateless: true})
	for name, want := range map[string]string{"runtime": "index out of range", "own": "panic=string"} {
		log.Reset()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"`+name+`"}}`))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Accept", "application/json, text/event-stream")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r.WithContext(WithRequest(r.Context(), &Request{Who: identity.Who{Known: true}})))
		if text := w.Body.String(); !strings.Contains(text, errFault.Error()) || !strings.Contains(text, `"isError":true`) {
			t.Errorf("%s: answered %s", name, text)
		}
		if told := log.String(); !strings.Contains(told, want) || !strings.Contains(told, "tools_test.go") || strings.Contains(told, "s3cret") {
			t.Errorf("%s: the log says %s", name, told)
		}
	}
}
