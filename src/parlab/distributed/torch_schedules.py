"""The pipeline schedules of torch.distributed.pipelining as ours: an independent order to compare.

torch builds a list of actions for each rank and runs that. Here it is read without running.
"""

from itertools import zip_longest

from parlab.distributed import compat
from parlab.pipeline.actions import Action
from parlab.pipeline.schedules import Schedule
from parlab.units import require_choice, require_int

TORCH_SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
)
MAX_FORWARDS = 10_000  # some 10 s


def torch_schedule(name, p, m, v=1):
    """Return torch's schedule of that name for p ranks, m micro-batches and v chunks a rank.

    A chunk's number counts the stages of its rank upwards. Steps at which torch only waits, and
    REDUCE_GRAD at the end, are no actions here. torch 2.13 labels the forward passes of 1F1B's last
    rank from 1 on, though it runs them from 0 on: here they start at 0. DualPipeV is left out, as
    it fuses a forward and a backward pass into one action.

    name: one of `TORCH_SCHEDULES`. ValueError also for sizes that torch refuses, with its reason.

    >>> from parlab.pipeline.schedules import one_f_one_b
    >>> torch_schedule("1F1B", 4, 8).actions == one_f_one_b(4, 8).actions
    True
    """
    name = require_choice("name", name, TORCH_SCHEDULES)
    p, m, v = (require_int(*size, minimum=1) for size in (("p", p), ("m", m), ("v", v)))
    if p * m * v > MAX_FORWARDS:
        raise ValueError(
            f"p m v must be at most {MAX_FORWARDS}, got {p} x {m} x {v}: torch's time grows with "
            "the square of m"
        )
    order = compat.torch_pipeline_order(name, p, m, v)
    order = [[entry for entry in row if entry[1] in "FBIW"] for row in order]
    if name == "1F1B" and min(i for _, kind, i in order[-1] if kind == "F") == 1:
        order[-1] = [(s, kind, i - (kind == "F")) for s, kind, i in order[-1]]
    stages = [sorted({stage for stage, _, _ in row}) for row in order]
    actions = [
        [Action(kind, i, here.index(stage)) for stage, kind, i in row]
        for row, here in zip(order, stages, strict=True)
    ]
    return Schedule(f"torch {name}", m, stages, actions)


def differences(ours, theirs):
    """Where two schedules order their actions differently: (rank, position, ours, theirs).

    Where one list ends earlier its action is None. Other ranks or stages raise ValueError.

    >>> from parlab.pipeline.schedules import gpipe, one_f_one_b
    >>> differences(gpipe(1, 1), one_f_one_b(1, 1))
    []
    """
    if ours.stages != theirs.stages:
        raise ValueError("schedules must place the same stages on the same ranks")
    return [
        (rank, position, *pair)
        for rank, rows in enumerate(zip(ours.actions, theirs.actions, strict=True))
        for position, pair in enumerate(zip_longest(*rows))
        if pair[0] != pair[1]
    ]
