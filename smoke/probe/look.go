package main

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// zone is `probe zone NAME`: the time zone database is there.
func zone(_ context.Context, args []string) error {
	l, err := time.LoadLocation(args[0])
	if err != nil {
		return err
	}
	_, err = fmt.Println(time.Date(2024, 7, 1, 12, 0, 0, 0, time.UTC).In(l).Format(time.RFC3339))
	return err
}

// resolve is `probe resolve NAME`: names are looked up as a static Go program does.
func resolve(ctx context.Context, args []string) error {
	addrs, err := new(net.Resolver).LookupHost(ctx, args[0])
	if err != nil {
		return err
	}
	slices.Sort(addrs)
	_, err = fmt.Println(strings.Join(addrs, " "))
	return err
}

// roots is `probe roots NAME...`: the bundle has the public authorities.
func roots(_ context.Context, names []string) error {
	file := os.Getenv("SSL_CERT_FILE")
	if file == "" {
		file = "/etc/ssl/certs/ca-certificates.crt"
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	n, found := 0, map[string]bool{}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return err
		}
		n++
		found[cert.Subject.CommonName] = true
	}
	for _, name := range names {
		if !found[name] {
			return fmt.Errorf("%s has %d authorities and not %q", file, n, name)
		}
	}
	_, err = fmt.Println(n, "authorities")
	return err
}

// hash is `probe hash FILE`: its sha256.
func hash(_ context.Context, args []string) error {
	f, err := os.Open(args[0])
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	_, err = fmt.Println(hex.EncodeToString(h.Sum(nil)))
	return err
}

// tree is `probe tree DIR...`: path, mode and owner of all below.
func tree(_ context.Context, dirs []string) error {
	for _, dir := range dirs {
		err := filepath.WalkDir(os.ExpandEnv(dir), func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			st := info.Sys().(*syscall.Stat_t)
			_, err = fmt.Printf("%s %s %d:%d\n", path, info.Mode(), st.Uid, st.Gid)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// uid is `probe uid`: who runs this, and what is left to it.
func uid(context.Context, []string) error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	fmt.Printf("uid %d gid %d\n", os.Getuid(), os.Getgid())
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "CapEff:") || strings.HasPrefix(line, "NoNewPrivs:") {
			fmt.Print(strings.Join(strings.Fields(line), " "), "\n")
		}
	}
	return nil
}

// zombies is `probe zombies`: it leaves an orphan to PID 1 and demands that
// it is reaped when it has ended.
func zombies(ctx context.Context, args []string) error {
	if len(args) > 0 { // the process between: start a child, tell its pid and leave it
		p, err := os.StartProcess("/proc/self/exe", []string{"probe", "uid"}, &os.ProcAttr{})
		if err != nil {
			return err
		}
		_, err = fmt.Println(p.Pid)
		return err
	}
	out, err := exec.CommandContext(ctx, "/proc/self/exe", "zombies", "leave").Output()
	if err != nil {
		return err
	}
	stat := filepath.Join("/proc", strings.TrimSpace(string(out)), "stat")
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var last []byte
	for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(stat)
		if err != nil {
			return nil // ended and reaped
		}
		last = text
	}
	return fmt.Errorf("PID 1 does not reap its orphans: %s", last)
}

// fetch is `probe http METHOD URL [HEADER: VALUE]... [@BODY]`.
func fetch(ctx context.Context, args []string) error {
	if len(args) < 2 {
		return errors.New("usage: probe http METHOD URL [HEADER: VALUE]... [@BODY]")
	}
	var content string
	header := http.Header{}
	for _, a := range args[2:] {
		if b, ok := strings.CutPrefix(a, "@"); ok {
			content = b
			continue
		}
		k, v, _ := strings.Cut(a, ": ")
		header.Set(k, v)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		req, err := http.NewRequestWithContext(ctx, args[0], args[1], strings.NewReader(content))
		if err != nil {
			return err
		}
		req.Header = header
		res, err := http.DefaultClient.Do(req)
		if errors.Is(err, syscall.ECONNREFUSED) && time.Now().Before(deadline) {
			time.Sleep(20 * time.Millisecond) // the service is starting
			continue
		}
		if err != nil {
			return err
		}
		defer res.Body.Close()
		fmt.Println(res.Status)
		_, err = io.Copy(os.Stdout, res.Body)
		return err
	}
}
