"""The exercise of chapter 1 on the size from which on the ring beats the tree."""

import math

from parlab.exercises.collective_cost import (
    FEW_ROUNDINGS,
    draw_link,
    expect_ring,
    expect_tree,
    tree_levels,
)
from parlab.exercises.records import Case, Exercise, Misconception


def ring_tree_crossover_bytes(n_ranks, latency_s, bandwidth_bytes_per_s):
    """Return the size of the tensor from which on the ring beats the pipelined tree.

    Both as in `all_reduce_cost` and `tree_all_reduce_cost`. It is 0 where the tree never wins.

    >>> round(ring_tree_crossover_bytes(8, 5e-6, 50e9))
    8000000
    """
    steps_saved = (n_ranks - 1) - math.ceil(math.log2(n_ranks))
    return latency_s * bandwidth_bytes_per_s * n_ranks * steps_saved


def _expect_crossover(n, latency, bandwidth):
    """Halve an interval at whose left end the tree wins."""

    def ring_is_slower(size):
        return (
            expect_ring(n, size, latency, bandwidth)[2]
            > (expect_tree(n, size, latency, bandwidth)[2])
        )

    low, high = 0.0, 1.0
    if n <= 3:
        return 0.0
    while ring_is_slower(high):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ring_is_slower(middle) else (low, middle)
    return high


def _draw_crossover(rng):
    return int(rng.integers(2, 40)), *draw_link(rng)


# Known mistakes.


def _crossover(factor=lambda n: n, levels=tree_levels):
    return lambda n, latency, bandwidth: latency * bandwidth * factor(n) * (n - 1 - levels(n))


def _against_binomial(n, latency, bandwidth):
    levels = tree_levels(n)
    return latency * bandwidth * (n - 1 - levels) / (levels - (n - 1) / n)


_FIELD = {4: 1e6, 6: 3e6, 8: 8e6, 48: 492e6, 64: 912e6}

CROSSOVER = Exercise(
    chapter=1,
    solution=ring_tree_crossover_bytes,
    expect=_expect_crossover,
    route="bisection on the two times, messages added one by one",
    draw=_draw_crossover,
    cases=(
        Case((2, 5e-6, 50e9), 0.0, "two ranks: the tree has as many steps"),
        Case((3, 5e-6, 50e9), 0.0, "three ranks: the tree has as many steps"),
        *(Case((n, 5e-6, 50e9), size, "nccl 457 and 1368") for n, size in _FIELD.items()),
    ),
    misconceptions=(
        Misconception(
            "the factor N is lost",
            (_crossover(factor=lambda n: 1),),
            "The tree sends 2 S, the ring 2 (N-1)/N S: they differ by 2 S/N, not by 2 S.",
            "Write both times down and subtract them: what is left of the bytes?",
        ),
        Misconception(
            "the two phases count on one side only",
            (_crossover(factor=lambda n: 2 * n),),
            "Steps and bytes both come twice, once for each phase, so the 2 cancels.",
            "Write both times down, and divide by what they share.",
        ),
        Misconception(
            "log2 N is not rounded up",
            (_crossover(levels=math.log2), _crossover(levels=lambda n: int(math.log2(n)))),
            "A tree has whole levels: ceil(log2 N).",
            "Try N = 6.",
        ),
        Misconception(
            "compared with the plain tree",
            (_against_binomial,),
            "The binomial tree sends S on every level in turn. Large messages go through a "
            "pipelined tree, 2 S/B in all.",
            "Which part of the tree's time grows with the number of levels?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (CROSSOVER,)
