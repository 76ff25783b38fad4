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

// writeHelper writes a docker configuration that asks a program for the login, in
// the protocol of docker-credential-helpers.
func writeHelper(t *testing.T, address, user, password string) {
	t.Helper()
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	script := `#!/bin/sh
read -r server
[ "$1 $server" = "get ` + address + `" ] && echo '{"ServerURL":"` + address + `","Username":"` + user + `","Secret":"` + password + `"}'
`
	if err := os.WriteFile(filepath.Join(bin, "docker-credential-test"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(`{"credHelpers":{"`+address+`":"test"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
}
