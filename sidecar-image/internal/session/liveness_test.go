package session

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// What is taken for a run's end. An answer is a status, maybe a content type and
// a body; "drop" is a connection that breaks.
func TestLivenessAnswers(t *testing.T) {
	const missing = `404 application/json {"error":"no such run"}`
	for _, tc := range []struct {
		name    string
		answers []string
		dead    bool // after the last answer; before it never
	}{
		{"running", []string{`200 application/json {"status":"running"}`}, false},
		{"completed", []string{`200 application/json {"status":"Completed"}`}, true},
		{"not alive", []string{`200 application/json {"alive":false,"status":"running"}`}, true},
		{"state", []string{`200 application/json {"state":"failed"}`}, true},
		{"gone", []string{"410"}, true},
		{"missing", []string{missing, missing, missing}, true},
		{"missing, as a problem", []string{missing, missing, "404 application/problem+json;charset=utf-8 {}"}, true},
		{"a page in front", []string{`200 text/html <html>`}, false},
		{"an ingress with nothing behind", []string{"404 text/html <html>", "404 text/plain;charset=utf-8 default_backend", "404 text/html <html>", "404"}, false},
		{"503 between", []string{missing, "503", missing, "503", missing}, false},
		{"the ingress's between", []string{missing, missing, "404 text/html <html>", missing, missing}, false},
		{"a break between", []string{missing, missing, "drop", missing}, false},
		{"nonsense between", []string{missing, missing, "200 application/json nonsense", missing}, false},
		{"found again", []string{missing, missing, `200 application/json {"status":"running"}`, missing}, false},
		{"down, then missing", []string{"503", "drop", missing, missing, missing}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var next atomic.Value
			rt := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if auth := r.Header.Get("Authorization"); r.URL.EscapedPath() != "/v1/runs/a%2Fb" || auth != "Bearer status-token" {
					t.Errorf("asked for %s with %q", r.URL, auth)
				}
				status, rest, _ := strings.Cut(next.Load().(string), " ")
				kind, body, _ := strings.Cut(rest, " ")
				code, err := strconv.Atoi(status)
				if err != nil {
					panic(http.ErrAbortHandler)
				}
				if kind != "" {
					w.Header().Set("Content-Type", kind)
				}
				w.WriteHeader(code)
				_, _ = w.Write([]byte(body))
			}))
			defer rt.Close()
			l := &Liveness{URL: rt.URL + "/v1/runs/{root_run_id}", Token: "status-token", Client: rt.Client()}
			for i, a := range tc.answers {
				next.Store(a)
				l.ask(t.Context(), []string{"a/b"}, func(run string, dead bool, err error) {
					if want := tc.dead && i == len(tc.answers)-1; run != "a/b" || dead != want {
						t.Errorf("after answer %d, %s: dead is %t (%v)", i+1, a, dead, err)
					}
				})
			}
		})
	}
}

// A runtime that is slow about some runs is asked about others meanwhile, but
// not about all at once.
func TestLivenessAsksInParallel(t *testing.T) {
	const runs = 3 * asked
	var mu sync.Mutex
	under, most := 0, 0
	all := make(chan struct{})
	rt := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		under++
		if most = max(most, under); most == asked {
			select {
			case <-all:
			default:
				close(all)
			}
		}
		mu.Unlock()
		select {
		case <-all:
		case <-time.After(time.Minute):
		}
		mu.Lock()
		under--
		mu.Unlock()
		w.WriteHeader(http.StatusGone)
	}))
	defer rt.Close()
	l := &Liveness{URL: rt.URL + "/{root_run_id}", Client: rt.Client()}
	var names, dead []string
	for i := range runs {
		names = append(names, strconv.Itoa(i))
	}
	l.ask(t.Context(), names, func(run string, d bool, err error) {
		mu.Lock()
		defer mu.Unlock()
		if d && err == nil {
			dead = append(dead, run)
		}
	})
	slices.Sort(names)
	slices.Sort(dead)
	if !slices.Equal(names, dead) || most != asked {
		t.Errorf("%d of %d were found dead, %d asked about at once", len(dead), runs, most)
	}
}
