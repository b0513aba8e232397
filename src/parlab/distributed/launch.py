"""Run a function on n real processes, from a notebook cell, a script or a test.

The caller's side. `rank.py` is what every started process executes. Nothing here imports torch, so
a kernel that only launches ranks stays small.
"""

import importlib.util
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from parlab.distributed import rank as rank_side
from parlab.distributed.start import context, main_module_hidden, pickle_program
from parlab.units import require_int, require_number

MAX_RANKS = 64  # a process takes 0.1 GB and a core's share; price larger N instead
START_UP_S = 60.0  # importing torch on a busy machine; not charged to the caller's timeout
GRACE_S = 1.0  # for the cause to show after a rank has only reported that its peer is gone
POLL_S = 0.1  # how often rank 0's new lines are passed on

# What gloo says when the process at the other end has ended: a symptom, never the cause.
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|pair closure|(read|write) error",
    re.IGNORECASE,
)


class RankError(RuntimeError):
    """A rank failed. `rank` is its number; `exitcode` is set if the process ended by itself."""

    def __init__(self, message, rank, exitcode=None):
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode


class RankTimeout(RankError, TimeoutError):
    """The ranks in `ranks` did not return in time; `rank` is the first of them."""

    def __init__(self, message, ranks):
        super().__init__(message, ranks[0])
        self.ranks = ranks


def run_ranks(fn, n, *, args=(), timeout=60.0, show_all=False, start_method=None):
    """Call ``fn(*args)`` on n processes joined by torch.distributed and return the n values.

    In every process the gloo backend is ready: `dist.get_rank()` tells the processes apart. Each
    computes with one thread, since n ranks share this machine's cores. Lines printed by rank 0
    appear here as they come; what the other ranks print is hidden unless `show_all`.

    Parameters
    ----------
    fn : callable; may be defined in a notebook cell or in a script without a main guard.
    n : number of processes, 1 to 64.
    args : arguments of fn, the same for every rank.
    timeout : seconds the ranks may take once all of them have joined.
    show_all : print the other ranks' lines too, rank by rank, after the last one has returned.
    start_method : "forkserver" or "spawn"; None takes forkserver where the system has it. The
        first launch of a kernel loads torch once (1.5 s); later ones only fork (0.1 to 0.3 s).
        With spawn every rank of every launch loads torch anew.

    Errors
    ------
    RankError : a rank raised, or its process ended; carries the rank's own message and traceback.
    RankTimeout : ranks did not return in time; says which, and where each of them stands.
    TypeError, ValueError : a parameter or a returned value that cannot be used.
    In every case, KeyboardInterrupt included, all ranks have ended when the call is over.

    >>> def which_rank():
    ...     import torch.distributed as dist
    ...     return dist.get_rank() ** 2
    >>> run_ranks(which_rank, 3)
    [0, 1, 4]
    """
    _check_parameters(fn, n, timeout)
    program = pickle_program(fn, tuple(args))
    chosen = context(start_method)
    folder = Path(tempfile.mkdtemp(prefix="parlab-ranks-"))
    ranks = []
    try:
        for number in range(n):
            ranks.append(_start(chosen, number, n, folder, fn, program, timeout))
        values = _collect(ranks, timeout)
        if show_all:
            for rank in ranks[1:]:
                rank.relay(prefix=f"[rank {rank.number}] ")
        _release(ranks)
        return values
    finally:
        for rank in ranks:
            rank.end()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class _Rank:
    """The caller's view of one process."""

    number: int
    process: multiprocessing.process.BaseProcess
    connection: Connection
    folder: Path
    fn: object
    joined: bool = False
    done: bool = False
    value: object = None
    failure: Exception | None = None
    relayed: dict = field(default_factory=dict)

    def read(self):
        """Take in what the process reported, or that it has ended."""
        try:
            while not self.done and self.failure is None and self.connection.poll():
                self._accept(*self.connection.recv())
        except (EOFError, OSError):
            self._ended()
        else:
            if not self.done and self.failure is None and not self.process.is_alive():
                # Its last words may have arrived between the two checks.
                if self.connection.poll():
                    self.read()
                else:
                    self._ended()

    def _accept(self, kind, content):
        if kind == "joined":
            self.joined = True
        elif kind == "value":
            self._accept_value(content)
        elif kind == "unpicklable":
            self.failure = TypeError(
                f"fn returned a value on rank {self.number} that cannot be sent back: {content}; "
                "return numbers, strings, tensors, arrays or containers of these"
            )
        else:
            self.failure = RankError(rank_side.describe(self.number, content, self.fn), self.number)

    def _accept_value(self, content):
        try:
            self.value, self.done = pickle.loads(content), True
        except Exception as error:
            self.failure = TypeError(
                f"the value of rank {self.number} arrived but cannot be rebuilt here: {error}"
            )

    def _ended(self):
        self.process.join(GRACE_S)
        code = self.process.exitcode
        ended = f"exit code {code}"
        if code is not None and code < 0:
            ended = f"signal {signal.Signals(-code).name}"
        path = self.folder / f"{self.number}.log"
        log = path.read_text("utf-8", "replace").strip() if path.exists() else ""
        tail = "\n".join(["", "The end of what it wrote:", *log.splitlines()[-10:]]) if log else ""
        message = f"rank {self.number}'s process ended by {ended} before fn returned{tail}"
        self.failure = RankError(message, self.number, code)

    def relay(self, prefix="", final=True):
        """Pass on the complete new lines that the rank printed; all of them if `final`."""
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            path = self.folder / f"{self.number}.{name}"
            start = self.relayed.get(name, 0)
            if not path.exists() or path.stat().st_size == start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                new = file.read()
            if not final:
                new = new[: new.rfind(b"\n") + 1]
            self.relayed[name] = start + len(new)
            for line in new.decode("utf-8", "replace").splitlines(keepends=True):
                stream.write(prefix + line)
            stream.flush()

    def end(self):
        self.process.kill()
        self.process.join(GRACE_S)
        self.connection.close()


def _check_parameters(fn, n, timeout):
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}: pass the function itself")
    require_int("n", n, minimum=1, maximum=MAX_RANKS, why="each is a process of this machine")
    require_number("timeout", timeout, minimum=0, exclusive=True)
    if importlib.util.find_spec("torch") is None:
        raise ImportError("run_ranks starts torch.distributed processes: pip install torch")


def _start(chosen, number, n, folder, fn, program, timeout):
    ours, theirs = chosen.Pipe()
    process = chosen.Process(
        target=rank_side.main,
        args=(theirs, number, n, str(folder), program, dict(os.environ), timeout, START_UP_S),
        name=f"rank {number}",
    )
    with main_module_hidden():
        process.start()
    theirs.close()
    return _Rank(number, process, ours, folder, fn)


def _collect(ranks, timeout):
    deadline = time.monotonic() + START_UP_S + timeout
    all_joined = False
    try:
        while waiting := [rank for rank in ranks if not rank.done]:
            _read_ready(waiting, min(POLL_S, max(0.0, deadline - time.monotonic())))
            ranks[0].relay(final=False)
            if any(rank.failure for rank in ranks):
                raise _cause(ranks)
            if not all_joined and all(rank.joined for rank in ranks):
                all_joined, deadline = True, time.monotonic() + timeout
            if time.monotonic() > deadline + POLL_S:
                raise _timed_out([rank for rank in ranks if not rank.done], timeout)
    finally:
        ranks[0].relay()
    return [rank.value for rank in ranks]


def _release(ranks):
    """All have returned: let them leave the group in good order."""
    for rank in ranks:
        with suppress(OSError):  # it is gone already
            rank.connection.send("leave")
    for rank in ranks:
        rank.process.join(GRACE_S)


def _read_ready(ranks, seconds):
    by_handle = {rank.connection: rank for rank in ranks}
    by_handle |= {rank.process.sentinel: rank for rank in ranks}
    for rank in {by_handle[handle] for handle in wait(list(by_handle), seconds)}:
        rank.read()


def _cause(ranks):
    """The failure to show: a rank's own error or death rather than its peers' lost connections."""
    end_of_grace = time.monotonic() + GRACE_S
    while True:
        failures = [rank.failure for rank in ranks if rank.failure]
        own = [f for f in failures if not LOST_PEER.search(str(f)) or getattr(f, "exitcode", None)]
        waiting = [rank for rank in ranks if not rank.done and not rank.failure]
        left = end_of_grace - time.monotonic()
        if own or not waiting or left <= 0:
            return (own or failures)[0]
        _read_ready(waiting, left)


def _timed_out(stalled, timeout):
    stalled_numbers = [rank.number for rank in stalled]
    names = ", ".join(map(str, stalled_numbers))
    lines = [f"{'rank' if len(stalled) == 1 else 'ranks'} {names} did not return in {timeout:g} s"]
    if not all(rank.joined for rank in stalled):
        lines[0] += f" (nor join the others in {START_UP_S:g} s more)"
    end_of_grace = time.monotonic() + GRACE_S
    while not all(places := [rank_side.where(rank.folder, rank.number) for rank in stalled]):
        if time.monotonic() > end_of_grace:
            break
        time.sleep(POLL_S)
    return RankTimeout("\n".join(lines + [place for place in places if place]), stalled_numbers)
