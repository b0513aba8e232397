"""Exercises of chapter 1: what an all-reduce costs, on a ring and on a tree."""

import math

from parlab.exercises.records import Case, Exercise, Misconception

PARTS = ("steps", "bytes_per_rank", "seconds")
FEW_ROUNDINGS = "a handful of multiplications and additions of floats"


def all_reduce_cost(n_ranks, tensor_bytes, latency_s, bandwidth_bytes_per_s):
    """Price a ring all-reduce: a message of b bytes takes latency + b / bandwidth.

    n_ranks: N. tensor_bytes: S, on each rank. latency_s: of one message. bandwidth_bytes_per_s: of
    a link in one direction, as a rank sends and receives at the same time.

    Returns (steps, bytes_per_rank, seconds): steps one after the other, bytes that a rank sends.

    >>> steps, sent, seconds = all_reduce_cost(8, 14e9, 0, 450e9)
    >>> steps, sent, round(seconds, 4)
    (14, 24500000000.0, 0.0544)
    """
    steps = 2 * (n_ranks - 1)
    bytes_per_rank = steps * tensor_bytes / n_ranks
    return steps, bytes_per_rank, steps * latency_s + bytes_per_rank / bandwidth_bytes_per_s


def tree_all_reduce_cost(n_ranks, tensor_bytes, latency_s, bandwidth_bytes_per_s):
    """Price a pipelined tree all-reduce: up to the root and down again.

    The tree has ceil(log2 N) levels. The tensor is cut into so many pieces that all levels work at
    the same time, so a rank inside the tree sends its S bytes up and S bytes down at full speed,
    and the levels cost latency only. One rank alone sends nothing.

    Arguments and results as in `all_reduce_cost`.

    >>> steps, sent, seconds = tree_all_reduce_cost(8, 1e6, 5e-6, 50e9)
    >>> steps, sent, round(seconds, 9)
    (6, 2000000.0, 7e-05)
    """
    levels = math.ceil(math.log2(n_ranks))
    bytes_per_rank = 2 * tensor_bytes if n_ranks > 1 else 0
    seconds = 2 * levels * latency_s + bytes_per_rank / bandwidth_bytes_per_s
    return 2 * levels, bytes_per_rank, seconds


# Independent routes: messages counted one by one.


def expect_ring(n, size, latency, bandwidth):
    sent = [size / n for phase in range(2) for _ in range(n - 1)]
    return len(sent), math.fsum(sent), math.fsum(latency + b / bandwidth for b in sent)


def tree_levels(n):
    levels, reached = 0, 1
    while reached < n:
        levels, reached = levels + 1, 2 * reached
    return levels


def expect_tree(n, size, latency, bandwidth):
    steps = 2 * tree_levels(n)
    sent = [float(size)] * 2 if n > 1 else [0.0]
    return steps, sum(sent), sum([latency] * steps) + sum(b / bandwidth for b in sent)


def _draw(rng):
    size = float(rng.integers(1, 1000) * 10 ** rng.integers(0, 8))
    return int(rng.integers(2, 40)), size, *draw_link(rng)


def draw_link(rng):
    return float(rng.integers(1, 20)) * 1e-6, float(rng.integers(1, 500)) * 1e9


# Known mistakes.


def _ring(steps=lambda n: 2 * (n - 1), sent=None, seconds=None):
    """A ring with one thing wrong, and all that follows from it."""

    def compute(n, size, latency, bandwidth):
        count = steps(n)
        b = sent(n, size) if sent else count * size / n
        time = seconds or (lambda count, b, latency, bandwidth: count * latency + b / bandwidth)
        return count, b, time(count, b, latency, bandwidth)

    return (compute,)


def _tree(levels=tree_levels, sent=lambda size, levels: 2 * size, both_ways=1):
    def compute(n, size, latency, bandwidth):
        if n == 1:
            return 0, 0, 0
        up_and_down = 2 * levels(n)
        b = sent(size, levels(n))
        return up_and_down, b, up_and_down * latency + b / (both_ways * bandwidth)

    return compute


def _binomial(n, size, latency, bandwidth):
    levels = tree_levels(n)
    return 2 * levels, levels * size, 2 * levels * (latency + size / bandwidth)


def _binomial_both_ways(n, size, latency, bandwidth):
    steps, sent, seconds = _binomial(n, size, latency, bandwidth)
    return steps, 2 * sent, seconds


def _up_only(n, size, latency, bandwidth):
    if n == 1:
        return 0, 0, 0
    return tree_levels(n), size, tree_levels(n) * latency + size / bandwidth


BOTH_DIRECTIONS = (
    "A data sheet's 900 GB/s may be both directions of a link added. A ring sends and receives at "
    "the same time, so each direction has half of that."
)

ALL_REDUCE_COST = Exercise(
    chapter=1,
    solution=all_reduce_cost,
    expect=expect_ring,
    route="messages added one by one",
    draw=_draw,
    cases=(
        Case((1, 1000, 1e-6, 1e9), (0, 0.0, 0.0), "one rank has nothing to send"),
        Case((2, 8, 1.0, 4.0), (2, 8.0, 4.0), "by hand"),
        Case((8, 14e9, 0.0, 450e9), (14, 24.5e9, 24.5 / 450), "7B model over NVLink: 54 ms"),
        Case((8, 14e9, 0.0, 50e9), (14, 24.5e9, 0.49), "7B model over InfiniBand: 0.49 s"),
    ),
    misconceptions=(
        Misconception(
            "both directions of the link are added",
            _ring(seconds=lambda count, b, latency, speed: count * latency + b / (2 * speed)),
            BOTH_DIRECTIONS,
            "Which of your numbers is a bandwidth, and is it the one way the bytes go?",
        ),
        Misconception(
            "only one of the two phases",
            _ring(steps=lambda n: n - 1),
            "N - 1 steps are a reduce-scatter. Then each rank holds one complete chunk, and needs "
            "the others.",
            "What has to happen after each chunk is complete on one rank?",
        ),
        Misconception(
            "N steps in each phase",
            _ring(steps=lambda n: 2 * n),
            "A chunk needs N - 1 sends to visit N ranks: it is already on the first.",
            "Count the arrows between N ranks in a row.",
        ),
        Misconception(
            "2 S bytes, the limit for many ranks",
            _ring(sent=lambda n, size: 2 * size if n > 1 else 0),
            "2 (N-1)/N S comes near to 2 S, but for N = 2 it is S.",
            "Multiply the steps by the bytes of one step.",
        ),
        Misconception(
            "bytes of the whole array in every step",
            _ring(sent=lambda n, size: 2 * (n - 1) * size),
            "A step sends one chunk of S/N bytes, not the array of S.",
            "Into how many chunks is the array cut?",
        ),
        Misconception(
            "the latency counts once",
            _ring(seconds=lambda count, b, latency, speed: (latency if count else 0) + b / speed),
            "The steps are one after the other, since each needs what the last one brought; every "
            "one has a start-up cost.",
            "How many messages does a rank wait for in turn?",
        ),
        Misconception(
            "bits for bytes",
            _ring(seconds=lambda count, b, latency, speed: count * latency + 8 * b / speed),
            "400 Gb/s are 50 GB/s. Here the bandwidth is in bytes already.",
            "Look at the unit in the parameter's name.",
        ),
        Misconception(
            "sent and received bytes are counted together",
            _ring(sent=lambda n, size: 4 * (n - 1) * size / n)
            + _ring(
                sent=lambda n, size: 4 * (n - 1) * size / n,
                seconds=lambda count, b, latency, speed: count * latency + b / 2 / speed,
            ),
            "Every byte that one rank sends another receives. Counting both doubles the traffic.",
            "Count the bytes of a message at its sender only.",
        ),
    ),
    parts=PARTS,
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

TREE_COST = Exercise(
    chapter=1,
    solution=tree_all_reduce_cost,
    expect=expect_tree,
    route="levels counted by doubling, messages added one by one",
    draw=_draw,
    cases=(
        Case((1, 1000, 1e-6, 1e9), (0, 0.0, 0.0), "one rank has nothing to send"),
        Case((3, 8, 1.0, 4.0), (4, 16.0, 8.0), "by hand"),
        Case((8, 1e6, 5e-6, 50e9), (6, 2e6, 70e-6), "by hand"),
    ),
    misconceptions=(
        Misconception(
            "the levels are rounded down",
            (_tree(levels=lambda n: int(math.log2(n))),),
            "A tree of two levels holds 4 ranks. For 5 it needs a third, however few sit there.",
            "Try N = 5: can two doublings reach all ranks?",
        ),
        Misconception(
            "the levels are not rounded",
            (_tree(levels=math.log2),),
            "A message cannot pass a fraction of a level.",
            "Try N = 5 and look at your steps.",
        ),
        Misconception(
            "the whole tensor on every level, one level after the other",
            (
                _binomial,
                _binomial_both_ways,
                _tree(sent=lambda size, levels: 2 * levels * size),
            ),
            "That is the plain binomial tree, 2 ceil(log2 N) (alpha + S/B). Pipelined, all levels "
            "work at the same time on different pieces.",
            "How many bytes does one rank send up, and how many down?",
        ),
        Misconception(
            "only up, not down again",
            (_up_only,),
            "At the top of the tree only the root has the sum.",
            "What do the other ranks still need?",
        ),
        Misconception(
            "both directions of the link are added",
            (_tree(both_ways=2),),
            BOTH_DIRECTIONS,
            "Which of your numbers is a bandwidth, and is it the one way the bytes go?",
        ),
    ),
    parts=PARTS,
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (ALL_REDUCE_COST, TREE_COST)
