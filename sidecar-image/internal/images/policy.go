package images

import "errors"

// LoadPolicy reads SANDBOX_IMAGE_POLICY.
func LoadPolicy(path string) (Verifier, error) {
	return nil, errors.New("SANDBOX_IMAGE_POLICY is not supported by this build")
}
