// Package xz reads the .xz format (version 1.2.1 of its specification) with the
// one filter that Debian's packages use, LZMA2. It exists because the unpacker
// spends nearly all its time there: one chunk after another is decoded by a
// decoder that has all of the chunk in memory. What it reads is hostile.
package xz

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"
	"slices"
	"strings"
)

const (
	magic       = "\xfd7zXZ\x00"
	footerMagic = "YZ"
	lzma2       = 0x21      // the filter's id
	maxSize     = 1 << 21   // uncompressed bytes of a chunk
	minWindow   = 256 << 10 // bytes
	maxSlack    = 8 << 20   // bytes that the window has beyond a dictionary; moving one costs as much as a few chunks
)

// Reader decodes concatenated .xz streams.
type Reader struct {
	r       io.Reader
	maxDict int64
	err     error
	started bool
	read    int64 // bytes taken from r

	flags  [2]byte // of the stream
	check  hash.Hash
	blocks int64  // finished ones of the stream
	index  []byte // their records, as the index must have them

	in  input
	lz  lzma
	win []byte
	out int // win[out:pos] is decoded and not handed out
	pos int

	block
}

// block is the state of the block that is being read.
type block struct {
	active       bool
	header, data int64 // the header's size, the position where the data begin
	packed, size int64 // as the header declares them, or -1
	total        int64 // uncompressed bytes so far
	dict         int
	needDict     bool
	needProps    bool
}

// NewReader returns a reader of r, which should be buffered: it is read in
// small pieces, and never beyond the last stream and its padding. A stream that
// needs a dictionary of more than maxDict bytes is refused.
func NewReader(r io.Reader, maxDict int64) *Reader {
	return &Reader{r: r, maxDict: maxDict}
}

// Read returns an error that is not io.EOF when the input is damaged,
// truncated, followed by other bytes, or needs what this package lacks.
func (z *Reader) Read(p []byte) (int, error) {
	for z.out == z.pos {
		if z.err == nil {
			z.err = z.advance()
		}
		if z.err != nil {
			return 0, z.err
		}
	}
	n := copy(p, z.win[z.out:z.pos])
	z.out += n
	return n, nil
}

// advance decodes one chunk or reads what is between chunks.
func (z *Reader) advance() error {
	if z.active {
		return z.chunk()
	}
	if z.check == nil {
		return z.streamHeader()
	}
	return z.blockHeader()
}

// fill reads the next bytes of what is named.
func (z *Reader) fill(b []byte, what string) error {
	n, err := io.ReadFull(z.r, b)
	z.read += int64(n)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return fmt.Errorf("xz: it is truncated: it ends after %d bytes, within %s", z.read, what)
	}
	return err
}

// damaged is an error at the place that was read last.
func (z *Reader) damaged(format string, a ...any) error {
	return fmt.Errorf("xz: near byte %d: %s", z.read, fmt.Sprintf(format, a...))
}

func (z *Reader) streamHeader() error {
	h := z.in[:12]
	for again := true; again; { // padding comes in fours
		n, err := io.ReadFull(z.r, h[:4])
		z.read += int64(n)
		again = z.started && n == 4 && zero(h[:4])
		switch {
		case err == io.EOF && z.started:
			return io.EOF
		case err != nil && err != io.EOF && err != io.ErrUnexpectedEOF:
			return err
		case again:
		case z.started && !strings.HasPrefix(magic, string(h[:n])):
			return z.damaged("the bytes after the last stream are neither padding nor another stream")
		case !strings.HasPrefix(magic, string(h[:n])):
			return errors.New("xz: it does not begin as an .xz file")
		case n < 4:
			return fmt.Errorf("xz: it is truncated: it ends after %d bytes, within the stream header", z.read)
		}
	}
	if err := z.fill(h[4:], "the stream header"); err != nil {
		return err
	}
	if string(h[:6]) != magic {
		return z.damaged("a stream does not begin as an .xz file")
	}
	if crc32.ChecksumIEEE(h[6:8]) != binary.LittleEndian.Uint32(h[8:]) {
		return z.damaged("the checksum of the stream header is wrong")
	}
	z.flags = [2]byte(h[6:])
	switch z.flags {
	case [2]byte{0, 0}:
		z.check = none{}
	case [2]byte{0, 1}:
		z.check = crc32.NewIEEE()
	case [2]byte{0, 4}:
		z.check = crc64.New(crc64.MakeTable(crc64.ECMA))
	case [2]byte{0, 10}:
		z.check = sha256.New()
	default:
		return z.damaged("the stream flags are %#x: this reader knows the checks none, CRC32, CRC64 and SHA-256 and no other flags", z.flags)
	}
	z.started, z.blocks, z.index = true, 0, z.index[:0]
	return nil
}

// none is the check that there may be instead of one.
type none struct{}

func (none) Write(p []byte) (int, error) { return len(p), nil }
func (none) Sum(b []byte) []byte         { return b }
func (none) Reset()                      {}
func (none) Size() int                   { return 0 }
func (none) BlockSize() int              { return 1 }

// blockHeader reads a block's header, or the index and what follows it.
func (z *Reader) blockHeader() error {
	h := z.in[:1024]
	begin := z.read
	if err := z.fill(h[:1], "a block header"); err != nil {
		return err
	}
	if h[0] == 0 {
		return z.indexAndFooter()
	}
	h = h[:(int(h[0])+1)*4]
	if err := z.fill(h[1:], "a block header"); err != nil {
		return err
	}
	body, sum := h[:len(h)-4], h[len(h)-4:]
	if crc32.ChecksumIEEE(body) != binary.LittleEndian.Uint32(sum) {
		return z.damaged("the checksum of a block header is wrong")
	}
	flags, rest := body[1], body[2:]
	z.block = block{active: true, header: z.read - begin, data: z.read, packed: -1, size: -1, needDict: true, needProps: true}
	ok := true
	if flags&0x40 != 0 {
		z.packed, rest, ok = varint(rest)
		ok = ok && z.packed > 0
	}
	if ok && flags&0x80 != 0 {
		z.size, rest, ok = varint(rest)
	}
	if !ok {
		return z.damaged("a size in a block header is not valid")
	}
	if flags&0x3c != 0 {
		return z.damaged("a block header has unknown flags")
	}
	if flags&3 != 0 || len(rest) < 3 || rest[0] != lzma2 || rest[1] != 1 {
		return z.damaged("a block uses filters other than LZMA2 alone, which this reader lacks")
	}
	bits := rest[2]
	if bits > 40 {
		return z.damaged("a block's dictionary size is not valid")
	}
	dict := int64(2|bits&1) << (bits/2 + 11)
	if bits == 40 {
		dict = 1<<32 - 1
	}
	if dict > z.maxDict {
		return z.damaged("a block needs a dictionary of %d bytes, %d are allowed", dict, z.maxDict)
	}
	if !zero(rest[3:]) {
		return z.damaged("the padding of a block header is not zero")
	}
	z.dict = int(dict)
	z.check.Reset()
	return nil
}

// varint reads a number in the format's multibyte encoding, of which only the
// shortest form is valid.
func varint(b []byte) (int64, []byte, bool) {
	v, n := binary.Uvarint(b)
	if n <= 0 || n > 9 || n > 1 && b[n-1] == 0 {
		return 0, nil, false
	}
	return int64(v), b[n:], true
}

func zero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// chunk reads one LZMA2 chunk or the end of the block.
func (z *Reader) chunk() error {
	h := z.in[:6]
	if err := z.fill(h[:1], "a block"); err != nil {
		return err
	}
	control := h[0]
	if control == 0 {
		return z.blockEnd()
	}
	switch {
	case control > 2 && control < 0x80:
		return z.damaged("an LZMA2 chunk has the unknown control byte %#x", control)
	case control == 1 || control >= 0xe0:
		z.needDict, z.needProps = false, true
		z.out, z.pos = 0, 0
	case z.needDict:
		return z.damaged("the first LZMA2 chunk of a block does not reset the dictionary")
	}
	if control >= 0x80 && control < 0xc0 && z.needProps {
		return z.damaged("the first LZMA chunk after a dictionary reset has no properties")
	}
	rest := h[1:3]
	switch {
	case control >= 0xc0:
		rest = h[1:6]
	case control >= 0x80:
		rest = h[1:5]
	}
	if err := z.fill(rest, "a chunk"); err != nil {
		return err
	}
	size := int(binary.BigEndian.Uint16(h[1:])) + 1
	packed := size
	if control >= 0x80 {
		size += int(control&0x1f) << 16
		packed = int(binary.BigEndian.Uint16(h[3:])) + 1
	}
	if control >= 0xc0 {
		z.needProps = false
		if err := z.lz.props(h[5]); err != nil {
			return z.damaged("an LZMA chunk has invalid properties")
		}
	}
	if control >= 0xa0 {
		z.lz.reset()
	}
	z.total += int64(size)
	if z.size >= 0 && z.total > z.size || z.packed >= 0 && z.read-z.data+int64(packed) > z.packed {
		return z.damaged("a block is larger than its header says")
	}
	z.room(size)
	if control < 0x80 {
		if err := z.fill(z.win[z.pos:z.pos+size], "a chunk"); err != nil {
			return err
		}
	} else {
		if err := z.fill(z.in[:packed], "a chunk"); err != nil {
			return err
		}
		if err := z.lz.decode(&z.in, packed, z.win, z.pos, z.pos+size, z.dict); err != nil {
			return z.damaged("%v", err)
		}
	}
	z.check.Write(z.win[z.pos : z.pos+size])
	z.pos += size
	return nil
}

// room makes room in the window for n more bytes, when all before are handed out.
func (z *Reader) room(n int) {
	whole := z.dict + max(maxSize+16, min(z.dict, maxSlack))
	if z.pos+n > whole {
		from := (z.pos - z.dict) &^ 15 // the low bits of a position choose probabilities
		z.pos = copy(z.win, z.win[from:z.pos])
		z.out = z.pos
	}
	if need := z.pos + n; need+windowTail > len(z.win) {
		// A header's claim costs no memory: the window grows with what was decoded.
		size := max(need, min(2*len(z.win), whole))
		if z.size >= 0 {
			size = max(need, int(min(int64(size), z.size)))
		}
		w := make([]byte, max(size, minWindow)+windowTail)
		copy(w, z.win[:z.pos])
		z.win = w
	}
}

func (z *Reader) blockEnd() error {
	packed := z.read - z.data
	if z.packed >= 0 && z.packed != packed || z.size >= 0 && z.size != z.total {
		return z.damaged("a block is smaller than its header says")
	}
	tail := z.in[:int(-packed&3)+z.check.Size()]
	if err := z.fill(tail, "the check of a block"); err != nil {
		return err
	}
	padding, sum := tail[:-packed&3], tail[-packed&3:]
	if !zero(padding) {
		return z.damaged("the padding of a block is not zero")
	}
	want := z.check.Sum(nil)
	if len(want) < sha256.Size { // the format's CRCs are little-endian, Go's are not
		slices.Reverse(want)
	}
	if !bytes.Equal(sum, want) {
		return z.damaged("the check of a block does not match its content")
	}
	z.blocks++
	z.index = binary.AppendUvarint(z.index, uint64(z.header+packed+int64(len(sum))))
	z.index = binary.AppendUvarint(z.index, uint64(z.total))
	z.active = false
	return nil
}

// indexAndFooter reads the end of a stream. The blocks leave it only one form.
func (z *Reader) indexAndFooter() error {
	want := binary.AppendUvarint([]byte{0}, uint64(z.blocks))
	want = append(want, z.index...)
	want = append(want, make([]byte, -len(want)&3)...)
	want = binary.LittleEndian.AppendUint32(want, crc32.ChecksumIEEE(want))
	size := len(want)
	back := binary.LittleEndian.AppendUint32(nil, uint32(size/4-1))
	back = append(back, z.flags[:]...)
	want = binary.LittleEndian.AppendUint32(want, crc32.ChecksumIEEE(back))
	want = append(append(want, back...), footerMagic...)
	got := make([]byte, len(want))
	if err := z.fill(got[1:], "the index"); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return z.damaged("the index or the footer does not match the blocks")
	}
	z.check = nil
	return nil
}
