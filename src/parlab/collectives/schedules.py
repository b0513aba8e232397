"""Collectives as plain data: a schedule is a list of steps, a step a list of simultaneous sends.

The same object is validated here, priced in `cost`, run on arrays in `simulate`, drawn by the
panels and executed between processes by `parlab.distributed.ring`.

N is the number of ranks, r a rank, t a step; all rank and chunk arithmetic is modulo N.
"""

from dataclasses import dataclass
from typing import NamedTuple

from parlab.units import require_choice, require_int

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
MAX_RANKS = 1024  # a ring of 1,024 ranks already holds 2.1 million sends


class Send(NamedTuple):
    """One message: `src` sends its copy of `chunk`; `dst` adds it (`reduce`) or keeps it."""

    src: int
    dst: int
    chunk: int
    reduce: bool


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who sends which chunk to whom and when; all sends of one step are simultaneous.

    operation: what holds at the end, one of `OPERATIONS`.
    owner: owner[chunk] is the rank where a chunk is complete: at the end of a reduce-scatter, at
        the start of an all-gather or a broadcast. An all-reduce has none.
    """

    operation: str
    n_ranks: int
    n_chunks: int
    steps: tuple[tuple[Send, ...], ...]
    owner: tuple[int, ...] = ()

    def __post_init__(self):
        operation = require_choice("operation", self.operation, OPERATIONS)
        object.__setattr__(self, "operation", operation)
        require_int("n_ranks", self.n_ranks, minimum=1)
        require_int("n_chunks", self.n_chunks, minimum=1)
        owners_needed = 0 if self.operation == "all_reduce" else self.n_chunks
        if len(self.owner) != owners_needed:
            raise ValueError(
                f"owner must name {owners_needed} ranks (one per chunk, none for an all-reduce), "
                f"got {len(self.owner)}"
            )


def ring_reduce_scatter_schedule(n_ranks, shift=0):
    """N - 1 steps after which rank r holds the finished chunk r + shift.

    In step t rank r sends chunk r + shift - 1 - t to rank r + 1, which adds it to its own.
    shift=0 is the ownership of torch.distributed; shift=1 that of many textbooks.

    >>> ring_reduce_scatter_schedule(3).steps[0]  # doctest: +NORMALIZE_WHITESPACE
    (Send(src=0, dst=1, chunk=2, reduce=True), Send(src=1, dst=2, chunk=0, reduce=True),
     Send(src=2, dst=0, chunk=1, reduce=True))
    """
    n = _ranks(n_ranks)
    steps = tuple(_ring_step(n, shift - 1 - t, reduce=True) for t in range(n - 1))
    return Schedule("reduce_scatter", n, n, steps, tuple((c - shift) % n for c in range(n)))


def ring_all_gather_schedule(n_ranks, shift=0):
    """N - 1 steps that carry every chunk around the ring; rank r starts with chunk r + shift.

    In step t rank r sends chunk r + shift - t to rank r + 1: first its own, then what just came.
    """
    n = _ranks(n_ranks)
    steps = tuple(_ring_step(n, shift - t, reduce=False) for t in range(n - 1))
    return Schedule("all_gather", n, n, steps, tuple((c - shift) % n for c in range(n)))


def ring_all_reduce_schedule(n_ranks, shift=0):
    """Ring reduce-scatter, then ring all-gather: 2(N - 1) steps of S/N bytes per rank.

    >>> len(ring_all_reduce_schedule(8).steps)
    14
    """
    scatter = ring_reduce_scatter_schedule(n_ranks, shift)
    gather = ring_all_gather_schedule(n_ranks, shift)
    return Schedule("all_reduce", scatter.n_ranks, scatter.n_ranks, scatter.steps + gather.steps)


def broadcast_schedule(n_ranks, root=0):
    """Binomial tree from `root`: ceil(log2 N) steps, in each of which every holder serves one rank.

    >>> [[(send.src, send.dst) for send in step] for step in broadcast_schedule(4).steps]
    [[(0, 1)], [(0, 2), (1, 3)]]
    """
    n = _ranks(n_ranks)
    root = require_int("root", root, minimum=0, maximum=n - 1)
    steps = []
    holders = 1
    while holders < n:
        pairs = [(i, i + holders) for i in range(min(holders, n - holders))]
        steps.append(tuple(Send((i + root) % n, (j + root) % n, 0, False) for i, j in pairs))
        holders *= 2
    return Schedule("broadcast", n, 1, tuple(steps), (root,))


def binomial_all_reduce_schedule(n_ranks):
    """Reduce to rank 0 up a binomial tree, then broadcast down: 2 ceil(log2 N) steps of S bytes.

    >>> [[(send.src, send.dst) for send in step] for step in binomial_all_reduce_schedule(4).steps]
    [[(2, 0), (3, 1)], [(1, 0)], [(0, 1)], [(0, 2), (1, 3)]]
    """
    down = broadcast_schedule(n_ranks)
    up = tuple(
        tuple(Send(send.dst, send.src, 0, True) for send in step) for step in reversed(down.steps)
    )
    return Schedule("all_reduce", down.n_ranks, 1, up + down.steps)


def halving_doubling_schedule(n_ranks):
    """Recursive halving reduce-scatter, then recursive doubling all-gather.

    With N = 2^k ranks: 2k steps; in halving step j partners at distance N / 2^(j+1) exchange the
    half of their remaining chunks that the other keeps (Thakur, Rabenseifner and Gropp, 2005,
    doi:10.1177/1094342005051521). Any other N is extended as in that paper: with q the largest
    power of two below N, ranks q..N-1 first add their whole tensor to ranks 0..N-q-1 and get the
    result back in one last step.

    >>> [len(halving_doubling_schedule(n).steps) for n in (1, 2, 4, 8, 6)]
    [0, 2, 4, 6, 6]
    """
    n = _ranks(n_ranks)
    q = 1 << (n.bit_length() - 1)
    chunks = range(q)
    halving = []
    distance = q // 2
    while distance:
        # A rank keeps the chunks whose bits agree with its own down to `distance`.
        halving.append(
            tuple(
                Send(r, r ^ distance, c, True)
                for r in range(q)
                for c in chunks
                if (c ^ r) & distance and (c ^ r) < 2 * distance
            )
        )
        distance //= 2
    # Doubling sends back along the same edges what halving had collected over them.
    doubling = [
        tuple(sorted(Send(send.dst, send.src, send.chunk, False) for send in step))
        for step in reversed(halving)
    ]
    fold = tuple(Send(r, r - q, c, True) for r in range(q, n) for c in chunks)
    unfold = tuple(Send(r - q, r, c, False) for r in range(q, n) for c in chunks)
    steps = [fold, *halving, *doubling, unfold]
    return Schedule("all_reduce", n, q, tuple(step for step in steps if step))


def hierarchical_schedule(n_nodes, ranks_per_node):
    """Reduce-scatter inside each node, all-reduce across nodes, all-gather inside: three rings.

    Node k holds ranks k L to k L + L - 1, with L = ranks_per_node and M = n_nodes. The tensor is
    cut into L shards of M chunks; the local ranks i of all nodes all-reduce shard i among
    themselves, so 2 (M-1)/M S leaves every node, spread over its L cards.

    >>> len(hierarchical_schedule(2, 8).steps)  # 7 inside, 2 across, 7 inside
    16
    """
    m = _ranks(n_nodes, "n_nodes")
    local = _ranks(ranks_per_node, "ranks_per_node")
    n = _ranks(m * local, "n_nodes * ranks_per_node")

    def inside(step):
        return tuple(
            Send(k * local + s.src, k * local + s.dst, s.chunk * m + j, s.reduce)
            for k in range(m)
            for s in step
            for j in range(m)
        )

    def across(step):
        return tuple(
            Send(s.src * local + i, s.dst * local + i, i * m + s.chunk, s.reduce)
            for i in range(local)
            for s in step
        )

    steps = (
        *map(inside, ring_reduce_scatter_schedule(local).steps),
        *map(across, ring_all_reduce_schedule(m).steps),
        *map(inside, ring_all_gather_schedule(local).steps),
    )
    return Schedule("all_reduce", n, n, steps)


def naive_all_reduce_schedule(n_ranks):
    """Every rank sends its whole tensor to rank 0, which sends the sum back to each: 2 steps.

    Rank 0 receives (N - 1) S bytes and sends as many: its link is the bottleneck.
    """
    n = _ranks(n_ranks)
    gather = tuple(Send(r, 0, 0, True) for r in range(1, n))
    spread = tuple(Send(0, r, 0, False) for r in range(1, n))
    return Schedule("all_reduce", n, 1, (gather, spread) if n > 1 else ())


def holdings(schedule):
    """Return what every rank holds before the first step and after each step.

    state[rank][chunk] is a bitmask of the ranks whose contributions that copy contains: 0 where
    the rank has nothing, all ones where the chunk is complete.

    Raises ValueError, naming step and send, where a send is impossible (no such rank or chunk,
    nothing to send), adds a contribution twice or overwrites one that it does not bring.

    >>> [list(map(bin, rank)) for rank in holdings(ring_reduce_scatter_schedule(2))[-1]]
    [['0b11', '0b1'], ['0b10', '0b11']]
    """
    return list(_evolve(schedule))


def _evolve(schedule):
    n, chunks, complete = schedule.n_ranks, schedule.n_chunks, (1 << schedule.n_ranks) - 1
    if schedule.operation in ("all_reduce", "reduce_scatter"):
        state = [[1 << rank] * chunks for rank in range(n)]
    else:
        state = [
            [complete * (schedule.owner[c] == rank) for c in range(chunks)] for rank in range(n)
        ]
    yield state
    for t, step in enumerate(schedule.steps):
        after = [list(row) for row in state]
        for send in step:
            where = f"step {t}, {send}"
            if not (0 <= send.src < n and 0 <= send.dst < n and send.src != send.dst):
                raise ValueError(f"{where}: src and dst must be two ranks from 0 to {n - 1}")
            if not 0 <= send.chunk < chunks:
                raise ValueError(f"{where}: chunk must be from 0 to {chunks - 1}")
            brought, own = state[send.src][send.chunk], after[send.dst][send.chunk]
            if not brought:
                raise ValueError(f"{where}: rank {send.src} holds nothing of that chunk yet")
            if send.reduce and brought & own:
                raise ValueError(f"{where}: adds {_names(brought & own)} a second time")
            if not send.reduce and own & ~brought:
                raise ValueError(
                    f"{where}: overwrites what it does not bring, {_names(own & ~brought)}"
                )
            after[send.dst][send.chunk] = brought | own
        state = after
        yield state


def validate(schedule):
    """Raise ValueError unless the schedule does what its operation promises.

    Every chunk is reduced exactly once from every rank and is delivered wherever the operation
    needs it: everywhere, or at its owner for a reduce-scatter.

    >>> validate(ring_all_reduce_schedule(5))
    >>> broken = Schedule("all_reduce", 2, 1, ((Send(0, 1, 0, True),),))
    >>> validate(broken)
    Traceback (most recent call last):
    ...
    ValueError: all_reduce leaves rank 0 without the contributions of rank 1 in chunk 0
    """
    complete = (1 << schedule.n_ranks) - 1
    for state in _evolve(schedule):
        final = state
    for rank, row in enumerate(final):
        for chunk, held in enumerate(row):
            wanted = schedule.operation != "reduce_scatter" or schedule.owner[chunk] == rank
            if wanted and held != complete:
                raise ValueError(
                    f"{schedule.operation} leaves rank {rank} without the contributions of "
                    f"{_names(complete & ~held)} in chunk {chunk}"
                )


def _ring_step(n, first, reduce):
    """Rank r sends chunk r + first to its right neighbour."""
    return tuple(Send(r, (r + 1) % n, (r + first) % n, reduce) for r in range(n))


def _ranks(value, name="n_ranks"):
    why = "larger schedules are millions of sends; all_reduce_cost prices any N without one"
    return require_int(name, value, minimum=1, maximum=MAX_RANKS, why=why)


def _names(mask):
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(ranks)
