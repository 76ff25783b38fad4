package gocache

import (
	"io/fs"
	"sync"
	"syscall"
)

// umask is the process's, which can only be read by setting it.
var umask = sync.OnceValue(func() fs.FileMode {
	m := syscall.Umask(0)
	syscall.Umask(m)
	return fs.FileMode(m)
})
