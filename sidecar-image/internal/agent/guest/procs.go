package guest

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// procs starts, reaps and kills the container's processes, and knows which
// exec each belongs to.
//
// A process may leave its parent (double fork), its group and session (setsid)
// and its environment, but not its hard resource limits: without
// CAP_SYS_RESOURCE they can only be lowered. Two that nothing meets serve as a mark,
// and prlimit(2) reads them back: of RLIMIT_RSS, without effect since Linux 2.4
// (getrlimit(2)), each exec has one byte less than the exec before, and of
// RLIMIT_FSIZE, of which it has exabytes, one byte more. So no process can take the
// mark of another exec, be it a later or an earlier one. Whoever lowers a limit has
// no exec's mark, and dies with whichever is killed first.
//
// The agent lowers its own RLIMIT_RSS before it forks, which it could not with a
// limit that has to rise: it sets RLIMIT_FSIZE of the child, which is traced and
// therefore stopped at its execve(2), before it does anything. Where it may not trace
// (gVisor lets no undumpable process), or has a limit of file sizes, the mark is
// RLIMIT_RSS alone; a process can then take that of an exec that was started later.
//
// A process may lower the agent's limits too (prlimit(2) asks for the same uid and no
// more), and so take the marks away. From then on nobody can say which exec a
// process is of, and all of the session's die with the first that is killed.
type procs struct {
	mu      sync.Mutex
	base    uint64 // above every mark of RLIMIT_RSS
	last    uint64 // execs started so far
	marks   bool   // the kernel has such a limit
	pairs   bool   // and RLIMIT_FSIZE is the other half
	traced  bool   // a child was
	lost    bool   // they were lowered by another than us
	waiters map[int]chan waited
	peaks   map[uint64]int64 // bytes, of the largest process that has ended, by exec
	end     func()           // ends the container, and with it every process
}

const (
	sizeBase = 1 << 61 // below every mark of RLIMIT_FSIZE
	// startLimit is what a bash has to be started: a process of the session can stop
	// it on the way to its execve, and the agent with it.
	startLimit = 10 * time.Second
)

type waited struct {
	status syscall.WaitStatus
	maxRSS int64 // bytes
}

func newProcs(end func()) *procs {
	p := &procs{waiters: map[int]chan waited{}, peaks: map[uint64]int64{}, base: 1 << 62, end: end}
	var lim unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_RSS, nil, &lim); err == nil {
		p.base, p.marks = min(p.base, lim.Max), true
	}
	p.pairs = p.marks && unix.Prlimit(0, unix.RLIMIT_FSIZE, nil, &lim) == nil && lim.Max == unix.RLIM_INFINITY
	return p
}

// start forks with the next mark and returns it with the pid and the channel
// that gets the exit status.
func (p *procs) start(path string, argv []string, attr *syscall.ProcAttr) (pid int, id uint64, done chan waited, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id = p.last + 1
	if p.marks {
		mark := p.base - id
		// A child inherits the limits of its parent, so lowering our own leaves no
		// moment in which the child is unmarked.
		if err := unix.Prlimit(0, unix.RLIMIT_RSS, &unix.Rlimit{Cur: mark, Max: mark}, nil); err != nil {
			if p.last == 0 {
				p.marks, p.pairs = false, false
			} else {
				p.lost = true
			}
		}
	}
	p.last = id
	defer time.AfterFunc(startLimit, p.end).Stop()
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	attr.Sys.Ptrace = p.pairs
	pid, err = syscall.ForkExec(path, argv, attr)
	if p.pairs && !p.traced && (err == syscall.EPERM || err == syscall.EACCES || err == syscall.ENOSYS) {
		attr.Sys.Ptrace = false
		if pid, err = syscall.ForkExec(path, argv, attr); err == nil {
			p.pairs = false
		}
	}
	if err != nil {
		return 0, 0, nil, err
	}
	done = make(chan waited, 1)
	over := false
	if p.pairs {
		p.traced = true
		over = p.release(pid, id, done)
	}
	if p.marks {
		// The limit is never raised, so if it still is the mark the child has got it.
		var lim unix.Rlimit
		if unix.Prlimit(0, unix.RLIMIT_RSS, nil, &lim) != nil || lim.Max != p.base-id {
			p.lost = true
		}
	}
	if over {
		return pid, id, done, nil
	}
	p.waiters[pid], p.peaks[id] = done, 0
	// When memory runs out the kernel should take a command, never the agent.
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("800"), 0)
	return pid, id, done, nil
}

// release gives a child that is stopped at its execve the other half of its mark and
// lets it run. It says whether the child is dead instead, and done has been told: others
// of the session may send it any signal at any time.
func (p *procs) release(pid int, id uint64, done chan<- waited) (over bool) {
	marked := false
	for {
		var ws syscall.WaitStatus
		var ru syscall.Rusage
		_, err := syscall.Wait4(pid, &ws, 0, &ru)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil || !ws.Stopped():
			done <- waited{ws, ru.Maxrss * 1024}
			return true
		case !marked:
			mark := uint64(sizeBase) + id
			if err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: mark, Max: mark}, nil); err != nil && err != syscall.ESRCH {
				p.lost = true
			}
			marked = true
		}
		if sig := ws.StopSignal(); sig != syscall.SIGTRAP {
			_ = syscall.PtraceCont(pid, int(sig)) // on its way to the stop
		} else if syscall.PtraceDetach(pid) == nil {
			return false
		}
	}
}

// reap collects every exited child, ours and adopted.
func (p *procs) reap() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		// Looked at first: the mark goes with the process.
		var si unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &si, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err == unix.EINTR {
			continue
		}
		// siginfo_t of SIGCHLD has the pid after three ints and a gap (sigaction(2), 64 bits).
		pid := int(*(*int32)(unsafe.Add(unsafe.Pointer(&si), 16)))
		if err != nil || pid <= 0 {
			return
		}
		var lim unix.Rlimit
		marked := p.marks && !p.lost && unix.Prlimit(pid, unix.RLIMIT_RSS, nil, &lim) == nil
		var ws syscall.WaitStatus
		var ru syscall.Rusage
		if got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, &ru); err == syscall.EINTR {
			continue
		} else if err != nil || got != pid {
			return
		}
		rss := ru.Maxrss * 1024
		if peak, ok := p.peaks[p.base-lim.Max]; ok && marked {
			p.peaks[p.base-lim.Max] = max(peak, rss)
		}
		if ch := p.waiters[pid]; ch != nil {
			delete(p.waiters, pid)
			ch <- waited{ws, rss}
		}
	}
}

// peak is the memory of the largest process of an exec that has ended, in bytes: those too
// that its shell did not wait for. It is asked for once, at the end.
func (p *procs) peak(id uint64) int64 {
	p.reap() // what was killed just now
	p.mu.Lock()
	defer p.mu.Unlock()
	defer delete(p.peaks, id)
	return p.peaks[id]
}

// members lists the live processes of exec id, and those with no known mark;
// when the marks are lost all but the agent's own.
func (p *procs) members(id uint64, leader int) ([]int, error) {
	all, err := pids()
	p.mu.Lock() // after the look: what was seen has its whole mark, and is counted
	known := procs{base: p.base, last: p.last, marks: p.marks, pairs: p.pairs, lost: p.lost}
	p.mu.Unlock()
	var out []int
	self := os.Getpid()
	for _, pid := range all {
		if pid == self {
			continue
		}
		state, ppid, pgrp, session := stat(pid)
		if state == 0 || state == 'Z' || state == 'X' {
			continue
		}
		if !known.marks {
			// A kernel that has no such limit leaves us the session and group.
			if session == leader || pgrp == leader || ppid == leader {
				out = append(out, pid)
			}
			continue
		}
		var rss, size unix.Rlimit
		if unix.Prlimit(pid, unix.RLIMIT_RSS, nil, &rss) == nil && unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &size) == nil && known.mine(rss.Max, size.Max, id) {
			out = append(out, pid)
		}
	}
	return out, err
}

// mine tells whether a process with these limits is of exec id, or of none that
// was started.
func (p *procs) mine(rss, size, id uint64) bool {
	if rss >= p.base {
		return false // the agent's own, which were started with its first limit
	}
	of := p.base - rss
	whole := of <= p.last && (!p.pairs || size == sizeBase+of)
	return p.lost || of == id || !whole
}

// kill ends every process of an exec and returns when none is left, or after
// limit. An agent that cannot look for them, because one of them has lowered its
// limit of open files, ends the container.
func (p *procs) kill(id uint64, leader int, limit time.Duration) {
	for clean, round, end := 0, 0, time.Now().Add(limit); clean < 2 && time.Now().Before(end); round++ {
		victims, err := p.members(id, leader)
		if err != nil {
			p.end()
			return
		}
		if len(victims) == 0 {
			clean++
			continue
		}
		clean = 0
		if round >= 3 {
			// They fork faster than they die: stop them all first.
			for _, pid := range victims {
				_ = syscall.Kill(pid, syscall.SIGSTOP)
			}
			victims, _ = p.members(id, leader)
		}
		for _, pid := range victims {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(time.Millisecond) // a killed process needs a moment to be gone
	}
}

// forward passes a signal to every process and waits until they are gone, or
// until end. The bridge of a second connection is let be: it carries what the others
// say meanwhile, and they would be killed with it.
func (p *procs) forward(sig syscall.Signal, end time.Time) {
	for ; time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		alive := false
		all, _ := pids()
		for _, pid := range all {
			var rss unix.Rlimit
			if p.marks && unix.Prlimit(pid, unix.RLIMIT_RSS, nil, &rss) == nil && rss.Max >= p.base {
				continue
			}
			if state, _, _, _ := stat(pid); pid != os.Getpid() && state != 'Z' && state != 0 {
				alive = true
				if sig != 0 {
					_ = syscall.Kill(pid, sig)
				}
			}
		}
		if !alive {
			return
		}
		sig = 0
	}
}

func pids() ([]int, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	out := make([]int, 0, len(names))
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			out = append(out, pid)
		}
	}
	return out, err
}

// stat reads what proc_pid_stat(5) says after the command's name; state is 0
// when the process is gone, and a question mark when it cannot be told.
func stat(pid int) (state byte, ppid, pgrp, session int) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ESRCH):
		return 0, 0, 0, 0
	case err != nil:
		return '?', 0, 0, 0
	}
	s := string(b)
	// The name may hold spaces and parentheses, chosen by the process.
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 4 {
		return 0, 0, 0, 0
	}
	ppid, _ = strconv.Atoi(f[1])
	pgrp, _ = strconv.Atoi(f[2])
	session, _ = strconv.Atoi(f[3])
	return f[0][0], ppid, pgrp, session
}

// oomKills reads how many processes of the container the kernel has killed for
// memory, from cgroup v2 or v1; 0 where neither is visible.
func oomKills() int64 {
	for _, path := range []string{"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"} {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, "oom_kill "); ok {
				n, _ := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
				return n
			}
		}
	}
	return 0
}
