"""Run a learner's function in a process of its own, for a bounded time.

Why a new process, and not this one: an endless loop can be stopped in the same process by a signal
or a trace, but not one that catches every exception, a long call into C such as `time.sleep`, or
code on a system without such signals (Windows); and what takes all memory or calls `os._exit`
takes the notebook's kernel with it. Why not a fork, which would bring all of the notebook along:
a forked process may hang in a matrix product if a library's threads ran before (OpenMP on Linux,
Accelerate on macOS), and a right answer would be called endless. So a fresh Python is started,
0.2 s, and the function goes there by value (`by_value`), from a notebook as from a file.

The process ends itself when time is up, by a timer in C that no Python code can hold up, so nothing
is left behind even if the notebook's kernel is killed. It leaves where it stood, line by line.
"""

import contextlib
import faulthandler
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from parlab.exercises import by_value
from parlab.exercises.outcome import Outcome, Place, call, innermost

LIMIT_S = 5.0  # for all calls of one check; the reference solutions take 0.05 s
START_UP_S = 60.0  # for a new Python on a busy machine
KILLED_S = 2.0  # for the system to end a process that it was told to kill
MEMORY_LIMIT = 4 * 2**30  # bytes

CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from parlab.exercises.apart import answer_calls
answer_calls(sys.argv[2])
"""


def run_apart(function, calls, *, limit_s=LIMIT_S):
    """Call the function with each tuple of arguments and return an Outcome for each.

    The list is shorter where a call did not return: its last Outcome says why.

    Raises `by_value.CannotSend` for a function that depends on something of this process.

    >>> run_apart(divmod, [(7, 2)])[0].value
    (3, 1)
    """
    program = by_value.dumps(function)
    with tempfile.TemporaryDirectory(prefix="parlab-check-") as folder:
        folder = Path(folder)
        request = {"function": program, "calls": calls, "limit_s": limit_s}
        (folder / "request").write_bytes(pickle.dumps(request))
        ended = _run_child(folder, START_UP_S + limit_s)
        outcomes = _read_outcomes(folder / "outcomes")
        if len(outcomes) < len(calls):
            outcomes.append(_last_outcome(folder / "stack", ended))
    return outcomes


def answer_calls(folder):
    """What the new process does: answer the calls of a request, one by one."""
    folder = Path(folder)
    _limit_memory()
    request = pickle.loads((folder / "request").read_bytes())
    function = pickle.loads(request["function"])
    with open(folder / "stack", "w") as stack, open(folder / "outcomes", "wb") as outcomes:
        faulthandler.dump_traceback_later(request["limit_s"], exit=True, file=stack)
        for args in request["calls"]:
            outcomes.write(pickle.dumps(call(function, args)))
            outcomes.flush()
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # threads that the function has started do not keep the process alive


def _run_child(folder, seconds):
    """Return the exit code; None if the process had to be ended from here."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, json.dumps([*map(str, sys.path)]), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process):
    """End the process, and on POSIX whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    # Not without a limit: an interrupt at a bad moment of the wait before leaves its lock taken.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def _read_outcomes(path):
    outcomes = []
    if path.exists():
        with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                outcomes.append(pickle.load(file))
    return outcomes


def _last_outcome(path, ended):
    stack = path.read_text("utf-8", "replace") if path.exists() else ""
    if stack or ended is None:
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stack)  # the newest call first
        places = [Place(file, int(line), function) for file, line, function in frames]
        return Outcome("endless", place=innermost(places))
    if ended < 0:
        return Outcome("died", message=f"it was ended by {signal.Signals(-ended).name}")
    return Outcome("died", message=f"it ended with exit code {ended}")


def _limit_memory():
    """Make an endless list a MemoryError in this process, where the system can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        return
