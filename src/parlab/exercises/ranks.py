"""Run a learner's function on real processes: the exercises with torch.distributed.

All calls of a check share one launch, and each has a process group of its own, so that a message
that nobody took in one call does not arrive in the next.
"""

import importlib.util
import pickle
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from parlab.exercises import by_value
from parlab.exercises.apart import LIMIT_S
from parlab.exercises.outcome import Outcome, Place, call
from parlab.exercises.show import show

NO_TORCH = "it runs on real processes, which need torch: pip install torch"
POLL_S = 0.001


def run_on_ranks(function, calls, n_ranks, *, n_parts=0, limit_s=LIMIT_S):
    """Call the function with each tuple of arguments on n_ranks processes at once.

    There an array is a tensor, and float64 is the dtype of new tensors. Returns an Outcome for each
    call; its value lists what the ranks returned, as arrays. n_parts: where a rank returns a tuple
    of so many, the value is a tuple of so many lists.

    What ends a rank ends all. The list ends early with a call that some rank did not return from
    within the limit of all calls, that ended a process, or that is not written yet.

    Raises `by_value.CannotSend` as `run_apart` does, ImportError where there is no torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(NO_TORCH)
    program = by_value.dumps(function)
    outcomes = []
    while len(outcomes) < len(calls):
        outcomes += _launch(function, program, calls[len(outcomes) :], n_ranks, n_parts, limit_s)
        last = outcomes[-1]
        if last.kind in ("endless", "died") or last.error == "NotImplementedError":
            break
    return outcomes


def _launch(function, program, calls, n_ranks, n_parts, limit_s):
    """Outcomes up to the first call that did not end well, in new processes."""
    from parlab.distributed.launch import RankError, run_ranks

    failure = None
    with tempfile.TemporaryDirectory(prefix="parlab-check-") as folder:
        try:
            run_ranks(answer_calls, n_ranks, args=(program, calls, folder), timeout=limit_s)
        except RankError as error:
            failure = error
        answers = [_read(Path(folder), number) for number in range(len(calls))]
    joined = []
    for by_rank in answers:
        if len(by_rank) < n_ranks or any(o.kind != "value" for o in by_rank.values()):
            return [*joined, _not_returned(function, by_rank, failure)]
        joined.append(_joined([by_rank[rank] for rank in range(n_ranks)], n_parts))
    return joined


def answer_calls(program, calls, folder):
    """What every rank does: leave an Outcome of each call in a file."""
    import torch
    import torch.distributed as dist

    torch.set_default_dtype(torch.float64)
    folder, rank, n = Path(folder), dist.get_rank(), dist.get_world_size()
    function = pickle.loads(program)
    for number, args in enumerate(calls):
        if number:
            dist.destroy_process_group()
            store = dist.FileStore(str(folder / f"store.{number}"), n)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        outcome = call(lambda *args: _to_arrays(function(*_to_tensors(args))), args)
        _write(folder, number, rank, outcome)
        if outcome.kind != "value":  # the others must not wait for this one
            raise RuntimeError("the learner's function did not return a value")
        while len(list(folder.glob(f"{number}.*.outcome"))) < n:
            time.sleep(POLL_S)


def _to_tensors(value):
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)  # shares memory, so a change of the input is seen
    if isinstance(value, list | tuple):
        return type(value)(map(_to_tensors, value))
    return value


def _to_arrays(value):
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {key: _to_arrays(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return list(map(_to_arrays, value))
    return tuple(map(_to_arrays, value)) if isinstance(value, tuple) else value


def _write(folder, number, rank, outcome):
    """A file that is there is whole."""
    path = folder / f"{number}.{rank}.new"
    path.write_bytes(pickle.dumps(outcome))
    path.rename(folder / f"{number}.{rank}.outcome")


def _read(folder, number):
    """{rank: Outcome} of a call, in the order in which they were written."""
    files = sorted(folder.glob(f"{number}.*.outcome"), key=lambda path: path.stat().st_mtime_ns)
    return {int(path.name.split(".")[1]): pickle.loads(path.read_bytes()) for path in files}


def _joined(outcomes, n_parts):
    """One Outcome for all ranks that returned; what is shown as printed is rank 0's."""
    values = [outcome.value for outcome in outcomes]
    changed = [outcome.changed for outcome in outcomes if outcome.changed is not None]
    joined = outcomes[0]._replace(value=values, changed=changed[0] if changed else None)
    if all(value is None for value in values):
        return joined._replace(value=None)
    if not n_parts:
        return joined
    for rank, value in enumerate(values):
        if not isinstance(value, tuple | list) or len(value) != n_parts:
            what = f"{show(value, 40)} on rank {rank}"
            return joined._replace(kind="unreadable", value=None, message=what)
    return joined._replace(value=tuple(map(list, zip(*values, strict=True))))


def _not_returned(function, by_rank, failure):
    """The Outcome of a call from which some rank did not return a value."""
    from parlab.distributed.launch import RankTimeout

    if isinstance(failure, RankTimeout):
        # One whose peer was ended first may have raised since.
        returned = {rank for rank, outcome in by_rank.items() if outcome.kind == "value"}
        waiting = [rank for rank in failure.ranks if rank not in returned]
        places = {rank: _place(function, rank, str(failure)) for rank in waiting}
        who = [f"rank {r} in line {p.line}" if p else f"rank {r}" for r, p in places.items()]
        place = next(filter(None, places.values()), None)
        return Outcome("endless", message=f"(on {' and '.join(who)})", place=place)
    if failure.exitcode is not None:
        return Outcome("died", message=str(failure).splitlines()[0])
    for rank, outcome in by_rank.items():  # the first is the cause of the others
        if outcome.kind != "value":
            return outcome._replace(message=f"{outcome.message} (on rank {rank})".strip())


def _place(function, rank, message):
    """The line of the function in which a rank was stopped, if the message tells."""
    code = getattr(function, "__code__", None)
    lines = re.findall(rf"^rank {rank} stands in .*", message, re.MULTILINE)
    found = code and lines and re.findall(rf" {code.co_name} \(line (\d+)\)", lines[0])
    return Place(code.co_filename, int(found[-1]), code.co_name) if found else None
