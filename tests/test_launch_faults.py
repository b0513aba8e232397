"""Ranks raise, exit, stall or are killed, or the caller is: the cause is shown and none stay."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from parlab.distributed.launch import RankError, RankTimeout, run_ranks

if sys.platform == "win32":
    pytest.skip("processes are looked at with ps", allow_module_level=True)


def running(*selection):
    """Process ids that `ps` finds for the selection and that are no zombies."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines()]
    key, wanted = selection
    column = {"pid": 0, "group": 1}[key]
    return [
        int(row[0]) for row in rows if int(row[column]) in wanted and not row[2].startswith("Z")
    ]


def assert_none_left(key, wanted, within_s=10):
    deadline = time.monotonic() + within_s
    while left := running(key, wanted):
        assert time.monotonic() < deadline, f"still running after {within_s} s: {left}"
        time.sleep(0.1)


def faulty(fault, at_rank, folder):
    """One rank fails, the others wait for it in a collective; all note their process ids."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == at_rank:
        if fault == "raise":
            raise ValueError("boom")
        if fault == "exit":
            os._exit(3)
        if fault == "exit long after its connections":
            dist.destroy_process_group()
            time.sleep(0.5)
            os._exit(3)
        if fault == "exit without an error":
            os._exit(0)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "abort":
            os.write(2, b"terminate called in a library\n")
            os.abort()
        if fault == "stall":
            time.sleep(1000)
        if fault == "stall in a loop":
            while True:
                pass
    dist.all_reduce(torch.ones(10))


@pytest.mark.parametrize(
    ("fault", "at_rank", "message", "exitcode"),
    [
        ("raise", 1, "rank 1: ValueError: boom\n", None),
        ("raise", 0, "rank 0: ValueError: boom\n", None),
        ("exit", 2, "rank 2's process ended by exit code 3 before fn returned", 3),
        ("exit", 0, "rank 0's process ended by exit code 3 before fn returned", 3),
        ("exit without an error", 1, "rank 1's process ended by exit code 0 before fn", 0),
        ("exit long after its connections", 1, "rank 1's process ended by exit code 3", 3),
        ("kill", 1, "rank 1's process ended by signal SIGKILL before fn returned", -9),
        ("abort", 1, "rank 1's process ended by signal SIGABRT", -6),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_failing_rank_is_the_one_that_is_shown(fault, at_rank, message, exitcode, tmp_path):
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(faulty, 3, args=(fault, at_rank, str(tmp_path)), timeout=40)
    assert str(caught.value).startswith(message)
    assert caught.value.rank == at_rank and caught.value.exitcode == exitcode
    assert time.monotonic() - started < 30, "the caller waited for the timeout"
    assert_none_left("pid", {int(path.read_text()) for path in tmp_path.iterdir()})


def test_the_traceback_leads_to_the_line_that_raised(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(faulty, 2, args=("raise", 1, str(tmp_path)))
    assert 'raise ValueError("boom")' in str(caught.value)
    assert "_outcome" not in str(caught.value), "the launcher's own frames are no help"


def test_the_last_words_of_a_library_are_shown_with_the_death(tmp_path):
    with pytest.raises(RankError, match="terminate called in a library"):
        run_ranks(faulty, 2, args=("abort", 0, str(tmp_path)))


@pytest.mark.parametrize("fault", ["stall", "stall in a loop"])
def test_stalled_ranks_are_ended_by_the_timeout_and_named_with_their_place(fault, tmp_path):
    with pytest.raises(RankTimeout) as caught:
        run_ranks(faulty, 2, args=(fault, 1, str(tmp_path)), timeout=3)
    first, *places = str(caught.value).splitlines()
    assert first == "ranks 0, 1 did not return in 3 s"
    assert places[0].startswith("rank 0 stands in faulty (line ")
    assert "> all_reduce (line " in places[0]
    assert places[1].startswith("rank 1 stands in faulty (line ") and ">" not in places[1]
    assert caught.value.ranks == [0, 1] and isinstance(caught.value, TimeoutError)
    assert_none_left("pid", {int(path.read_text()) for path in tmp_path.iterdir()})


def test_only_the_ranks_that_did_not_return_are_named():
    def stall_alone():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(1000)

    with pytest.raises(RankTimeout, match="^rank 1 did not return in 2 s\n") as caught:
        run_ranks(stall_alone, 3, timeout=2)
    assert caught.value.ranks == [1]


def test_a_launch_after_a_failure_works(tmp_path):
    with pytest.raises(RankError):
        run_ranks(faulty, 2, args=("kill", 1, str(tmp_path)))
    assert run_ranks(os.getcwd, 2) == [os.getcwd()] * 2


CALLER = """
    import os, time
    from parlab.distributed.launch import run_ranks

    def wait():
        import torch.distributed as dist
        dist.barrier()
        print("all ranks wait", flush=True)
        {waiting}

    try:
        run_ranks(wait, 3, timeout=200, start_method={method!r})
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        time.sleep(200)
"""


@pytest.fixture
def waiting_caller(tmp_path):
    """Start a script whose ranks all wait; everything it starts shares its process group."""
    started = []

    def start(method, waiting="time.sleep(1000)"):
        script = tmp_path / "caller.py"
        script.write_text(textwrap.dedent(CALLER).format(method=method, waiting=waiting))
        process = subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        started.append(process)
        assert process.stdout.readline() == "all ranks wait\n"
        return process

    yield start
    for process in started:
        if running("group", {process.pid}):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("method", "waiting"),
    [
        ("forkserver", "time.sleep(1000)"),
        ("forkserver", "dist.recv(__import__('torch').ones(1))"),
        ("spawn", "while True: pass"),
    ],
    ids=["forkserver, asleep", "forkserver, in gloo", "spawn, in a loop"],
)
def test_no_process_is_left_ten_seconds_after_the_caller_was_killed(
    waiting_caller, method, waiting, tmp_path
):
    caller = waiting_caller(method, waiting)
    assert len(running("group", {caller.pid})) >= 4, "the caller and three ranks"
    caller.kill()
    caller.wait()
    assert_none_left("group", {caller.pid}, within_s=10)
    assert not list(tmp_path.glob("parlab-*")), "the ranks' folder stayed"


def test_an_interrupt_ends_the_ranks_and_reaches_the_caller(waiting_caller, tmp_path):
    caller = waiting_caller("forkserver")
    with_ranks = len(running("group", {caller.pid}))
    os.killpg(caller.pid, signal.SIGINT)  # as a terminal and a notebook server do: to all of them
    assert caller.stdout.readline() == "interrupted\n"
    assert len(running("group", {caller.pid})) <= with_ranks - 3
    assert not list(tmp_path.glob("parlab-*"))
