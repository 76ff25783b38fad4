package wire

import (
	"bytes"
	"encoding/binary"
	"io"
	"runtime"
	"strings"
	"testing"
)

func TestFrames(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	large := bytes.Repeat([]byte("x"), MaxPayload)
	frames := []Frame{
		{THello, 0, []byte(`{"version":1}`)}, {TCancel, 7, nil}, {TData, 1 << 31, bytes.Repeat([]byte("d"), MaxData)},
		{TOutput, 3, []byte("\x01out")}, {TExec, 9, large}, {TGrant, 4, []byte("1234")},
	}
	for _, f := range frames {
		if err := w.Write(f.Type, f.Stream, f.Payload); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Write(TExec, 1, large, []byte("y")); err == nil {
		t.Error("a frame above the bound was written")
	}
	r := NewReader(&buf)
	for _, want := range frames {
		got, err := r.Read()
		if err != nil || got.Type != want.Type || got.Stream != want.Stream || !bytes.Equal(got.Payload, want.Payload) {
			t.Fatalf("%d %d %d bytes, %v; want %d %d %d bytes", got.Type, got.Stream, len(got.Payload), err, want.Type, want.Stream, len(want.Payload))
		}
	}
	if _, err := r.Read(); err != io.EOF {
		t.Errorf("the end is %v", err)
	}
}

func frame(n uint32, t Type, payload string) []byte {
	b := binary.BigEndian.AppendUint32(nil, n)
	return append(append(b, byte(t), 0, 0, 0, 1), payload...)
}

func TestBounds(t *testing.T) {
	for name, b := range map[string][]byte{
		"too large":            frame(MaxPayload+1, TExec, ""),
		"largest number":       frame(1<<32-1, TExec, ""),
		"large data":           frame(MaxData+1, TData, ""),
		"large live":           frame(8+MaxLive+1, TLive, ""),
		"cancel with payload":  frame(1, TCancel, "x"),
		"grant too long":       frame(5, TGrant, "12345"),
		"unknown type":         frame(0, 99, ""),
		"type zero":            frame(0, 0, ""),
		"a former type":        frame(0, 7, ""),
		"cut in the header":    frame(0, TEnd, "")[:5],
		"cut in the payload":   frame(4, TGrant, "1234")[:12],
		"cut in a large frame": frame(MaxPayload, TExec, strings.Repeat("x", 100)),
	} {
		if f, err := NewReader(bytes.NewReader(b)).Read(); err == nil || err == io.EOF {
			t.Errorf("%s: %v, %v", name, f, err)
		}
	}
}

// A header alone must not reserve what it announces.
func TestNoMemoryForAHeader(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 100 {
		_, _ = NewReader(bytes.NewReader(frame(MaxPayload, TExec, "x"))).Read()
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 100*2*(MaxData+1) {
		t.Errorf("100 headers allocated %d bytes", grown)
	}
}

func TestCredit(t *testing.T) {
	c := NewCredit()
	if n := c.Take(Window + 1); n != Window {
		t.Fatalf("took %d", n)
	}
	got := make(chan int)
	go func() { got <- c.Take(10) }()
	c.Add(4)
	if n := <-got; n != 4 {
		t.Errorf("took %d of 4", n)
	}
	go func() { got <- c.Take(10) }()
	c.Close()
	if n := <-got; n != 0 {
		t.Errorf("took %d of a closed window", n)
	}
}

func FuzzReader(f *testing.F) {
	f.Add(frame(4, TGrant, "abcd"))
	f.Add(frame(0, TEnd, ""))
	f.Add(frame(1<<20, TExec, "{"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b))
		used := 0
		for {
			f, err := r.Read()
			if err != nil {
				return
			}
			if used += headerLen + len(f.Payload); used > len(b) || len(f.Payload) > MaxPayload {
				t.Fatalf("a frame of %d bytes out of %d", len(f.Payload), len(b))
			}
		}
	})
}
