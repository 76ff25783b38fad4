package engine

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/moby/moby/client"
)

// A pull's failure comes in its stream, after a status of 200.
func TestPullStream(t *testing.T) {
	const ref = "registry.example/session:1"
	for _, tc := range []struct{ name, stream, want string }{
		{"whole", `{"status":"Pulling from session","id":"1"}` + "\n" + `{"status":"Downloading","progressDetail":{"current":1,"total":2}}` + "\n" + `{"status":"Status: Downloaded newer image"}`, ""},
		{"empty", "", ""},
		{"refused", `{"status":"Pulling"}` + "\n" + `{"errorDetail":{"message":"toomanyrequests: slow down"},"error":"toomanyrequests: slow down"}`, "pulling " + ref + ": toomanyrequests: slow down"},
		{"detail alone", `{"errorDetail":{"code":401,"message":"authentication required"}}`, "pulling " + ref + ": authentication required"},
		{"more after it", `{"error":"no space left on device"}` + "\n" + `{"status":"done"}`, "no space left on device"},
		{"cut off", `{"status":"Pull`, "unexpected EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pulled := false
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				switch {
				case strings.HasSuffix(r.URL.Path, "/images/create"):
					fmt.Fprint(w, tc.stream)
					pulled = true
				case pulled && tc.want == "":
					fmt.Fprint(w, `{"Id":"sha256:1"}`)
				default:
					w.WriteHeader(http.StatusNotFound)
					fmt.Fprint(w, `{"message":"no such image"}`)
				}
			}))
			defer srv.Close()
			api, err := client.New(client.WithHost("tcp://"+srv.Listener.Addr().String()), client.WithAPIVersion("1.41"))
			if err != nil {
				t.Fatal(err)
			}
			defer api.Close()
			img, err := (&Engine{api: api}).ResolveImage(t.Context(), ref, true)
			switch {
			case !pulled:
				t.Error("nothing was pulled")
			case tc.want == "" && (err != nil || img.ID != "sha256:1"):
				t.Errorf("%+v, %v", img, err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("%v; want %s", err, tc.want)
			}
		})
	}
}
