package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"

	"github.com/loomcycle/loomcycle-images/internal/cache"
	"github.com/loomcycle/loomcycle-images/internal/dist"
	"github.com/loomcycle/loomcycle-images/internal/host"
	"github.com/loomcycle/loomcycle-images/internal/pins"
	"github.com/loomcycle/loomcycle-images/internal/registry"
	"github.com/loomcycle/loomcycle-images/internal/release"
	"github.com/loomcycle/loomcycle-images/internal/signing"
	"github.com/loomcycle/loomcycle-images/policies"
)

func init() {
	commands["sign"] = command{"[-dist DIR]: sign every image, SBOM and provenance into the build's layout", runSign}
	commands["verify"] = command{"REF|DIR: check signatures, attestations and the release manifest of an image in a registry, or of a build", runVerify}
	commands["release"] = command{"[-dist DIR] [-config FILE] [-wait TIME]: push, check and promote the build", publisher("release", release.Publish)}
	commands["promote"] = command{"[-dist DIR] [-config FILE] [-wait TIME]: move the tags of a build that was pushed", publisher("promote", release.Promote)}
	commands["release-abort"] = command{"[-config FILE] VERSION: take back the channels that a killed release moved", runReleaseAbort}
	commands["release-list"] = command{"[-config FILE]: what was released to each registry", runReleaseList}
	commands["release-show"] = command{"[-config FILE] VERSION|CHANNEL: a release's images and SBOMs", runReleaseShow}
	commands["release-mirror"] = command{"[-config FILE] VERSION DEST: copy a release with its signatures to another registry, HOST[:PORT][/PREFIX]", runReleaseMirror}
	commands["release-rollback"] = command{"[-config FILE] CHANNEL VERSION: point a channel to an older version", runReleaseRollback}
	commands["pins"] = command{"[-config FILE] [-out DIR] [-update DIR] VERSION|CHANNEL: write a release's images pinned by digest, or update a folder's pins in place", runPins}
}

// notice prints a line about what is being done.
func (e environment) notice(format string, args ...any) { fmt.Fprintf(e.log, format+"\n", args...) }

func runSign(ctx context.Context, env environment, args []string) error {
	folder, r, err := readDist("sign", args)
	if err != nil {
		return err
	}
	s, _, err := signer(ctx, env)
	if err != nil {
		return err
	}
	artifact, err := signing.SignFamily(ctx, folder, r, s)
	if err != nil {
		return err
	}
	fmt.Fprintf(env.out, "signed %d images; release artifact %s\n", len(r.Images), artifact)
	return writeSignatures(ctx, env, folder, r)
}

// writeSignatures lists in dist/signatures.json what verifies, for the policy
// to judge. It needs to know who is trusted, which a keyless signer may not say.
func writeSignatures(ctx context.Context, env environment, folder string, r *dist.Release) error {
	t, err := trust(ctx, env)
	if err != nil {
		env.notice("the policy will not judge signatures: %v", err)
		return nil
	}
	var all []policies.Signature
	for _, i := range r.Images {
		h, err := v1.NewHash(i.IndexDigest.String())
		if err != nil {
			return err
		}
		_, checked, err := signing.VerifyImage(ctx, signing.Layout(filepath.Join(folder, "oci")), h, t)
		if err != nil {
			return err
		}
		for _, c := range checked {
			kind := c.Type
			if kind == signing.Signature {
				kind = "signature"
			}
			all = append(all, policies.Signature{Digest: digest.Digest(c.Digest.String()), Kind: kind, By: t.Whom(), Verified: true})
		}
	}
	return writeJSON(filepath.Join(folder, "signatures.json"), all)
}

func signer(ctx context.Context, env environment) (*signing.Signer, string, error) {
	cache, err := cache.Dir(env.getenv)
	if err != nil {
		return nil, "", err
	}
	c := signing.FromEnv(env.getenv, cache)
	c.Notice = env.notice
	s, err := signing.Open(ctx, c)
	return s, cache, err
}

func trust(ctx context.Context, env environment) (*signing.Trust, error) {
	cache, err := cache.Dir(env.getenv)
	if err != nil {
		return nil, err
	}
	c, err := signing.TrustFromEnv(env.getenv, cache)
	if err != nil {
		return nil, err
	}
	return signing.NewTrust(ctx, c)
}

// runVerify checks a build's folder, or an image in a registry by tag or digest.
func runVerify(ctx context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("verify", flag.ContinueOnError)
	config := flags.String("config", "release.yaml", "the release configuration, which names the release repository")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("verify takes one REGISTRY/REPOSITORY[:TAG][@DIGEST] or the folder of a build")
	}
	t, err := trust(ctx, env)
	if err != nil {
		return err
	}
	fmt.Fprintf(env.log, "trusting %s\n", t.Whom())
	ref := flags.Arg(0)
	if info, err := os.Stat(ref); err == nil && info.IsDir() {
		return verifyFolder(ctx, env, ref, t)
	}
	c, err := release.Load(*config)
	if err != nil {
		return err
	}
	host, image, tag, h, err := resolve(ctx, env, ref, c)
	if err != nil {
		return err
	}
	store := signing.Repository{Client: host, Path: image}
	member, checked, err := signing.VerifyImage(ctx, store, h, t)
	if err == nil {
		fmt.Fprintln(env.out, member.Image.Name, member.Version)
	}
	printChecked(env, checked)
	if err != nil {
		return err
	}
	// Who may write to a registry, but has no key, can copy what was signed anywhere.
	if want := c.Repository(member.Image.Name); want != image {
		return fmt.Errorf("%s is signed, but as the image %s, which lies in a repository %s: somebody copied it to another's place", ref, member.Image.Name, want)
	}
	if tag != "" {
		if err := c.Bound(tag, member.Version); err != nil {
			return fmt.Errorf("%s: %w", ref, err)
		}
	}
	releases := signing.Repository{Client: host, Path: c.Releases}
	artifact, absent, err := host.Digest(ctx, c.Releases, member.Version)
	if err != nil {
		return err
	}
	if absent {
		return fmt.Errorf("%s has no release %s, to which the image says it belongs: its release was not finished", releases.Name(), member.Version)
	}
	return verifyRelease(ctx, env, releases, artifact, member.Version, t, member.Image)
}

func verifyFolder(ctx context.Context, env environment, folder string, t *signing.Trust) error {
	l := signing.Layout(filepath.Join(folder, "oci"))
	artifact, err := l.Release()
	if err != nil {
		return err
	}
	r, err := dist.Read(folder)
	if err != nil {
		return err
	}
	var indexes []v1.Hash
	for _, i := range r.Images {
		h, err := v1.NewHash(i.IndexDigest.String())
		if err != nil {
			return err
		}
		_, checked, err := signing.VerifyImage(ctx, l, h, t)
		fmt.Fprintln(env.out, i.Name)
		printChecked(env, checked)
		if err != nil {
			return err
		}
		indexes = append(indexes, h)
	}
	if err := l.Check(ctx, indexes...); err != nil { // what pulling them from a registry would show
		return err
	}
	return verifyRelease(ctx, env, l, artifact, r.Version, t, r.Images...)
}

func verifyRelease(ctx context.Context, env environment, s signing.Store, artifact v1.Hash, version string, t *signing.Trust, images ...dist.Image) error {
	if err := signing.VerifyDigest(ctx, s, artifact, []string{signing.Signature}, t); err != nil {
		return fmt.Errorf("release manifest: %w", err)
	}
	r, _, err := signing.ReadRelease(ctx, s, artifact)
	if err != nil {
		return err
	}
	if r.Version != version {
		return fmt.Errorf("release manifest %s is that of %s, not of %s", artifact, r.Version, version)
	}
	for _, i := range images {
		listed, err := r.Image(i.Name)
		if err != nil {
			return fmt.Errorf("release manifest %s: %w", artifact, err)
		}
		if listed.IndexDigest != i.IndexDigest {
			return fmt.Errorf("release manifest %s: %s is %s in it, not %s", artifact, i.Name, listed.IndexDigest, i.IndexDigest)
		}
	}
	fmt.Fprintf(env.out, "release %s of %s@%s\n  %s  signature, images\nverified\n", r.Version, r.Source.Repository, r.Source.Commit, artifact)
	return nil
}

func printChecked(env environment, checked []signing.Checked) {
	var last v1.Hash
	for _, c := range checked {
		if c.Digest != last {
			if last.Hex != "" {
				fmt.Fprintln(env.out, " good")
			}
			fmt.Fprintf(env.out, "  %s  %s:", c.Digest, c.Subject)
			last = c.Digest
		}
		fmt.Fprintf(env.out, " %s,", signing.Title(c.Type))
	}
	if len(checked) > 0 {
		fmt.Fprintln(env.out, " good")
	}
}

// resolve opens an image's registry and finds its digest and the tag that led to
// it, if one did. The releases lie beside the image: below the same prefix.
func resolve(ctx context.Context, env environment, ref string, config *release.Config) (c *registry.Client, image, tag string, h v1.Hash, err error) {
	name, text, pinned := strings.Cut(ref, "@")
	if slash := strings.LastIndex(name, "/"); slash >= 0 {
		var after string
		if after, tag, _ = strings.Cut(name[slash:], ":"); tag == "" && !pinned {
			tag = "latest"
		}
		name = name[:slash] + after
	}
	address, image, ok := config.Split(name)
	if !ok {
		return nil, "", "", h, fmt.Errorf("%q is neither a folder nor an image; write REGISTRY/REPOSITORY[:TAG][@DIGEST]", ref)
	}
	if pinned {
		if h, err = v1.NewHash(text); err != nil {
			return nil, "", "", h, fmt.Errorf("%q: %w", ref, err)
		}
	}
	if c, err = registry.Open(ctx, address, []string{image, config.Releases}, registry.Options{ReadOnly: true, Log: env.notice}); err != nil || pinned {
		return c, image, tag, h, err
	}
	h, absent, err := c.Digest(ctx, image, tag)
	if err == nil && absent {
		err = fmt.Errorf("%s/%s has no tag %s", address, image, tag)
	}
	return c, image, tag, h, err
}

// publication adds the flags that every command with a release configuration has.
func publication(flags *flag.FlagSet, env environment) func(context.Context) (release.Options, error) {
	config := flags.String("config", "release.yaml", "the release configuration")
	return func(ctx context.Context) (release.Options, error) {
		o := release.Options{Notice: env.notice}
		var err error
		if o.Config, err = release.Load(*config); err != nil {
			return o, err
		}
		if err := o.Config.Resolve(env.getenv, env.notice); err != nil {
			return o, err
		}
		cache, err := cache.Dir(env.getenv)
		if err != nil {
			return o, err
		}
		o.State = filepath.Join(cache, "release")
		o.Trust, err = trust(ctx, env)
		return o, err
	}
}

func publisher(name string, do func(context.Context, release.Options) error) func(context.Context, environment, []string) error {
	return func(ctx context.Context, env environment, args []string) error {
		flags := flag.NewFlagSet(name, flag.ContinueOnError)
		folder := distFlag(flags)
		wait := flags.Duration("wait", 0, "how long to wait for another release to end")
		open := publication(flags, env)
		if err := flags.Parse(args); err != nil {
			return err
		}
		o, err := open(ctx)
		if err != nil {
			return err
		}
		o.Dist, o.Wait = *folder, *wait
		for _, r := range o.Config.Registries {
			if r.LegacySignatures && o.Legacy == nil {
				if err := signing.FromEnv(env.getenv, "").CheckLegacy(); err != nil {
					return fmt.Errorf("%s: %w", r.Variable, err)
				}
				s, _, err := signer(ctx, env)
				if err != nil {
					return err
				}
				o.Legacy = s.Legacy
			}
		}
		if err := hooks(env, &o); err != nil {
			return err
		}
		o.Step = func(name string, run func() error) error {
			began := time.Now()
			err := run()
			if err == nil {
				env.notice("%-36s %s", name, time.Since(began).Round(time.Millisecond))
			}
			return err
		}
		return do(ctx, o)
	}
}

// hooks replaces the configured commands by RELEASE_SMOKE and RELEASE_POLICY,
// of which - means none, and runs them with the references in a file.
func hooks(env environment, o *release.Options) error {
	for variable, command := range map[string]*[]string{"RELEASE_SMOKE": &o.Config.Hooks.Smoke, "RELEASE_POLICY": &o.Config.Hooks.Policy} {
		switch v := env.getenv(variable); v {
		case "":
		case "-":
			*command = nil
		default:
			*command = strings.Fields(v)
		}
	}
	o.Hook = func(ctx context.Context, name string, command []string, refs []release.Ref) error {
		f, err := os.CreateTemp("", "release-refs-*.txt")
		if err != nil {
			return err
		}
		defer os.Remove(f.Name())
		for _, r := range refs {
			fmt.Fprintf(f, "%s %s\n", r.Image, r.Reference)
		}
		if err := f.Close(); err != nil {
			return err
		}
		var argv []string
		for _, a := range command {
			argv = append(argv, strings.ReplaceAll(a, "{refs}", f.Name()))
		}
		if err := group(ctx, env.log, 30*time.Second, argv); err != nil {
			return fmt.Errorf("%s: %w", strings.Join(command, " "), err)
		}
		return nil
	}
	return nil
}

// group runs a program that may start others, as `go run` does. When the context
// ends all are interrupted, and what still runs a grace later is killed.
func group(ctx context.Context, log io.Writer, grace time.Duration, argv []string) error {
	cmd := host.Command(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = log, log, grace
	err := cmd.Run()
	if ctx.Err() != nil && cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // the delay ends in the death of the first one only
	}
	return err
}

func runReleaseList(ctx context.Context, env environment, args []string) error {
	o, _, err := parsed(ctx, env, "release-list", args, 0)
	if err != nil {
		return err
	}
	list, err := release.List(ctx, o)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(env.out, 0, 0, 2, ' ', 0)
	for _, l := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Version, l.Registry, l.Digest, strings.Join(l.Channels, " "))
	}
	return w.Flush()
}

// parsed parses the arguments of a command that takes n of them.
func parsed(ctx context.Context, env environment, name string, args []string, n int) (release.Options, []string, error) {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	open := publication(flags, env)
	if err := flags.Parse(args); err != nil {
		return release.Options{}, nil, err
	}
	if flags.NArg() != n {
		return release.Options{}, nil, fmt.Errorf("%s takes %s", name, commands[name].usage)
	}
	o, err := open(ctx)
	return o, flags.Args(), err
}

func runReleaseShow(ctx context.Context, env environment, args []string) error {
	o, rest, err := parsed(ctx, env, "release-show", args, 1)
	if err != nil {
		return err
	}
	s, err := release.Show(ctx, o, rest[0])
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(env.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "version\t%s\nsource\t%s@%s\nmanifest\t%s/%s@%s\n", s.Release.Version, s.Release.Source.Repository, s.Release.Source.Commit, s.Registry, o.Config.Releases, s.Digest)
	for _, i := range s.Release.Images {
		fmt.Fprintf(w, "%s\t%s/%s@%s\n", i.Name, s.Registry, o.Config.Repository(i.Name), i.IndexDigest)
		for _, v := range i.Platforms {
			fmt.Fprintf(w, "  %s\t%s, %d layers, %.1f MB\n", v.Platform, v.Digest, len(v.Layers), float64(v.Size)/1e6)
		}
	}
	for _, b := range s.SBOMs {
		fmt.Fprintf(w, "%s\t%s %s %s\n", signing.Title(b.Type), b.Image, b.Platform, b.Digest)
	}
	return w.Flush()
}

func runReleaseMirror(ctx context.Context, env environment, args []string) error {
	o, rest, err := parsed(ctx, env, "release-mirror", args, 2)
	if err != nil {
		return err
	}
	v, err := release.ParseVersion(rest[0])
	if err != nil {
		return err
	}
	return release.Mirror(ctx, o, v, release.Registry{Address: strings.TrimSuffix(rest[1], "/")})
}

func runReleaseAbort(ctx context.Context, env environment, args []string) error {
	o, rest, err := parsed(ctx, env, "release-abort", args, 1)
	if err != nil {
		return err
	}
	v, err := release.ParseVersion(rest[0])
	if err != nil {
		return err
	}
	return release.Abort(ctx, o, v)
}

func runReleaseRollback(ctx context.Context, env environment, args []string) error {
	o, rest, err := parsed(ctx, env, "release-rollback", args, 2)
	if err != nil {
		return err
	}
	v, err := release.ParseVersion(rest[1])
	if err != nil {
		return err
	}
	return release.Rollback(ctx, o, rest[0], v)
}

func runPins(ctx context.Context, env environment, args []string) error {
	flags := flag.NewFlagSet("pins", flag.ContinueOnError)
	out := flags.String("out", "dist/pins", "the folder to write to")
	update := flags.String("update", "", "a folder whose pins are updated in place, instead")
	open := publication(flags, env)
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("pins takes one VERSION or CHANNEL")
	}
	o, err := open(ctx)
	if err != nil {
		return err
	}
	s, err := release.Show(ctx, o, flags.Arg(0))
	if err != nil {
		return err
	}
	var all []pins.Pin
	for _, i := range s.Release.Images {
		all = append(all, pins.Pin{Image: i.Name, Repository: s.Registry + "/" + o.Config.Repository(i.Name), Version: s.Release.Version, Digest: i.IndexDigest.String()})
	}
	if *update != "" {
		changes, err := pins.Update(*update, all, func(where, why string) {
			env.notice("%s: left as it is: %s", where, why)
		})
		for _, c := range changes {
			fmt.Fprintf(env.out, "%s:%d: %s -> %s\n", c.File, c.Line, c.From, c.To)
		}
		if err == nil && len(changes) == 0 {
			env.notice("%s: nothing to change", *update)
		}
		return err
	}
	files, err := pins.Files(all)
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := writeFile(filepath.Join(*out, name), text); err != nil {
			return err
		}
		fmt.Fprintln(env.out, filepath.Join(*out, name))
	}
	return nil
}
