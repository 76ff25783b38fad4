#!/usr/bin/dash
# Compiles Go's standard library for $GOARCH, as a go command of the images
# will ask for it, and lays the results out below /out. Runs in a root of the
# worker's own packages as they were unpacked: no maintainer script ran, so
# there is no /bin/sh and no awk. /target holds the C library of $GOARCH.
set -eu

# The keys of packages with cgo hold the compiler's name and version and no
# path. The objects hold paths, which must not tell what this ran on.
mkdir /tmp/bin /tmp/warm
printf '#!/usr/bin/dash\nexec %s --sysroot=/target -ffile-prefix-map=/target= -ffile-prefix-map=/usr/lib/gcc-cross/=/usr/lib/gcc/ "$@"\n' "$TRIPLET-gcc" > /tmp/bin/gcc
chmod +x /tmp/bin/gcc
export PATH=/tmp/bin:/usr/local/go/bin:/usr/bin:/usr/sbin
export HOME=/tmp GOCACHE=/tmp/cache GOTOOLCHAIN=local GOOS=linux GOFLAGS= GOENV=off CGO_ENABLED=1

# A package that imports all of it, for what only tests and vet ask for.
cd /tmp/warm
go mod init warm 2> /dev/null
{
	echo 'package warm'
	go list std | grep -vE '(^|/)(internal|vendor)(/|$)|^runtime/cgo$' | sed 's/.*/import _ "&"/'
} > warm.go
printf 'package warm\n\nimport "testing"\n\nfunc TestNothing(*testing.T) {}\n' > warm_test.go
touch -d "@$EPOCH" go.mod warm.go warm_test.go /tmp/bin/gcc # go's index of a package has their times

go build std
go vet .
go test -count=1 -exec true . > /dev/null # not kept as a result, which would hold file times
CGO_ENABLED=0 go build std # vet and test ask for little more, seldom, and would take as long again

mkdir -p /out/usr/local/lib/go-cache /out/usr/local/libexec
/pack/go-cache pack "$GOCACHE" /out/usr/local/lib/go-cache "$EPOCH"
cp /program/go-cache /out/usr/local/libexec/go-cache
chmod -R u=rwX,go=rX /out
find /out -exec touch -h -d "@$EPOCH" {} +
