package buildkit

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
	"github.com/loomcycle/loomcycle-images/internal/syncbuf"
)

// becomeNobody runs a command as the user nobody, with the subordinate ids of a
// file that only this mount namespace knows, in a folder where that user finds
// this checkout and its Go, wherever they are. What HIDDEN names is no program.
const becomeNobody = `set -e
cd "$1"
for f in subuid subgid; do
	test -e /etc/$f || : > /etc/$f
	mount --bind ids /etc/$f
done
for f in $HIDDEN; do
	test ! -e $f || mount --bind /dev/null $f
done
mount --bind "$2" go
mount --bind "$3" checkout
cd checkout/internal/buildkit
shift 3
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all "$@"`

// stepVariable names a folder with the compiled testdata/step; bareVariable is
// set where the test is one without all that a daemon needs.
const (
	stepVariable = "BUILDKIT_TEST_STEP"
	bareVariable = "BUILDKIT_TEST_BARE"
)

// nobody is the folder of becomeNobody, with a home of that user in it.
func nobody(t *testing.T, ids string) (dir, home string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	dir, err := os.MkdirTemp("/tmp", "rootless-*") // a short path that nobody may walk
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	home = filepath.Join(dir, "home")
	const telemetry = "home/.config/go/telemetry" // of which go leaves a process that outlives the test
	for _, sub := range []string{"go", "checkout", "home/bin", "step", telemetry} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, sub), 0o755))
	}
	err = errors.Join(err, os.WriteFile(filepath.Join(dir, telemetry, "mode"), []byte("off"), 0o644))
	self, serr := os.Executable()
	if err := errors.Join(err, serr, os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "ids"), []byte(ids), 0o644),
		copyFile(self, filepath.Join(dir, "buildkit.test")),
		os.Chown(home, 65534, 65534), os.Chown(filepath.Join(home, "bin"), 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	return dir, home
}

// asNobody runs tests of this package as that user. PATH is Go's folder, then path.
func asNobody(t *testing.T, dir, path string, tests []string, env ...string) {
	t.Helper()
	goEnv, err := exec.Command("go", "env", "GOROOT", "CGO_ENABLED").Output()
	known := strings.Fields(string(goEnv))
	if err != nil || len(known) != 2 {
		t.Fatalf("go env printed %q: %v", goEnv, err)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", becomeNobody, "sh", dir, known[0], root,
		"/usr/bin/env", "PATH="+filepath.Join(dir, "go", "bin")+":"+path,
		filepath.Join(dir, "buildkit.test"), "-test.v", "-test.run", "^("+strings.Join(tests, "|")+")$")
	home := filepath.Join(dir, "home")
	cmd.Env = append(env, "HOME="+home, "TMPDIR="+home, "LOOMCYCLE_CACHE="+home, "PATH="+os.Getenv("PATH"),
		"CGO_ENABLED="+known[1], "GOTOOLCHAIN=local", "CI="+os.Getenv("CI"))
	out, err := cmd.CombinedOutput()
	for _, name := range tests {
		if !strings.Contains(string(out), "--- PASS: "+name) {
			t.Errorf("%s does not pass", name)
		}
	}
	if err != nil || t.Failed() {
		t.Errorf("%v\n%s", err, out)
	}
}

// The daemon of an ordinary user, who has rootlesskit and a range of ids.
func TestRootless(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the other tests of this package are this one for a user who is not root")
	}
	for _, program := range []string{"rootlesskit", "newuidmap"} {
		citest.Program(t, program, "apt-get install rootlesskit uidmap")
	}
	if f, err := os.ReadFile("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"); err == nil && strings.TrimSpace(string(f)) != "0" {
		citest.Skip(t, "AppArmor lets an ordinary user do nothing in a user namespace: sysctl kernel.apparmor_restrict_unprivileged_userns=0")
	}
	d, _, _ := fresh(t, nil)
	p, err := d.plan(t.Context())
	if err == nil {
		err = p.bin.ensure(t.Context(), t.Logf, t.Output())
	}
	if err != nil {
		t.Fatal(err)
	}
	dir, home := nobody(t, "nobody:200000:65536\n")
	program := filepath.Join(home, "bin", filepath.Base(p.bin.path))
	if err := errors.Join(copyFile(p.bin.path, program), os.Chown(program, 65534, 65534), buildStep(filepath.Join(dir, "step"))); err != nil {
		t.Fatal(err)
	}
	asNobody(t, dir, os.Getenv("PATH"), []string{"TestDaemonLivesAndHeals", "TestStepsAndNetwork", "TestCancelEndsTheStep", "TestMergedStatesBecomeSharedLayers"},
		stepVariable+"="+filepath.Join(dir, "step"))
}

// An ordinary user of a machine with nothing but Go learns at once, before
// anything is compiled, all that is missing.
func TestMissingIsSaidAtOnce(t *testing.T) {
	if os.Getenv(bareVariable) == "" {
		dir, _ := nobody(t, "somebody:200000:65536\n")
		asNobody(t, dir, "", []string{"TestMissingIsSaidAtOnce"}, bareVariable+"=1", "HIDDEN=/usr/sbin/runc /usr/local/sbin/runc")
		return
	}
	var log syncbuf.Buffer
	home := t.TempDir()
	_, err := Connect(t.Context(), Options{Getenv: env(nil), Log: &log, CacheDir: home, Root: "../..", Programs: []string{"npm"}})
	if err == nil {
		t.Fatal("a daemon is up")
	}
	for _, part := range []string{"apt-get install npm rootlesskit runc uidmap (as root)", "/etc/subuid", "usermod --add-subuids", "user nobody", "BUILDKIT_HOST"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error lacks %q: %v", part, err)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("the error is not one sentence: %v", err)
	}
	if _, err := os.Stat(filepath.Join(home, "bin")); !errors.Is(err, fs.ErrNotExist) || strings.Contains(log.String(), "compiling") {
		t.Errorf("something was compiled: %v\n%s", err, &log)
	}
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// buildStep compiles testdata/step.
func buildStep(dir string) error {
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "step"), "./testdata/step")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compiling testdata/step: %w\n%s", err, out)
	}
	return nil
}
