package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"
)

// The names of what authority makes.
const (
	bundleFile = "ca-certificates.crt"
	serverFile = "server.pem"
)

// authority is `probe authority BUNDLE DIR`: it makes a private authority and
// a server that it vouches for, and writes a bundle with it to DIR.
func authority(_ context.Context, args []string) error {
	bundle, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Smoke Private CA"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	ca, err := x509.CreateCertificate(rand.Reader, template, template, caKey.Public(), caKey)
	if err != nil {
		return err
	}
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"},
		NotBefore: template.NotBefore, NotAfter: template.NotAfter,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	cert, err := x509.CreateCertificate(rand.Reader, server, template, key.Public(), caKey)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	block := func(kind string, b []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}) }
	if err := os.WriteFile(filepath.Join(args[1], bundleFile), append(bundle, block("CERTIFICATE", ca)...), 0o644); err != nil {
		return err
	}
	pair := append(block("CERTIFICATE", cert), block("PRIVATE KEY", der)...)
	return os.WriteFile(filepath.Join(args[1], serverFile), pair, 0o644)
}

// handshake is `probe tls SERVER.PEM`: it serves with that certificate and
// fetches from itself, trusting what the system trusts.
func handshake(ctx context.Context, args []string) error {
	pair, err := tls.LoadX509KeyPair(args[0], args[0])
	if err != nil {
		return err
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "trusted\n") }))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // the client tells it
	s.StartTLS()
	defer s.Close()
	_, port, err := net.SplitHostPort(s.Listener.Addr().String())
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://localhost:"+port, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(os.Stdout, res.Body)
	return err
}
