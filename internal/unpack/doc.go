// Package unpack turns Debian packages, the Go toolchain and Node into the
// files of an image, for any architecture, without running a foreign
// instruction: it writes what dpkg and the maintainer scripts would have
// written. It is a pure function of its plan and inputs and knows nothing of
// images or BuildKit. What it reads is treated as hostile.
package unpack
