package unpack

import (
	"bytes"
	"cmp"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// The parts of glibc's cache file, sysdeps/generic/dl-cache.h.
const (
	cacheMagic     = "glibc-ld.so.cache1.1"
	cacheHeader    = 48
	cacheEntry     = 24
	cacheLittle    = 2
	extensionMagic = 0xeaa42174
	flagLibc6      = 3
)

// machines maps Debian's architectures to the machine of their libraries and
// its flag in the cache.
var machines = map[string]struct {
	machine elf.Machine
	flag    uint32
}{
	"amd64": {elf.EM_X86_64, 0x0300 | flagLibc6},
	"arm64": {elf.EM_AARCH64, 0x0a00 | flagLibc6},
}

type library struct{ soname, path string }

// ldconfig writes /etc/ld.so.cache, byte for byte what glibc's ldconfig makes
// of the image. The dynamic linker would find Debian's libraries without it,
// but ctypes.util.find_library and `ldconfig -p` read it. Libraries below
// glibc-hwcaps, of which Debian ships none, are not listed.
func (f *finish) ldconfig() error {
	target, ok := machines[f.plan.Arch]
	if !ok {
		return fmt.Errorf("ld.so.cache: no machine is known for architecture %q", f.plan.Arch)
	}
	dirs, err := f.libraryDirs("etc/ld.so.conf", 0)
	if err != nil {
		return fmt.Errorf("ld.so.cache: %w", err)
	}
	dirs = append(dirs, "/lib", "/usr/lib") // ldconfig's own
	var libs []library
	seen := map[string]bool{}
	for _, d := range dirs {
		at := merged(strings.TrimPrefix(d, "/"), true)
		if seen[at] {
			continue
		}
		seen[at] = true
		sonames, err := f.sonames(at, target.machine)
		if err != nil {
			return fmt.Errorf("ld.so.cache: %w", err)
		}
		for _, s := range sonames {
			libs = append(libs, library{s, d + "/" + s})
		}
	}
	slices.SortStableFunc(libs, func(a, b library) int { return compareLibraries(b.soname, a.soname) })
	generator, err := f.generator()
	if err != nil {
		return err
	}
	return f.put("etc/ld.so.cache", meta{mode: 0o644}, encodeCache(libs, target.flag, generator))
}

// libraryDirs reads ld.so.conf and what it includes.
func (f *finish) libraryDirs(conf string, depth int) ([]string, error) {
	if depth > 4 {
		return nil, fmt.Errorf("/%s is included too deeply", conf)
	}
	b, err := f.root.ReadFile(conf)
	if err != nil {
		return nil, err
	}
	var dirs []string
	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || words[0] == "hwcap":
		case words[0] == "include":
			for _, pattern := range words[1:] {
				files, err := fs.Glob(f.root.FS(), strings.TrimPrefix(pattern, "/"))
				if err != nil {
					return nil, err
				}
				for _, file := range files { // sorted
					more, err := f.libraryDirs(file, depth+1)
					if err != nil {
						return nil, err
					}
					dirs = append(dirs, more...)
				}
			}
		default:
			dirs = append(dirs, path.Clean(words[0]))
		}
	}
	return dirs, nil
}

// sonames returns the names by which the libraries of a folder can be loaded.
func (f *finish) sonames(at string, machine elf.Machine) ([]string, error) {
	entries, err := fs.ReadDir(f.root.FS(), at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, e := range entries {
		name := e.Name()
		isLink := e.Type()&fs.ModeSymlink != 0
		if !strings.HasPrefix(name, "lib") && !strings.HasPrefix(name, "ld-") || !strings.Contains(name, ".so") || !isLink && !e.Type().IsRegular() {
			continue
		}
		real, ok := f.follow(at+"/"+name, 0)
		if !ok {
			continue
		}
		soname, ok, err := f.soname(real, machine)
		if err != nil {
			return nil, fmt.Errorf("/%s: %w", real, err)
		}
		if !ok {
			continue
		}
		soname = cmp.Or(soname, name)
		// A link counts under its own name when it is that of the library or
		// the one for ld(1), like libz.so for libz.so.1.
		if isLink && (name == soname || strings.HasSuffix(name, ".so") && strings.HasPrefix(soname, name)) {
			soname = name
		}
		names[soname] = true
		if !f.exists(at + "/" + soname) {
			return nil, fmt.Errorf("/%s/%s has the soname %s, but no file or link of that name is beside it", at, name, soname)
		}
	}
	return slices.Sorted(maps.Keys(names)), nil
}

// soname reads a library's DT_SONAME; ok is false when the file is none for
// the machine.
func (f *finish) soname(p string, machine elf.Machine) (soname string, ok bool, err error) {
	file, err := f.root.Open(p)
	if err != nil {
		return "", false, err
	}
	defer file.Close()
	magic := make([]byte, 4)
	if _, err := io.ReadFull(file, magic); err != nil || string(magic) != elf.ELFMAG {
		return "", false, nil // a linker script
	}
	e, err := elf.NewFile(file)
	if err != nil {
		return "", false, err
	}
	if e.Type != elf.ET_DYN || e.Machine != machine {
		return "", false, nil
	}
	names, err := e.DynString(elf.DT_SONAME)
	if err != nil || len(names) == 0 {
		return "", true, nil
	}
	return names[0], true, nil
}

// generator is the text by which the image's ldconfig signs its caches.
func (f *finish) generator() (string, error) {
	b, err := f.root.ReadFile("usr/sbin/ldconfig")
	if err != nil {
		return "", err
	}
	_, rest, ok := bytes.Cut(b, []byte("\x00ldconfig ("))
	text, _, end := bytes.Cut(rest, []byte{0})
	if !ok || !end || len(text) > 200 {
		return "", errors.New("ld.so.cache: the image's ldconfig does not hold its version text")
	}
	return "ldconfig (" + string(text), nil
}

// compareLibraries orders names as the dynamic linker does: numbers by value,
// and behind everything else.
func compareLibraries(a, b string) int {
	digit := func(s string) bool { return s != "" && s[0] >= '0' && s[0] <= '9' }
	for a != "" {
		switch {
		case digit(a) && digit(b):
			var x, y int
			for ; digit(a); a = a[1:] {
				x = x*10 + int(a[0]-'0')
			}
			for ; digit(b); b = b[1:] {
				y = y*10 + int(b[0]-'0')
			}
			if x != y {
				return x - y
			}
		case digit(a):
			return 1
		case digit(b):
			return -1
		case b == "" || a[0] != b[0]:
			if b == "" {
				return 1
			}
			return int(a[0]) - int(b[0])
		default:
			a, b = a[1:], b[1:]
		}
	}
	if b == "" {
		return 0
	}
	return -1
}

// encodeCache lays the cache out: header, entries, strings, and an extension
// that names the generator.
func encodeCache(libs []library, flag uint32, generator string) []byte {
	offsets, table := stringTable(libs)
	le := binary.LittleEndian
	start := uint32(cacheHeader + cacheEntry*len(libs))
	b := []byte(cacheMagic)
	b = le.AppendUint32(b, uint32(len(libs)))
	b = le.AppendUint32(b, uint32(len(table)))
	b = append(b, cacheLittle, 0, 0, 0)
	extension := (start + uint32(len(table)) + 3) &^ 3
	b = le.AppendUint32(b, extension)
	b = append(b, make([]byte, 12)...)
	for _, l := range libs {
		b = le.AppendUint32(b, flag)
		b = le.AppendUint32(b, start+offsets[l.soname])
		b = le.AppendUint32(b, start+offsets[l.path])
		b = append(b, make([]byte, 12)...) // OS version and hardware capabilities
	}
	b = append(b, table...)
	b = append(b, make([]byte, int(extension)-len(b))...)
	for _, v := range []uint32{extensionMagic, 1, 0, 0, extension + 24, uint32(len(generator))} {
		b = le.AppendUint32(b, v)
	}
	return append(b, generator...)
}

// stringTable stores each string once, and one that is the end of another
// inside it.
func stringTable(libs []library) (map[string]uint32, []byte) {
	set := map[string]bool{}
	for _, l := range libs {
		set[l.soname], set[l.path] = true, true
	}
	all := slices.Collect(maps.Keys(set))
	slices.SortFunc(all, func(a, b string) int {
		for i := 1; i <= min(len(a), len(b)); i++ {
			if x, y := a[len(a)-i], b[len(b)-i]; x != y {
				return int(y) - int(x)
			}
		}
		return len(b) - len(a)
	})
	offsets := map[string]uint32{}
	var table []byte
	last := ""
	for _, s := range all {
		if strings.HasSuffix(last, s) && last != "" {
			offsets[s] = offsets[last] + uint32(len(last)-len(s))
		} else {
			offsets[s] = uint32(len(table))
			table = append(append(table, s...), 0)
		}
		last = s
	}
	return offsets, table
}
