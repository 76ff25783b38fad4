// Command sigstoresigned copies an image under a containers policy.json with the
// library of podman, CRI-O and skopeo, for distributions that compile sigstore
// out of those programs (Debian 12 does).
//
//	sigstoresigned POLICY REGISTRIES.D docker://REF dir:FOLDER
package main

import (
	"context"
	"fmt"
	"os"

	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/transports/alltransports"
	"go.podman.io/image/v5/types"
)

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sigstoresigned:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("usage: sigstoresigned POLICY REGISTRIES.D SOURCE DESTINATION")
	}
	policy, err := signature.NewPolicyFromFile(args[0])
	if err != nil {
		return err
	}
	check, err := signature.NewPolicyContext(policy)
	if err != nil {
		return err
	}
	src, err := alltransports.ParseImageName(args[2])
	if err != nil {
		return err
	}
	dst, err := alltransports.ParseImageName(args[3])
	if err != nil {
		return err
	}
	_, err = copy.Image(ctx, check, dst, src, &copy.Options{
		SourceCtx: &types.SystemContext{RegistriesDirPath: args[1], DockerInsecureSkipTLSVerify: types.OptionalBoolTrue, OSChoice: "linux"},
	})
	return err
}
