"""Exercises of chapter 1: reduce-scatter and all-gather on a ring."""

import numpy as np

from parlab.exercises.records import AnyOf, Case, Exercise, Misconception
from parlab.exercises.ring import ORDER_OF_SUMS, chunk_bytes, draw_arrays, total


def ring_reduce_scatter(arrays):
    """Reduce-scatter on a ring: rank r ends with chunk r of the sum.

    arrays: one per rank, all of one size and dtype, cut as `np.array_split` cuts. A rank sends to
    its right neighbour only, one chunk in each step. The arrays stay as they are.

    Returns (results, sent): each rank's chunk, and the bytes each rank sent.

    >>> results, sent = ring_reduce_scatter([np.array([1, 2]), np.array([10, 20])])
    >>> results[0].tolist(), results[1].tolist(), sent
    ([11], [22], [8, 8])
    """
    n = len(arrays)  # given
    chunks = [np.array_split(np.array(array).ravel(), n) for array in arrays]  # given
    sent = [0] * n  # given
    for step in range(n - 1):
        messages = []
        for rank in range(n):
            chunk = (rank - 1 - step) % n
            messages.append((rank, chunk, chunks[rank][chunk].copy()))
        for rank, chunk, data in messages:
            sent[rank] += data.nbytes
            mine = chunks[(rank + 1) % n]
            mine[chunk] = mine[chunk] + data
    return [row[rank] for rank, row in enumerate(chunks)], sent


def ring_all_gather(shards):
    """All-gather on a ring: every rank ends with all shards, in the order of the ranks.

    shards: one flat array per rank; sizes may differ. A rank sends to its right neighbour only, one
    shard in each step: first its own, then what it has just received.

    Returns (results, sent): each rank's concatenation, and the bytes each rank sent.

    >>> results, sent = ring_all_gather([np.array([1, 2]), np.array([3])])
    >>> results[0].tolist(), results[1].tolist(), sent
    ([1, 2, 3], [1, 2, 3], [16, 8])
    """
    n = len(shards)  # given
    sent = [0] * n  # given
    held = [{rank: shards[rank]} for rank in range(n)]
    for step in range(n - 1):
        for rank in range(n):
            whose = (rank - step) % n
            sent[rank] += held[rank][whose].nbytes
            held[(rank + 1) % n][whose] = held[rank][whose]
    return [np.concatenate([row[rank] for rank in range(n)]) for row in held], sent


def _expect_reduce_scatter(arrays):
    # A rank sends every chunk but the one that it ends with.
    size = chunk_bytes(arrays)
    return np.array_split(total(arrays).ravel(), len(arrays)), [sum(size) - own for own in size]


def _expect_all_gather(shards):
    # A rank sends every shard but its receiver's own; the ring's direction is a convention.
    n, size = len(shards), [shard.nbytes for shard in shards]
    ways = [[sum(size) - size[(rank + way) % n] for rank in range(n)] for way in (1, -1)]
    return [np.concatenate(shards)] * n, AnyOf(tuple(ways))


def _draw_shards(rng):
    sizes = rng.integers(1, 6, int(rng.integers(2, 6)))
    return ([rng.normal(size=size).round(2) for size in sizes],)


# Known mistakes.


def _scattered(results=None, sent=None):
    """A way with wrong results, or with wrong bytes."""

    def compute(arrays):
        right = _expect_reduce_scatter(arrays)
        wrong = results(arrays) if results else right[0]
        return wrong, sent(right[1], arrays) if sent else right[1]

    return compute


def _next_owner(arrays):
    n = len(arrays)
    chunks, sent = _expect_reduce_scatter(arrays)
    return [chunks[(r + 1) % n] for r in range(n)], [sent[(r + 1) % n] for r in range(n)]


def _rows(arrays):
    """Whole rows after the steps: complete where the rank ends, partial sums elsewhere."""
    n = len(arrays)
    chunks = [np.array_split(array.ravel(), n) for array in arrays]
    rows = []
    for rank in range(n):
        # Chunk c sets out at rank c + 1 and has passed the ranks from there to this one.
        passed = [[(c + 1 + i) % n for i in range((rank - c - 1) % n + 1)] for c in range(n)]
        rows.append([sum(chunks[k][c] for k in ranks) for c, ranks in enumerate(passed)])
    return [np.concatenate(row) for row in rows]


def _gathered(results=None, sent=None):
    """Ways with wrong results in both directions of the ring, or one with wrong bytes."""

    def way(direction):
        def compute(shards):
            right, usual = _expect_all_gather(shards)
            wrong = results(shards) if results else right
            return wrong, sent(shards) if sent else usual.values[direction]

        return compute

    return (way(0), way(1))


def _from_own(step):
    def results(shards):
        n = len(shards)
        orders = [[(rank + step * i) % n for i in range(n)] for rank in range(n)]
        return [np.concatenate([shards[whose] for whose in order]) for order in orders]

    return results


def _bytes_of(formula):
    """Bytes of each rank from its own shard's, the total and N."""

    def sent(shards):
        size = [shard.nbytes for shard in shards]
        return [formula(own, sum(size), len(size)) for own in size]

    return sent


REDUCE_SCATTER = Exercise(
    chapter=1,
    solution=ring_reduce_scatter,
    expect=_expect_reduce_scatter,
    route="NumPy's sum, cut; bytes by what a rank keeps",
    draw=draw_arrays,
    cases=(
        Case(([np.array([5.0, 7.0])],), ([np.array([5.0, 7.0])], [0]), "one rank"),
        Case(
            ([np.array([1, 2, 3])] * 2,),
            ([np.array([2, 4]), np.array([6])], [8, 16]),
            "3 elements on 2 ranks, by hand",
        ),
        Case(
            ([np.arange(64.0)] * 4,),
            ([np.arange(64.0)[16 * r : 16 * r + 16] * 4 for r in range(4)], [384] * 4),
            "(N-1)/N of 64 doubles",
        ),
    ),
    misconceptions=(
        Misconception(
            "rank r ends with chunk r + 1",
            (_next_owner,),
            "Inside an all-reduce this is fine, and often taught. As a collective of its own, "
            "rank r owns chunk r, so that the results in rank order are the sum.",
            "Let every chunk set out one rank later.",
        ),
        Misconception(
            "whole rows are returned, with partial sums in them",
            (_scattered(_rows),),
            "Only one chunk of each rank is complete after N - 1 steps; the others hold the sums "
            "of a few ranks.",
            "Return from each rank the chunk that it owns.",
        ),
        Misconception(
            "every rank gets the whole sum",
            (
                _scattered(lambda a: [total(a).ravel()] * len(a)),
                _scattered(lambda a: [total(a)] * len(a), lambda sent, a: [2 * s for s in sent]),
            ),
            "That is an all-reduce. A reduce-scatter leaves each rank its own chunk, for half the "
            "bytes.",
            "Stop after the first phase.",
        ),
        Misconception(
            "the mean instead of the sum",
            (_scattered(lambda a: [c / len(a) for c in _expect_reduce_scatter(a)[0]]),),
            "Reduce-scatter adds up; who wants a mean divides afterwards.",
            "Look for a division.",
        ),
        Misconception(
            "bytes of an all-reduce",
            (_scattered(sent=lambda sent, a: [2 * s for s in sent]),),
            "One phase of N - 1 steps sends (N-1)/N S bytes; two phases would send twice that.",
            "How many steps does your loop have, and how large is one message?",
        ),
        Misconception(
            "bytes of the whole array in every step",
            (_scattered(sent=lambda sent, a: [(len(a) - 1) * a[0].nbytes] * len(a)),),
            "A step sends one chunk of S/N bytes, not the array of S.",
            "Count the bytes of what is in the message.",
        ),
    ),
    parts=("results", "sent"),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

ALL_GATHER = Exercise(
    chapter=1,
    solution=ring_all_gather,
    expect=_expect_all_gather,
    route="np.concatenate; bytes by what the neighbour has already",
    draw=_draw_shards,
    cases=(
        Case(([np.array([5.0])],), ([np.array([5.0])], [0]), "one rank"),
        Case(
            ([np.array([1.0]), np.array([2.0]), np.array([3.0])],),
            ([np.array([1.0, 2.0, 3.0])] * 3, [16] * 3),
            "three ranks, by hand",
        ),
    ),
    misconceptions=(
        Misconception(
            "every rank starts with its own shard",
            _gathered(_from_own(1)) + _gathered(_from_own(-1)),
            "The order is that of the ranks, the same everywhere; only then do ranks agree on the "
            "gathered weights.",
            "Put what arrives in the place of the rank it comes from.",
        ),
        Misconception(
            "N - 1 times the own shard",
            _gathered(sent=_bytes_of(lambda own, whole, n: (n - 1) * own)),
            "On a ring a rank sends its own shard once and then passes on the others'. With equal "
            "shards the number is the same, with unequal ones not.",
            "Whose shard does a rank send in its second step?",
        ),
        Misconception(
            "received bytes instead of sent ones",
            _gathered(sent=_bytes_of(lambda own, whole, n: whole - own)),
            "A rank receives all shards but its own, and sends all but its neighbour's own.",
            "Add the bytes to the rank that they leave.",
        ),
        Misconception(
            "a step too many",
            _gathered(sent=_bytes_of(lambda own, whole, n: whole)),
            "In the last of N steps each shard would come home to where it set out.",
            "After how many steps has every rank seen all shards?",
        ),
        Misconception(
            "only the own shard is counted",
            _gathered(sent=_bytes_of(lambda own, whole, n: own if n > 1 else 0)),
            "A rank also passes on what it receives; else its neighbour would see one shard only.",
            "Add up the bytes in every step.",
        ),
    ),
    parts=("results", "sent"),
)

EXERCISES = (REDUCE_SCATTER, ALL_GATHER)
