package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/lock"
)

// build is a dist folder with the lock and the sources it was made from.
type build struct {
	folder  string // dist
	root    string // of the repository
	release *dist.Release
	lock    *lock.Lock
	oci     layout.Path
}

// distFlag adds the flag that says where a build is.
func distFlag(flags *flag.FlagSet) *string {
	return flags.String("dist", "dist", "the folder of the build")
}

// readDist reads the build that a command's arguments name, which say nothing else.
func readDist(command string, args []string) (folder string, r *dist.Release, err error) {
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	at := distFlag(flags)
	if err := flags.Parse(args); err != nil {
		return "", nil, err
	}
	r, err = dist.Read(*at)
	return *at, r, err
}

// buildFlags adds the flags that find a build; call the result after parsing.
func buildFlags(flags *flag.FlagSet) func() (*build, error) {
	folder := distFlag(flags)
	root := flags.String("root", ".", "the repository's root")
	locked := flags.String("lock", "", "the lock (default ROOT/images/lock/lock.json)")
	return func() (*build, error) {
		if *locked == "" {
			*locked = filepath.Join(*root, "images", "lock", "lock.json")
		}
		return openBuild(*folder, *root, *locked)
	}
}

func openBuild(folder, root, locked string) (*build, error) {
	b := &build{folder: folder, root: root, oci: layout.Path(filepath.Join(folder, "oci"))}
	var err error
	if b.release, err = dist.Read(folder); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(locked)
	if err != nil {
		return nil, fmt.Errorf("read the lock that the images were built from: %w", err)
	}
	if got := digest.FromBytes(text); got != b.release.LockDigest {
		return nil, fmt.Errorf("%s is not the lock that %s was built from (%s, want %s); build again", locked, folder, got, b.release.LockDigest)
	}
	if b.lock, err = lock.Parse(text); err != nil {
		return nil, fmt.Errorf("%s: %w", locked, err)
	}
	return b, nil
}

// index gives an image's index.
func (b *build) index(d digest.Digest) (v1.ImageIndex, error) {
	hash, err := v1.NewHash(d.String())
	if err != nil {
		return nil, err
	}
	top, err := b.oci.ImageIndex()
	if err != nil {
		return nil, fmt.Errorf("read the layout %s: %w", b.oci, err)
	}
	index, err := top.ImageIndex(hash)
	if err != nil {
		return nil, fmt.Errorf("the index %s is not in %s; build again: %w", d, b.oci, err)
	}
	return index, nil
}

// image gives a variant of the image with that index.
func (b *build) image(index digest.Digest, v dist.Variant) (v1.Image, *v1.ConfigFile, error) {
	parent, err := b.index(index)
	if err != nil {
		return nil, nil, err
	}
	hash, err := v1.NewHash(v.Digest.String())
	if err != nil {
		return nil, nil, err
	}
	img, err := parent.Image(hash)
	if err != nil {
		return nil, nil, fmt.Errorf("%s is not in the index %s of %s; build again: %w", v.Digest, index, b.oci, err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, nil, fmt.Errorf("%s: read the configuration: %w", v.Digest, err)
	}
	return img, config, nil
}

// file is where a variant's document of a kind lies: KIND/IMAGE/linux-amd64SUFFIX.
func (b *build) file(kind, image, platform, suffix string) string {
	return filepath.Join(b.folder, kind, image, strings.ReplaceAll(platform, "/", "-")+suffix)
}

// replace fills a new folder and puts it in the place of dist/NAME, so that a
// run that fails half-way leaves the old one.
func (b *build) replace(name string, fill func(at *build) error) error {
	tmp, err := os.MkdirTemp(b.folder, "."+name+"-*.tmp")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	at := *b
	at.folder = tmp
	if err := fill(&at); err != nil {
		return err
	}
	final := filepath.Join(b.folder, name)
	if err := os.RemoveAll(final); err != nil {
		return err
	}
	return os.Rename(filepath.Join(tmp, name), final)
}

func writeFile(name string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, data, 0o644)
}

func writeJSON(name string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(name, append(data, '\n'))
}
