package smoke

import (
	"cmp"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/loomcycle/loomcycle-images/internal/atomicfile"
)

// Status is what became of a case on an image.
type Status string

// The statuses.
const (
	Passed Status = "passed"
	Failed Status = "failed"
	NotRun Status = "not run"
)

// Result is one cell of the table.
type Result struct {
	Case     string  `json:"case"`
	Title    string  `json:"title"`
	Fault    int     `json:"fault,omitempty"`
	Image    string  `json:"image"`
	Platform string  `json:"platform"`
	Digest   string  `json:"digest"` // of the image's manifest
	Emulated bool    `json:"emulated,omitempty"`
	Status   Status  `json:"status"`
	Seconds  float64 `json:"seconds"`
	Message  string  `json:"message,omitempty"`
	Command  string  `json:"command,omitempty"`
	Output   string  `json:"output,omitempty"`
}

func (r *Result) key() string { return r.Case + " " + r.Image + " " + r.Platform }

func (r *Result) line() string {
	s := fmt.Sprintf("%s %s on %s, %s (%.1f s)", r.Status, r.Case, r.Image, r.where(), r.Seconds)
	if r.Status != Passed {
		s += ": " + r.Message
	}
	return s
}

func (r *Result) where() string {
	if r.Emulated {
		return r.Platform + " (emulated)"
	}
	return r.Platform
}

// Report is a whole run.
type Report struct {
	Started time.Time `json:"started"`
	Seconds float64   `json:"seconds"`
	Engine  string    `json:"engine,omitempty"`
	// Cases is how many the run had; there are fewer results when it was
	// interrupted.
	Cases       int      `json:"cases"`
	Interrupted bool     `json:"interrupted,omitempty"`
	Results     []Result `json:"results"`
	// Leaks are containers, volumes and processes that the run left behind.
	Leaks []string `json:"leaks,omitempty"`
}

func (r *Report) count(s Status) (n int) {
	for _, res := range r.Results {
		if res.Status == s {
			n++
		}
	}
	return n
}

// Err is nil when every case passed or was left out on purpose, and nothing
// leaked.
func (r *Report) Err() error {
	var errs []error
	if n := r.count(Failed); n > 0 {
		errs = append(errs, fmt.Errorf("%d of %d smoke cases failed", n, len(r.Results)))
	}
	if len(r.Leaks) > 0 {
		errs = append(errs, fmt.Errorf("the run left behind: %s", strings.Join(r.Leaks, ", ")))
	}
	return errors.Join(errs...)
}

// write prints the table and writes the report's files.
func (r *Report) write(w io.Writer, folder, summary string) error {
	errs := []error{r.Print(w)}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return errors.Join(append(errs, err)...)
	}
	text, err := json.MarshalIndent(r, "", "  ")
	errs = append(errs, err, atomicfile.Write(filepath.Join(folder, "report.json"), append(text, '\n'), 0o644))
	text, err = r.junit()
	errs = append(errs, err, atomicfile.Write(filepath.Join(folder, "junit.xml"), text, 0o644))
	if summary != "" {
		f, err := os.OpenFile(summary, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, r.markdown(f), f.Close())
	}
	return errors.Join(errs...)
}

// column is one variant; an emulated one has a star.
type column struct{ image, platform string }

func (r *Report) columns() (cols []column, heads []string) {
	for _, res := range r.Results {
		c := column{res.Image, res.Platform}
		i := slices.Index(cols, c)
		if i < 0 {
			i = len(cols)
			cols = append(cols, c)
			heads = append(heads, strings.TrimPrefix(res.Platform, "linux/"))
		}
		if res.Emulated && !strings.HasSuffix(heads[i], "*") {
			heads[i] += "*"
		}
	}
	// The columns of an image stand together, whatever case came first.
	first := func(name string) int { return slices.IndexFunc(cols, func(c column) bool { return c.image == name }) }
	order := make([]int, len(cols))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(first(cols[a].image), first(cols[b].image)), cmp.Compare(cols[a].platform, cols[b].platform))
	})
	var sorted []column
	var names []string
	for _, i := range order {
		sorted, names = append(sorted, cols[i]), append(names, heads[i])
	}
	return sorted, names
}

// short is an image's name as the table has it.
func short(image string) string {
	return strings.TrimPrefix(strings.TrimPrefix(image, "loomcycle-"), "sandbox-")
}

// rows are the table's: case, cells.
func (r *Report) rows(cols []column, cell func(*Result) string) [][]string {
	var rows [][]string
	at := map[string]int{}
	for i := range r.Results {
		res := &r.Results[i]
		n, ok := at[res.Case]
		if !ok {
			n = len(rows)
			at[res.Case] = n
			rows = append(rows, append([]string{res.Case}, make([]string, len(cols))...))
		}
		rows[n][1+slices.Index(cols, column{res.Image, res.Platform})] = cell(res)
	}
	return rows
}

// slowest is how many cases the report lists by their time.
const slowest = 5

// table is the cases by the variants, an image's name above its platforms:
// for the whole family less than 100 characters wide.
func (r *Report) table(w io.Writer) error {
	cols, heads := r.columns()
	rows := r.rows(cols, func(res *Result) string {
		switch {
		case res.Status == NotRun:
			return "no run"
		case res.Status == Failed:
			return "FAILED"
		case res.Seconds < 9.95:
			return fmt.Sprintf("ok %.1f", res.Seconds)
		}
		return fmt.Sprintf("ok %.0f", res.Seconds)
	})
	name, width := len("CASE"), make([]int, len(cols))
	for _, row := range append(rows, append([]string{""}, heads...)) {
		name = max(name, len(row[0]))
		for i, cell := range row[1:] {
			width[i] = max(width[i], len(cell))
		}
	}
	var top strings.Builder
	for i, c := range cols {
		if i > 0 && cols[i-1].image == c.image {
			continue
		}
		last := i
		span := width[i]
		for last+1 < len(cols) && cols[last+1].image == c.image {
			last++
			span += 1 + width[last]
		}
		width[last] += max(0, len(short(c.image))-span)
		fmt.Fprintf(&top, "  %-*s", max(span, len(short(c.image))), short(c.image))
	}
	line := func(first string, cells []string) {
		var text strings.Builder
		fmt.Fprintf(&text, "%-*s", name, first)
		for i, cell := range cells {
			gap := " "
			if i == 0 || cols[i-1].image != cols[i].image {
				gap = "  "
			}
			fmt.Fprintf(&text, "%s%-*s", gap, width[i], cmp.Or(cell, "-"))
		}
		fmt.Fprintln(w, strings.TrimRight(text.String(), " "))
	}
	fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-*s%s", name, "", top.String()), " "))
	line("CASE", heads)
	for _, row := range rows {
		line(row[0], row[1:])
	}
	_, err := fmt.Fprintln(w, "ok: passed, in so many seconds; -: no case of this image, platform or profile")
	return err
}

// Print writes the table, what failed and the slowest cases.
func (r *Report) Print(w io.Writer) error {
	if len(r.Results) > 0 {
		if err := r.table(w); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(r.Results, func(res Result) bool { return res.Emulated }) {
		fmt.Fprintln(w, "*: under QEMU, the cases that are marked for it")
	}
	for _, res := range r.Results {
		if res.Status != Failed {
			continue
		}
		fmt.Fprintf(w, "\nFAILED %s: %s\n  image    %s %s %s\n", res.Case, res.Title, res.Image, res.where(), res.Digest)
		if res.Command != "" {
			fmt.Fprintf(w, "  command  %s\n", indent(res.Command, "           "))
		}
		fmt.Fprintf(w, "  problem  %s\n", indent(res.Message, "           "))
		if res.Output != "" {
			fmt.Fprintf(w, "  output   %s\n", indent(tail(res.Output, 40), "           "))
		}
	}
	for reason, n := range r.reasons() {
		fmt.Fprintf(w, "\nnot run, %d: %s\n", n, reason)
	}
	for i, res := range r.slowest() {
		if i == 0 {
			fmt.Fprintln(w, "\nslowest:")
		}
		fmt.Fprintf(w, "  %5.1f s  %s on %s, %s\n", res.Seconds, res.Case, short(res.Image), res.where())
	}
	if r.Interrupted {
		fmt.Fprintf(w, "INTERRUPTED after %d of %d cases\n", len(r.Results), r.Cases)
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d not run in %.0f s with %s\n",
		r.count(Passed), r.count(Failed), r.count(NotRun), r.Seconds, cmp.Or(r.Engine, "no engine"))
	for _, l := range r.Leaks {
		fmt.Fprintf(w, "LEAKED %s\n", l)
	}
	return nil
}

// reasons are why cases were not run, in the table's order, and how many each.
func (r *Report) reasons() iter.Seq2[string, int] {
	return func(yield func(string, int) bool) {
		n, order := map[string]int{}, []string{}
		for _, res := range r.Results {
			if res.Status != NotRun {
				continue
			}
			if n[res.Message]++; n[res.Message] == 1 {
				order = append(order, res.Message)
			}
		}
		for _, reason := range order {
			if !yield(reason, n[reason]) {
				return
			}
		}
	}
}

func (r *Report) slowest() []Result {
	s := slices.Clone(r.Results)
	slices.SortStableFunc(s, func(a, b Result) int { return cmp.Compare(b.Seconds, a.Seconds) })
	return s[:min(slowest, len(s))]
}

func indent(s, by string) string {
	return strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n"+by)
}

// tail is the last lines of a text.
func tail(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	if len(lines) <= n {
		return strings.Join(lines, "\n")
	}
	return fmt.Sprintf("[%d lines above]\n%s", len(lines)-n, strings.Join(lines[len(lines)-n:], "\n"))
}

// markdown is the summary that a GitHub run shows.
func (r *Report) markdown(w io.Writer) error {
	cols, heads := r.columns()
	for i, c := range cols {
		heads[i] = short(c.image) + " " + heads[i]
	}
	fmt.Fprintf(w, "### Smoke: %d passed, %d failed, %d not run\n\n| case | %s |\n| --- |%s\n", r.count(Passed), r.count(Failed), r.count(NotRun),
		strings.Join(heads, " | "), strings.Repeat(" --- |", len(heads)))
	for _, row := range r.rows(cols, func(res *Result) string {
		mark := map[Status]string{Passed: "✅", Failed: "❌", NotRun: "⚪"}[res.Status]
		return fmt.Sprintf("%s %.1f s", mark, res.Seconds)
	}) {
		fmt.Fprintf(w, "| %s |\n", strings.Join(row, " | "))
	}
	for _, res := range r.Results {
		if res.Status == Failed {
			fmt.Fprintf(w, "\n**%s** on %s, %s, `%s`: %s\n", res.Case, res.Image, res.where(), res.Digest, res.Message)
			fence := "```"
			for strings.Contains(res.Command+res.Output, fence) {
				fence += "`"
			}
			fmt.Fprintf(w, "\n%s\n$ %s\n%s\n%s\n", fence, res.Command, tail(res.Output, 40), fence)
		}
	}
	for reason, n := range r.reasons() {
		fmt.Fprintf(w, "\n%d not run: %s\n", n, reason)
	}
	for _, l := range r.Leaks {
		fmt.Fprintf(w, "\n**leaked**: %s\n", l)
	}
	if r.Interrupted {
		fmt.Fprintf(w, "\n**interrupted** after %d of %d cases\n", len(r.Results), r.Cases)
	}
	for i, res := range r.slowest() {
		fmt.Fprintf(w, "%s%s on %s, %s %.1f s", []string{"\nSlowest: ", "; "}[min(i, 1)], res.Case, short(res.Image), res.where(), res.Seconds)
	}
	_, err := fmt.Fprintf(w, "\n\n%.0f s with %s\n", r.Seconds, cmp.Or(r.Engine, "no engine"))
	return err
}

// The JUnit XML that CI systems read: a suite for each variant.
type junitSuites struct {
	XMLName xml.Name     `xml:"testsuites"`
	Suites  []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"time,attr"` // seconds
	Stamp    string      `xml:"timestamp,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Name    string        `xml:"name,attr"`
	Class   string        `xml:"classname,attr"`
	Time    string        `xml:"time,attr"`
	Failure *junitFailure `xml:"failure,omitempty"`
	Skipped *junitFailure `xml:"skipped,omitempty"`
}

type junitFailure struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

func (r *Report) junit() ([]byte, error) {
	var out junitSuites
	cols, _ := r.columns()
	for _, c := range cols {
		s := junitSuite{Name: c.image + " " + c.platform, Stamp: r.Started.Format("2006-01-02T15:04:05")}
		var total float64
		for _, res := range r.Results {
			if (column{res.Image, res.Platform}) != c {
				continue
			}
			jc := junitCase{Name: res.Case, Class: c.image + "." + strings.ReplaceAll(c.platform, "/", "-"), Time: fmt.Sprintf("%.3f", res.Seconds)}
			switch res.Status {
			case Failed:
				s.Failures++
				jc.Failure = &junitFailure{printable(res.Message), printable(fmt.Sprintf("%s\n$ %s\n%s", res.Digest, res.Command, res.Output))}
			case NotRun:
				s.Skipped++
				jc.Skipped = &junitFailure{Message: printable(res.Message)}
			}
			s.Tests++
			total += res.Seconds
			s.Cases = append(s.Cases, jc)
		}
		s.Time = fmt.Sprintf("%.3f", total)
		out.Suites = append(out.Suites, s)
	}
	if len(r.Leaks) > 0 || r.Interrupted {
		f := &junitFailure{Message: "the run was interrupted"}
		if len(r.Leaks) > 0 {
			f = &junitFailure{Message: "the run left something behind", Text: printable(strings.Join(r.Leaks, "\n"))}
		}
		out.Suites = append(out.Suites, junitSuite{Name: "the run", Tests: 1, Failures: 1, Time: fmt.Sprintf("%.3f", r.Seconds),
			Stamp: r.Started.Format("2006-01-02T15:04:05"), Cases: []junitCase{{Name: "end", Class: "smoke", Time: "0", Failure: f}}})
	}
	text, err := xml.MarshalIndent(out, "", "  ")
	return append([]byte(xml.Header), append(text, '\n')...), err
}

// printable drops what XML cannot hold: escape sequences of colour, say.
func printable(s string) string {
	return strings.Map(func(c rune) rune {
		if c < ' ' && c != '\n' && c != '\t' {
			return -1
		}
		return c
	}, s)
}
