package server

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/freeport"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

func TestServe(t *testing.T) {
	addr := freeport.Address(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	var log syncbuf.Buffer
	go func() { done <- Serve(ctx, addr, Info{Version: "1.2.3", Commit: "abc"}, &log) }()

	var v struct{ Version, Commit, Platform string }
	get(t, "http://"+addr+"/v1/version", func(b io.Reader) error { return json.NewDecoder(b).Decode(&v) })
	if v.Version != "1.2.3" || v.Commit != "abc" || !strings.HasPrefix(v.Platform, "linux/") {
		t.Errorf("version answered %+v", v)
	}
	get(t, "http://"+addr+"/healthz", func(b io.Reader) error {
		if s, _ := io.ReadAll(b); string(s) != "ok\n" {
			t.Errorf("healthz answered %q", s)
		}
		return nil
	})

	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("a clean shutdown returned %v", err)
		}
	case <-time.After(grace):
		t.Error("an idle server took the whole grace period to stop")
	}
	if !strings.Contains(log.String(), `"grace_seconds":5}`) {
		t.Errorf("the log does not say how long it waits: %s", log.String())
	}
}

func TestServeNamesTheVariable(t *testing.T) {
	err := Serve(t.Context(), "nowhere", Info{}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "LOOMCYCLE_LISTEN_ADDR=nowhere") {
		t.Errorf("got %v", err)
	}
}

func get(t *testing.T, url string, read func(io.Reader) error) {
	t.Helper()
	var err error
	for range 100 {
		var resp *http.Response
		if resp, err = http.Get(url); err == nil {
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s", url, resp.Status)
			}
			if err = read(resp.Body); err != nil {
				t.Fatal(err)
			}
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal(err)
}
