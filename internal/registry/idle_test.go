package registry

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// Over HTTP/2 a request shares its connection with others, whose bytes are no
// sign of life of its own.
func TestSilentRequestBesideABusyOne(t *testing.T) {
	over := make(chan struct{})
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/silent" {
			select {
			case <-over:
			case <-r.Context().Done():
			}
		}
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	defer close(over)
	// The busy requests are of the same connection, but nobody gives them up.
	busy := s.Client()
	client := http.Client{Transport: idle{busy.Transport, 500 * time.Millisecond}}
	silent := make(chan error, 1)
	go func() {
		res, err := client.Post(s.URL+"/silent", "", strings.NewReader("a blob"))
		if err == nil {
			res.Body.Close()
		}
		silent <- err
	}()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		res, err := busy.Get(s.URL + "/busy")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.ProtoMajor != 2 {
			t.Fatalf("%s, %v", res.Proto, err)
		}
		res.Body.Close()
		select {
		case err := <-silent:
			if err == nil || !strings.Contains(err.Error(), "nothing moved for 500ms") {
				t.Errorf("the silent request ends with %v", err)
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
	t.Error("the silent request goes on")
}
