package build

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/moby/buildkit/client/llb"
	"github.com/tonistiigi/fsutil"

	"github.com/loomcycle/loomcycle-images/internal/mirror"
)

// A compile step cannot see the folder of a file: proxy in GOPROXY, so it is
// sent, and mounted at moduleMount/N.
const moduleMount = "/modules"

// modules gives GOPROXY as a compile step is to read it, and the folders that
// it names, by their local source.
func modules(goproxy string) (inside string, folders map[string]fsutil.FS, err error) {
	folders = map[string]fsutil.FS{}
	var absent error // a folder that is not there; the go command passes over one, too
	for goproxy != "" {
		item, separator := goproxy, ""
		if i := strings.IndexAny(goproxy, ",|"); i >= 0 {
			item, separator = goproxy[:i], goproxy[i:i+1]
		}
		goproxy = goproxy[len(item)+len(separator):]
		if strings.HasPrefix(item, "file:") {
			dir, ok := mirror.LocalPath(item)
			if !ok || !filepath.IsAbs(dir) {
				return "", nil, fmt.Errorf("GOPROXY names %s: the go command wants the whole path, file:///DIR", item)
			}
			all, err := fsutil.NewFS(dir)
			if errors.Is(err, fs.ErrNotExist) {
				absent = fmt.Errorf("GOPROXY: %w", err)
				continue
			}
			if err != nil {
				return "", nil, fmt.Errorf("GOPROXY: %w", err)
			}
			n := fmt.Sprint(len(folders))
			// Toolchains are large, and locked sources of their own.
			if folders["modules-"+n], err = fsutil.NewFilterFS(all, &fsutil.FilterOpt{ExcludePatterns: []string{"golang.org/toolchain"}}); err != nil {
				return "", nil, fmt.Errorf("GOPROXY: %w", err)
			}
			item = "file://" + moduleMount + "/" + n
		}
		inside += item + separator
	}
	if inside == "" && absent != nil {
		return "", nil, absent
	}
	return inside, folders, nil
}

// proxies are the mounts of the folders.
func proxies(folders map[string]fsutil.FS) []llb.RunOption {
	var mounts []llb.RunOption
	for i := range len(folders) {
		name := fmt.Sprintf("modules-%d", i)
		mounts = append(mounts, llb.AddMount(fmt.Sprintf("%s/%d", moduleMount, i),
			llb.Local(name, llb.WithCustomName("send the Go modules of GOPROXY")), llb.Readonly))
	}
	return mounts
}
