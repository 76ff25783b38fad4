package debian_test

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/debian"
	"github.com/loomcycle/loomcycle-images/internal/debian/debiantest"
)

// day is when the test archives are published.
func day() time.Time { return time.Date(2025, 3, 1, 12, 0, 0, 0, time.UTC) }

func archive(t *testing.T) (*debiantest.Archive, debian.Keyring) {
	a := &debiantest.Archive{Dir: t.TempDir(), Key: debiantest.NewKey(t, day().Add(-time.Hour))}
	keys := t.TempDir()
	if err := os.WriteFile(filepath.Join(keys, "test.asc"), a.Key.Public(t), 0o644); err != nil {
		t.Fatal(err)
	}
	ring, err := debian.LoadKeyring(keys)
	if err != nil {
		t.Fatal(err)
	}
	return a, ring
}

func TestReadInRelease(t *testing.T) {
	a, ring := archive(t)
	good := debiantest.Release{Suite: "trixie", Date: day(), ValidUntil: day().Add(7 * 24 * time.Hour), Arches: []string{"amd64"},
		Packages: []debiantest.Package{{Name: "bash", Version: "1:5.2+b1", Arch: "amd64"}, {Name: "tzdata", Version: "1", Arch: "all"}}}
	text := a.Text(t, good)
	signed := a.Key.Sign(t, text)
	for _, c := range []struct {
		name  string
		text  []byte
		suite string
		now   time.Time
		want  string // part of the error; empty when it is right
		is    error
	}{
		{"right", signed, "trixie", day().Add(time.Hour), "", nil},
		{"last valid second", signed, "trixie", good.ValidUntil, "", nil},
		{"unsigned", []byte(text), "trixie", day(), "no valid signature", debian.ErrUnsigned},
		{"another key", debiantest.NewKey(t, day()).Sign(t, text), "trixie", day(), "no valid signature", debian.ErrUnsigned},
		{"changed after signing", bytes.Replace(signed, []byte("Packages.xz"), []byte("Packages.gz"), 1), "trixie", day(), "no valid signature", debian.ErrUnsigned},
		{"text before the signed block", append([]byte("SHA256:\n"), signed...), "trixie", day(), "no valid signature", debian.ErrUnsigned},
		{"text after the signed block", append(slices.Clone(signed), []byte("SHA256:\n")...), "trixie", day(), "no valid signature", debian.ErrUnsigned},
		{"expired", signed, "trixie", good.ValidUntil.Add(time.Second), "valid until 2025-03-08T12:00:00Z", debian.ErrExpired},
		{"from the future", signed, "trixie", day().Add(-48 * time.Hour), "lies after the clock's", nil},
		{"another suite", signed, "sid", day(), "it is of suite trixie", nil},
		{"no date", a.Key.Sign(t, "Suite: trixie\n"), "trixie", day(), "its Date is no date", nil},
		{"empty", a.Key.Sign(t, ""), "trixie", day(), "it is empty", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := debian.ReadInRelease(c.text, ring, c.suite, c.now)
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				if _, byHash, f, err := r.PackagesIndex("main", "amd64"); err != nil || f.Size == 0 || !strings.HasSuffix(byHash, f.SHA256.Encoded()) {
					t.Fatalf("index: %q %+v %v", byHash, f, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || c.is != nil && !errors.Is(err, c.is) {
				t.Fatalf("error %v, want one with %q", err, c.want)
			}
		})
	}
}

func TestReadPackages(t *testing.T) {
	a, _ := archive(t)
	a.Publish(t, debiantest.Release{Suite: "trixie", Date: day(), Arches: []string{"amd64"}, Packages: []debiantest.Package{
		{Name: "bash", Version: "1:5.2+b1", Arch: "amd64", Fields: "Depends: libc6\nTag: a, b,\n c\n", Content: "four"},
		{Name: "tzdata", Version: "1", Arch: "all"},
		{Name: "hello", Version: "1", Arch: "arm64"},
	}})
	f, err := os.Open(filepath.Join(a.Dir, "dists/trixie/main/binary-amd64/Packages.xz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var got []debian.Entry
	if err := debian.ReadPackages(f, func(e debian.Entry) error { got = append(got, e); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Version != "1:5.2+b1" || got[0].Size != 4 || got[0].Path != "pool/main/b/bash/bash_1:5.2+b1_amd64.deb" || got[1].Arch != "all" {
		t.Fatalf("read %+v", got)
	}
	if err := debian.ReadPackages(strings.NewReader("no xz"), func(debian.Entry) error { return nil }); err == nil {
		t.Fatal("a file that is no xz is read without an error")
	}
}

func TestLoadKeyringEmpty(t *testing.T) {
	if _, err := debian.LoadKeyring(t.TempDir()); err == nil || !strings.Contains(err.Error(), "holds no archive key") {
		t.Fatalf("error %v", err)
	}
}

// Whatever is done to a signed file, it is refused or says what was signed.
func FuzzReadInRelease(f *testing.F) {
	key := debiantest.NewKey(f, day())
	a := &debiantest.Archive{Dir: f.TempDir(), Key: key}
	signed := key.Sign(f, a.Text(f, debiantest.Release{Suite: "trixie", Date: day(), Arches: []string{"amd64"}}))
	keys := f.TempDir()
	if err := os.WriteFile(filepath.Join(keys, "test.asc"), key.Public(f), 0o644); err != nil {
		f.Fatal(err)
	}
	ring, err := debian.LoadKeyring(keys)
	if err != nil {
		f.Fatal(err)
	}
	want, err := debian.ReadInRelease(signed, ring, "trixie", day())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(signed)
	f.Add(bytes.ReplaceAll(signed, []byte("\n"), []byte(" \r\n")))
	f.Add([]byte("-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nDate: x\n-----BEGIN PGP SIGNATURE-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := debian.ReadInRelease(text, ring, "trixie", day())
		if err == nil && (!maps.Equal(got.Files, want.Files) || !got.Date.Equal(want.Date) || got.ByHash != want.ByHash) {
			t.Fatalf("accepted as %+v, signed was %+v", got, want)
		}
	})
}
