package xz

import (
	"encoding/binary"
	"errors"
)

// The layout of the probabilities, all in one array. A state is followed by
// four bits of the position; a tree's root has the index 1.
const (
	isMatch    = 0                  // [12][16]
	isRep0Long = isMatch + 12<<4    // [12][16]
	isRep      = isRep0Long + 12<<4 // [12]
	isRep0     = isRep + 12         // [12]
	isRep1     = isRep0 + 12        // [12]
	isRep2     = isRep1 + 12        // [12]
	distSlot   = isRep2 + 12        // [4][64], by length
	distLow    = distSlot + 4<<6    // [128], the slots 4 to 13
	distAlign  = distLow + 128      // [16]
	matchLen   = distAlign + 16     // [lenSize]
	repLen     = matchLen + lenSize // [lenSize]
	literals   = repLen + lenSize   // [16][litSize]
	probsSize  = literals + 16*litSize
	litSize    = 0x300

	lenChoice  = 0
	lenChoice2 = 1
	lenLow     = 2              // [16][8]
	lenMid     = lenLow + 16<<3 // [16][8]
	lenHigh    = lenMid + 16<<3 // [256]
	lenSize    = lenHigh + 1<<8
)

const (
	maxPacked  = 1 << 16       // compressed bytes of a chunk
	inSize     = 2 * maxPacked // a power of two that leaves room for the bytes that one symbol may read
	windowTail = 8             // bytes that the copy of a match may write beyond its end
)

// input is a chunk's compressed bytes, followed by any others.
type input [inSize]byte

var (
	errRange  = errors.New("the range decoder's data is damaged")
	errFirst  = errors.New("the first byte for the range decoder is not zero")
	errMatch  = errors.New("a match reaches beyond the dictionary or the chunk")
	errParams = errors.New("an LZMA chunk has invalid properties")
)

// lzma is what LZMA keeps from chunk to chunk.
type lzma struct {
	state, rep0, rep1, rep2, rep3 uint32
	lc, lpMask, pbMask            uint32
	probs                         [probsSize]uint16
}

// props sets the parameters that the properties byte holds.
func (l *lzma) props(b byte) error {
	lc, lp, pb := b%9, b/9%5, b/45
	if pb > 4 || lc+lp > 4 { // the second is LZMA2's own limit
		return errParams
	}
	l.lc, l.lpMask, l.pbMask = uint32(lc), 1<<lp-1, 1<<pb-1
	return nil
}

func (l *lzma) reset() {
	l.state, l.rep0, l.rep1, l.rep2, l.rep3 = 0, 0, 0, 0, 0
	for i := range l.probs {
		l.probs[i] = 1 << 10
	}
}

// The range decoder's state is kept in local variables: the range rng, the
// code, and the index i of the next byte of in.

// norm takes in the next byte when the range has become too small for a bit.
func norm(rng, code uint32, in *input, i int) (uint32, uint32, int) {
	if rng < 1<<24 {
		rng <<= 8
		code = code<<8 | uint32(in[i&(inSize-1)])
		i++
	}
	return rng, code, i
}

// bit decodes a bit that decides what is next, with branches.
func bit(rng, code uint32, in *input, i int, p *uint16) (uint32, uint32, int, bool) {
	if rng < 1<<24 {
		rng <<= 8
		code = code<<8 | uint32(in[i&(inSize-1)])
		i++
	}
	bound := (rng >> 11) * uint32(*p)
	if code < bound {
		*p += (1<<11 - *p) >> 5
		return bound, code, i, false
	}
	*p -= *p >> 5
	return rng - bound, code - bound, i, true
}

// one returns 1 for true. The compiler makes conditional moves only of what no
// load's address is computed from, and looks no further than a comparison.
func one(b bool) uint32 {
	var x uint32
	if b {
		x = 1
	}
	return x
}

// tree decodes a tree of bits from the highest to the symbol's leading one at
// limit. These bits are close to random, so that branches would be mispredicted:
// both outcomes are computed, and the probability of either next bit loaded.
// It is a function of its own, as its like below, to have all registers.
//
//go:noinline
func tree(t *[1 << 9]uint16, in *input, i int, rng, code, limit uint32) (uint32, uint32, uint32, int) {
	sym, p := uint32(1), uint32(t[1])
	for sym < limit {
		rng, code, i = norm(rng, code, in, i)
		bound := (rng >> 11) * p
		next0, next1 := uint32(t[sym<<1&0x1ff]), uint32(t[(sym<<1|1)&0x1ff])
		p0, p1 := p+(1<<11-p)>>5, p-p>>5
		b := one(code >= bound)
		r, c := rng-bound, code-bound
		if code < bound {
			r, c, p1, next1 = bound, code, p0, next0
		}
		t[uint8(sym)] = uint16(p1)
		rng, code, p, sym = r, c, next1, sym<<1+b
	}
	return sym, rng, code, i
}

// reverse decodes a tree of bits from the lowest.
//
//go:noinline
func reverse(t *[1 << 9]uint16, in *input, i int, rng, code, bits uint32) (uint32, uint32, uint32, int) {
	sym, value := uint32(1), uint32(0)
	for k := range bits {
		rng, code, i = norm(rng, code, in, i)
		p := uint32(t[uint8(sym)])
		bound := (rng >> 11) * p
		p0, p1 := p+(1<<11-p)>>5, p-p>>5
		b := one(code >= bound)
		r, c := rng-bound, code-bound
		if code < bound {
			r, c, p1 = bound, code, p0
		}
		t[uint8(sym)] = uint16(p1)
		rng, code, sym, value = r, c, sym<<1+b, value+b<<k
	}
	return value, rng, code, i
}

// matched decodes a literal that follows a match: as long as its bits are those
// of the byte after the match, that byte chooses the probabilities.
//
//go:noinline
func matched(t *[litSize]uint16, in *input, i int, rng, code, match uint32) (uint32, uint32, uint32, int) {
	sym, offset := uint32(1), uint32(0x100)
	for sym < 0x100 {
		rng, code, i = norm(rng, code, in, i)
		match <<= 1
		like := match & offset
		p := uint32(t[offset+like+sym])
		bound := (rng >> 11) * p
		p0, p1 := p+(1<<11-p)>>5, p-p>>5
		b := one(code >= bound)
		r, c := rng-bound, code-bound
		if code < bound {
			r, c, p1 = bound, code, p0
		}
		t[offset+like+sym] = uint16(p1)
		rng, code, sym = r, c, sym<<1+b
		offset &= like ^ (b - 1)
	}
	return sym, rng, code, i
}

// decode decodes a chunk of n bytes to win[pos:limit]. What is before pos is the
// history, and no match is farther than dict bytes.
func (l *lzma) decode(in *input, n int, win []byte, pos, limit, dict int) error {
	if n < 5 {
		return errRange
	}
	if in[0] != 0 {
		return errFirst
	}
	rng, code, i := ^uint32(0), binary.BigEndian.Uint32(in[1:]), 5
	p := &l.probs
	state, rep0, rep1, rep2, rep3 := l.state, l.rep0, l.rep1, l.rep2, l.rep3
	prev := uint32(0)
	if pos > 0 {
		prev = uint32(win[pos-1])
	}
	for pos < limit {
		if i > n { // a symbol is at most 20 bytes, which in has beyond n
			return errRange
		}
		var yes bool
		at := uint32(pos) & l.pbMask
		if rng, code, i, yes = bit(rng, code, in, i, &p[isMatch+state<<4+at]); !yes {
			t := p[literals+((uint32(pos)&l.lpMask)<<l.lc+prev>>(8-l.lc))*litSize:]
			if state < 7 {
				prev, rng, code, i = tree((*[1 << 9]uint16)(t), in, i, rng, code, 1<<8)
			} else {
				prev, rng, code, i = matched((*[litSize]uint16)(t), in, i, rng, code, uint32(win[pos-int(rep0)-1]))
			}
			switch {
			case state < 4:
				state = 0
			case state < 10:
				state -= 3
			default:
				state -= 6
			}
			prev &= 0xff
			win[pos] = byte(prev)
			pos++
			continue
		}

		lens := uint32(repLen)
		if rng, code, i, yes = bit(rng, code, in, i, &p[isRep+state]); !yes {
			lens = matchLen
			rep1, rep2, rep3 = rep0, rep1, rep2
			state = after(state, 7, 10)
		} else {
			if rng, code, i, yes = bit(rng, code, in, i, &p[isRep0+state]); !yes {
				if rng, code, i, yes = bit(rng, code, in, i, &p[isRep0Long+state<<4+at]); !yes { // one byte
					if int(rep0) >= min(pos, dict) {
						return errMatch
					}
					state = after(state, 9, 11)
					win[pos] = win[pos-int(rep0)-1]
					prev = uint32(win[pos])
					pos++
					continue
				}
			} else {
				if rng, code, i, yes = bit(rng, code, in, i, &p[isRep1+state]); !yes {
					rep0, rep1 = rep1, rep0
				} else {
					if rng, code, i, yes = bit(rng, code, in, i, &p[isRep2+state]); !yes {
						rep0, rep1, rep2 = rep2, rep0, rep1
					} else {
						rep0, rep1, rep2, rep3 = rep3, rep0, rep1, rep2
					}
				}
			}
			state = after(state, 8, 11)
		}

		base, size, length := lens+lenLow+at<<3, uint32(8), uint32(2)
		if rng, code, i, yes = bit(rng, code, in, i, &p[lens+lenChoice]); yes {
			base, length = lens+lenMid+at<<3, 2+8
			if rng, code, i, yes = bit(rng, code, in, i, &p[lens+lenChoice2]); yes {
				base, size, length = lens+lenHigh, 256, 2+8+8
			}
		}
		var sym uint32
		sym, rng, code, i = tree((*[1 << 9]uint16)(p[base:]), in, i, rng, code, size)
		length += sym - size

		if lens == matchLen {
			var slot uint32
			slot, rng, code, i = tree((*[1 << 9]uint16)(p[distSlot+min(length-2, 3)<<6:]), in, i, rng, code, 64)
			slot -= 64
			rep0 = slot
			if slot >= 4 {
				bits := slot>>1 - 1
				rep0 = (2 | slot&1) << bits
				base = distLow + rep0 - slot
				if slot >= 14 {
					direct := uint32(0)
					for range bits - 4 { // with the fixed probability of one half
						rng, code, i = norm(rng, code, in, i)
						rng >>= 1
						code -= rng
						mask := uint32(int32(code) >> 31)
						code += rng & mask
						direct = direct<<1 + 1 + mask
					}
					rep0 += direct << 4
					base, bits = distAlign, 4
				}
				sym, rng, code, i = reverse((*[1 << 9]uint16)(p[base:]), in, i, rng, code, bits)
				rep0 += sym
			}
		}

		if int(rep0) >= min(pos, dict) || int(length) > limit-pos {
			return errMatch
		}
		from, end := pos-int(rep0)-1, pos+int(length)
		if rep0 >= 7 {
			for ; pos < end; pos, from = pos+8, from+8 {
				*(*[8]byte)(win[pos : pos+8]) = *(*[8]byte)(win[from : from+8])
			}
			pos = end
		} else {
			for ; pos < end; pos, from = pos+1, from+1 {
				win[pos] = win[from]
			}
		}
		prev = uint32(win[end-1])
	}
	if _, code, i = norm(rng, code, in, i); i != n || code != 0 {
		return errRange
	}
	l.state, l.rep0, l.rep1, l.rep2, l.rep3 = state, rep0, rep1, rep2, rep3
	return nil
}

// after returns the state after a match: one for when a literal was before it.
func after(state, literal, match uint32) uint32 {
	if state < 7 {
		return literal
	}
	return match
}
