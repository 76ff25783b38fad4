// Package bench measures the pipeline against the usual way of doing its work,
// both in one run on one machine, and writes the figures into the documents.
package bench

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// Row is one line of a table.
type Row struct{ What, Figure, Goal string }

// Table renders rows as Markdown.
func Table(rows []Row) string {
	var b strings.Builder
	b.WriteString("| what | figure | goal |\n| --- | --- | --- |\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", r.What, r.Figure, r.Goal)
	}
	return b.String()
}

// Record puts text between the marks <!-- NAME --> and <!-- /NAME --> of a
// document.
func Record(file, name, text string) error {
	doc, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	open, end := "<!-- "+name+" -->", "<!-- /"+name+" -->"
	marks := regexp.MustCompile(`(?s)` + regexp.QuoteMeta(open) + `.*` + regexp.QuoteMeta(end))
	if !marks.Match(doc) {
		return fmt.Errorf("%s has no place for %s: add the lines %s and %s", file, name, open, end)
	}
	text = open + "\n" + strings.TrimSpace(text) + "\n" + end
	return os.WriteFile(file, bytes.TrimLeft(marks.ReplaceAllLiteral(doc, []byte(text)), "\n"), 0o644)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
