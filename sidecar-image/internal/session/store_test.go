package session

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"
)

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	open := func(instance string) *Store {
		t.Helper()
		s, err := OpenStore(dir, instance)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open("")
	at := time.Unix(1_700_000_000, 5).UTC()
	a := Record{ID: "sbx-a", State: Open, Container: "c", Key: "k", Principal: "p", Network: "none", Created: at, Deadline: at.Add(time.Hour), LastUsed: at}
	b := Record{ID: "sbx-b", State: Open, Created: at, Deadline: at, LastUsed: at}
	for _, r := range []Record{b, a} {
		if err := s.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	a.LastUsed = at.Add(time.Minute)
	if err := s.Touch(a.ID, a.LastUsed); err != nil {
		t.Fatal(err)
	}
	// What a kill and a power cut leave: a write without its end, an empty record.
	half := filepath.Join(dir, "sessions", ".123")
	for _, name := range []string{half, s.file(b.ID)} {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(s.file(b.ID), at, at); err != nil {
		t.Fatal(err)
	}
	again := open("")
	if again.Instance != s.Instance || len(s.Instance) < 16 {
		t.Errorf("the instance %q became %q", s.Instance, again.Instance)
	}
	if other := open("mine"); other.Instance != "mine" {
		t.Errorf("the instance that was asked for is %q", other.Instance)
	}
	got, err := again.All()
	for i := range got {
		got[i].LastUsed = got[i].LastUsed.UTC()
	}
	if want := []Record{a, {ID: b.ID, State: Opening, LastUsed: at}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	if _, err := os.Lstat(half); err == nil {
		t.Error("half a write is still there")
	}
	for _, id := range []string{a.ID, b.ID, b.ID} {
		if err := again.Delete(id); err != nil {
			t.Error(err)
		}
	}
	if left, err := again.All(); err != nil || len(left) > 0 {
		t.Errorf("%+v, %v", left, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "instance"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenStore(dir, ""); err == nil {
		t.Error("an empty id was taken")
	}
}

// A reader meets whole records only, and none that is gone.
func TestStoreIsReadWhileWritten(t *testing.T) {
	s, err := OpenStore(t.TempDir(), "i")
	if err != nil {
		t.Fatal(err)
	}
	r := Record{ID: "sbx-a", State: Open, Principal: "p"}
	done := make(chan error)
	go func() {
		var err error
		for i := 0; i < 500 && err == nil; i++ {
			if err = s.Put(r); err == nil && i%2 == 0 {
				err = s.Delete(r.ID)
			}
		}
		done <- err
	}()
	for {
		records, err := s.All()
		if err != nil || slices.ContainsFunc(records, func(r Record) bool { return r.Principal != "p" }) {
			t.Fatalf("%+v, %v", records, err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}
