package unpack

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

const arHeaderSize = 60

// arMember is one member of an ar archive that is held in memory.
type arMember struct {
	name string
	data []byte
}

// readAr splits an ar archive in the common format that deb(5) asks for: short
// names only, no symbol table.
func readAr(b []byte) ([]arMember, error) {
	b, ok := bytes.CutPrefix(b, []byte("!<arch>\n"))
	if !ok {
		return nil, errors.New("it is not an ar archive")
	}
	var members []arMember
	for len(b) > 0 {
		if len(b) < arHeaderSize || b[58] != '`' || b[59] != '\n' {
			return nil, fmt.Errorf("the ar header of member %d is damaged", len(members)+1)
		}
		name := strings.TrimSuffix(strings.TrimRight(string(b[:16]), " "), "/")
		size, err := strconv.ParseUint(strings.TrimRight(string(b[48:58]), " "), 10, 34)
		if err != nil {
			return nil, fmt.Errorf("ar member %q has no valid size: %w", name, err)
		}
		b = b[arHeaderSize:]
		if size > uint64(len(b)) {
			return nil, fmt.Errorf("ar member %q should have %d bytes, the file ends after %d", name, size, len(b))
		}
		if members = append(members, arMember{name, b[:size]}); len(members) > 16 {
			return nil, errors.New("it has more than 16 ar members")
		}
		b = b[size:]
		if size%2 == 1 && len(b) > 0 {
			b = b[1:]
		}
	}
	return members, nil
}
