package buildkit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

// becomeNobody runs a command as the user nobody, with a range of subordinate ids
// that only this mount namespace knows, in a folder where that user finds this
// checkout and its Go, wherever they are.
const becomeNobody = `set -e
cd "$1"
for f in subuid subgid; do
	test -e /etc/$f || : > /etc/$f
	mount --bind ids /etc/$f
done
mount --bind "$2" go
mount --bind "$3" checkout
cd checkout/internal/buildkit
shift 3
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all "$@"`

// stepVariable names a folder with the compiled testdata/step.
const stepVariable = "BUILDKIT_TEST_STEP"

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
	dir, err := os.MkdirTemp("/tmp", "rootless-*") // a short path that nobody may walk
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	home := filepath.Join(dir, "home")
	for _, sub := range []string{"go", "checkout", "home/bin", "step"} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, sub), 0o755))
	}
	self, serr := os.Executable()
	if err := errors.Join(err, serr, os.Chmod(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "ids"), []byte("nobody:200000:65536\n"), 0o644),
		copyFile(self, filepath.Join(dir, "buildkit.test")),
		copyFile(p.bin.path, filepath.Join(home, "bin", filepath.Base(p.bin.path))),
		buildStep(filepath.Join(dir, "step"))); err != nil {
		t.Fatal(err)
	}
	for _, owned := range []string{home, filepath.Join(home, "bin"), filepath.Join(home, "bin", filepath.Base(p.bin.path))} {
		if err := os.Chown(owned, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	goEnv, err := exec.Command("go", "env", "GOROOT", "CGO_ENABLED").Output()
	known := strings.Fields(string(goEnv))
	if err != nil || len(known) != 2 {
		t.Fatalf("go env printed %q: %v", goEnv, err)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	tests := []string{"TestDaemonLivesAndHeals", "TestStepsAndNetwork", "TestCancelEndsTheStep"}
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", becomeNobody, "sh", dir, known[0], root,
		filepath.Join(dir, "buildkit.test"), "-test.v", "-test.run", "^("+strings.Join(tests, "|")+")$")
	cmd.Env = []string{"HOME=" + home, "TMPDIR=" + home, "LOOMCYCLE_CACHE=" + home, stepVariable + "=" + filepath.Join(dir, "step"),
		"PATH=" + filepath.Join(dir, "go", "bin") + ":" + os.Getenv("PATH"), "CGO_ENABLED=" + known[1], "GOTOOLCHAIN=local", "CI=" + os.Getenv("CI")}
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
