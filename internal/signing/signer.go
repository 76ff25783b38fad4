// Package signing signs image digests and attests facts about them in the
// sigstore bundle format, stores the bundles as OCI 1.1 referrers in a layout or
// a registry, and checks them as a consumer should. Nothing it writes is part of
// an image, so signing twice never changes an image's digest.
package signing

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sigstore/cosign/v2/pkg/cosign"
	"github.com/sigstore/cosign/v2/pkg/providers"
	_ "github.com/sigstore/cosign/v2/pkg/providers/github" // the OIDC token of a GitHub job
	sigs "github.com/sigstore/cosign/v2/pkg/signature"
	protocommon "github.com/sigstore/protobuf-specs/gen/pb-go/common/v1"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/sign"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	_ "github.com/sigstore/sigstore/pkg/signature/kms/aws" // awskms://, gcpkms://, azurekms://, hashivault://
	_ "github.com/sigstore/sigstore/pkg/signature/kms/azure"
	_ "github.com/sigstore/sigstore/pkg/signature/kms/gcp"
	_ "github.com/sigstore/sigstore/pkg/signature/kms/hashivault"
	signatureoptions "github.com/sigstore/sigstore/pkg/signature/options"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// Config says with what to sign. FromEnv reads it from the environment.
type Config struct {
	// Key is a cosign private key file or a KMS URI. Empty means keyless when
	// an OIDC token is to be had, else a throw-away key in CacheDir.
	Key      string
	Password []byte // of a key file
	// Keyless asks Fulcio for a short-lived certificate.
	Keyless bool
	IDToken string // OIDC token; empty means from the CI system
	// SigningConfig and TrustedRoot are files of a private sigstore; empty
	// means those of the public one, fetched with TUF.
	SigningConfig, TrustedRoot string
	// Log also records what a key signs in the transparency log. Keyless always does.
	Log      bool
	CacheDir string
	Notice   func(format string, args ...any)
}

// FromEnv reads COSIGN_KEY, COSIGN_PASSWORD, SIGSTORE_ID_TOKEN,
// SIGSTORE_SIGNING_CONFIG, SIGSTORE_TRUSTED_ROOT, SIGNING_LOG and, for
// a GitHub job that may ask for a token, ACTIONS_ID_TOKEN_REQUEST_URL.
func FromEnv(getenv func(string) string, cacheDir string) Config {
	return Config{
		Key: getenv("COSIGN_KEY"), Password: []byte(getenv("COSIGN_PASSWORD")),
		Keyless:       getenv("COSIGN_KEY") == "" && (getenv("SIGSTORE_ID_TOKEN") != "" || getenv("ACTIONS_ID_TOKEN_REQUEST_URL") != ""),
		IDToken:       getenv("SIGSTORE_ID_TOKEN"),
		SigningConfig: getenv("SIGSTORE_SIGNING_CONFIG"), TrustedRoot: getenv("SIGSTORE_TRUSTED_ROOT"),
		Log: getenv("SIGNING_LOG") == "1", CacheDir: cacheDir,
	}
}

func (c Config) notice(format string, args ...any) {
	if c.Notice != nil {
		c.Notice(format, args...)
	}
}

// throwaway is the private key that dist makes on a machine without one; it
// proves nothing to anyone but that machine.
func (c Config) throwaway() string { return filepath.Join(c.CacheDir, "signing", "throw-away.key") }

// keyFile is the key to sign with, made when it is the throw-away one.
func (c Config) keyFile() (string, []byte, error) {
	if c.Key != "" {
		return c.Key, c.Password, nil
	}
	file := c.throwaway()
	if _, err := os.Stat(file); err == nil {
		c.notice("signing with the throw-away key %s; set COSIGN_KEY to sign for others", file)
		return file, nil, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", nil, fmt.Errorf("look for the throw-away key: %w", err)
	}
	pair, err := cosign.GenerateKeyPair(func(bool) ([]byte, error) { return nil, nil })
	if err != nil {
		return "", nil, fmt.Errorf("make a throw-away key: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return "", nil, fmt.Errorf("make a throw-away key: %w", err)
	}
	// The link fails when another process was faster, and then that one's key is used.
	tmp := fmt.Sprintf("%s.%d", file, os.Getpid())
	defer os.Remove(tmp)
	if err := os.WriteFile(tmp, pair.PrivateBytes, 0o600); err != nil {
		return "", nil, fmt.Errorf("make a throw-away key: %w", err)
	}
	switch err := os.Link(tmp, file); {
	case errors.Is(err, fs.ErrExist):
		return file, nil, nil
	case err != nil:
		return "", nil, fmt.Errorf("make a throw-away key: %w", err)
	}
	c.notice("made a throw-away signing key %s: it proves only that this machine signed; set COSIGN_KEY to sign for others", file)
	return file, nil, nil
}

// publish writes the throw-away key's public half where it is not: the run that
// made the key may not have come to it, or the key is another one now.
func (c Config) publish(k *keypair) error {
	public := strings.TrimSuffix(c.throwaway(), ".key") + ".pub"
	text, err := k.GetPublicKeyPem()
	if err != nil {
		return err
	}
	if have, err := os.ReadFile(public); err == nil && string(have) == text {
		return nil
	}
	return atomicfile.Write(public, []byte(text), 0o644)
}

// Signer signs in-toto statements.
type Signer struct {
	config  Config
	keypair sign.Keypair // nil when keyless: each signature has a key of its own
	sv      signature.Verifier
	file    string // of the key, or its URI
	// password opens the file.
	password []byte
	sigs     *root.SigningConfig
	trusted  root.TrustedMaterial
}

// Open finds the key or the keyless infrastructure. It fails when a key can't
// be read, and says which variable named it.
func Open(ctx context.Context, c Config) (*Signer, error) {
	s := &Signer{config: c}
	if !c.Keyless {
		var err error
		if s.file, s.password, err = c.keyFile(); err != nil {
			return nil, err
		}
		sv, err := sigs.SignerVerifierFromKeyRef(ctx, s.file, func(bool) ([]byte, error) { return s.password, nil }, nil)
		if err != nil {
			return nil, fmt.Errorf("open the signing key %s (COSIGN_KEY, COSIGN_PASSWORD): %w", s.file, err)
		}
		k, err := newKeypair(sv)
		if err == nil && c.Key == "" {
			err = c.publish(k)
		}
		if err != nil {
			return nil, fmt.Errorf("signing key %s: %w", s.file, err)
		}
		s.keypair, s.sv = k, sv
	}
	if !c.Keyless && !c.Log {
		return s, nil
	}
	var err error
	if c.SigningConfig != "" {
		s.sigs, err = root.NewSigningConfigFromPath(c.SigningConfig)
	} else {
		s.sigs, err = cosign.SigningConfig()
	}
	if err != nil {
		return nil, fmt.Errorf("read where to get certificates and log signatures (SIGSTORE_SIGNING_CONFIG): %w", err)
	}
	s.trusted, err = trustedRoot(c.TrustedRoot)
	return s, err
}

func trustedRoot(file string) (root.TrustedMaterial, error) {
	if file == "" {
		r, err := cosign.TrustedRoot()
		if err != nil {
			return nil, fmt.Errorf("fetch sigstore's trusted root; offline, name a file with SIGSTORE_TRUSTED_ROOT: %w", err)
		}
		return r, nil
	}
	r, err := root.NewTrustedRootFromPath(file)
	if err != nil {
		return nil, fmt.Errorf("SIGSTORE_TRUSTED_ROOT: %w", err)
	}
	return r, nil
}

// PublicKeyPEM is the key that verifies, or empty when keyless.
func (s *Signer) PublicKeyPEM() (string, error) {
	if s.keypair == nil {
		return "", nil
	}
	return s.keypair.GetPublicKeyPem()
}

// Sign wraps a statement in a DSSE envelope and returns a sigstore bundle v0.3 as JSON.
func (s *Signer) Sign(ctx context.Context, statement []byte) ([]byte, error) {
	o := sign.BundleOptions{Context: ctx}
	keypair := s.keypair
	if keypair == nil {
		token := s.config.IDToken
		var err error
		if token == "" {
			if token, err = providers.Provide(ctx, "sigstore"); err != nil {
				return nil, fmt.Errorf("ask the CI system for an OIDC token (the job needs the permission id-token: write): %w", err)
			}
		}
		if keypair, err = sign.NewEphemeralKeypair(nil); err != nil {
			return nil, err
		}
		fulcio, err := root.SelectService(s.sigs.FulcioCertificateAuthorityURLs(), sign.FulcioAPIVersions, time.Now())
		if err != nil {
			return nil, fmt.Errorf("the signing configuration names no certificate authority: %w", err)
		}
		o.CertificateProvider = sign.NewFulcio(&sign.FulcioOptions{BaseURL: fulcio.URL, Timeout: 30 * time.Second, Retries: 3})
		o.CertificateProviderOptions = &sign.CertificateProviderOptions{IDToken: token}
		o.TrustedRoot = s.trusted // what is signed is verified at once
	}
	if s.sigs != nil {
		if err := s.witnesses(&o); err != nil {
			return nil, err
		}
	}
	b, err := sign.Bundle(&sign.DSSEData{Data: statement, PayloadType: "application/vnd.in-toto+json"}, keypair, o)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	return protojson.Marshal(b)
}

// witnesses adds the timestamp authorities and transparency logs of the signing configuration.
func (s *Signer) witnesses(o *sign.BundleOptions) error {
	if all := s.sigs.TimestampAuthorityURLs(); len(all) > 0 {
		tsas, err := root.SelectServices(all, s.sigs.TimestampAuthorityURLsConfig(), sign.TimestampAuthorityAPIVersions, time.Now())
		if err != nil {
			return fmt.Errorf("choose a timestamp authority: %w", err)
		}
		for _, t := range tsas {
			o.TimestampAuthorities = append(o.TimestampAuthorities, sign.NewTimestampAuthority(&sign.TimestampAuthorityOptions{URL: t.URL, Timeout: 30 * time.Second, Retries: 3}))
		}
	}
	if all := s.sigs.RekorLogURLs(); len(all) > 0 {
		logs, err := root.SelectServices(all, s.sigs.RekorLogURLsConfig(), sign.RekorAPIVersions, time.Now())
		if err != nil {
			return fmt.Errorf("choose a transparency log: %w", err)
		}
		for _, l := range logs {
			o.TransparencyLogs = append(o.TransparencyLogs, sign.NewRekor(&sign.RekorOptions{BaseURL: l.URL, Timeout: 90 * time.Second, Retries: 3, Version: l.MajorAPIVersion}))
		}
	}
	return nil
}

// keypair lends a cosign key, also one in a KMS, to sigstore-go.
type keypair struct {
	sv      signature.SignerVerifier
	public  crypto.PublicKey
	hint    []byte
	kind    string
	details signature.AlgorithmDetails
}

func newKeypair(sv signature.SignerVerifier) (*keypair, error) {
	k := &keypair{sv: sv}
	var err error
	if k.public, err = sv.PublicKey(); err != nil {
		return nil, fmt.Errorf("read the public key: %w", err)
	}
	switch k.public.(type) {
	case *ecdsa.PublicKey:
		k.kind = "ECDSA"
	case *rsa.PublicKey:
		k.kind = "RSA"
	case ed25519.PublicKey:
		k.kind = "ED25519"
	default:
		return nil, fmt.Errorf("a %T can't sign bundles; use ECDSA, RSA or Ed25519", k.public)
	}
	der, err := x509.MarshalPKIXPublicKey(k.public)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(der)
	k.hint = []byte(base64.StdEncoding.EncodeToString(sum[:])) // as cosign names keys
	k.details, err = signature.GetDefaultAlgorithmDetails(k.public, *cosign.GetDefaultLoadOptions(nil)...)
	return k, err
}

func (k *keypair) GetHashAlgorithm() protocommon.HashAlgorithm { return k.details.GetProtoHashType() }
func (k *keypair) GetSigningAlgorithm() protocommon.PublicKeyDetails {
	return k.details.GetSignatureAlgorithm()
}
func (k *keypair) GetHint() []byte                { return k.hint }
func (k *keypair) GetKeyAlgorithm() string        { return k.kind }
func (k *keypair) GetPublicKey() crypto.PublicKey { return k.public }
func (k *keypair) GetPublicKeyPem() (string, error) {
	b, err := cryptoutils.MarshalPublicKeyToPEM(k.public)
	return string(b), err
}

func (k *keypair) SignData(ctx context.Context, data []byte) (sig, digest []byte, err error) {
	h := k.details.GetHashType().New()
	h.Write(data)
	digest = h.Sum(nil)
	sig, err = k.sv.SignMessage(bytes.NewReader(data), signatureoptions.WithContext(ctx), signatureoptions.WithDigest(digest))
	return sig, digest, err
}
