"""Collectives carried out on NumPy arrays, one array per simulated rank, with every byte counted.

The all-reduces, the reduce-scatter and the all-gather run the schedules of `schedules`, so what is
simulated is what is priced, drawn and executed between processes. Each returns `(results, sent)`:
one fresh array per rank and the bytes that each rank sent. Inputs are never changed.

Arrays may have any shape, and any number of elements: they are cut flat into chunks of
`np.array_split` sizes. Sums stay in the arrays' own dtype, bit for bit; an integer sum that does
not fit it is refused.
"""

import numpy as np

from parlab.collectives import schedules
from parlab.collectives.executor import compile_plan, execute, new_rows, plan_for, stack
from parlab.units import require_choice, require_int

OPS = ("sum", "mean")


def ring_all_reduce(arrays, *, op="sum"):
    """Ring all-reduce: every rank ends with the elementwise sum.

    Each rank sends 2 (N-1)/N S bytes in 2 (N-1) steps where N divides the number of elements;
    otherwise ranks differ by a few elements and the total is still 2 (N-1) S.

    arrays: one array per rank, all of one shape and dtype. op: "sum" or "mean".
    Returns (results, sent). Raises TypeError for values that can't be added and for the mean of
    integers, ValueError for ranks that disagree and for an integer overflow.

    >>> results, sent = ring_all_reduce([np.arange(4.0), np.ones(4)])
    >>> results[1], sent
    (array([1., 2., 3., 4.]), [32, 32])
    """
    return _all_reduce(schedules.ring_all_reduce_schedule, arrays, op)


def tree_all_reduce(arrays, *, op="sum"):
    """Plain binomial tree: reduce to rank 0, then broadcast; 2 ceil(log2 N) steps of S bytes.

    Arguments, results and errors as in `ring_all_reduce`.

    >>> tree_all_reduce([np.ones(2)] * 4)[1]
    [32, 32, 16, 16]
    """
    return _all_reduce(schedules.binomial_all_reduce_schedule, arrays, op)


def halving_doubling_all_reduce(arrays, *, op="sum"):
    """Recursive halving, then doubling: the ring's bytes in 2 log2 N steps for N a power of two.

    Other N are folded onto the next lower power of two (`schedules.halving_doubling_schedule`).
    Arguments, results and errors as in `ring_all_reduce`.

    >>> halving_doubling_all_reduce([np.ones(8)] * 4)[1]
    [96, 96, 96, 96]
    """
    return _all_reduce(schedules.halving_doubling_schedule, arrays, op)


def hierarchical_all_reduce(arrays, ranks_per_node, *, op="sum"):
    """Reduce-scatter inside each node, all-reduce across nodes, all-gather inside.

    ranks_per_node: consecutive ranks that share a node; must divide the number of arrays.
    Otherwise as `ring_all_reduce`.

    >>> hierarchical_all_reduce([np.ones(8)] * 4, ranks_per_node=2)[1]
    [96, 96, 96, 96]
    """
    arrays = list(arrays)
    local = require_int("ranks_per_node", ranks_per_node, minimum=1)
    if len(arrays) % local:
        raise ValueError(f"ranks_per_node must divide the {len(arrays)} ranks, got {local}")
    return _all_reduce(schedules.hierarchical_schedule, arrays, op, len(arrays) // local, local)


def naive_all_reduce(arrays, *, op="sum"):
    """Gather on rank 0 and send the sum back: rank 0 receives and sends (N-1) S bytes.

    Arguments, results and errors as in `ring_all_reduce`.

    >>> naive_all_reduce([np.zeros(64)] * 8)[1]
    [3584, 512, 512, 512, 512, 512, 512, 512]
    """
    return _all_reduce(schedules.naive_all_reduce_schedule, arrays, op)


def ring_reduce_scatter(arrays):
    """Ring reduce-scatter: rank r ends with chunk r of the sum, cut as `np.array_split` cuts.

    Each rank sends (N-1)/N S bytes where N divides the number of elements. Results are flat.
    Arguments and errors as in `ring_all_reduce`.

    >>> results, sent = ring_reduce_scatter([np.arange(4), np.arange(4)])
    >>> results[0], results[1], sent
    (array([0, 2]), array([4, 6]), [16, 16])
    """
    arrays = _summable(arrays)
    plan = plan_for(schedules.ring_reduce_scatter_schedule, (len(arrays),), arrays[0].size)
    rows = execute(plan, stack(plan, arrays))
    results = [np.array_split(row, len(arrays))[rank].copy() for rank, row in enumerate(rows)]
    return results, plan.sent_bytes(rows)


def ring_all_gather(shards):
    """Ring all-gather: every rank ends with all shards, concatenated along their first axis.

    shards: one array per rank, of one dtype and equal but for the first axis; sizes may differ.
    Rank r sends every shard but that of its right neighbour: (N-1)/N of the total if all are equal.

    >>> ring_all_gather([np.array([1, 2]), np.array([3])])
    ([array([1, 2, 3]), array([1, 2, 3])], [16, 8])
    """
    shards = [np.atleast_1d(array) for array in _arrays(shards, "shards")]
    _agree("shards", "shape after the first axis", [shard.shape[1:] for shard in shards])
    sizes = tuple(shard.size for shard in shards)
    plan = plan_for(schedules.ring_all_gather_schedule, (len(shards),), sizes)
    rows = new_rows(plan, len(shards), sum(sizes), shards[0].dtype)
    ends = np.cumsum(sizes)
    for row, shard, end in zip(rows, shards, ends, strict=True):
        row[end - shard.size : end] = shard.reshape(-1)
    execute(plan, rows)
    shape = (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    return [row.reshape(shape) for row in rows], plan.sent_bytes(rows)


def broadcast(array, n_ranks, *, root=0):
    """Binomial broadcast: `root` holds the array, all have it after ceil(log2 N) steps.

    >>> broadcast(np.array([1.0, 2.0]), 4)[1]
    [32, 16, 0, 0]
    """
    (array,) = _arrays([array], "array")
    plan = plan_for(schedules.broadcast_schedule, (n_ranks, root), array.size)
    rows = new_rows(plan, n_ranks, array.size, array.dtype)
    rows[root][...] = array.reshape(-1)
    execute(plan, rows)
    return [row.reshape(array.shape) for row in rows], plan.sent_bytes(rows)


def run_on_arrays(schedule, arrays):
    """Execute any all-reduce `Schedule` on arrays, such as one that you wrote by hand.

    The schedule is validated first. Arguments, results and errors as in `ring_all_reduce`.

    >>> Send = schedules.Send
    >>> swap = schedules.Schedule("all_reduce", 2, 1, ((Send(0, 1, 0, True), Send(1, 0, 0, True)),))
    >>> run_on_arrays(swap, [np.array([1, 2]), np.array([3, 4])])
    ([array([4, 6]), array([4, 6])], [16, 16])
    """
    if schedule.operation != "all_reduce":
        raise ValueError(f"schedule must be an all_reduce, got {schedule.operation!r}")
    schedules.validate(schedule)
    arrays = _summable(arrays)
    if len(arrays) != schedule.n_ranks:
        raise ValueError(f"arrays must be {schedule.n_ranks}, one per rank, got {len(arrays)}")
    plan = compile_plan(schedule, arrays[0].size)
    rows = execute(plan, stack(plan, arrays))
    return [row.reshape(arrays[0].shape) for row in rows], plan.sent_bytes(rows)


def _all_reduce(make_schedule, arrays, op, *sizes):
    op = require_choice("op", op, OPS)
    arrays = _summable(arrays)
    dtype = arrays[0].dtype
    if op == "mean" and dtype.kind in "iu":
        raise TypeError(
            f"the mean of {dtype} values need not be a whole number: "
            f"convert arrays to a floating dtype, or use op='sum' and divide"
        )
    plan = plan_for(make_schedule, sizes or (len(arrays),), arrays[0].size)
    rows = execute(plan, stack(plan, arrays))
    if op == "mean":
        for row in rows:
            row /= len(arrays)
    return [row.reshape(arrays[0].shape) for row in rows], plan.sent_bytes(rows)


# Checks of what the caller passes.


def _arrays(values, name):
    arrays = []
    for rank, value in enumerate(values):
        where = f"{name}[{rank}]"
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{where} is a masked array, and the mask would be lost: fill it first")
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{where} is not an array: {error}") from None
        if array.dtype.hasobject:
            raise TypeError(f"{where} must hold plain numbers, got dtype {array.dtype}")
        arrays.append(array)
    if not arrays:
        raise ValueError(f"{name} must hold one array per rank, got none")
    _agree(name, "dtype", [array.dtype for array in arrays])
    return arrays


def _summable(values):
    arrays = _arrays(values, "arrays")
    _agree("arrays", "shape", [array.shape for array in arrays])
    if arrays[0].dtype.kind not in "iufc":
        raise TypeError(
            f"arrays must be integers, floats or complex numbers to be summed, "
            f"got dtype {arrays[0].dtype}"
        )
    if arrays[0].dtype.kind in "iu" and arrays[0].size:
        _refuse_overflow(arrays)
    return arrays


def _agree(name, what, values):
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"all ranks must agree: {name}[{rank}] has {what} {value}, "
                f"{name}[0] has {values[0]}"
            )


def _refuse_overflow(arrays):
    dtype = arrays[0].dtype
    limits = np.iinfo(dtype)
    lowest = sum(int(array.min()) for array in arrays)
    highest = sum(int(array.max()) for array in arrays)
    if limits.min <= lowest and highest <= limits.max:
        return  # not even the extremes of all ranks together leave the range
    # Sums of the upper and the lower 32 bits are exact in 64; the carry joins them.
    upper = sum((array >> (limits.bits // 2)).astype(np.int64) for array in arrays)
    lower = sum((array & (2 ** (limits.bits // 2) - 1)).astype(np.int64) for array in arrays)
    upper += lower >> (limits.bits // 2)
    half = 2 ** (limits.bits // 2)
    wrong = (upper < limits.min // half) | (upper > limits.max // half)
    if wrong.any():
        where = np.unravel_index(np.argmax(wrong), wrong.shape)
        total = sum(int(array[where]) for array in arrays)
        raise ValueError(
            f"the sum {total} at index {tuple(map(int, where))} does not fit {dtype} "
            f"({limits.min} to {limits.max}): convert arrays to a wider dtype first"
        )
