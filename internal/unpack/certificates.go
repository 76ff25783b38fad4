package unpack

import (
	"bytes"
	"crypto/sha1"
	"encoding/asn1"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"unicode/utf16"

	"crypto/x509"
)

const (
	certsFrom = "usr/share/ca-certificates"
	certsTo   = "etc/ssl/certs"
)

// certificates does what update-ca-certificates does for a fresh install:
// every authority that the package ships is trusted. It writes the bundle, a
// link to each certificate and OpenSSL's hash links.
func (f *finish) certificates() error {
	var names []string
	err := fs.WalkDir(f.root.FS(), certsFrom, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(p, ".crt") {
			names = append(names, strings.TrimPrefix(p, certsFrom+"/"))
		}
		return err
	})
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return errors.New("the image has no certificate authority")
	}
	slices.Sort(names)
	conf := append([]string{
		"# The certificate authorities that update-ca-certificates(8) trusts, below /" + certsFrom + ".",
		"# A line that begins with an exclamation mark is an authority that is not trusted.",
	}, names...)
	if err := f.put("etc/ca-certificates.conf", meta{mode: 0o644}, lines(conf)); err != nil {
		return err
	}
	var bundle bytes.Buffer
	hashes := map[string]int{}
	rename := strings.NewReplacer(" ", "_", ",", "_", "(", "=", ")", "=")
	for _, name := range names {
		b, err := f.root.ReadFile(certsFrom + "/" + name)
		if err != nil {
			return err
		}
		bundle.Write(b)
		if !bytes.HasSuffix(b, []byte("\n")) {
			bundle.WriteByte('\n')
		}
		hash, err := subjectHash(b)
		if err != nil {
			return fmt.Errorf("certificate %s: %w", name, err)
		}
		link := rename.Replace(strings.TrimSuffix(name[strings.LastIndex(name, "/")+1:], ".crt")) + ".pem"
		err = errors.Join(
			f.link(certsTo+"/"+link, "/"+certsFrom+"/"+name),
			f.link(fmt.Sprintf("%s/%s.%d", certsTo, hash, hashes[hash]), link))
		if err != nil {
			return err
		}
		hashes[hash]++
	}
	return f.put(certsTo+"/ca-certificates.crt", meta{mode: 0o644}, bundle.Bytes())
}

// subjectHash returns the name by which OpenSSL (since 1.0) looks a
// certificate up: the first four bytes, little endian, of the SHA-1 of the
// subject in canonical form.
func subjectHash(pemBytes []byte) (string, error) {
	block, _ := pem.Decode(pemBytes)
	if block == nil || block.Type != "CERTIFICATE" {
		return "", errors.New("it is not a PEM certificate")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return "", err
	}
	canon, err := canonicalName(cert.RawSubject)
	if err != nil {
		return "", err
	}
	sum := sha1.Sum(canon)
	return fmt.Sprintf("%08x", binary.LittleEndian.Uint32(sum[:])), nil
}

type rawAttribute struct {
	Type  asn1.ObjectIdentifier
	Value asn1.RawValue
}

// canonicalName encodes a distinguished name as OpenSSL compares it: without
// the outer header, strings as UTF-8, in lower case, with single blanks.
func canonicalName(der []byte) ([]byte, error) {
	var rdns []asn1.RawValue
	rest, err := asn1.Unmarshal(der, &rdns)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d bytes follow it", len(rest))
	}
	if err != nil {
		return nil, fmt.Errorf("the subject is not a name: %w", err)
	}
	var out []byte
	for _, rdn := range rdns {
		var attrs []rawAttribute
		if _, err := asn1.UnmarshalWithParams(rdn.FullBytes, &attrs, "set"); err != nil {
			return nil, err
		}
		var encoded [][]byte
		for _, a := range attrs {
			if text, ok := directoryString(a.Value); ok {
				a.Value = asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: []byte(canonicalText(text))}
			}
			b, err := asn1.Marshal(a)
			if err != nil {
				return nil, err
			}
			encoded = append(encoded, b)
		}
		slices.SortFunc(encoded, bytes.Compare) // DER: a set is sorted
		b, err := asn1.Marshal(asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: bytes.Join(encoded, nil)})
		if err != nil {
			return nil, err
		}
		out = append(out, b...)
	}
	return out, nil
}

// directoryString decodes the string types that OpenSSL canonicalises.
func directoryString(v asn1.RawValue) (string, bool) {
	const visible, universal = 26, 28
	switch v.Tag {
	case asn1.TagUTF8String, asn1.TagPrintableString, asn1.TagIA5String, visible:
		return string(v.Bytes), true
	case asn1.TagT61String: // taken for Latin-1
		r := make([]rune, len(v.Bytes))
		for i, b := range v.Bytes {
			r[i] = rune(b)
		}
		return string(r), true
	case asn1.TagBMPString:
		var u []uint16
		for b := v.Bytes; len(b) > 1; b = b[2:] {
			u = append(u, binary.BigEndian.Uint16(b))
		}
		return string(utf16.Decode(u)), true
	case universal:
		var r []rune
		for b := v.Bytes; len(b) > 3; b = b[4:] {
			r = append(r, rune(binary.BigEndian.Uint32(b)))
		}
		return string(r), true
	}
	return "", false
}

// canonicalText lowers ASCII letters and leaves one blank between words.
func canonicalText(s string) string {
	lower := func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}
	blank := func(r rune) bool { return strings.ContainsRune(" \t\n\v\f\r", r) }
	return strings.Map(lower, strings.Join(strings.FieldsFunc(s, blank), " "))
}
