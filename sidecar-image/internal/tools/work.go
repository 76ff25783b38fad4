package tools

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/host"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/agent/wire"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

type execIn struct {
	SessionID string            `json:"session_id" jsonschema:"from sandbox_open"`
	Command   string            `json:"command" jsonschema:"run with bash -c in /work"`
	Timeout   *number           `json:"timeout_seconds,omitempty" jsonschema:"seconds until the command and what it started are killed"`
	MaxOutput *whole            `json:"max_output_bytes,omitempty" jsonschema:"output to keep; half from the head and half from the tail"`
	Env       map[string]string `json:"env,omitempty" jsonschema:"environment of this command alone"`
	Stdin     string            `json:"stdin,omitempty" jsonschema:"text for its standard input"`
}

type execOut struct {
	ExitCode   int      `json:"exit_code"`
	Stdout     string   `json:"stdout"`
	Stderr     string   `json:"stderr"`
	DurationMS int64    `json:"duration_ms"`
	TimedOut   bool     `json:"timed_out"`
	OverQuota  bool     `json:"over_quota" jsonschema:"the command was killed because the workspace grew above its quota"`
	Truncated  bool     `json:"truncated"`
	Dropped    int64    `json:"dropped_bytes" jsonschema:"bytes cut from the middle of the output"`
	Signal     string   `json:"signal,omitempty" jsonschema:"the signal that ended the command"`
	OOM        bool     `json:"oom" jsonschema:"a process was killed because the session's memory was used up"`
	PeakMemory int64    `json:"peak_memory_bytes" jsonschema:"of the command's largest process that has ended; never less than a few MiB, which what starts it takes"`
	Notes      []string `json:"notes,omitempty"`
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

func execute(ctx context.Context, c *call, in execIn) (*result, execOut, error) {
	var out execOut
	s, err := c.get(in.SessionID)
	if err != nil {
		return nil, out, err
	}
	m, stdin, err := c.command(in, &out.Notes)
	if err != nil {
		return nil, out, err
	}
	used, err := s.Use()
	if err != nil {
		return nil, out, err
	}
	defer used()
	got, exit, killed, ended, err := c.runIn(ctx, s, m, stdin)
	if err != nil {
		return nil, out, err
	}
	defer ended(0)
	made, err := c.http.Hold(ctx, ofOutput(int64(got.Len())))
	if err != nil {
		return nil, out, fmt.Errorf("the command has ended (exit code %d), but its output is lost: %w", exit.Code, err)
	}
	kept := 0
	defer func() { made(int64(kept)) }()
	quota := killed
	if quota == nil {
		quota = s.Settled(ctx)
	}
	out.OverQuota = killed != nil
	r := &result{isErr: out.OverQuota || exit.TimedOut || exit.Code != 0}
	r.text, kept = c.render(&out, got, exit, m.Timeout, s.MemMB, quota)
	return r, out, nil
}

// command checks what is to be run.
func (c *call) command(in execIn, notes *[]string) (m wire.Exec, stdin io.Reader, err error) {
	switch {
	case len(in.Command) > wire.MaxArgument:
		return m, nil, fieldError("command", "has %d bytes, %d are allowed: write it to a file with sandbox_write and run that", len(in.Command), wire.MaxArgument)
	case strings.IndexByte(in.Command, 0) >= 0:
		return m, nil, fieldError("command", "holds a NUL byte, which no command can")
	case strings.TrimSpace(in.Command) == "":
		return m, nil, fieldError("command", "is empty; it has to be a bash command")
	}
	if err := checkEnv(in.Env); err != nil {
		return m, nil, err
	}
	m = wire.Exec{Command: in.Command, Env: in.Env, Live: c.req.Params.GetProgressToken() != nil && !c.http.JSON}
	seconds, err := c.clamp(notes, "timeout_seconds", in.Timeout)
	if err != nil {
		return m, nil, err
	}
	m.Timeout = time.Duration(seconds * float64(time.Second))
	limit, err := c.clampWhole(notes, "max_output_bytes", in.MaxOutput)
	if err != nil {
		return m, nil, err
	}
	m.MaxOutput = int(limit)
	if in.Stdin != "" {
		stdin = strings.NewReader(in.Stdin)
	}
	return m, stdin, nil
}

const (
	maxEnv      = 256       // variables of one command
	maxEnvBytes = 256 << 10 // of them all, with their names
)

func checkEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return fieldError("env", "has %d variables, %d are allowed", len(env), maxEnv)
	}
	size := 0
	for k, v := range env {
		one := len(k) + len("=") + len(v)
		size += one
		switch {
		case !envName.MatchString(k):
			return fieldError("env", "%q is no name of a variable: up to 128 letters, digits and _, and no digit at first", shown(k))
		case strings.IndexByte(v, 0) >= 0:
			return fieldError("env", "the value of %s holds a NUL byte, which none can", shown(k))
		case one > wire.MaxArgument:
			return fieldError("env", "%s has %d bytes with its name, %d are allowed: hand it over in stdin or in a file", shown(k), one, wire.MaxArgument)
		}
	}
	if size > maxEnvBytes {
		return fieldError("env", "has %d bytes, %d are allowed: hand large values over in stdin or in files", size, maxEnvBytes)
	}
	return nil
}

// runIn runs a command in a session that is in use, with progress for a client that
// asked. killed is a *session.ErrQuota when it was ended for that. ended gives back the
// room of its output.
func (c *call) runIn(ctx context.Context, s *session.Session, m wire.Exec, stdin io.Reader) (got *host.Output, exit wire.Exit, killed error, ended func(int64), err error) {
	conn, err := s.Conn(ctx)
	if err != nil {
		return nil, exit, nil, nil, err
	}
	free, err := c.http.Run(ctx, int64(m.MaxOutput))
	if err != nil {
		return nil, exit, nil, nil, err
	}
	defer func() {
		if err != nil {
			free(0)
		}
	}()
	guarded, stop, err := s.Guard(ctx, m.Timeout)
	if err != nil {
		return nil, exit, nil, nil, err
	}
	live := make(chan *host.Output, 1)
	done := make(chan struct{})
	if m.Live {
		go c.progress(ctx, time.Now(), live, done)
	}
	got, exit, err = conn.Exec(guarded, m, stdin, func(o *host.Output) { live <- o })
	close(done)
	if over := (*session.ErrQuota)(nil); errors.As(context.Cause(guarded), &over) && err != nil && got != nil {
		if killed, err = over, nil; !exit.Cancelled { // whatever the connection's end made of it
			exit.Code, exit.Signal = 128+int(syscall.SIGKILL), "SIGKILL"
		}
	}
	stop()
	if err != nil {
		return nil, exit, nil, nil, explain(ctx, s, conn, err, "")
	}
	return got, exit, killed, free, nil
}

// render fills in what a command did, and makes the text of it. quota is what the
// workspace has to say, or what the command was killed for. size is what both take, in bytes.
func (c *call) render(out *execOut, got *host.Output, exit wire.Exit, timeout time.Duration, memMB int64, quota error) (_ string, size int) {
	kept := func(w host.Which) string {
		return text(got.Bytes(w, fmt.Sprintf("\n[... %d bytes left out ...]\n", got.Dropped(w))))
	}
	out.ExitCode, out.Signal, out.OOM, out.TimedOut, out.PeakMemory = exit.Code, exit.Signal, exit.OOM, exit.TimedOut, exit.PeakMemory
	out.DurationMS, out.Truncated, out.Dropped = exit.Duration.Milliseconds(), exit.Dropped > 0, exit.Dropped
	stdout, stderr := kept(host.Stdout), kept(host.Stderr)
	out.Stdout, out.Stderr = c.http.park(stdout), c.http.park(stderr)

	var b strings.Builder
	both := kept(host.Both)
	b.Grow(len(both) + 1<<10) // for the notes, mostly
	b.WriteString(both)
	line := func(format string, args ...any) {
		if b.Len() > 0 && !strings.HasSuffix(b.String(), "\n") {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, format, args...)
	}
	if out.Truncated {
		line("[output truncated: %d of %d bytes left out of the middle]", exit.Dropped, exit.StdoutBytes+exit.StderrBytes)
	}
	if quota != nil && !out.OverQuota {
		out.Notes = append(out.Notes, quota.Error())
	}
	for _, n := range out.Notes {
		line("[note: %s]", n)
	}
	if exit.OOM {
		line("[out of memory: a process was killed at the session's limit of %d MiB]", memMB)
	}
	switch {
	case out.OverQuota:
		out.Notes = append(out.Notes, quota.Error())
		line("[killed: %v]", quota)
	case exit.TimedOut:
		line("[timed out after %s]", timeout)
	case exit.Code != 0:
		line("[exit: %d]", exit.Code)
	}
	return b.String(), len(stdout) + len(stderr) + b.Len()
}

// text makes output fit for JSON. It takes b over.
func text(b []byte) string {
	return strings.ToValidUTF8(unsafe.String(unsafe.SliceData(b), len(b)), "\uFFFD")
}

const (
	progressEvery = wire.LiveEvery
	progressMax   = wire.MaxLive
	progressQuiet = 15 // ticks after which an unchanged output is reported too
)

// progress tells a client that asked for it what a long command has written.
func (c *call) progress(ctx context.Context, began time.Time, live <-chan *host.Output, done <-chan struct{}) {
	t := time.NewTicker(progressEvery)
	defer t.Stop()
	var o *host.Output
	last, silent := ^uint64(0), 0
	for {
		select {
		case o = <-live:
		case <-done:
			return
		case <-ctx.Done():
			return
		case <-t.C:
			if o == nil {
				continue
			}
			b, n := o.Live(progressMax)
			if silent++; n == last && silent < progressQuiet {
				continue
			}
			last, silent = n, 0
			err := c.req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: c.req.Params.GetProgressToken(), Progress: time.Since(began).Seconds(), Message: text(b)})
			if err != nil {
				return
			}
		}
	}
}

// explain turns an operation's failure into the sentence for the caller.
func explain(ctx context.Context, s *session.Session, conn *host.Conn, err error, path string) error {
	var we *wire.Error
	switch {
	case errors.Is(err, wire.ErrTooLong):
		return fieldError("env", "has too many control characters, with the command's, to be sent with it: hand them over in stdin or in a file")
	case errors.Is(err, host.ErrLost):
		if over := s.Lost(ctx, conn); over != nil {
			return fmt.Errorf("the call was ended: %w", over)
		}
		return &lost{err}
	case errors.As(err, &we) && path != "":
		return fieldError("path", "%s: %s", path, we.Message)
	}
	return err
}

// lost keeps the connection's own words, which may name the engine's address, for the log.
type lost struct{ err error }

func (e *lost) Error() string { return e.Public() + " (" + e.err.Error() + ")" }
func (e *lost) Unwrap() error { return e.err }

// Public is what the session's owner is told.
func (e *lost) Public() string {
	return "the session's container or the engine went away under the call; try once more, and open a new session if that fails"
}

type writeIn struct {
	SessionID string `json:"session_id" jsonschema:"from sandbox_open"`
	Path      string `json:"path" jsonschema:"of a file, relative to /work"`
	Content   string `json:"content" jsonschema:"what is in the file then; a large one is best sent as base64, as JSON escapes make text up to six times longer, and the request has a limit too"`
	Encoding  string `json:"encoding,omitempty" jsonschema:"of content: utf8 (the default) or base64"`
	Mode      string `json:"mode,omitempty" jsonschema:"permissions in octal, such as 0755; without it 0644, and an existing file keeps its own"`
}

type writeOut struct {
	Path  string `json:"path"`
	Bytes int    `json:"bytes"`
}

const maxPath = 4095 // bytes; PATH_MAX without the NUL

// inWork checks the path of a file and returns it relative to /work, without
// detours. What links lead to is the agent's, and the kernel's, to refuse.
func inWork(p string) (string, error) {
	rel := p
	if strings.HasPrefix(p+"/", workPath+"/") {
		rel = strings.TrimLeft(p[len(workPath):], "/")
	}
	switch last := rel[strings.LastIndexByte(rel, '/')+1:]; {
	case len(rel) > maxPath:
		return "", fieldError("path", "has %d bytes, %d are allowed", len(rel), maxPath)
	case strings.IndexByte(rel, 0) >= 0:
		return "", fieldError("path", "holds a NUL byte, which no path can")
	case rel == "":
		return "", fieldError("path", "is empty; it has to name a file, relative to /work")
	case strings.HasPrefix(rel, "/"):
		return "", fieldError("path", "%q is absolute; it has to be relative to /work", shown(p))
	case last == "", last == ".", last == "..":
		return "", fieldError("path", "%q names a directory; it has to name a file", shown(p))
	}
	if rel = path.Clean(rel); strings.HasPrefix(rel, "../") {
		return "", fieldError("path", "%q leaves /work", shown(p))
	}
	return rel, nil
}

// modeText is a mode with all three digits: of fewer nobody knows which are meant.
var modeText = regexp.MustCompile(`^(0o?)?([0-7]{3})$`)

func parseMode(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	if m := modeText.FindStringSubmatch(s); m != nil {
		if n, _ := strconv.ParseUint(m[2], 8, 32); n != 0 { // 0 would leave a file as it was
			return uint32(n), nil
		}
	}
	return 0, fieldError("mode", "%q is not allowed; octal permissions from 0001 to 0777 are, with all their digits", shown(s))
}

func write(ctx context.Context, c *call, in writeIn) (*result, writeOut, error) {
	var out writeOut
	s, err := c.get(in.SessionID)
	if err != nil {
		return nil, out, err
	}
	name, err := inWork(in.Path)
	if err != nil {
		return nil, out, err
	}
	var content []byte
	switch in.Encoding {
	case "", "utf8":
		content = []byte(in.Content)
	case "base64":
		if content, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return nil, out, fieldError("content", "is not base64: %v", err)
		}
	default:
		return nil, out, fieldError("encoding", "%q is not allowed; utf8 and base64 are", shown(in.Encoding))
	}
	if int64(len(content)) > c.Config.MaxFile {
		return nil, out, fieldError("content", "has %d bytes, %d are allowed in one call", len(content), c.Config.MaxFile)
	}
	mode, err := parseMode(in.Mode)
	if err != nil {
		return nil, out, err
	}
	used, err := s.UseToWrite(ctx)
	if err != nil {
		return nil, out, err
	}
	defer used()
	conn, err := s.Conn(ctx)
	if err != nil {
		return nil, out, err
	}
	err = conn.WriteFile(ctx, name, mode, content)
	s.Measure()
	if err != nil {
		return nil, out, explain(ctx, s, conn, err, name)
	}
	out = writeOut{workPath + "/" + name, len(content)}
	return &result{text: fmt.Sprintf("wrote %d bytes to %s", out.Bytes, out.Path)}, out, nil
}

type readIn struct {
	SessionID string `json:"session_id" jsonschema:"from sandbox_open"`
	Path      string `json:"path" jsonschema:"of a file, relative to /work"`
	MaxBytes  *whole `json:"max_bytes,omitempty" jsonschema:"most bytes to read from offset on"`
	Offset    *whole `json:"offset,omitempty" jsonschema:"first byte to read, from 0; within a character of UTF-8 it is that character's first"`
	Encoding  string `json:"encoding,omitempty" jsonschema:"of the answer: utf8 (the default) or base64"`
}

type readOut struct {
	Path       string   `json:"path"`
	Size       int64    `json:"size" jsonschema:"of the whole file, in bytes"`
	Offset     int64    `json:"offset" jsonschema:"of the first byte in this answer"`
	Bytes      int64    `json:"bytes" jsonschema:"how many this answer holds"`
	EOF        bool     `json:"eof"`
	NextOffset int64    `json:"next_offset,omitempty" jsonschema:"where to go on, when eof is false"`
	Encoding   string   `json:"encoding"`
	Notes      []string `json:"notes,omitempty"`
}

// readSlack is by how much a file may have grown since it was asked how large it
// is, in bytes; of one that grew by more a part is answered, which says so.
const readSlack = 16 << 10

func read(ctx context.Context, c *call, in readIn) (*result, readOut, error) {
	out := readOut{Encoding: in.Encoding}
	s, err := c.get(in.SessionID)
	if err != nil {
		return nil, out, err
	}
	name, err := inWork(in.Path)
	if err != nil {
		return nil, out, err
	}
	switch in.Encoding {
	case "":
		out.Encoding = "utf8"
	case "utf8", "base64":
	default:
		return nil, out, fieldError("encoding", "%q is not allowed; utf8 and base64 are", shown(in.Encoding))
	}
	if out.Offset, err = c.clampWhole(nil, "offset", in.Offset); err != nil {
		return nil, out, err
	}
	limit, err := c.clampWhole(&out.Notes, "max_bytes", in.MaxBytes)
	if err != nil {
		return nil, out, err
	}
	used, err := s.Use()
	if err != nil {
		return nil, out, err
	}
	defer used()
	conn, err := s.Conn(ctx)
	if err != nil {
		return nil, out, err
	}
	// How much there is, before anything is held of it.
	_, size, err := conn.ReadFile(ctx, wire.Read{Path: name})
	if err != nil {
		return nil, out, explain(ctx, s, conn, err, name)
	}
	left := max(size-out.Offset, 0)
	limit = min(limit, left+readSlack)
	made, err := c.http.Hold(ctx, ofFile(limit+maxLead))
	if err != nil {
		return nil, out, err
	}
	var answer strings.Builder
	defer func() { made(int64(answer.Len())) }()
	lead := int64(0) // bytes before the offset, for a character that begins in them
	if out.Encoding == "utf8" {
		lead = min(out.Offset, maxLead)
	}
	b, size, err := conn.ReadFile(ctx, wire.Read{Path: name, Offset: out.Offset - lead, Max: limit + lead})
	if err != nil {
		return nil, out, explain(ctx, s, conn, err, name)
	}
	out.Path, out.Size = workPath+"/"+name, size
	end := out.Offset - lead + int64(len(b))
	if out.Encoding == "utf8" {
		part, begun := textPart(b, int(lead), end < size)
		if begun > 0 {
			out.Notes = append(out.Notes, fmt.Sprintf("offset %d is within a character, which begins at %d", out.Offset, out.Offset-int64(begun)))
		}
		out.Offset -= int64(begun)
		if len(part) == 0 && len(b) > int(lead) { // whoever went on from here would not move
			return nil, out, fieldError("max_bytes", "%d does not hold the character at offset %d: ask for %d or more", limit, out.Offset, utf8.UTFMax)
		}
		if !utf8.Valid(part) {
			return nil, out, fieldError("encoding", "%s is not UTF-8 text; read it with encoding base64", name)
		}
		b, end = part, out.Offset+int64(len(part))
	}
	out.Bytes, out.EOF = int64(len(b)), end >= size
	// Built in one piece of memory: it may be large.
	if out.Encoding == "base64" {
		answer.Grow(base64.StdEncoding.EncodedLen(len(b)) + 256)
		e := base64.NewEncoder(base64.StdEncoding, &answer)
		_, _ = e.Write(b) // a Builder takes everything
		_ = e.Close()
	} else {
		answer.Grow(len(b) + 256)
		answer.Write(b)
	}
	if !out.EOF {
		out.NextOffset = end
		// Never silently: the caller of a part is told that it is one.
		fmt.Fprintf(&answer, "\n[read truncated: bytes %d to %d of %d; go on with offset %d]", out.Offset, end, size, end)
		for _, n := range out.Notes { // to a whole file nothing is added
			answer.WriteString("\n[note: " + n + "]")
		}
	}
	return &result{text: answer.String()}, out, nil
}

// maxLead is how far into a character an offset may be, in bytes.
const maxLead = utf8.UTFMax - 1

// textPart returns b from lead on, or from begun bytes before, where the character
// begins that is split there; where more follows, one that the end splits is left to
// it. Parts join without a gap or an overlap, whatever offsets were asked for.
func textPart(b []byte, lead int, more bool) (part []byte, begun int) {
	if lead = min(lead, len(b)); lead < len(b) && !utf8.RuneStart(b[lead]) {
		for n := 1; n <= lead; n++ {
			if !utf8.RuneStart(b[lead-n]) {
				continue
			}
			if _, size := utf8.DecodeRune(b[lead-n:]); size > n || !utf8.FullRune(b[lead-n:]) {
				begun = n
			}
			break
		}
	}
	if part = b[lead-begun:]; more {
		part = wholeRunes(part)
	}
	return part, begun
}

// wholeRunes cuts a character that the end of a part splits.
func wholeRunes(b []byte) []byte {
	for i := 1; i <= min(utf8.UTFMax-1, len(b)); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}
