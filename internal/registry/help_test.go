package registry_test

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func itoa(n int) string { return strconv.Itoa(n) }

func newServer(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// writeLogin writes a docker configuration, as `docker login` would.
func writeLogin(t *testing.T, address, user, password string) {
	t.Helper()
	text, err := json.Marshal(map[string]any{"auths": map[string]any{address: map[string]string{
		"auth": base64.StdEncoding.EncodeToString([]byte(user + ":" + password))}}})
	if err == nil {
		err = os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
