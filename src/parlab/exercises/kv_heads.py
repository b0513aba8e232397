"""The exercise of chapter 3 on attention heads: fewer key-value heads than ranks."""

from parlab.exercises.records import Case, Exercise, Misconception


def heads_on_rank(rank, n, n_heads, n_kv_heads):
    """Return the query heads and the key-value heads that a rank of n holds, as two lists.

    Consecutive query heads go to one rank, n_heads / n to each. Query head q needs key-value head
    q // (n_heads / n_kv_heads). A rank holds those that its query heads need, whole: a head is
    never cut, but several ranks may hold the same one.

    n divides n_heads; n divides n_kv_heads, or n_kv_heads divides n.

    >>> heads_on_rank(5, 8, 32, 4)
    ([20, 21, 22, 23], [2])
    """
    queries = list(range(rank * n_heads // n, (rank + 1) * n_heads // n))
    group = n_heads // n_kv_heads
    return queries, list(range(queries[0] // group, queries[-1] // group + 1))


def _expect(rank, n, n_heads, n_kv_heads):
    """Heads dealt out one by one."""
    queries = [q for q in range(n_heads) if q // (n_heads // n) == rank]
    needed = {q // (n_heads // n_kv_heads) for q in queries}
    return queries, sorted(needed)


def _draw(rng):
    n_kv, times = int(rng.integers(1, 4)), int(rng.integers(2, 4))
    n = n_kv * times  # more ranks than key-value heads, or
    if rng.integers(2):
        n, n_kv = n_kv, n
    return int(rng.integers(n)), n, max(n, n_kv) * int(rng.integers(2, 4)), n_kv


# Known mistakes.


def _kv(wrong):
    """Right query heads; wrong key-value heads."""
    return lambda rank, n, heads, kv: (_expect(rank, n, heads, kv)[0], list(wrong(rank, n, kv)))


def _block(rank, size):
    return range(rank * size, (rank + 1) * size)


def _in_turn(rank, n, heads, kv):
    queries = list(range(rank, heads, n))
    return queries, sorted({q // (heads // kv) for q in queries})


def _queries_in_turn(*args):
    return _in_turn(*args)[0], _expect(*args)[1]


EXERCISES = (
    Exercise(
        chapter=3,
        solution=heads_on_rank,
        expect=_expect,
        route="heads dealt out one by one",
        draw=_draw,
        cases=(
            Case((5, 8, 32, 4), ([20, 21, 22, 23], [2]), "4 key-value heads at tp 8: sglang 19086"),
            Case((1, 4, 32, 8), (list(range(8, 16)), [2, 3]), "2 key-value heads a rank, by hand"),
            Case((0, 1, 4, 2), ([0, 1, 2, 3], [0, 1]), "one rank"),
        ),
        misconceptions=(
            Misconception(
                "key-value heads are divided by the ranks though there are fewer",
                (
                    _kv(lambda rank, n, kv: _block(rank, kv // n)),
                    _kv(lambda rank, n, kv: range(rank * kv // n, (rank + 1) * kv // n)),
                ),
                "4 // 8 is 0, and most ranks hold nothing for their queries to look at. The heads "
                "have to be held by several ranks, or the layout refused.",
                "Which key-value head does the rank's first query head need?",
            ),
            Misconception(
                "key-value heads that do not exist",
                (_kv(lambda rank, n, kv: _block(rank, max(1, kv // n))),),
                "One head a rank is right, but there are no n of them: neighbours share one.",
                "What is the number of the last key-value head?",
            ),
            Misconception(
                "copies are dealt out in turn",
                (_kv(lambda rank, n, kv: [rank % kv] if n > kv else _block(rank, kv // n)),),
                "Query heads are dealt out in blocks, so neighbours share a key-value head. With "
                "rank % n_kv_heads the queries look at another group's keys, and nothing fails.",
                "Which key-value head does the rank's first query head need?",
            ),
            Misconception(
                "every rank holds all key-value heads",
                (_kv(lambda rank, n, kv: range(kv)),),
                "That works, but the cache of keys and values is what grouped-query attention and "
                "tensor parallelism are to make smaller.",
                "Which of them does no query head of this rank use?",
            ),
            Misconception(
                "query heads are dealt out in turn",
                (_in_turn, _queries_in_turn),
                "A rank's columns of the query matrix lie side by side, and so do its heads: rank, "
                "rank + n, ... would need the matrix to be sorted anew.",
                "Which columns does a column-parallel layer leave on this rank?",
            ),
        ),
        parts=("queries", "kv_heads"),
    ),
)
