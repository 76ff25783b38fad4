package plan

// Slim leaves documentation, man pages and foreign locales out and keeps the
// licences (Debian policy 12.5). The lines are dpkg's own path-exclude and
// path-include options, the last match wins. They are not written to the image:
// dpkg would report what they leave out of packages installed later as missing
// (dpkg --verify), and some packages do not work without such files.
var Slim = []string{
	"path-exclude=/usr/share/doc/*",
	"path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/man/*",
	"path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/locale/*",
	"path-include=/usr/share/locale/locale.alias",
	"path-exclude=/usr/share/groff/*",
	"path-exclude=/usr/share/linda/*",
	"path-exclude=/usr/share/lintian*",
	"path-exclude=/usr/share/doc-base*",
	"path-exclude=/usr/share/gtk-doc/*",
	"path-exclude=/usr/share/help/*",
	"path-exclude=/usr/share/bug*",
	"path-exclude=/usr/share/menu*",
	"path-include=/usr/share/doc/apt/examples/debian.sources",
}

// Distroless leaves out in addition what only a shell, a login or a package
// manager would read, and every world-writable folder but /tmp.
var Distroless = append(append([]string{}, Slim...),
	"path-exclude=/usr/share/doc/apt/*",
	"path-exclude=/etc/dpkg*",
	"path-exclude=/etc/issue*",
	"path-exclude=/etc/kernel/*",
	"path-exclude=/etc/motd",
	"path-exclude=/etc/profile*",
	"path-exclude=/etc/skel*",
	"path-exclude=/etc/update-motd.d*",
	"path-exclude=/root/.*",
	"path-exclude=/usr/games",
	"path-exclude=/usr/local/*",
	"path-exclude=/usr/sbin/*",
	"path-exclude=/usr/share/base-files*",
	"path-exclude=/usr/share/dict",
	"path-exclude=/usr/src",
	"path-exclude=/var/backups",
	"path-exclude=/var/lock",
	"path-exclude=/run/lock",
	"path-exclude=/var/mail",
	"path-exclude=/var/spool*",
	"path-exclude=/var/tmp",
	"path-exclude=/var/log/*",
)
