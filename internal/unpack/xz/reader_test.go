package xz

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	oracle "github.com/therootcompany/xz"

	"github.com/loomcycle/loomcycle-images/internal/citest"
)

const maxDict = 64 << 20

// compress runs Debian's xz-utils.
func compress(t testing.TB, data []byte, args ...string) []byte {
	t.Helper()
	program := citest.Program(t, "xz", "apt-get install xz-utils")
	cmd := exec.Command(program, append([]string{"--compress", "--stdout"}, args...)...)
	cmd.Stdin = bytes.NewReader(data)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("xz %v: %v: %s", args, err, stderr.Bytes())
	}
	return out
}

// words returns n bytes of text with literals, matches and repeated matches.
func words(n int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 0))
	var b bytes.Buffer
	for b.Len() < n {
		switch r.IntN(4) {
		case 0:
			b.WriteByte(byte(r.IntN(256)))
		case 1:
			b.WriteString([]string{"package ", "lzma ", "\x00\x00\x00\x01", "return ", "\n\n"}[r.IntN(5)])
		case 2:
			b.Write(bytes.Repeat([]byte{byte(r.IntN(3))}, r.IntN(300)))
		default:
			if b.Len() > 0 { // something that was there, with a change
				from := r.IntN(b.Len())
				part := bytes.Clone(b.Bytes()[from:min(from+r.IntN(60)+1, b.Len())])
				part[len(part)/2]++
				b.Write(part)
			}
		}
	}
	return b.Bytes()[:n]
}

func noise(n int) []byte {
	b := make([]byte, n)
	for i, r := 0, rand.New(rand.NewPCG(1, 2)); i < n; i++ {
		b[i] = byte(r.Uint32())
	}
	return b
}

func executable(t testing.TB, n int) []byte {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	return b[:min(n, len(b))]
}

func TestReader(t *testing.T) {
	text := words(300_000, 1)
	mixed := slices.Concat(text[:200_000], noise(200_000), text[:100_000], make([]byte, 3<<20), noise(70_000), text[100_000:])
	for _, c := range []struct {
		name string
		data []byte
		args string
	}{
		{"empty", nil, ""},
		{"empty without a check", nil, "--check=none"},
		{"one byte", []byte("x"), ""},
		{"preset 0", text, "-0"},
		{"preset 1e", text, "-1e"},
		{"preset 3", text, "-3"},
		{"preset 6", mixed, "-6"},
		{"preset 9", text, "-9"},
		{"preset 9e", mixed, "-9e"},
		{"an executable", executable(t, 2<<20), "-6"},
		{"no check", text, "--check=none"},
		{"CRC32", text, "--check=crc32"},
		{"CRC64", text, "--check=crc64"},
		{"SHA-256", text, "--check=sha256"},
		{"blocks", text, "--block-size=70001"},
		{"blocks with sizes", mixed, "-T2 --block-size=500000"},
		{"blocks of a byte", text[:300], "-0 --block-size=1"},
		{"blocks listed", text, "--block-list=1000,4096,1,70000,0"},
		{"incompressible", noise(3 << 20), "-0"},
		{"zeros", make([]byte, 20<<20), "-1"},
		{"a window that moves", slices.Concat(mixed, mixed, mixed), "-0 --lzma2=preset=0,dict=4KiB"},
		{"a window that moves, with sizes", slices.Concat(mixed, mixed), "-T2 --lzma2=preset=1,dict=100KiB"},
		{"no literal context", text, "--lzma2=lc=0,lp=0,pb=0"},
		{"literal position bits", mixed, "--lzma2=lc=0,lp=4,pb=4"},
		{"both literal bits", mixed, "--lzma2=lc=1,lp=3,pb=0,dict=64KiB"},
		{"most context", text, "--lzma2=lc=4,lp=0,pb=4"},
		{"short matches", mixed, "--lzma2=mode=fast,mf=hc3,nice=5"},
		{"no compression", text, "--lzma2=preset=0,mode=fast,mf=hc3,nice=2,depth=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			packed := compress(t, c.data, strings.Fields(c.args)...)
			got, err := io.ReadAll(NewReader(bytes.NewReader(packed), maxDict))
			if err != nil || !bytes.Equal(got, c.data) {
				t.Fatalf("%d bytes and %v, want %d bytes", len(got), err, len(c.data))
			}
			several := slices.Concat(packed, make([]byte, 8), packed, packed, make([]byte, 4))
			got, err = io.ReadAll(NewReader(iotest.HalfReader(bytes.NewReader(several)), maxDict))
			if err != nil || !bytes.Equal(got, bytes.Repeat(c.data, 3)) {
				t.Fatalf("as three streams with padding: %d bytes and %v, want %d bytes", len(got), err, 3*len(c.data))
			}
		})
	}
}

// TestReads: whatever the sizes asked for, the bytes are the same, and the end
// stays the end.
func TestReads(t *testing.T) {
	data := words(200_000, 3)
	z := NewReader(bytes.NewReader(compress(t, data, "--block-size=50000")), maxDict)
	var got []byte
	for i := 0; ; i++ {
		p := make([]byte, i%700)
		n, err := z.Read(p)
		got = append(got, p[:n]...)
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := z.Read(make([]byte, 1)); n != 0 || err != io.EOF || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, then %d and %v", len(got), n, err)
	}
	failing := NewReader(iotest.TimeoutReader(iotest.OneByteReader(bytes.NewReader(compress(t, data)))), maxDict)
	if _, err := io.ReadAll(failing); err != iotest.ErrTimeout {
		t.Errorf("an error of the source became %v", err)
	}
}

// TestTruncated: no part of a file passes for the file.
func TestTruncated(t *testing.T) {
	packed := compress(t, words(2000, 4), "-T2", "--block-size=900")
	for n := range packed {
		if _, err := io.ReadAll(NewReader(bytes.NewReader(packed[:n]), maxDict)); err == nil || !strings.Contains(err.Error(), "truncated") {
			t.Fatalf("of %d bytes the first %d: %v, want an error that says so", len(packed), n, err)
		}
	}
}

// TestFlipped: a file with any one bit changed is refused, unless the bit
// changes nothing of the content, as one of LZMA's properties may.
func TestFlipped(t *testing.T) {
	for _, args := range [][]string{{"--check=crc32"}, {"--check=sha256", "--block-size=100"}, {"-T2", "--block-size=200"}} {
		data := words(600, 5)
		packed := compress(t, data, args...)
		for i := range len(packed) * 8 {
			b := bytes.Clone(packed)
			b[i/8] ^= 1 << (i % 8)
			if got, err := io.ReadAll(NewReader(bytes.NewReader(b), maxDict)); err == nil && !bytes.Equal(got, data) {
				t.Fatalf("xz %v: bit %d of byte %d is flipped and nobody notices", args, i%8, i/8)
			}
		}
	}
}

// parts are those of a stream with one block, all sums of which are right.
type parts struct {
	flags   []byte // of the stream, default without a check
	header  []byte // of the block, from its flags; default LZMA2 with 1 MiB
	data    []byte // LZMA2 chunks
	padding byte   // the bytes after the block's data
	size    int    // what the chunks unpack to
	index   func(unpadded, size uint64) []byte
}

func (p parts) build() []byte {
	sum := func(b []byte) []byte { return binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b)) }
	if p.flags == nil {
		p.flags = []byte{0, 0}
	}
	if p.header == nil {
		p.header = []byte{0, lzma2, 1, 16}
	}
	b := slices.Concat([]byte(magic), p.flags, sum(p.flags))
	header := append([]byte{0}, p.header...)
	header = append(header, make([]byte, -len(header)&3)...)
	header[0] = byte(len(header) / 4)
	b = slices.Concat(b, header, sum(header), p.data, bytes.Repeat([]byte{p.padding}, -len(p.data)&3))
	unpadded := uint64(len(header) + 4 + len(p.data))
	index := binary.AppendUvarint(binary.AppendUvarint([]byte{0, 1}, unpadded), uint64(p.size))
	if p.index != nil {
		index = p.index(unpadded, uint64(p.size))
	}
	index = append(index, make([]byte, -len(index)&3)...)
	footer := append(binary.LittleEndian.AppendUint32(nil, uint32(len(index)/4)), p.flags...)
	return slices.Concat(b, index, sum(index), sum(footer), footer, []byte(footerMagic))
}

func TestRefused(t *testing.T) {
	text := words(5000, 6)
	good := compress(t, text)
	chunk := []byte{1, 0, 1, 'h', 'i'} // resets the dictionary, not compressed
	hi := append(bytes.Clone(chunk), 0)
	if got, err := io.ReadAll(NewReader(bytes.NewReader(parts{data: hi, size: 2}.build()), maxDict)); err != nil || string(got) != "hi" {
		t.Fatalf("the test's own stream: %q, %v", got, err)
	}
	for _, c := range []struct {
		name  string
		input []byte
		want  string
	}{
		{"nothing", nil, "truncated"},
		{"gzip", []byte("\x1f\x8b\x08\x00"), "does not begin as an .xz file"},
		{"half a magic", []byte(magic[:5] + "x123456"), "begin"},
		{"padding only", make([]byte, 8), "does not begin"},
		{"bytes after the end", append(bytes.Clone(good), "more"...), "neither padding nor another stream"},
		{"a byte after the end", append(bytes.Clone(good), 'x'), "neither padding nor another stream"},
		{"half a padding", append(bytes.Clone(good), 0, 0), "neither padding nor another stream"},
		{"half a second stream", append(bytes.Clone(good), good[:20]...), "truncated"},
		{"a large dictionary", compress(t, text, "--lzma2=dict=65MiB"), "needs a dictionary of 100663296 bytes, 67108864 are allowed"},
		{"the largest dictionary", parts{header: []byte{0, lzma2, 1, 40}, data: hi, size: 2}.build(), "needs a dictionary of 4294967295"},
		{"no dictionary size", parts{header: []byte{0, lzma2, 1, 41}, data: hi, size: 2}.build(), "dictionary size is not valid"},
		{"a branch filter", compress(t, text, "--x86", "--lzma2"), "filters other than LZMA2"},
		{"a delta filter", compress(t, text, "--delta", "--lzma2"), "filters other than LZMA2"},
		{"another filter", parts{header: []byte{0, 0x22, 1, 16}, data: hi, size: 2}.build(), "filters other than LZMA2"},
		{"a filter without properties", parts{header: []byte{0, lzma2, 0}, data: hi, size: 2}.build(), "filters other than LZMA2"},
		{"an unknown check", parts{flags: []byte{0, 2}, data: hi, size: 2}.build(), "checks none, CRC32, CRC64 and SHA-256"},
		{"unknown stream flags", parts{flags: []byte{0, 0x10}, data: hi, size: 2}.build(), "no other flags"},
		{"unknown block flags", parts{header: []byte{4, lzma2, 1, 16}, data: hi, size: 2}.build(), "unknown flags"},
		{"bytes in a header's padding", parts{header: []byte{0, lzma2, 1, 16, 1}, data: hi, size: 2}.build(), "padding of a block header"},
		{"bytes in a block's padding", parts{data: hi, size: 2, padding: 1}.build(), "padding of a block is not zero"},
		{"a size that is too small", parts{header: []byte{0x80, 1, lzma2, 1, 16}, data: hi, size: 2}.build(), "larger than its header says"},
		{"a size that is too large", parts{header: []byte{0x80, 3, lzma2, 1, 16}, data: hi, size: 2}.build(), "smaller than its header says"},
		{"a packed size that is too small", parts{header: []byte{0x40, 4, lzma2, 1, 16}, data: hi, size: 2}.build(), "larger than its header says"},
		{"a packed size that is too large", parts{header: []byte{0x40, 7, lzma2, 1, 16}, data: hi, size: 2}.build(), "smaller than its header says"},
		{"a packed size of nothing", parts{header: []byte{0x40, 0, lzma2, 1, 16}, data: hi, size: 2}.build(), "size in a block header"},
		{"a size in a longer form", parts{header: []byte{0x80, 0x82, 0, lzma2, 1, 16}, data: hi, size: 2}.build(), "size in a block header"},
		{"a size of 70 bits", parts{header: slices.Concat([]byte{0x80}, bytes.Repeat([]byte{0xff}, 9), []byte{1, lzma2, 1, 16}), data: hi, size: 2}.build(), "size in a block header"},
		{"a huge size", parts{header: slices.Concat([]byte{0x80}, bytes.Repeat([]byte{0xff}, 8), []byte{0x7f, lzma2, 1, 16}), data: hi, size: 2}.build(), "smaller than its header says"},
		{"an unknown chunk", parts{data: []byte{3, 0, 0, 'x', 0}, size: 1}.build(), "unknown control byte 0x3"},
		{"no dictionary reset", parts{data: []byte{2, 0, 0, 'x', 0}, size: 1}.build(), "does not reset the dictionary"},
		{"no properties", parts{data: append(bytes.Clone(chunk), 0x80, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0), size: 3}.build(), "has no properties"},
		{"invalid properties", parts{data: []byte{0xe0, 0, 0, 0, 5, 225, 0, 0, 0, 0, 0, 0, 0}, size: 1}.build(), "invalid properties"},
		{"too much context", parts{data: []byte{0xe0, 0, 0, 0, 5, 13, 0, 0, 0, 0, 0, 0, 0}, size: 1}.build(), "invalid properties"},
		{"a short LZMA chunk", parts{data: []byte{0xe0, 0, 0, 0, 3, 93, 0, 0, 0, 0, 0}, size: 1}.build(), "range decoder"},
		{"a match before the begin", parts{data: []byte{0xe0, 0, 9, 0, 5, 93, 0, 0xff, 0xff, 0xff, 0xff, 0, 0}, size: 10}.build(), "match reaches beyond"},
		{"an index without its block", parts{data: hi, size: 2, index: func(uint64, uint64) []byte { return []byte{0, 0} }}.build(), "index"},
		{"an index with another size", parts{data: hi, size: 3}.build(), "index"},
		{"a count in a longer form", parts{data: hi, size: 2, index: func(u, s uint64) []byte { return []byte{0, 0x81, 0, byte(u), byte(s)} }}.build(), "index"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := io.ReadAll(NewReader(bytes.NewReader(c.input), maxDict))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
}

// TestMemory: what a header claims is not allocated before it is needed.
func TestMemory(t *testing.T) {
	packed := compress(t, words(1000, 7), "--lzma2=dict=64MiB")
	z := NewReader(bytes.NewReader(packed), maxDict)
	if _, err := io.ReadAll(z); err != nil {
		t.Fatal(err)
	}
	if len(z.win) > 1<<20 {
		t.Errorf("a window of %d bytes for 1000", len(z.win))
	}
}

// unpack decodes at most limit bytes.
func unpack(r io.Reader, limit int64) ([]byte, error) {
	return io.ReadAll(io.LimitReader(r, limit))
}

func compare(t *testing.T, input []byte) {
	t.Helper()
	const dict, limit = 1 << 20, 8 << 20
	ours, err := unpack(NewReader(bytes.NewReader(input), dict), limit)
	r, theirErr := oracle.NewReader(bytes.NewReader(input), dict)
	var theirs []byte
	if theirErr == nil {
		theirs, theirErr = unpack(r, limit)
	}
	if (err == nil) != (theirErr == nil) && !stricter(err) {
		t.Fatalf("our error is %v, the other decoder's %v", err, theirErr)
	}
	n := min(len(ours), len(theirs)) // after an error, how much came before it differs
	if err == nil && theirErr == nil && len(ours) != len(theirs) || !bytes.Equal(ours[:n], theirs[:n]) {
		t.Fatalf("%d bytes differ from the other decoder's %d", len(ours), len(theirs))
	}
}

// stricter reports whether the other decoder takes what the specification does not allow.
func stricter(err error) bool { return err != nil && strings.Contains(err.Error(), errFirst.Error()) }

// FuzzReader: any bytes are read as another decoder reads them, or refused.
func FuzzReader(f *testing.F) {
	for _, args := range []string{"", "-0 --check=none", "--check=sha256 --block-size=300", "-T2 --block-size=500 --check=crc32"} {
		packed := compress(f, words(1500, 8), strings.Fields(args)...)
		f.Add(packed)
		f.Add(append(bytes.Clone(packed), make([]byte, 4)...))
	}
	f.Add(parts{data: []byte{1, 0, 0, 'x', 0}, size: 1}.build())
	f.Fuzz(compare)
}

// FuzzLZMA2: the same for the chunks of a block, of which all sums are right.
func FuzzLZMA2(f *testing.F) {
	for _, args := range []string{"--lzma2=dict=64KiB", "--lzma2=lc=0,lp=4,pb=4", "--lzma2=mode=fast,nice=3", "--lzma2=lc=4,pb=0"} {
		for _, data := range [][]byte{words(1500, 9), words(60, 10), noise(40)} {
			f.Add(compress(f, data, "--format=raw", args))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = append(data, 0)
		size, _ := unpack(NewReader(bytes.NewReader(parts{data: data}.build()), maxDict), 8<<20)
		compare(t, parts{data: data, size: len(size)}.build())
	})
}

// BenchmarkReader decodes the test's own program, the kind of bytes that
// packages are large of, with this package and with the oracle.
func BenchmarkReader(b *testing.B) {
	data := executable(b, 1<<30)
	packed := compress(b, data, "-6")
	for _, c := range []struct {
		name string
		open func() (io.Reader, error)
	}{
		{"this", func() (io.Reader, error) { return NewReader(bytes.NewReader(packed), maxDict), nil }},
		{"therootcompany", func() (io.Reader, error) { return oracle.NewReader(bytes.NewReader(packed), maxDict) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				r, err := c.open()
				if err != nil {
					b.Fatal(err)
				}
				if n, err := io.Copy(io.Discard, struct{ io.Reader }{r}); err != nil || n != int64(len(data)) {
					b.Fatal(n, err)
				}
			}
		})
	}
}
