// Command loomcycle-builder is the sandbox sidecar: an MCP server that runs
// each code session in a container of its own.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/jsonlog"
	"github.com/loomcycle/loomcycle-images/internal/pid1"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/cgroup"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/service"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/workspace"
)

// version is set by the linker.
var version = "dev"

const usage = `loomcycle-builder runs sandbox sessions for MCP clients.

  loomcycle-builder [serve]                       serve MCP at /mcp
  loomcycle-builder workspaces list [--json]      the durable workspaces, their sizes and last uses
  loomcycle-builder workspaces prune --older-than 30d [--dry-run]
                                                  remove those that were not used for so long and that no
                                                  session has, by the records in SANDBOX_STATE_DIR too
  loomcycle-builder config [--markdown]           every variable
  loomcycle-builder healthcheck                   ask the running sidecar whether it is ready
  loomcycle-builder version

It is configured by its environment:

`

func main() {
	// podman leaves the monitor of each session's container to PID 1.
	if exit, first := pid1.Run(); first {
		os.Exit(exit)
	}
	if err := run(os.Args[1:], os.Getenv, os.Environ(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "loomcycle-builder:", err)
		os.Exit(1)
	}
}

func run(args []string, getenv func(string) string, environ []string, out io.Writer) error {
	verb := "serve"
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	switch verb {
	case "serve":
		unknown := config.UnknownVars(environ)
		c, err := config.Load(getenv)
		if err != nil {
			for _, u := range unknown { // what is missing may be there with a typo
				err = errors.Join(err, u)
			}
			return err
		}
		c.Agent = agentBeside(c.Agent)
		return serve(c, unknown)
	case "workspaces":
		return workspaces(args, getenv, out)
	case "config":
		if len(args) == 1 && args[0] == "--markdown" {
			config.Markdown(out)
			return nil
		}
		config.Help(out)
		return nil
	case "healthcheck":
		return healthcheck(getenv)
	case "version", "--version":
		fmt.Fprintln(out, version)
		return nil
	case "help", "--help", "-h":
		fmt.Fprint(out, usage)
		config.Help(out)
		return nil
	}
	return fmt.Errorf("there is no command %q; loomcycle-builder help names them", verb)
}

func serve(c *config.Config, unknown []config.Unknown) error {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Log))
	log := jsonlog.New(os.Stderr, level)
	for _, u := range unknown {
		log.Warn("a variable is ignored", "error", u)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// Below PID 1, which is our own reaper or the engine's: the nested podman's containers will be below us.
	if os.Getppid() == 1 && c.Host == "" {
		self, err := os.ReadFile("/proc/self/cgroup")
		if err == nil {
			err = cgroup.MakeRoom("/sys/fs/cgroup", string(self))
		}
		if err != nil {
			log.Warn("sessions may have no limits", "error", err)
		}
	}
	return service.Run(ctx, c, version, log)
}

func workspaces(args []string, getenv func(string) string, out io.Writer) error {
	root := getenv("SANDBOX_WORKSPACE_ROOT")
	if root == "" {
		return errors.New("SANDBOX_WORKSPACE_ROOT is not set: there are no durable workspaces")
	}
	verb := ""
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	flags := flag.NewFlagSet("workspaces "+verb, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // main prints the error, once
	asJSON, dry, older := flags.Bool("json", false, ""), new(bool), time.Duration(-1)
	switch verb {
	case "list":
	case "prune":
		dry = flags.Bool("dry-run", false, "")
		flags.Func("older-than", "", func(s string) (err error) { older, err = age(s); return err })
	default:
		return errors.New("workspaces takes list or prune")
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(out, usage)
		return nil
	case err != nil:
		return fmt.Errorf("workspaces %s: %w", verb, err)
	case flags.NArg() > 0:
		return fmt.Errorf("workspaces %s: there is no argument %q", verb, flags.Arg(0))
	case verb == "prune" && older < 0:
		return errors.New("workspaces prune needs --older-than, for example --older-than 30d")
	}
	ws, err := workspace.Existing(root, "", engine.SessionUser, 0)
	if err != nil {
		return err
	}
	var infos []workspace.Info
	records := func() (map[string]bool, error) {
		recorded, err := session.Recorded(cmp.Or(getenv("SANDBOX_STATE_DIR"), config.DefaultStateDir))
		switch {
		case verb == "list" && errors.Is(err, fs.ErrNotExist):
			err = nil // the locks alone tell
		case err != nil:
			err = fmt.Errorf("SANDBOX_STATE_DIR has to be the sidecar's, as its sessions may run on without it and keep their workspaces: %w", err)
		}
		return recorded, err
	}
	if verb == "list" {
		infos, err = ws.List(records)
	} else {
		infos, err = ws.Prune(time.Now().Add(-older), *dry, records)
	}
	if err != nil && len(infos) == 0 {
		return err
	}
	if *asJSON {
		return errors.Join(json.NewEncoder(out).Encode(infos), err)
	}
	t := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "PRINCIPAL\tWORKSPACE\tMIB\tLAST USED\tIN USE\tNOTE")
	for _, i := range infos {
		note := i.Error
		if i.Unread > 0 {
			note = strings.TrimPrefix(fmt.Sprintf("%s; %d directories may not be read and are not counted", note, i.Unread), "; ")
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%v\t%s\n", i.Principal, i.Name, i.Bytes>>20, i.LastUsed.UTC().Format(time.RFC3339), i.InUse, note)
	}
	return errors.Join(t.Flush(), err)
}

// age is a time that is not negative, in Go's words or in days.
func age(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if days, ok := strings.CutSuffix(s, "d"); ok {
		var n uint64
		n, err = strconv.ParseUint(days, 10, 16)
		d = time.Duration(n) * 24 * time.Hour
	}
	if err != nil || d < 0 {
		return 0, errors.New("it is no age such as 30d, 720h or 0h")
	}
	return d, nil
}

// healthcheck is for images without a shell or curl.
func healthcheck(getenv func(string) string) error {
	addr := getenv("SANDBOX_LISTEN_ADDR")
	if addr == "" {
		addr = config.DefaultListen
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("SANDBOX_LISTEN_ADDR: %w", err)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // all addresses are listened on, this one too
	}
	// Straight to it, whatever HTTP_PROXY says: that is for the sidecar's own pulls.
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{}}
	resp, err := client.Get("http://" + net.JoinHostPort(host, port) + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return fmt.Errorf("not ready: %s", b)
	}
	return nil
}

// agentBeside finds the session agent next to this program, for a sidecar that
// runs from a build directory instead of the image.
func agentBeside(path string) string {
	if fileExists(path) {
		return path
	}
	exe, err := os.Executable()
	if err != nil {
		return path
	}
	if beside := filepath.Join(filepath.Dir(exe), "session-agent"); fileExists(beside) {
		return beside
	}
	return path
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
