// Package plan is what the smoke runner and the probe inside a container say
// to each other: JSON in, JSON out, the same for every engine.
package plan

// Where a container finds what the runner gives it.
const (
	Dir     = "/smoke"         // read-only: the probe, and the plan
	Probe   = "/smoke/probe"   // the static program of ./smoke/probe
	File    = "/smoke/plan"    // a Plan
	Fixture = "/smoke-fixture" // read-only: the fixture's files
)

// Plan is the work of one container.
type Plan struct {
	// Fixture is where the fixture is copied to, made writable for the
	// container's user; empty without one. Variables are expanded in it.
	Fixture string `json:"fixture,omitempty"`
	Steps   []Step `json:"steps"`
}

// Step is one command.
type Step struct {
	Argv []string `json:"argv"`
	// Env is added to the container's environment, or to nothing but the
	// kept variables when Clear is set.
	Env   []string `json:"env,omitempty"`
	Clear bool     `json:"clear,omitempty"`
	Keep  []string `json:"keep,omitempty"`
	// Dir is the working directory; the fixture, else the container's, when
	// empty. Variables are expanded in it and in Files.
	Dir       string   `json:"dir,omitempty"`
	Stdin     string   `json:"stdin,omitempty"`
	TimeoutMS int64    `json:"timeoutMS"`
	Files     []string `json:"files,omitempty"` // looked at after the command
}

// Report is what the probe prints when all steps are done, or one was not
// as its plan wants and the rest makes no sense.
type Report struct {
	Error string   `json:"error,omitempty"` // of the probe itself
	Steps []Result `json:"steps"`
}

// Result is what came of a step.
type Result struct {
	Exit       int        `json:"exit"` // -1 when it was killed
	TimedOut   bool       `json:"timedOut,omitempty"`
	DurationMS int64      `json:"durationMS"`
	Stdout     string     `json:"stdout,omitempty"`
	Stderr     string     `json:"stderr,omitempty"`
	Files      []FileInfo `json:"files,omitempty"`
}

// FileInfo is a file as the container's user sees it.
type FileInfo struct {
	Path    string `json:"path"`
	Missing bool   `json:"missing,omitempty"`
	Mode    string `json:"mode,omitempty"` // octal permissions with set-id and sticky bits: 0755
	UID     int    `json:"uid"`
	GID     int    `json:"gid"`
	Content string `json:"content,omitempty"` // of a small regular file
}
