package dist

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Summary prints one line a variant.
func Summary(w io.Writer, r *Release) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "IMAGE\tPLATFORM\tDIGEST\tSIZE\n")
	for _, img := range r.Images {
		fmt.Fprintf(t, "%s\tindex\t%s\t\n", img.Name, img.IndexDigest)
		for _, v := range img.Platforms {
			fmt.Fprintf(t, "\t%s\t%s\t%s\n", v.Platform, v.Digest, Bytes(v.Size))
		}
	}
	return t.Flush()
}

// Inspect prints an image of a dist folder for a person.
func Inspect(w io.Writer, folder, image string) error {
	r, err := Read(folder)
	if err != nil {
		return err
	}
	img, err := r.Image(image)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s %s\nindex %s\ncommit %s\n", img.Name, r.Version, img.IndexDigest, r.Source.Commit)
	for _, v := range img.Platforms {
		config, err := readConfig(folder, v)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "\n%s %s, %s compressed\n", v.Platform, v.Digest, Bytes(v.Size))
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintf(t, "  created\t%s\n  user\t%s\n  workdir\t%s\n  entrypoint\t%s\n  cmd\t%s\n", config.Created.UTC().Format("2006-01-02T15:04:05Z"),
			config.Config.User, config.Config.WorkingDir, strings.Join(config.Config.Entrypoint, " "), strings.Join(config.Config.Cmd, " "))
		for port := range config.Config.ExposedPorts {
			fmt.Fprintf(t, "  port\t%s\n", port)
		}
		for _, kv := range config.Config.Env {
			fmt.Fprintf(t, "  env\t%s\n", kv)
		}
		for _, l := range v.Layers {
			fmt.Fprintf(t, "  layer %s\t%s\t%s\n", l.Group, Bytes(l.Size), l.Digest)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func readConfig(folder string, v Variant) (*v1.ConfigFile, error) {
	f, err := os.Open(filepath.Join(folder, "oci", "blobs", "sha256", v.Config.Encoded()))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return v1.ParseConfigFile(f)
}

// Bytes writes a size for a person.
func Bytes(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.2f GB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	case n >= 1e3:
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%d B", n)
}
