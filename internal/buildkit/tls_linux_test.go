package buildkit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A node on another machine is reached over TLS with a certificate on both sides;
// one that another authority has signed, or that has another name, is refused.
func TestRemoteOverTLS(t *testing.T) {
	d, opts, _ := fresh(t, nil)
	up(t, d)
	ours, strangers := t.TempDir(), t.TempDir()
	address := "tcp://" + tlsProxy(t, authority(t, ours), strings.TrimPrefix(d.Address(), "unix://"))
	authority(t, strangers)
	unnamed := t.TempDir() // trusts the node, which does not know it
	if err := errors.Join(copyFile(filepath.Join(ours, "ca.pem"), filepath.Join(unnamed, "ca.pem")),
		copyFile(filepath.Join(strangers, "cert.pem"), filepath.Join(unnamed, "cert.pem")), copyFile(filepath.Join(strangers, "key.pem"), filepath.Join(unnamed, "key.pem"))); err != nil {
		t.Fatal(err)
	}

	use := func(folder, name string) {
		opts.Getenv = env(map[string]string{"BUILDKIT_HOST": address, "BUILDKIT_TLS_DIR": folder, "BUILDKIT_TLS_SERVER_NAME": name})
	}
	use(ours, "node.example.test")
	run, locals := steps(t)
	far, _ := variant(t, connected(t, opts), t.TempDir(), "linux/amd64", 1, layer(run, "one", "1"), locals)
	opts.Getenv = env(map[string]string{"BUILDKIT_HOST": d.Address()})
	if near, _ := variant(t, connected(t, opts), t.TempDir(), "linux/amd64", 1, layer(run, "one", "1"), locals); far.Digest != near.Digest {
		t.Errorf("over TLS %s, without %s", far.Digest, near.Digest)
	}
	for _, c := range []struct{ what, folder, name, says string }{
		{"another authority", strangers, "node.example.test", "unknown authority"},
		{"another name", ours, "other.example.test", "not other.example.test"},
		{"a client that is not known", unnamed, "node.example.test", address},
		{"no files", filepath.Join(ours, "nothing"), "node.example.test", "ca.pem"},
	} {
		use(c.folder, c.name)
		b, err := Connect(t.Context(), opts)
		if err == nil {
			b.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "BUILDKIT_HOST="+address) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// authority writes the files of BUILDKIT_TLS_DIR, and returns what a node needs that
// admits only clients of the same authority.
func authority(t *testing.T, folder string) *tls.Config {
	t.Helper()
	sign := func(template, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if parent == nil {
			parent, parentKey = template, key
		}
		template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(1), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return cert, key
	}
	ca, caKey := sign(&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	client, clientKey := sign(&x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, caKey)
	node, nodeKey := sign(&x509.Certificate{DNSNames: []string{"node.example.test"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, ca, caKey)
	der, err := x509.MarshalPKCS8PrivateKey(clientKey)
	write := func(name, kind string, der []byte) {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	}
	write("ca.pem", "CERTIFICATE", ca.Raw)
	write("cert.pem", "CERTIFICATE", client.Raw)
	write("key.pem", "PRIVATE KEY", der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{node.Raw}, PrivateKey: nodeKey}},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, NextProtos: []string{"h2"}}
}

// tlsProxy listens on loopback and passes what it gets on to a socket.
func tlsProxy(t *testing.T, conf *tls.Config, socket string) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			outer, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer outer.Close()
				if outer.(*tls.Conn).HandshakeContext(t.Context()) != nil {
					return
				}
				inner, err := net.Dial("unix", socket)
				if err != nil {
					return
				}
				defer inner.Close()
				go func() { _, _ = io.Copy(inner, outer); inner.Close() }()
				_, _ = io.Copy(outer, inner)
			}()
		}
	}()
	return l.Addr().String()
}
