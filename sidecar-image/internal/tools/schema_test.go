package tools

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

var update = flag.Bool("update", false, "write testdata/tools.json")

// What clients are told of the tools, to the last word: names, arguments,
// results and annotations. The text forms are pinned in ../../e2e (TestTextForms).
func TestSchema(t *testing.T) {
	c, err := config.Load(func(name string) string {
		return map[string]string{"SANDBOX_IMAGE": "x", "SANDBOX_IMAGES": "node=x"}[name]
	})
	if err != nil {
		t.Fatal(err)
	}
	srv := mcp.NewServer(&mcp.Implementation{Name: "sidecar"}, nil)
	(&Tools{Config: c}).Register(srv)
	client, server := mcp.NewInMemoryTransports()
	ss, err := srv.Connect(t.Context(), server, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ss.Close()
	cs, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(t.Context(), client, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer cs.Close()
	list, err := cs.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.MarshalIndent(list.Tools, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	if *update {
		if err := os.WriteFile("testdata/tools.json", got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/tools.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the tools are not those of testdata/tools.json; runtimes rely on them. If the change is meant: go test ./sidecar-image/internal/tools -update\n%s", got)
	}
}
