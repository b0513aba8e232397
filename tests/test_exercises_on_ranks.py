"""Exercises on real processes: whatever one rank does, a few calm lines come in bounded time."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from exercise_bugs import buggy

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.grade import grade
from parlab.exercises.outcome import Place
from parlab.exercises.ranks import run_on_ranks
from parlab.exercises.records import Case, Exercise
from parlab.exercises.report import report


@pytest.fixture(scope="module", autouse=True)
def _torch_is_loaded():
    run_on_ranks(len, [([],)], 1)  # once for all launches; no part of what is timed below


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def sum_over_ranks(x):
    import torch
    import torch.distributed as dist

    if x < 0 and dist.get_rank() == 1:
        raise ValueError("no")
    total = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(total)
    print("printed")
    return total.item()


def toy(*fixed):
    """The exercise that `sum_over_ranks` solves, with these fixed arguments."""
    return Exercise(
        chapter=2,
        solution=sum_over_ranks,
        expect=lambda x: [2.0 * x + 1] * 2,
        route="by hand",
        draw=lambda rng: (int(rng.integers(0, 9)),),
        cases=tuple(Case((x,), [2.0 * x + 1] * 2, "by hand") for x in fixed),
        misconceptions=(),
        n_random=1,
        n_ranks=2,
    )


def test_an_exercise_on_ranks_is_graded_on_ranks():
    assert report(grade(toy(3), sum_over_ranks)) == (
        "sum_over_ranks: all 2 checks passed. (It printed 2 lines, not shown.)"
    )


def test_an_error_of_one_rank_is_shown_while_the_other_waits_and_other_calls_still_count():
    text = report(grade(toy(-3, 2, -1), sum_over_ranks))
    assert text.startswith("sum_over_ranks: 2 of 4 checks passed.\n")
    assert "    ValueError: no (on rank 1)\n" in text
    assert "in sum_over_ranks, line" in text and ': raise ValueError("no")\n' in text


def waits_for_nobody(x, folder):
    import torch
    import torch.distributed as dist

    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    if x == 2 and dist.get_rank() == 1:
        dist.recv(torch.empty(1), src=0)
    return x


def test_a_message_that_never_comes_ends_within_10_seconds_and_leaves_no_process(tmp_path):
    before = time.monotonic()
    outcomes = run_on_ranks(waits_for_nobody, [(x, str(tmp_path)) for x in (1, 2, 3)], 2)
    assert time.monotonic() - before < 10
    assert [(o.kind, o.value) for o in outcomes] == [("value", [1, 1]), ("endless", None)]
    line = waits_for_nobody.__code__.co_firstlineno + 7
    assert outcomes[1].message == f"(on rank 1 in line {line})"
    assert outcomes[1].place == Place(__file__, line, "waits_for_nobody")
    assert not any(is_running(int((tmp_path / rank).read_text())) for rank in "01")


def test_stages_that_send_to_each_other_wait_for_ever_and_see_where():
    edits = [("held.append((hidden, part))", "part.backward(); dist.send(hidden.grad, dst=0)")]
    verdict = grade(EXERCISES["two_stage_pipeline"], buggy("two_stage_pipeline", edits), seed=1)
    text = report(verdict)
    assert "no answer after 5 s, so it was stopped (on rank 0 in line " in text
    assert " and rank 1 in line " in text and "    in two_stage_pipeline, line " in text
    assert not verdict.mistakes and len(text.splitlines()) < 9


def one_rank_leaves(way):
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), src=1)
    os._exit(way) if way else sys.exit("bye")


@pytest.mark.parametrize(
    "way, kind, message",
    [(3, "died", "rank 1's process ended by exit code 3"), (0, "raised", "bye (on rank 1)")],
    ids=["os._exit", "exit"],
)
def test_a_rank_that_leaves_ends_the_other(way, kind, message):
    (outcome,) = run_on_ranks(one_rank_leaves, [(way,)], 2)
    assert outcome.kind == kind and message in outcome.message


def sends_too_much(x):
    import torch
    import torch.distributed as dist

    received = torch.empty(1)
    if dist.get_rank() == 0:
        dist.send(torch.full((1,), x), dst=1)
        dist.under_way = dist.isend(torch.full((1,), -x), dst=1)  # kept, or it would be withdrawn
        return received.dtype == torch.float64
    dist.recv(received, src=0)
    return received.tolist()


def test_a_message_that_nobody_took_does_not_arrive_in_the_next_call():
    first, second = run_on_ranks(sends_too_much, [(1.0,), (2.0,)], 2)
    assert (first.value, second.value) == ([True, [1.0]], [True, [2.0]])


def gives_back(kind, tensors):
    import torch
    import torch.distributed as dist

    assert all(tensor.dtype == torch.float64 for tensor in tensors)
    if kind == "nothing" or (kind == "half" and dist.get_rank() == 1):
        return None
    return tensors[0].requires_grad_(), {"rank": dist.get_rank()}


def test_answers_of_all_ranks_are_joined_part_by_part_as_arrays():
    calls = [(kind, [np.array([0.5, 2])]) for kind in ("all", "nothing", "half")]
    whole, nothing, half = run_on_ranks(gives_back, calls, 2, n_parts=2)
    arrays, ranks = whole.value
    assert [type(array) for array in arrays] == [np.ndarray] * 2
    assert np.array_equal(arrays, [[0.5, 2]] * 2) and ranks == [{"rank": 0}, {"rank": 1}]
    assert (nothing.kind, nothing.value) == ("value", None)
    assert (half.kind, half.message) == ("unreadable", "None on rank 1")


def test_without_torch_an_exercise_on_ranks_says_so_and_the_stubs_load():
    code = """if True:
        import sys; sys.modules |= dict.fromkeys(("torch", "cloudpickle"))
        import parlab as pl
        from parlab.exercises.source import student_file
        exec(student_file())
        pl.check(ddp_by_hand)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == (
        "ddp_by_hand was not run: it runs on real processes, which need torch: pip install torch\n"
    )


@pytest.mark.parametrize(
    "edits",
    [
        [("(0, True), (1, False)", "(-1, True), (0, False)")],
        [
            ("rank + shift - step - 1", "rank + 1 + step - shift"),
            ("rank + shift - step", "rank + step - shift"),
            ("(rank + 1) % n), dist", "(rank - 1) % n), dist"),
            ("irecv(arriving, (rank - 1) % n)", "irecv(arriving, (rank + 1) % n)"),
        ],
    ],
    ids=["rank r ends with chunk r", "to the left"],
)
def test_every_convention_of_a_ring_is_right(edits):
    verdict = grade(EXERCISES["ring_by_messages"], buggy("ring_by_messages", edits))
    assert verdict.passed, report(verdict)
