package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

func init() {
	commands["release-pack"] = command{"[-dist DIR]: write the files of a release's page, with their checksums, to dist/pack", runPack}
}

// runPack writes what people download. The same build has the same bytes, so a
// run again uploads what is there already.
func runPack(_ context.Context, env environment, args []string) error {
	folder, r, err := readDist("release-pack", args)
	if err != nil {
		return err
	}
	description, err := os.ReadFile(filepath.Join(folder, "release.json"))
	if err != nil {
		return err
	}
	when := time.Unix(r.Epoch, 0)
	sboms, err := archive(os.DirFS(folder), "sbom", when)
	if err != nil {
		return fmt.Errorf("pack the SBOMs, which the target sbom writes: %w", err)
	}
	pins, err := archive(os.DirFS(folder), "pins", when)
	if err != nil {
		return fmt.Errorf("pack the pins, which the target pins writes: %w", err)
	}
	b := &build{folder: folder}
	return b.replace("pack", func(at *build) error {
		var sums bytes.Buffer
		write := func(name string, data []byte) error {
			return writeFile(filepath.Join(at.folder, "pack", name), data)
		}
		for _, f := range []struct {
			name string
			data []byte
		}{{"sboms-v" + r.Version + ".tar.gz", sboms}, {"release-v" + r.Version + ".json", description}, {"pins-v" + r.Version + ".tar.gz", pins}} {
			if err := write(f.name, f.data); err != nil {
				return err
			}
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(f.data), f.name) // as sha256sum -c reads it
			fmt.Fprintln(env.out, filepath.Join(folder, "pack", f.name))
		}
		return write("checksums-v"+r.Version+".txt", sums.Bytes())
	})
}

// archive packs the files of a folder in the order of their names.
func archive(from fs.FS, folder string, when time.Time) ([]byte, error) {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	t := tar.NewWriter(z)
	err := fs.WalkDir(from, folder, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := fs.ReadFile(from, name)
		if err == nil {
			err = t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: when, Format: tar.FormatPAX})
		}
		if err == nil {
			_, err = t.Write(data)
		}
		return err
	})
	err = errors.Join(err, t.Close(), z.Close())
	return out.Bytes(), err
}
