package server

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"strconv"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	exact "github.com/segmentio/encoding/json"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
)

// maxSafeInteger is the largest whole number that every JSON parser keeps (RFC 8259
// section 6).
const maxSafeInteger = 1<<53 - 1

// message is what the HTTP layer looks at in a JSON-RPC message. The SDK
// parses it for real.
type message struct {
	Method                   string
	ID, Params               json.RawMessage
	requestID, progressToken json.RawMessage
}

// fault is what a request is refused for, in words of JSON and not of Go.
type fault struct {
	code   int
	status int
	text   string
}

func (f *fault) Error() string { return f.text }

func invalid(format string, args ...any) error {
	return &fault{jsonrpc.CodeInvalidRequest, http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// maxBatch is the most messages of a batch: each is held until the last is answered.
const maxBatch = 100

// What is left of a body without its long strings is read a dozen times, here and by the SDK,
// which makes Go values of all of it: 20 MiB of [],[],[] would take a minute and gigabytes.
const (
	maxLean   = 2 << 20 // bytes
	maxValues = 1 << 13
)

func notJSON() error {
	return &fault{jsonrpc.CodeParseError, http.StatusBadRequest, "the body is not JSON, or more than one value of it"}
}

// bounded refuses a body of which nobody wants so much, unless it plainly is no JSON: one that
// was cut off has all of a long string in it, which is not what is wrong with it.
func bounded(body []byte) error {
	values, text, escaped := 0, false, false
	for _, c := range body {
		switch {
		case escaped:
			escaped = false
		case c == '"':
			text = !text
		case text:
			escaped = c == '\\'
		case c == ',', c == '[', c == '{', c == ':':
			values++
		}
	}
	if start := bytes.TrimLeft(body, " \t\r\n"); text || len(start) == 0 || !bytes.ContainsAny(start[:1], `{["-0123456789tfn`) {
		return notJSON()
	}
	if len(body) > maxLean {
		return invalid("the request has %d bytes without its strings of %d bytes and more, and may have %d", len(body), tools.LiftMin, maxLean)
	}
	if values > maxValues {
		return invalid("the request's JSON has %d values and names, or more, and may have %d", values, maxValues)
	}
	return nil
}

// messages are those of a body, which is UTF-8: one, or a batch's.
func messages(body []byte) ([]message, error) {
	if err := bounded(body); err != nil {
		return nil, err
	}
	if !json.Valid(body) {
		return nil, notJSON()
	}
	if !bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("[")) {
		m, err := parse(body)
		return []message{m}, err
	}
	var batch []json.RawMessage
	elements := json.NewDecoder(bytes.NewReader(body))
	_, _ = elements.Token() // the bracket
	for elements.More() {
		if len(batch) == maxBatch {
			return nil, invalid("a batch may have %d messages", maxBatch)
		}
		var element json.RawMessage
		if err := elements.Decode(&element); err != nil {
			return nil, invalid("the batch cannot be read: %v", err)
		}
		batch = append(batch, element)
	}
	if len(batch) == 0 {
		return nil, invalid("the batch is empty")
	}
	var all []message
	for _, element := range batch {
		m, err := parse(element)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// parse matches names as the SDK does. The text is valid, and so of bounded depth.
func parse(text []byte) (m message, err error) {
	var envelope struct {
		Version json.RawMessage `json:"jsonrpc"`
		Method  json.RawMessage `json:"method"`
		ID      json.RawMessage `json:"id"`
		Params  json.RawMessage `json:"params"`
		Result  json.RawMessage `json:"result"`
		Error   json.RawMessage `json:"error"`
	}
	if fit(text, &envelope) != nil || tools.KindOfJSON(text) != "an object" {
		return m, invalid("a message is a JSON object, not %s", tools.KindOfJSON(text))
	}
	m = message{ID: envelope.ID, Params: envelope.Params}
	var version string
	if fit(envelope.Version, &version) != nil || version != "2.0" {
		return m, invalid(`jsonrpc has to be "2.0"`)
	}
	if len(envelope.Method) == 0 {
		if e := envelope.Error; len(e) > 0 && tools.KindOfJSON(e) != "an object" {
			return m, invalid("error has to be an object, not %s", tools.KindOfJSON(e))
		}
		if len(envelope.Result) == 0 && len(envelope.Error) == 0 { // with one of them it is an answer
			return m, invalid("the message has no method, which a request needs")
		}
		return m, nil
	}
	if fit(envelope.Method, &m.Method) != nil {
		return m, invalid("method has to be a string, not %s", tools.KindOfJSON(envelope.Method))
	}
	var params struct {
		RequestID json.RawMessage `json:"requestId"`
		Meta      json.RawMessage `json:"_meta"`
	}
	var meta struct {
		ProgressToken json.RawMessage `json:"progressToken"`
	}
	if fit(m.Params, &params) == nil {
		_ = fit(params.Meta, &meta) // what does not fit is paramsFit's to refuse
	}
	m.requestID, m.progressToken = params.RequestID, meta.ProgressToken
	return m, nil
}

// fit reads a JSON text into v.
func fit(text []byte, v any) error {
	_, err := exact.Parse(text, v, exact.DontMatchCaseInsensitiveStructFields)
	return err
}

// paramsOf are the requests' that the SDK knows: it refuses those of another form, but with
// the names of its own types.
var paramsOf = map[string]reflect.Type{
	"initialize": reflect.TypeFor[mcp.InitializeParams](), "ping": reflect.TypeFor[mcp.PingParams](),
	"tools/list": reflect.TypeFor[mcp.ListToolsParams](), "tools/call": reflect.TypeFor[mcp.CallToolParamsRaw](),
	"prompts/list": reflect.TypeFor[mcp.ListPromptsParams](), "prompts/get": reflect.TypeFor[mcp.GetPromptParams](),
	"resources/list": reflect.TypeFor[mcp.ListResourcesParams](), "resources/templates/list": reflect.TypeFor[mcp.ListResourceTemplatesParams](),
	"resources/read": reflect.TypeFor[mcp.ReadResourceParams](), "resources/subscribe": reflect.TypeFor[mcp.SubscribeParams](),
	"resources/unsubscribe": reflect.TypeFor[mcp.UnsubscribeParams](), "completion/complete": reflect.TypeFor[mcp.CompleteParams](),
	"logging/setLevel": reflect.TypeFor[struct { // the SDK's own is deprecated, with the method
		Level string `json:"level"`
	}](),
}

// paramsFit refuses params that are not of the method's form.
func paramsFit(m message) error {
	form := paramsOf[m.Method]
	if form == nil || len(m.Params) == 0 || string(m.Params) == "null" {
		return nil
	}
	err := fit(m.Params, reflect.New(form).Interface())
	if err == nil {
		return nil
	}
	f := &fault{jsonrpc.CodeInvalidParams, http.StatusOK, fmt.Sprintf("the params are not those of %s", m.Method)}
	wrong := (*json.UnmarshalTypeError)(nil)
	if !errors.As(err, &wrong) {
		return f
	}
	if has, err := strconv.Unquote(wrong.Value); err == nil && has != "" { // the text from there on
		want := map[reflect.Kind]string{reflect.String: "a string", reflect.Bool: "true or false", reflect.Slice: "an array",
			reflect.Struct: "an object", reflect.Map: "an object", reflect.Pointer: "an object"}[wrong.Type.Kind()]
		f.text = fmt.Sprintf("%s has to be %s, not %s", strings.TrimSuffix("params."+wrong.Field, "."), cmp.Or(want, "a number"), tools.KindOfJSON([]byte(has)))
	}
	return f
}

// names refuses what its answer could not name: a string that was lifted out of the
// request, and an id that the SDK would answer as another (it cuts fractions off).
func names(msgs []message, r *tools.Request) error {
	for _, m := range msgs {
		if r.StandsIn(m.ID) || r.StandsIn(m.requestID) || r.StandsIn(m.progressToken) {
			return invalid("id, requestId and progressToken may have %d bytes", tools.LiftMin-2)
		}
		if len(m.ID) == 0 || tools.KindOfJSON(m.ID) == "a string" {
			continue
		}
		if n, err := strconv.ParseFloat(string(m.ID), 64); !isNumber(m.ID) || err != nil || n != math.Trunc(n) || math.Abs(n) > maxSafeInteger {
			return invalid("a request's id is a string, or a whole number of at most 9007199254740991")
		}
	}
	for _, m := range msgs {
		if err := paramsFit(m); err != nil && len(m.ID) > 0 {
			return err
		}
	}
	return nil
}

func isNumber(id json.RawMessage) bool {
	return len(id) > 0 && (id[0] == '-' || '0' <= id[0] && id[0] <= '9')
}

// writeError answers with a JSON-RPC error. An id that is nil is null, as that of a
// request which cannot be told (JSON-RPC 2.0 section 5).
func writeError(w http.ResponseWriter, status int, id json.RawMessage, code int, text string) {
	answer, _ := json.Marshal(struct {
		Version string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Error   jsonrpc.Error   `json:"error"`
	}{"2.0", id, jsonrpc.Error{Code: int64(code), Message: text}})
	w.Header().Set("Content-Type", "application/json")
	w.Header().Del("Content-Length")
	w.WriteHeader(status)
	_, _ = w.Write(append(answer, '\n'))
}

// refusal turns the plain text with which the SDK refuses a request into a JSON-RPC
// error, which an MCP client can read, and tells the log and the metrics of it.
type refusal struct {
	http.ResponseWriter
	server  *Server
	request *http.Request
	msgs    []message

	status int // of a refusal; 0 while there is none
	text   bytes.Buffer
}

// Unwrap is for http.ResponseController.
func (w *refusal) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush is for the SDK, which asks for http.Flusher.
func (w *refusal) Flush() {
	if w.status == 0 {
		_ = http.NewResponseController(w.ResponseWriter).Flush()
	}
}

func (w *refusal) WriteHeader(status int) {
	if status >= http.StatusBadRequest && strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") {
		w.status = status
		return
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *refusal) Write(p []byte) (int, error) {
	if w.status != 0 {
		return w.text.Write(p)
	}
	return w.ResponseWriter.Write(p)
}

// end answers a request that was refused.
func (w *refusal) end() {
	if w.status == 0 {
		return
	}
	text := strings.TrimSpace(w.text.String())
	// The SDK's own words for a method that it does not know.
	if len(w.msgs) == 1 && strings.HasPrefix(text, "JSON RPC not handled:") {
		switch m := w.msgs[0]; {
		case len(m.ID) == 0: // a notification, which has no answer
			w.ResponseWriter.Header().Del("Content-Type")
			w.ResponseWriter.WriteHeader(http.StatusAccepted)
			return
		case string(m.ID) != "null":
			writeError(w.ResponseWriter, http.StatusOK, m.ID, jsonrpc.CodeMethodNotFound, fmt.Sprintf("there is no method %q", m.Method))
			return
		}
	}
	// The SDK's text quotes the request, whose contents are not the log's.
	reason, code, told := "request", jsonrpc.CodeInvalidRequest, fmt.Sprintf("it is none of MCP's (status %d)", w.status)
	if w.status == http.StatusForbidden {
		reason, told = "host", "Host or Origin is another than this server's" // a name that was rebound to loopback
	}
	w.server.refused(w.request, reason, errors.New(told))
	writeError(w.ResponseWriter, w.status, idOf(w.msgs), code, text)
}

// idOf is the id of an only message, if it is one.
func idOf(msgs []message) json.RawMessage {
	if len(msgs) == 1 && (isNumber(msgs[0].ID) || bytes.HasPrefix(msgs[0].ID, []byte(`"`))) {
		return msgs[0].ID
	}
	return nil
}
