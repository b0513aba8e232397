"""What one process of `run_ranks` executes, and how it reports to the caller."""

import faulthandler
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def main(connection, rank, n, folder, program, environment, timeout, start_up):
    """Join the process group, call the function, report its value or error, wait to be released."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's to handle
    os.environ.update(environment)
    folder = Path(folder)
    _capture_output(folder, rank)
    released = threading.Event()
    threading.Thread(target=_watch_caller, args=(connection, folder, released), daemon=True).start()
    outcome = _outcome(connection, rank, n, folder, program, timeout, start_up)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(outcome)
    # Nobody leaves before all have returned: an early leaver would look like a lost peer.
    released.wait()
    _leave_group()


def _capture_output(folder, rank):
    """Prints go to one file, what libraries write past Python (gloo's notices) to another."""
    log = open(folder / f"{rank}.log", "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = open(folder / f"{rank}.out", "w", 1, encoding="utf-8", newline="\n")  # noqa: SIM115
    sys.stderr = open(folder / f"{rank}.err", "w", 1, encoding="utf-8", newline="\n")  # noqa: SIM115


def _watch_caller(connection, folder, released):
    """End this process as soon as the caller closes the connection or dies, however it dies."""
    try:
        connection.recv()
        released.set()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _outcome(connection, rank, n, folder, program, timeout, start_up):
    try:
        fn, args = pickle.loads(program)
        _join_group(rank, n, folder, timeout + start_up)
        connection.send(("joined", None))
        with open(folder / f"{rank}.stack", "w", encoding="utf-8") as stack:
            faulthandler.dump_traceback_later(timeout, file=stack)
            try:
                value = fn(*args)
            finally:
                faulthandler.cancel_dump_traceback_later()
    except BaseException as error:  # SystemExit is a failure of the rank too
        return "error", _portable(error)
    try:
        return "value", _dumps(value)
    except Exception as error:
        return "unpicklable", f"{type(error).__name__}: {error}"


def _join_group(rank, n, folder, timeout):
    if sys.platform in LOOPBACK:
        # All ranks are on this machine: no host name to resolve, no firewall or VPN in the way.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    if sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # torch's Windows wheels are built without it
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A fresh file rather than a port: nothing to collide with, nothing left by an earlier run.
    store = dist.FileStore(str(folder / "store"), n)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout)
    )


def _leave_group():
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _dumps(value):
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    return dumps(value)


def _portable(error):
    """A traceback whose source lines the caller looks up: only a notebook knows its own cells."""
    report = traceback.TracebackException.from_exception(error, lookup_lines=False)
    del report.stack[0]  # the frame of _outcome
    try:
        return _dumps(report)
    except Exception:
        return "".join(report.format())


def describe(rank, report, fn):
    """The first line names rank, type and message; the traceback follows."""
    if isinstance(report, bytes):
        report = pickle.loads(report)
        _restore_file_names(report, fn)
        summary = "".join(report.format_exception_only()).strip()
        trace = "".join(report.format()).rstrip()
    else:
        summary, trace = report.strip().splitlines()[-1], report.rstrip()
    return f"rank {rank}: {summary}\n\n{trace}"


def _restore_file_names(report, fn):
    """Undo cloudpickle's anonymous file name of fn and the functions it uses: shows their lines."""
    while report is not None:
        for frame in report.stack:
            if frame.filename == "<dynamic-code>":
                known = {getattr(fn, "__name__", ""): fn, **getattr(fn, "__globals__", {})}
                code = getattr(known.get(frame.name), "__code__", None)
                frame.filename = getattr(code, "co_filename", frame.filename)
        report = report.__cause__ or report.__context__


def where(folder, rank):
    """One line that tells where a stalled rank stands, outermost function first; "" if unknown."""
    path = Path(folder) / f"{rank}.stack"
    threads = path.read_text("utf-8", "replace").split("\n\n") if path.exists() else []
    for thread in threads:
        calls = re.findall(r'^  File ".*", line (\d+) in (.*)$', thread, re.MULTILINE)
        names = [name for _, name in calls]
        if "_outcome" in names:
            inside = reversed(calls[: names.index("_outcome")])
            return f"rank {rank} stands in " + " > ".join(f"{f} (line {i})" for i, f in inside)
    return ""
