package unpack

import (
	"fmt"
	"strconv"
	"strings"
)

// The static ids of Debian policy 9.2.2. dpkg takes an owner's name before
// the number beside it; these are the names that every Debian system has.
var (
	users  = parseIDs("root:0 daemon:1 bin:2 sys:3 sync:4 games:5 man:6 lp:7 mail:8 news:9 uucp:10 proxy:13 www-data:33 backup:34 list:38 irc:39 _apt:42 nobody:65534")
	groups = parseIDs("root:0 daemon:1 bin:2 sys:3 adm:4 tty:5 disk:6 lp:7 mail:8 news:9 uucp:10 man:12 proxy:13 kmem:15 dialout:20 fax:21 voice:22 cdrom:24 floppy:25 tape:26 sudo:27 audio:29 dip:30 www-data:33 backup:34 operator:37 list:38 irc:39 src:40 shadow:42 utmp:43 video:44 sasl:45 plugdev:46 staff:50 games:60 users:100 nogroup:65534")
)

func parseIDs(s string) map[string]int {
	ids := map[string]int{}
	for _, f := range strings.Fields(s) {
		name, id, _ := strings.Cut(f, ":")
		ids[name], _ = strconv.Atoi(id)
	}
	return ids
}

// ownerID returns the id that dpkg would give a member with this owner.
func ownerID(known map[string]int, name string, id int) (int, error) {
	if n, ok := known[name]; ok {
		return n, nil
	}
	if name == "" && id == 0 {
		return 0, nil
	}
	return 0, fmt.Errorf("its owner %q (%d) is not one of Debian's static accounts, so its id would depend on the build", name, id)
}
