// Package tools are the eight MCP tools: arguments in, the text forms that
// runtimes parse and the structured results beside them out.
package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/config"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/engine"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/identity"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/metrics"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/session"
	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tracing"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Tools serve calls on a manager's sessions.
type Tools struct {
	Config   *config.Config
	Sessions *session.Manager
	// Image resolves a reference to what containers are created from, having
	// checked the operator's policy.
	Image   func(ctx context.Context, ref string) (id string, err error)
	Metrics *metrics.Metrics
	Tracing *tracing.Tracing
	Log     *slog.Logger
	Stop    <-chan struct{} // closed when the calls under way are to be answered at once; nil for never
}

// Request is what the HTTP layer knows of a call.
type Request struct {
	Who  identity.Who
	Done <-chan struct{} // closed when the client has gone or has cancelled
	JSON bool            // the client takes no event stream, so no progress either
	// Release is called when the call's arguments are no longer needed, maybe
	// long before the client has taken its answer; nil in a batch, where they
	// may be another call's.
	Release func()
	// Run waits for room for what a command writes, of up to n bytes. over is called
	// once, with 0, when the answer has been made of it.
	Run func(ctx context.Context, n int64) (over func(n int64), err error)
	// Hold waits for room for an answer that takes up to n bytes of memory. made
	// is called once, when the answer is there, with what it takes from then on:
	// that is kept until the client has it.
	Hold func(ctx context.Context, n int64) (made func(n int64), err error)
	Lifted
}

// MaxAnswer is what Run and Hold are asked for at most, in bytes.
func (t *Tools) MaxAnswer() int64 {
	return max(ofFile(t.Config.MaxFile+maxLead), ofOutput(t.Config.Output.Max))
}

// ofFile is what an answer takes while it is made of so many bytes of a file: those,
// and their text, which may be base64.
func ofFile(n int64) int64 { return 3*n + 1<<10 }

// ofOutput is what an answer takes while it is made of so many bytes that a command
// wrote: its streams alone and together; as texts, which are twice as long where each
// other byte has to be replaced; and the one text of both with the notes below it.
func ofOutput(n int64) int64 { return 8*n + 8<<10 }

type requestKey struct{}

// WithRequest hands a request to the tools that are called in it.
func WithRequest(ctx context.Context, r *Request) context.Context {
	return context.WithValue(ctx, requestKey{}, r)
}

// Instructions tell a model how the tools belong together.
const Instructions = `Run code in an isolated Linux container. sandbox_open once, then sandbox_write and sandbox_exec as often as needed in the same session (files and background processes stay), then sandbox_close. Paths are relative to /work.`

// call is one tool call.
type call struct {
	*Tools
	who  session.Caller
	req  *mcp.CallToolRequest
	http *Request

	session string // once the tool has one, for its span and its line in the log
}

// get returns the caller's session.
func (c *call) get(id string) (*session.Session, error) {
	s, err := c.Sessions.Get(c.who, id)
	if err == nil {
		c.session = s.ID
	}
	return s, err
}

// result is a tool's answer: its text, and whether it is an error.
type result struct {
	text  string
	isErr bool
}

// add registers a tool. A nil *result takes the text from the structured
// result, as JSON.
func add[In, Out any](t *Tools, s *mcp.Server, tool *mcp.Tool, shape func(in *jsonschema.Schema), run func(context.Context, *call, In) (*result, Out, error)) {
	in, err := t.inputSchema(reflect.TypeFor[In]())
	if err == nil {
		tool.OutputSchema, err = jsonschema.For[Out](nil)
	}
	if err != nil {
		panic(fmt.Sprintf("tool %s: %v", tool.Name, err)) // a programming error, found by any test
	}
	if shape != nil {
		shape(in)
	}
	tool.InputSchema = in
	answer := func(ctx context.Context, req *mcp.CallToolRequest) (res *mcp.CallToolResult, out Out, err error) {
		began := time.Now()
		defer func() {
			// The SDK calls this where no net/http server recovers: one call's fault would end all.
			if p := recover(); p != nil {
				res, err = nil, errFault
				t.Log.Error("a tool call panicked", "tool", tool.Name, "panic", panicked(p), "stack", string(debug.Stack()))
			}
			t.Metrics.Call(tool.Name, time.Since(began), err != nil || res != nil && res.IsError)
		}()
		r, _ := ctx.Value(requestKey{}).(*Request)
		if r == nil {
			return nil, out, errors.New("the call came without its HTTP request")
		}
		if !r.Who.Known {
			return nil, out, identity.ErrNoIdentity
		}
		// The SDK detaches a call from its request; a client that has gone cannot
		// be answered, so its call ends.
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		go func(ended <-chan struct{}) {
			select {
			case <-r.Done:
				cancel(errCancelled)
			case <-t.Stop:
				cancel(session.Stopped)
			case <-ended:
			}
		}(ctx.Done())
		ctx, end := t.Tracing.Call(ctx, req.Extra.Header, tool.Name, r.Who.Principal, r.Who.RootRun)
		c := &call{Tools: t, who: r.Who.Caller, req: req, http: r}
		var got *result
		var args In
		if err = decode(req.Params.Arguments, in, r.value, &args); err == nil {
			got, out, err = run(ctx, c, args)
			if err != nil && errors.Is(context.Cause(ctx), session.Stopped) { // whatever it made of that
				err = fmt.Errorf("the call was ended: %w", session.Stopped)
			}
		}
		kind := kindOf(got, err)
		end(c.session, kind)
		if r.Release != nil {
			r.in = nil
			r.Release()
		}
		log := t.Log.With("tool", tool.Name, "session", c.session, "principal", r.Who.Principal, "run", r.Who.RootRun, "kind", kind, "took", time.Since(began))
		if err != nil {
			log.Info("call failed", "error", loggable(err))
			return nil, out, err
		}
		log.Debug("call")
		res = &mcp.CallToolResult{}
		if got != nil {
			res.Content = []mcp.Content{&mcp.TextContent{Text: r.park(got.text)}}
			res.IsError = got.isErr
		}
		return res, out, nil
	}
	s.AddTool(tool, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		res, out, err := answer(ctx, req)
		if err != nil {
			res = &mcp.CallToolResult{}
			res.SetError(public(err)) // for the model to read, which an error of the protocol is not
			return res, nil
		}
		text, err := json.Marshal(out)
		if err == nil && res.Content == nil {
			text, err = sorted(text)
			res.Content = []mcp.Content{&mcp.TextContent{Text: string(text)}}
		}
		res.StructuredContent = json.RawMessage(text)
		return res, err
	})
}

// sorted returns a JSON object with its names in order, as texts have them.
func sorted(object []byte) ([]byte, error) {
	var m map[string]any
	if err := json.Unmarshal(object, &m); err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// public is an error without what only the operator should see of it.
func public(err error) error {
	var p interface{ Public() string }
	if errors.As(err, &p) {
		return errors.New(p.Public())
	}
	return err
}

var errFault = errors.New("the sidecar has a fault, which its log tells of: the call did not end")

// panicked is what the runtime says of a panic. Other words may quote the request.
func panicked(p any) string {
	if err, ok := p.(runtime.Error); ok {
		return err.Error()
	}
	return fmt.Sprintf("%T", p)
}

var errCancelled = errors.New("the call was cancelled")

// loggable is an error without what the caller sent, which the reason of a
// wrong argument may quote.
func loggable(err error) string {
	var w *wrongArgument
	if errors.As(err, &w) {
		return "wrong argument: " + w.field
	}
	return err.Error()
}

// kindOf names a call's failure for its span and the log, without a word of the caller's.
func kindOf(got *result, err error) string {
	var w *wrongArgument
	switch {
	case errors.As(err, &w):
		return "wrong_argument"
	case errors.As(err, new(*session.Ended)):
		return "session_ended"
	case errors.Is(err, session.ErrUnknown):
		return "unknown_session"
	case errors.Is(err, engine.ErrUnavailable):
		return "engine_unavailable"
	case errors.Is(err, context.Canceled), errors.Is(err, errCancelled):
		return "cancelled"
	case err != nil:
		return "failed"
	case got != nil && got.isErr:
		return "command" // it ended, with another code than 0
	}
	return ""
}

func yes() *bool { b := true; return &b }
func no() *bool  { return new(bool) }

// Register adds the tools to a server.
func (t *Tools) Register(s *mcp.Server) {
	add(t, s, &mcp.Tool{Name: "sandbox_open", Title: "Open a sandbox session",
		Description: "Open a session: one isolated Linux container with bash and development tools, kept until it is closed, idle for too long or out of time. Answers its session_id.",
		Annotations: &mcp.ToolAnnotations{DestructiveHint: no(), OpenWorldHint: no()}},
		func(in *jsonschema.Schema) {
			enum(in, "network", "none", "egress")
			if len(t.Config.Images) > 0 {
				enum(in, "image", t.imageNames()...)
			}
		}, open)
	add(t, s, &mcp.Tool{Name: "sandbox_exec", Title: "Run a command",
		Description: "Run a command with bash -c in /work of a session and answer its combined output. A non-zero exit is shown as [exit: N]. Background processes live on; whatever a timed-out command started is killed.",
		Annotations: &mcp.ToolAnnotations{DestructiveHint: yes(), OpenWorldHint: yes()}}, nil, execute)
	add(t, s, &mcp.Tool{Name: "sandbox_write", Title: "Write a file",
		Description: "Write a file below /work of a session, in one step, making directories as needed.",
		Annotations: &mcp.ToolAnnotations{DestructiveHint: yes(), IdempotentHint: true, OpenWorldHint: no()}},
		func(in *jsonschema.Schema) { enum(in, "encoding", "utf8", "base64") }, write)
	add(t, s, &mcp.Tool{Name: "sandbox_read", Title: "Read a file",
		Description: "Read a file below /work of a session. A file that is longer than max_bytes is read in parts, with offset.",
		Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true, IdempotentHint: true, OpenWorldHint: no()}},
		func(in *jsonschema.Schema) { enum(in, "encoding", "utf8", "base64") }, read)
	add(t, s, &mcp.Tool{Name: "sandbox_close", Title: "Close a session",
		Description: "Close a session and everything that runs in it. A durable workspace stays.",
		Annotations: &mcp.ToolAnnotations{DestructiveHint: yes(), IdempotentHint: true, OpenWorldHint: no()}}, nil, closeOne)
	add(t, s, &mcp.Tool{Name: "sandbox_list", Title: "List sessions",
		Description: "List the caller's open sessions.",
		Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true, IdempotentHint: true, OpenWorldHint: no()}}, nil, list)
	add(t, s, &mcp.Tool{Name: "sandbox_touch", Title: "Keep a session",
		Description: "Reset a session's idle timer.",
		Annotations: &mcp.ToolAnnotations{DestructiveHint: no(), IdempotentHint: true, OpenWorldHint: no()}}, nil, touch)
	add(t, s, &mcp.Tool{Name: "sandbox_close_run", Title: "Close the sessions of a run",
		Description: "Close every session of the caller that was opened in a run tree. An empty root_run_id closes nothing.",
		Annotations: &mcp.ToolAnnotations{DestructiveHint: yes(), IdempotentHint: true, OpenWorldHint: no()}}, nil, closeRun)
}

func enum(in *jsonschema.Schema, field string, values ...string) {
	for _, v := range values {
		in.Properties[field].Enum = append(in.Properties[field].Enum, v)
	}
}
