// Package admission holds policies for those who run the images; it has no
// code but the tests that check them.
package admission
