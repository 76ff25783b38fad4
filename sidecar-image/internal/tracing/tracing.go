// Package tracing exports OpenTelemetry traces of tool calls and of the engine's
// API calls under them, to where the standard OTEL_ variables say; without them
// there is none. A span says who, which and how long: never commands, contents,
// environments or tokens.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

const scope = "github.com/loomcycle/loomcycle-images/sidecar-image"

// Tracing makes spans. Off makes one that costs nothing.
type Tracing struct {
	provider trace.TracerProvider
	tracer   trace.Tracer
	shutdown func(context.Context) error
}

// Off returns a Tracing that makes no spans.
func Off() *Tracing {
	p := noop.NewTracerProvider()
	return &Tracing{p, p.Tracer(scope), func(context.Context) error { return nil }}
}

// Start returns a Tracing that sends spans by OTLP over HTTP. Endpoint, headers,
// certificates, sampler, batching and resource attributes are the
// specification's variables, which the OpenTelemetry SDK reads by itself.
func Start(ctx context.Context, version string, log *slog.Logger) (*Tracing, error) {
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("the trace exporter (OTEL_EXPORTER_OTLP_ENDPOINT and its like): %w", err)
	}
	res, err := resource.New(ctx, resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", "loomcycle-builder"), attribute.String("service.version", version)),
		resource.WithFromEnv()) // the last wins
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("the traces' resource (OTEL_RESOURCE_ATTRIBUTES): %w", err)
	}
	// The SDK has no other way to say that spans could not be sent.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are not sent", "error", err) }))
	p := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	return &Tracing{p, p.Tracer(scope), p.Shutdown}, nil
}

// Close sends what is left.
func (t *Tracing) Close(ctx context.Context) error { return t.shutdown(ctx) }

// Call begins the span of a tool call, below the caller's span where its
// headers name one (W3C Trace Context). end takes the kind of failure, empty for
// none.
func (t *Tracing) Call(ctx context.Context, h http.Header, tool, principal, run string) (_ context.Context, end func(session, failure string)) {
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(h))
	ctx, span := t.tracer.Start(ctx, "tools/call "+tool, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(
		attribute.String("mcp.method.name", "tools/call"), attribute.String("gen_ai.tool.name", tool),
		attribute.String("loomcycle.principal", principal), attribute.String("loomcycle.run", run)))
	return ctx, func(session, failure string) {
		if session != "" {
			span.SetAttributes(attribute.String("loomcycle.session", session))
		}
		if failure != "" {
			span.SetStatus(codes.Error, "")
			span.SetAttributes(attribute.String("error.type", failure))
		}
		span.End()
	}
}

// Engine are the options that make an engine client's calls spans. Calls that
// belong to no tool call, of the sidecar's own housekeeping, are none.
func (t *Tracing) Engine() []otelhttp.Option {
	return []otelhttp.Option{otelhttp.WithTracerProvider(t.provider),
		otelhttp.WithPropagators(propagation.NewCompositeTextMapPropagator()), // an engine is told nothing
		otelhttp.WithFilter(func(r *http.Request) bool { return trace.SpanContextFromContext(r.Context()).IsValid() })}
}
