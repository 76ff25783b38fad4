package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	exact "github.com/segmentio/encoding/json"

	"github.com/loomcycle/loomcycle-images/sidecar-image/internal/tools"
)

// maxSafeInteger is the largest whole number that every JSON parser keeps (RFC 8259
// section 6).
const maxSafeInteger = 1<<53 - 1

// message is what the HTTP layer looks at in a JSON-RPC message. The SDK
// parses it for real.
type message struct {
	Method string          `json:"method"`
	ID     json.RawMessage `json:"id"`
	Params struct {
		RequestID json.RawMessage `json:"requestId"`
		Meta      struct {
			ProgressToken json.RawMessage `json:"progressToken"`
		} `json:"_meta"`
	} `json:"params"`
}

// maxBatch is the most messages of a batch: each is held until the last is answered.
const maxBatch = 100

// messages are those of a body: one, or a batch's. What is no message is the SDK's to
// refuse.
func messages(body []byte) ([]message, error) {
	if !bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("[")) {
		if !json.Valid(body) {
			return make([]message, 1), nil
		}
		return []message{parse(body)}, nil
	}
	var batch []message
	elements := json.NewDecoder(bytes.NewReader(body))
	_, _ = elements.Token() // the bracket
	for elements.More() {
		var element json.RawMessage
		if elements.Decode(&element) != nil {
			break
		}
		if len(batch) == maxBatch {
			return nil, fmt.Errorf("a batch may have %d messages", maxBatch)
		}
		batch = append(batch, parse(element))
	}
	return batch, nil
}

// parse matches names as the SDK does. The text is valid, and so of bounded depth.
func parse(text []byte) (m message) {
	_, _ = exact.Parse(text, &m, exact.DontMatchCaseInsensitiveStructFields)
	return m
}

// names refuses what its answer could not name: a string that was lifted out of the
// request, and a number that the SDK would answer as another (it cuts fractions off).
func names(msgs []message, r *tools.Request) error {
	for _, m := range msgs {
		if r.StandsIn(m.ID) || r.StandsIn(m.Params.RequestID) || r.StandsIn(m.Params.Meta.ProgressToken) {
			return fmt.Errorf("id, requestId and progressToken may have %d bytes", tools.LiftMin-2)
		}
		if !isNumber(m.ID) {
			continue // the SDK refuses what is neither a string nor a number
		}
		if n, err := strconv.ParseFloat(string(m.ID), 64); err != nil || n != math.Trunc(n) || math.Abs(n) > maxSafeInteger {
			return errors.New("a request's id is a string, or a whole number of at most 9007199254740991")
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
	body    []byte
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
	switch {
	case w.status == http.StatusForbidden:
		reason, told = "host", "Host or Origin is another than this server's" // a name that was rebound to loopback
	case !json.Valid(w.body):
		code, told = jsonrpc.CodeParseError, "the body is not JSON"
	}
	w.server.refused(w.request, reason, errors.New(told))
	var id json.RawMessage
	if len(w.msgs) == 1 && (isNumber(w.msgs[0].ID) || bytes.HasPrefix(w.msgs[0].ID, []byte(`"`))) {
		id = w.msgs[0].ID
	}
	writeError(w.ResponseWriter, w.status, id, code, text)
}
