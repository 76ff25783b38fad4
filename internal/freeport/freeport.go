// Package freeport finds TCP ports for servers that tests start.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"testing"
)

// lowest is above the ports of well-known services.
const lowest = 10000

// Port is a TCP port of loopback that nobody listens on. It is none of those that
// the kernel gives to outgoing connections (ip_local_port_range), one of which
// could have it before the server.
func Port(t testing.TB) string {
	t.Helper()
	start := 32768 // the kernel's default
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		fmt.Sscan(string(text), &start)
	}
	if start <= lowest {
		start = 32768 // all are: no port is better than another
	}
	for range 100 {
		port := strconv.Itoa(lowest + rand.IntN(start-lowest))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no TCP port of loopback is free")
	return ""
}

// Address is HOST:PORT with such a port.
func Address(t testing.TB) string {
	t.Helper()
	return "127.0.0.1:" + Port(t)
}
