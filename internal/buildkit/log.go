package buildkit

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// maxLog is the size in bytes above which a log is set aside at the next start.
const maxLog = 8 << 20

func (d *Daemon) openLog() (f *os.File, size int64, err error) {
	if info, err := os.Stat(d.Log()); err == nil && info.Size() > maxLog {
		os.Rename(d.Log(), d.Log()+".1")
	}
	f, err = os.OpenFile(d.Log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("opening the log of buildkitd: %w", err)
	}
	if size, err = f.Seek(0, io.SeekEnd); err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, size, nil
}

// tail is the last few lines that were logged after the offset, but for the
// frames of a stack trace (a function, and below it its file after a tab) and
// rootlesskit's word that its child ended.
func tail(path string, offset int64) string {
	data, err := os.ReadFile(path)
	if err != nil || int64(len(data)) <= offset {
		return "(nothing)"
	}
	var kept []string
	for _, line := range strings.Split(strings.TrimSpace(string(data[offset:])), "\n") {
		if strings.HasPrefix(line, "\t") {
			kept = kept[:max(0, len(kept)-1)]
			continue
		}
		if !strings.HasPrefix(line, "[rootlesskit:") || !strings.Contains(line, "exited") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept[max(0, len(kept)-4):], " / ")
}
