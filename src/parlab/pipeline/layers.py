"""Which layers of the model each pipeline stage holds."""

from heapq import heapify, heapreplace
from itertools import accumulate

from parlab.units import require_int, require_number

MAX_LAYERS = 10**6


def split_layers(layers, stages, *, embedding=0, head=0):
    """Return the layers of every stage, as ranges: none is lost, and the slowest stage is shortest.

    One layer after the other goes to the stage that has least to do so far, the earlier one of
    equals; as all layers weigh the same, no split has a smaller maximum. With chunks, stages are
    p v, and `Schedule.stage` says which of them a rank holds.

    layers, stages: counts; with fewer layers than stages some are empty.
    embedding, head: work of the first and the last stage besides, in layers: a head's FLOP over a
        layer's, as `flops_per_token` has them, 0 to leave it out.

    >>> [len(stage) for stage in split_layers(30, 4)], split_layers(10, 3)
    ([8, 8, 7, 7], [range(0, 4), range(4, 7), range(7, 10)])
    >>> [len(stage) for stage in split_layers(24, 4, head=5.8)]
    [8, 7, 7, 2]
    """
    layers = require_int("layers", layers, minimum=0, maximum=MAX_LAYERS)
    stages = require_int("stages", stages, minimum=1, maximum=MAX_LAYERS)
    embedding = require_number("embedding", embedding, minimum=0)
    head = require_number("head", head, minimum=0)
    work = [(0, stage) for stage in range(stages)]
    work[0] = (work[0][0] + embedding, 0)
    work[-1] = (work[-1][0] + head, stages - 1)
    heapify(work)
    counts = [0] * stages
    for _ in range(layers):
        so_far, stage = work[0]
        counts[stage] += 1
        heapreplace(work, (so_far + 1, stage))
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
