"""The exercise of chapter 1: ring all-reduce, with the bytes that every rank sends."""

import numpy as np

from parlab.exercises.records import AnyOf, Case, Exercise, Misconception

ORDER_OF_SUMS = "a ring adds floats in another order than NumPy's sum"


def ring_all_reduce(arrays):
    """All-reduce on a ring: every rank ends with the elementwise sum.

    arrays: one per rank, all of one shape and dtype; any number of elements. A rank sends to its
    right neighbour only, one chunk in each step. The arrays stay as they are.

    Returns (results, sent): each rank's sum, in the arrays' shape, and the bytes each rank sent.

    >>> results, sent = ring_all_reduce([np.array([1, 2]), np.array([10, 20])])
    >>> results[0].tolist(), results[1].tolist(), sent
    ([11, 22], [11, 22], [16, 16])
    """
    n = len(arrays)  # given
    chunks = [np.array_split(np.array(array).ravel(), n) for array in arrays]  # given
    sent = [0] * n  # given
    for shift, summing in ((0, True), (1, False)):
        for step in range(n - 1):
            messages = []
            for rank in range(n):
                chunk = (rank + shift - step) % n
                messages.append((rank, chunk, chunks[rank][chunk].copy()))
            for rank, chunk, data in messages:
                sent[rank] += data.nbytes
                mine = chunks[(rank + 1) % n]
                mine[chunk] = mine[chunk] + data if summing else data
    return [np.concatenate(row).reshape(arrays[0].shape) for row in chunks], sent  # given


def total(arrays):
    """The elementwise sum, by NumPy, in the arrays' dtype."""
    return np.sum(np.stack(arrays), axis=0, dtype=arrays[0].dtype)


def chunk_bytes(arrays):
    """Bytes of each chunk of a rank's array."""
    return [chunk.nbytes for chunk in np.array_split(arrays[0].ravel(), len(arrays))]


def _bytes_sent(arrays, shift=1, direction=1):
    """Bytes per rank: all chunks in each phase, but for one.

    In the first phase a rank never sends the chunk that it ends with, `shift` away from its number;
    in the second never the one that its neighbour ended with.
    """
    n, size = len(arrays), chunk_bytes(arrays)
    kept = [size[(rank + shift) % n] + size[(rank + shift + direction) % n] for rank in range(n)]
    return [2 * sum(size) - k for k in kept]


def _expect(arrays):
    # Which chunk a rank ends with, and the ring's direction, are conventions: all are right.
    n = len(arrays)
    conventions = [_bytes_sent(arrays, shift, way) for way in (1, -1) for shift in range(n)]
    return [total(arrays)] * n, AnyOf(tuple(conventions))


def draw_arrays(rng):
    """Between 2 and 5 ranks' arrays: floats, small integers, or integers that no float holds."""
    n, size = int(rng.integers(2, 6)), int(rng.integers(1, 13))
    kind = rng.integers(0, 4)
    if kind == 0:
        return ([rng.integers(2**53, 2**55, size) for _ in range(n)],)
    if kind == 1:
        return ([rng.integers(-9, 10, size) for _ in range(n)],)
    return ([exact_floats(rng, size) for _ in range(n)],)


def exact_floats(rng, size):
    """Multiples of 1/8, whose sums are exact in any order: one that cancels gives 0, not 1e-16."""
    return (8 * rng.normal(size=size)).round() / 8


def _case_of_64_doubles(n):
    arrays = [np.arange(64.0) + rank for rank in range(n)]
    right = np.arange(64.0) * n + n * (n - 1) / 2
    sent = 2 * (n - 1) * 64 * 8 // n
    return Case((arrays,), ([right] * n, [sent] * n), "2 (N-1)/N of 64 doubles, sums by hand")


# Known mistakes.


def _wrong_bytes(compute):
    """Right sums with wrong bytes, in each of the usual conventions."""

    def way(shift, direction):
        return lambda arrays: (
            [total(arrays)] * len(arrays),
            compute(arrays, shift, direction),
        )

    return tuple(way(shift, direction) for direction in (1, -1) for shift in (0, 1, -1))


def _wrong_sums(compute):
    """Wrong sums, with the bytes of the usual conventions."""

    def way(shift, direction):
        return lambda arrays: (compute(arrays), _bytes_sent(arrays, shift, direction))

    return tuple(way(shift, direction) for direction in (1, -1) for shift in (0, 1, -1))


def _and_received(arrays, shift, direction):
    sent = _bytes_sent(arrays, shift, direction)
    return [sent[rank] + sent[(rank - direction) % len(arrays)] for rank in range(len(arrays))]


def _first_phase(arrays, shift, direction):
    n, size = len(arrays), chunk_bytes(arrays)
    return [sum(size) - size[(rank + shift) % n] for rank in range(n)]


def _second_phase(arrays, shift, direction):
    return _first_phase(arrays, shift + direction, direction)


def _same_for_all(of_bytes_and_n):
    return lambda arrays, *_: [of_bytes_and_n(arrays[0].nbytes, len(arrays))] * len(arrays)


def _by_chunk(make):
    """All ranks get the same array, whose chunk c is make(c, the ranks' chunks c)."""

    def compute(arrays):
        n = len(arrays)
        if n == 1:  # nothing is sent
            return list(arrays)
        columns = zip(*(np.array_split(array.ravel(), n) for array in arrays), strict=True)
        made = [make(c, column) for c, column in enumerate(columns)]
        return [np.concatenate(made).reshape(arrays[0].shape)] * n

    return compute


def _whole_chunks(arrays):
    """Elements that n equal chunks cover, and the bytes that a rank sends of them."""
    n, size = len(arrays), arrays[0].size
    return size // n * n, [2 * (n - 1) * (size // n) * arrays[0].itemsize] * n


def _tail_left_alone(arrays):
    cut, sent = _whole_chunks(arrays)
    results = [array.ravel().copy() for array in arrays]
    for result in results:
        result[:cut] = total(arrays).ravel()[:cut]
    return [result.reshape(arrays[0].shape) for result in results], sent


def _tail_lost(arrays):
    cut, sent = _whole_chunks(arrays)
    return [total(arrays).ravel()[:cut].reshape(-1)] * len(arrays), sent


def _tail_refused(arrays):
    np.split(arrays[0].ravel(), len(arrays))
    return [total(arrays)] * len(arrays), _bytes_sent(arrays)


MISCONCEPTIONS = (
    Misconception(
        "the all-gather starts from the wrong chunk",
        _wrong_sums(_by_chunk(lambda c, column: column[c]))
        + _wrong_sums(_by_chunk(lambda c, column: sum(column) - column[c])),
        "After the reduce-scatter only one chunk of a rank is complete. What is sent from another "
        "place overwrites complete sums with partial ones.",
        "Follow one chunk through the first phase for N = 3: on which rank does it end?",
    ),
    Misconception(
        "messages carry a rank's own chunk, not the partial sum that has just arrived",
        _wrong_sums(_by_chunk(lambda c, column: column[c - 1] + column[c - 2])),
        "A chunk collects one more contribution at each rank that it passes. Sending the original "
        "again brings each neighbour's share along and loses the others.",
        "In step t a rank passes on the chunk that it received, and added to, in step t - 1.",
    ),
    Misconception(
        "the mean instead of the sum",
        _wrong_sums(lambda arrays: [total(arrays) / len(arrays)] * len(arrays)),
        "All-reduce adds up. Dividing by N is what data parallelism does with the result.",
        "Look for a division.",
    ),
    Misconception(
        "integers pass through float64",
        _wrong_sums(lambda arrays: [np.sum(np.stack(arrays).astype(float), axis=0)] * len(arrays)),
        "float64 holds whole numbers up to 2^53 only; larger ones are rounded, and the sum is off "
        "by a few units that nobody sees.",
        "Keep the arrays' dtype: where do your chunks get theirs?",
    ),
    Misconception(
        "the remainder is forgotten where N does not divide the elements",
        (_tail_left_alone, _tail_lost, _tail_refused),
        "N equal chunks cover only a multiple of N; the elements after them are not reduced, or "
        "the cut fails.",
        "Chunks may differ in size by one: np.array_split cuts like that.",
    ),
    Misconception(
        "sent and received bytes are counted together",
        _wrong_bytes(_and_received) + _wrong_bytes(lambda *a: [2 * s for s in _bytes_sent(*a)]),
        "Every byte that one rank sends another receives. Counting both doubles the traffic.",
        "Add the bytes of a message to its sender only.",
    ),
    Misconception(
        "bytes of the whole array in every step",
        _wrong_bytes(_same_for_all(lambda size, n: 2 * (n - 1) * size)),
        "A step sends one chunk of S/N bytes, not the array of S.",
        "Count the bytes of what is in the message.",
    ),
    Misconception(
        "the whole array goes round the ring",
        _wrong_bytes(_same_for_all(lambda size, n: (n - 1) * size)),
        "N - 1 steps of S bytes give the right sum, but (N-1) S bytes per rank, N/2 times as much "
        "as with chunks.",
        "Cut each array into N chunks; two phases move one chunk per step.",
    ),
    Misconception(
        "a step too many in each phase",
        _wrong_bytes(_same_for_all(lambda size, n: 2 * size)),
        "A chunk is complete after N - 1 additions, because its first rank need not receive it. "
        "N steps send each chunk once around for nothing.",
        "How often must a chunk move until N contributions are in it?",
    ),
    Misconception(
        "only one of the two phases is counted",
        _wrong_bytes(_first_phase) + _wrong_bytes(_second_phase),
        "Reduce-scatter and all-gather both send (N-1)/N S bytes.",
        "Where does the second phase add to the counters?",
    ),
    Misconception(
        "elements are counted, not bytes",
        _wrong_bytes(lambda arrays, *a: [s / arrays[0].itemsize for s in _bytes_sent(arrays, *a)]),
        "The link carries bytes: an element of float64 has 8, one of bfloat16 2.",
        "An array knows its bytes: .nbytes.",
    ),
)

_LARGE = 2**53 + 1

EXERCISES = (
    Exercise(
        chapter=1,
        solution=ring_all_reduce,
        expect=_expect,
        route="NumPy's sum, and the bytes by what a ring leaves out",
        draw=draw_arrays,
        cases=(
            Case(([np.array([5.0, 7.0])],), ([np.array([5.0, 7.0])], [0]), "one rank"),
            Case(
                ([np.array([_LARGE, 0]), np.array([0, 1])],),
                ([np.array([_LARGE, 1])] * 2, [16, 16]),
                "an integer above 2^53",
            ),
            Case(
                ([np.arange(6).reshape(2, 3)] * 3,),
                ([np.arange(0, 18, 3).reshape(2, 3)] * 3, [64] * 3),
                "two dims, by hand",
            ),
            *map(_case_of_64_doubles, (2, 4, 8)),
        ),
        misconceptions=MISCONCEPTIONS,
        parts=("results", "sent"),
        tolerance=1e-9,
        why_tolerance=ORDER_OF_SUMS,
    ),
)
