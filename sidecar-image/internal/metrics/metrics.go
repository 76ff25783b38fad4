// Package metrics holds the sidecar's Prometheus metrics. No label comes from a
// request but a tool's name, so a client cannot make series.
package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are the sidecar's series.
type Metrics struct {
	reg    *prometheus.Registry
	calls  *prometheus.HistogramVec
	opens  *prometheus.HistogramVec
	closed *prometheus.CounterVec
	denied *prometheus.CounterVec
}

// New registers the series; count returns open sessions and warm containers.
func New(version string, count func() (open, pooled int)) *Metrics {
	m := &Metrics{
		reg: prometheus.NewRegistry(),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "sandbox_tool_seconds", Help: "Time of tool calls, by tool and outcome (ok, error).",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30, 120, 600}}, []string{"tool", "outcome"}),
		opens: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "sandbox_open_seconds", Help: "Time to open a session, by source (warm, cold) and outcome.",
			Buckets: []float64{.005, .01, .025, .05, .1, .2, .3, .5, 1, 2, 5, 10}}, []string{"source", "outcome"}),
		closed: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sandbox_sessions_closed_total", Help: "Sessions that ended, by reason."}, []string{"reason"}),
		denied: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sandbox_requests_denied_total", Help: "HTTP requests that were refused, by reason."}, []string{"reason"}),
	}
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sandbox_build_info", Help: "The sidecar's version."}, []string{"version"})
	info.WithLabelValues(version).Set(1)
	m.reg.MustRegister(m.calls, m.opens, m.closed, m.denied, info,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "sandbox_sessions", Help: "Open sessions."}, func() float64 { n, _ := count(); return float64(n) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "sandbox_warm_containers", Help: "Containers that wait in the warm pool."}, func() float64 { _, n := count(); return float64(n) }),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func outcome(failed bool) string {
	if failed {
		return "error"
	}
	return "ok"
}

// Call records a tool call.
func (m *Metrics) Call(tool string, d time.Duration, failed bool) {
	m.calls.WithLabelValues(tool, outcome(failed)).Observe(d.Seconds())
}

// Opened records an attempt to open a session.
func (m *Metrics) Opened(d time.Duration, warm bool, err error) {
	source := "cold"
	if warm {
		source = "warm"
	}
	m.opens.WithLabelValues(source, outcome(err != nil)).Observe(d.Seconds())
}

// Closed records the end of a session.
func (m *Metrics) Closed(reason string) { m.closed.WithLabelValues(reason).Inc() }

// Denied records a refused request.
func (m *Metrics) Denied(reason string) { m.denied.WithLabelValues(reason).Inc() }

// Handler serves the series, to anyone who asks: a gzip writer for each would take most of
// a MiB of memory.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{DisableCompression: true})
}
