package buildkit

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/distribution/reference"
	"github.com/moby/buildkit/client"
	"github.com/moby/buildkit/cmd/buildctl/build"
)

type cacheEntries struct{ from, to []client.CacheOptionsEntry }

// WithoutCaches hides the remote caches from a build that is to start from nothing.
func WithoutCaches(getenv func(string) string) func(string) string {
	return func(name string) string {
		if name == "CACHE_FROM" || name == "CACHE_TO" {
			return ""
		}
		return getenv(name)
	}
}

// remoteCaches reads CACHE_FROM and CACHE_TO: entries in the syntax of buildctl
// and buildx (type=registry,ref=...), separated by white space. Every job has a cache of
// its own below the given one, since an export replaces what was there.
func remoteCaches(getenv func(string) string, job string) (c cacheEntries, err error) {
	if c.from, err = build.ParseImportCache(strings.Fields(getenv("CACHE_FROM"))); err != nil {
		return c, fmt.Errorf("CACHE_FROM: %w", err)
	}
	if c.to, err = build.ParseExportCache(strings.Fields(getenv("CACHE_TO"))); err != nil {
		return c, fmt.Errorf("CACHE_TO: %w", err)
	}
	for _, e := range c.to {
		compress(e)
	}
	for _, e := range append(c.from[:len(c.from):len(c.from)], c.to...) {
		if err := perJob(e, job); err != nil {
			return c, err
		}
		credentials(e, getenv)
	}
	return c, nil
}

// credentials gives an S3 cache those of this environment, as buildx does: a
// daemon that is elsewhere, or was started before, has others or none.
func credentials(e client.CacheOptionsEntry, getenv func(string) string) {
	if e.Type != "s3" || e.Attrs["access_key_id"] != "" || e.Attrs["secret_access_key"] != "" || getenv("AWS_ACCESS_KEY_ID") == "" {
		return
	}
	for attr, name := range map[string]string{"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY", "session_token": "AWS_SESSION_TOKEN"} {
		e.Attrs[attr] = getenv(name)
	}
}

// compress has a cache store compressed layers where it can be told: a variant's
// export leaves plain tars in the daemon, which it would be given otherwise.
func compress(e client.CacheOptionsEntry) {
	switch e.Type {
	case "registry", "local", "s3": // neither gha nor azblob has the option
		if e.Attrs["compression"] == "" {
			e.Attrs["compression"], e.Attrs["force-compression"] = "zstd", "true"
		}
	}
}

// perJob narrows a cache entry to one job, in place.
func perJob(e client.CacheOptionsEntry, job string) error {
	switch e.Type {
	case "registry":
		ref, err := reference.ParseNormalizedNamed(e.Attrs["ref"])
		if err != nil {
			return fmt.Errorf("the cache reference %q is no image reference: %w", e.Attrs["ref"], err)
		}
		tag := job
		if t, ok := ref.(reference.Tagged); ok {
			tag = t.Tag() + "-" + job
		}
		tagged, err := reference.WithTag(reference.TrimNamed(ref), tag)
		if err != nil {
			return fmt.Errorf("the cache reference %q can't take the tag %q: %w", e.Attrs["ref"], tag, err)
		}
		e.Attrs["ref"] = tagged.String()
	case "local":
		for _, k := range []string{"src", "dest"} {
			if e.Attrs[k] != "" {
				e.Attrs[k] = filepath.Join(e.Attrs[k], job)
			}
		}
	case "gha":
		scope := e.Attrs["scope"]
		if scope == "" {
			scope = "buildkit" // the cache's own default
		}
		e.Attrs["scope"] = scope + "-" + job
	case "s3", "azblob":
		name := e.Attrs["name"]
		if name == "" {
			name = "buildkit"
		}
		e.Attrs["name"] = name + "-" + job
	}
	return nil
}
