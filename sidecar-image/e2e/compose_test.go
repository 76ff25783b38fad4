package e2e

import (
	"archive/tar"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/loomcycle/loomcycle-images/images"
	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/imagetest"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/enginetest"
)

// composeCommand is what a document tells to type.
var composeCommand = regexp.MustCompile("docker compose -[fp] [^`\n]+|docker compose [a-z][^`\n]*")

// Every `docker compose` command of the documents, with a real compose and a docker of the
// test's own. It is the variant with that docker's socket that they are run on: nested
// podman takes the built image, and is TestNestedImage's.
func TestComposeCommands(t *testing.T) {
	d := enginetest.NewDocker(t)
	d.Try(t, "runc")
	plugins := filepath.Join(t.TempDir(), "cli-plugins")
	if err := os.Mkdir(plugins, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(citest.Tool(t, "compose", "docker-compose", "", "github.com/docker/compose/v2/cmd"), filepath.Join(plugins, "docker-compose")); err != nil {
		t.Fatal(err)
	}

	// The files are copied: of what they name on the host, this test has its own.
	dir, workspaces, runtimeAt := t.TempDir(), filepath.Join(t.TempDir(), "workspaces"), freePort(t)
	own := strings.NewReplacer("/var/run/docker.sock:", strings.TrimPrefix(d.Host, "unix://")+":", "$(stat -c %g /var/run/docker.sock)", "$(stat -c %g "+strings.TrimPrefix(d.Host, "unix://")+")",
		"/srv/loomcycle-workspaces", workspaces, "127.0.0.1:8787:", runtimeAt+":",
		// It is in the engine already; to push it takes longer than all the rest.
		"${LOOMCYCLE_REGISTRY}/loomcycle-sandbox-session@${LOOMCYCLE_SESSION_DIGEST:?sha256 digest of the image loomcycle-sandbox-session}", d.Image+" # ${LOOMCYCLE_SESSION_DIGEST:?}")
	const at = "bundles/sandbox/compose"
	files, err := filepath.Glob("../../" + at + "/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, at), 0o755); err != nil {
		t.Fatal(err)
	}
	headers := ""
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, at, filepath.Base(file)), []byte(own.Replace(string(text))), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "#") {
				headers += line
			}
		}
	}

	// What the documents say, as they say it, but for the variant.
	documents := headers
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../*/README.md", "../../bundles/sandbox/README.md"} {
		guides, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range guides {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			documents += string(text)
		}
	}
	variant := regexp.MustCompile(`-f (` + at + `/)?(privileged|sysbox|socket)\.yaml`)
	var ups, others []string
	for _, command := range composeCommand.FindAllString(documents, -1) {
		command = variant.ReplaceAllString(command, "-f "+at+"/socket.yaml")
		switch list := &others; {
		case strings.Contains(command, " up "):
			list = &ups
			fallthrough
		default:
			if !slices.Contains(*list, command) {
				*list = append(*list, command)
			}
		}
	}
	if len(ups) == 0 || len(others) < 3 {
		t.Fatalf("the documents have lost their commands: %q %q", ups, others)
	}
	exports, _, _ := strings.Cut(guide(t, "export LOOMCYCLE_REGISTRY"), "docker compose")
	install := regexp.MustCompile(`(?m)^#   (install -d .*)$`).FindStringSubmatch(headers)
	gid := regexp.MustCompile(`(?m)^#   (export DOCKER_GID=.*)$`).FindStringSubmatch(headers)
	if install == nil || gid == nil {
		t.Fatal("socket.yaml does not say how to make the directory, and how to name the socket's group")
	}
	registry := standIns(t, map[string][]string{"loomcycle": {"./runtime/cmd/loomcycle"}, "loomcycle-builder-docker": {"./sidecar-image/cmd/loomcycle-builder", "./sidecar-image/cmd/session-agent"}})
	exports = regexp.MustCompile(`LOOMCYCLE_REGISTRY=\S+`).ReplaceAllString(exports, "LOOMCYCLE_REGISTRY="+registry.path)
	for image, digest := range registry.digests {
		exports += "export " + strings.ToUpper(strings.ReplaceAll(image, "-", "_")) + "_DIGEST=" + digest + "\n"
	}
	preamble := "cd " + dir + "\n" + exports + own.Replace(gid[1]) + "\n"
	env := []string{"DOCKER_HOST=" + d.Host, "DOCKER_CONFIG=" + filepath.Dir(plugins)}
	run := func(commands string) string { return script(t, 5*time.Minute, preamble+commands, env...) }
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := d.Command("logs", "loomcycle-sandbox-1").CombinedOutput()
			t.Logf("the sidecar's log:\n%s", out)
		}
		cmd := exec.Command("docker", "compose", "--project-name", "loomcycle", "down", "--volumes", "--rmi", "all", "--timeout", "5")
		cmd.Env = append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		ids, _ := d.Command("ps", "--all", "--quiet", "--filter", "label=loomcycle.managed=1").Output()
		for _, id := range strings.Fields(string(ids)) {
			_ = d.Command("rm", "--force", id).Run()
		}
	})

	for _, file := range []string{"privileged", "sysbox"} { // which end where their image, and Sysbox, are needed
		run("export LOOMCYCLE_BUILDER_DIGEST=${LOOMCYCLE_BUILDER_DIGEST/.../" + strings.Repeat("0", 64) + "}\ndocker compose -f " + at + "/" + file + ".yaml config --quiet")
	}
	run(own.Replace(install[1]) + "\n" + strings.Join(ups, "\n") + "\n" + guide(t, "umask"))
	eventually(t, 2*time.Minute, "the sidecar is healthy", func() bool {
		out, _ := d.Command("inspect", "--format", "{{.State.Health.Status}}", "loomcycle-sandbox-1").Output()
		return strings.TrimSpace(string(out)) == "healthy"
	})
	address, err := d.Command("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", "loomcycle-sandbox-1").Output()
	if err != nil {
		t.Fatal(err)
	}
	secret := run(`docker inspect --format '{{range .Config.Env}}{{println .}}{{end}}' loomcycle-sandbox-1 | sed -n s/^SANDBOX_AUTH_TOKEN=//p`)
	s := &sidecar{t: t, cli: d, URL: "http://" + strings.TrimSpace(string(address)) + ":9000"}
	c := s.as(map[string]string{"Authorization": "Bearer " + strings.TrimSpace(secret)})
	id := c.open(m{"workspace": "mine"})
	if a := c.exec(id, "echo kept > file && cat file"); a.Text != "kept\n" {
		t.Errorf("%+v", a)
	}
	c.call("sandbox_close", m{"session_id": id})
	// Another shell has what the guide keeps for it, and nothing else.
	out := script(t, 5*time.Minute, "cd "+dir+"\n"+strings.Join(others, "\n"), env...)
	for _, want := range []string{"shared", "mine", "PRINCIPAL", `"msg":"serving"`} {
		if !strings.Contains(out, want) {
			t.Errorf("%q: there is no %q in\n%s", others, want, out)
		}
	}
}

// stood are images in a registry of the test's own.
type stood struct {
	path    string            // registry and repository
	digests map[string]string // by image
}

// standIns are images with the real programs and configurations, and nothing else of
// what the family has: this is about what is started from them, and how.
func standIns(t *testing.T, programs map[string][]string) stood {
	t.Helper()
	family, err := images.Load(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	out := stood{strings.TrimPrefix(srv.URL, "http://") + "/loomcycle", map[string]string{}}
	bin := t.TempDir()
	for image, packages := range programs {
		def, err := family.Image(image)
		if err != nil {
			t.Fatal(err)
		}
		build := exec.Command("go", append([]string{"build", "-trimpath", "-ldflags=-s -w", "-o", bin + "/"}, packages...)...)
		build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
		if text, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		var uid, gid int
		if _, err := fmt.Sscanf(def.Config.User, "%d:%d", &uid, &gid); err != nil {
			t.Fatal(err)
		}
		var files []imagetest.Entry
		for _, dir := range def.Dirs {
			files = append(files, imagetest.Entry{Header: tar.Header{Name: path.Join(def.Home, dir)[1:] + "/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: uid, Gid: gid}})
		}
		for _, pkg := range packages {
			text, err := os.ReadFile(filepath.Join(bin, path.Base(pkg)))
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, imagetest.Program("usr/local/bin/"+path.Base(pkg), string(text)))
		}
		ref, err := name.NewTag(out.path+"/"+image+":test", name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		img := imagetest.Image(t, v1.Config{User: def.Config.User, WorkingDir: def.Config.Workdir, Entrypoint: def.Config.Entrypoint, Cmd: def.Config.Cmd, Env: def.Config.Env}, runtime.GOARCH, files)
		if err := remote.Write(ref, img); err != nil {
			t.Fatal(err)
		}
		digest, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		out.digests[image] = digest.String()
	}
	return out
}
