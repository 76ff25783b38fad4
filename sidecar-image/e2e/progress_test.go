package e2e

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A client that asked for progress sees the end of what a command has written, however
// much that is and however little of it is kept.
func TestProgress(t *testing.T) {
	s := start(t, "runc", nil)
	var mu sync.Mutex
	progress := map[any][]string{}
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, &mcp.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			mu.Lock()
			defer mu.Unlock()
			progress[r.Params.ProgressToken] = append(progress[r.Params.ProgressToken], r.Params.Message)
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cs, err := client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: s.URL + "/mcp", HTTPClient: &http.Client{Transport: withHeaders{map[string]string{"Authorization": "Bearer " + token}}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer cs.Close()
	id := s.client().open(m{})
	for _, tc := range []struct {
		name, command string
		limit         int
		want          string
	}{
		{"little", "echo begun; sleep 4", 65536, "begun\n"},
		{"more than is sent as it comes", "yes | head -c 102400; echo first; sleep 4; echo second; sleep 4", 65536, "y\nfirst\nsecond\n"},
		{"more than is kept", "echo 0123456789; sleep 4", 8, "789\n"},
		{"all but nothing is kept", "printf x; sleep 4", 1, "x"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			params := &mcp.CallToolParams{Name: "sandbox_exec", Arguments: m{"session_id": id, "command": tc.command, "max_output_bytes": tc.limit}}
			params.SetProgressToken(tc.name)
			if res, err := cs.CallTool(ctx, params); err != nil || res.IsError {
				t.Fatalf("%+v, %v", res, err)
			}
			mu.Lock()
			defer mu.Unlock()
			got := progress[tc.name]
			if len(got) == 0 || !strings.HasSuffix(got[len(got)-1], tc.want) || len(got[len(got)-1]) > 16<<10 {
				t.Errorf("%d notifications, the last ends in %.40q", len(got), strings.Join(got, "")[max(0, len(strings.Join(got, ""))-40):])
			}
		})
	}
}
