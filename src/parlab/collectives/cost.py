"""What a collective costs: bytes counted from its schedule, time from the alpha-beta model.

A message of n bytes takes alpha + n / B, with alpha the latency and B the bandwidth of a link in
one direction. A step takes as long as its busiest rank, which sends and receives at the same
time. N is the number of ranks, S the bytes of the tensor on each.
"""

from dataclasses import dataclass

from parlab.hardware import Link
from parlab.units import require_choice, require_int, require_number

ALGORITHMS = ("ring", "tree", "binomial", "halving_doubling", "naive")
MOST_RANKS = 10**9


@dataclass(frozen=True)
class CollectiveCost:
    """Sequential steps, bytes sent or received by the busiest rank, and seconds."""

    steps: int
    bytes_per_rank: float
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Bytes that move in a schedule: steps[t] is (sent per rank, received per rank)."""

    steps: tuple[tuple[list, list], ...]
    n_ranks: int

    @property
    def sent(self):
        """Bytes that each rank sends over all steps."""
        return [sum(sent[rank] for sent, _ in self.steps) for rank in range(self.n_ranks)]

    @property
    def received(self):
        """Bytes that each rank receives over all steps."""
        return [sum(received[rank] for _, received in self.steps) for rank in range(self.n_ranks)]

    @property
    def busiest(self):
        """Bytes of the rank that sends or receives most."""
        return max(*self.sent, *self.received)


def traffic(schedule, chunk_bytes):
    """Count the bytes that every rank sends and receives in every step.

    chunk_bytes: the size of each chunk, one number for all or one per chunk. Integers stay exact.

    >>> from parlab.collectives.schedules import ring_all_reduce_schedule
    >>> traffic(ring_all_reduce_schedule(4), 512 // 4).sent
    [768, 768, 768, 768]
    """
    size = _size_per_chunk(schedule, chunk_bytes)
    steps = []
    for step in schedule.steps:
        sent, received = [0] * schedule.n_ranks, [0] * schedule.n_ranks
        for src, dst, chunk, _ in step:
            sent[src] += size[chunk]
            received[dst] += size[chunk]
        steps.append((sent, received))
    return Traffic(tuple(steps), schedule.n_ranks)


def bytes_leaving_nodes(schedule, chunk_bytes, ranks_per_node):
    """Return, for every node of `ranks_per_node` consecutive ranks, the bytes that it sends out.

    >>> from parlab.collectives.schedules import hierarchical_schedule, ring_all_reduce_schedule
    >>> bytes_leaving_nodes(ring_all_reduce_schedule(16), 1, 8)  # S = 16 bytes: 1.875 S
    [30, 30]
    >>> bytes_leaving_nodes(hierarchical_schedule(2, 8), 1, 8)  # S = 16 bytes: S
    [16, 16]
    """
    local = require_int("ranks_per_node", ranks_per_node, minimum=1)
    if schedule.n_ranks % local:
        raise ValueError(
            f"ranks_per_node must divide the {schedule.n_ranks} ranks of the schedule, got {local}"
        )
    size = _size_per_chunk(schedule, chunk_bytes)
    leaving = [0] * (schedule.n_ranks // local)
    for step in schedule.steps:
        for src, dst, chunk, _ in step:
            if src // local != dst // local:
                leaving[src // local] += size[chunk]
    return leaving


def price(schedule, tensor_bytes, link, *, ranks_per_node=None, network=None):
    """Price any schedule step by step, with the tensor cut into equal chunks.

    A step takes alpha + (bytes of its busiest rank) / B. Where `ranks_per_node` and the link
    `network` between nodes are given, messages between nodes use `network` (one port per rank)
    and a step takes as long as the slower of the two.

    >>> from parlab.collectives.schedules import binomial_all_reduce_schedule
    >>> from parlab.hardware import Link
    >>> cost = price(binomial_all_reduce_schedule(8), 1e6, Link(5e-6, 50e9))
    >>> cost.steps, cost.bytes_per_rank, round(cost.seconds, 9)
    (6, 3000000.0, 0.00015)
    """
    tensor_bytes = require_number("tensor_bytes", tensor_bytes, minimum=0)
    _require_link("link", link)
    if (ranks_per_node is None) != (network is None):
        raise ValueError("ranks_per_node and network must be given together or not at all")
    if network is not None:
        _require_link("network", network)
    chunk = tensor_bytes / schedule.n_chunks
    local = ranks_per_node or schedule.n_ranks
    seconds = 0.0
    for step in schedule.steps:
        # One message, however many chunks it carries, for every rank, direction and kind of link.
        load = {}
        for src, dst, _, _ in step:
            crosses = src // local != dst // local
            for end in ((src, "sends", crosses), (dst, "receives", crosses)):
                load[end] = load.get(end, 0) + chunk
        seconds += max(
            _message(network if crosses else link, size) for (_, _, crosses), size in load.items()
        )
    return CollectiveCost(len(schedule.steps), traffic(schedule, chunk).busiest, seconds)


def all_reduce_cost(n_ranks, tensor_bytes, link, algorithm="ring"):
    """Closed forms of an all-reduce: steps, bytes of the busiest rank, seconds.

    ================  ==================  =========================  ==============================
    algorithm         steps               bytes per rank             seconds
    ================  ==================  =========================  ==============================
    ring              2(N-1)              2(N-1)/N S                 2(N-1) alpha + 2(N-1)/N S/B
    tree (pipelined)  2 ceil(log2 N)      2 S                        2 ceil(log2 N) alpha + 2 S/B
    binomial          2 ceil(log2 N)      ceil(log2 N) S             2 ceil(log2 N) (alpha + S/B)
    halving_doubling  2 log2 N            2(N-1)/N S                 2 log2 N alpha + 2(N-1)/N S/B
    naive             2                   (N-1) S                    2 alpha + 2(N-1) S/B
    ================  ==================  =========================  ==============================

    A pipelined tree cuts the tensor into so many pieces that its inner ranks are always busy
    (NCCL's double binary tree); halving_doubling for other N than powers of two adds the two
    folding steps of `halving_doubling_schedule`. Sources: Thakur et al. (2005); Patarasuk and
    Yuan (2009); Sanders, Speck and Traeff (2009).

    n_ranks: N, at least 1. tensor_bytes: S, a number or an array of them. link: one direction.

    >>> from parlab.hardware import Link
    >>> cost = all_reduce_cost(8, 14e9, Link(0, 450e9))  # bf16 gradients of a 7B model
    >>> cost.steps, cost.bytes_per_rank, round(cost.seconds, 4)
    (14, 24500000000.0, 0.0544)
    """
    n = require_int("n_ranks", n_ranks, minimum=1, maximum=MOST_RANKS)
    tensor_bytes = require_number("tensor_bytes", tensor_bytes, minimum=0)
    link = _require_link("link", link)
    algorithm = require_choice("algorithm", algorithm, ALGORITHMS)
    depth = (n - 1).bit_length()  # ceil(log2 N), exact for any integer
    # Bytes in units of S: of the busiest rank, and one after the other on the critical path.
    if algorithm == "ring":
        steps, busiest = 2 * (n - 1), 2 * (n - 1) / n
        on_the_path = busiest
    elif algorithm == "tree":
        steps, busiest = 2 * depth, 2.0 * (n > 1)
        on_the_path = busiest
    elif algorithm == "binomial":
        steps, busiest = 2 * depth, float(depth)
        on_the_path = 2.0 * depth
    elif algorithm == "halving_doubling":
        q = 1 << (n.bit_length() - 1)
        folds = 2 * (n > q)
        steps = 2 * (q.bit_length() - 1) + folds
        busiest = 2 * (q - 1) / q + folds / 2
        on_the_path = 2 * (q - 1) / q + folds
    else:  # naive
        steps, busiest = 2 * (n > 1), float(n - 1)
        on_the_path = 2.0 * (n - 1)
    seconds = steps * link.latency_s + on_the_path * tensor_bytes / link.bandwidth_bytes_per_s
    return CollectiveCost(steps, busiest * tensor_bytes, seconds)


def tree_all_reduce_cost(n_ranks, tensor_bytes, link):
    """The pipelined tree of `all_reduce_cost`: 2 ceil(log2 N) alpha + 2 S/B seconds.

    >>> from parlab.hardware import Link
    >>> round(tree_all_reduce_cost(8, 1e6, Link(5e-6, 50e9)).seconds, 9)
    7e-05
    """
    return all_reduce_cost(n_ranks, tensor_bytes, link, algorithm="tree")


def hierarchical_all_reduce_cost(n_nodes, ranks_per_node, tensor_bytes, link, network):
    """Reduce-scatter inside nodes, all-reduce of each shard across them, all-gather inside.

    Seconds: 2 (L-1) alpha + 2 (L-1)/L S/B over `link`, plus the all-reduce of S/L bytes among M
    ranks over `network`, with M nodes of L ranks and one network port per rank.
    """
    local = require_int("ranks_per_node", ranks_per_node, minimum=1)
    tensor_bytes = require_number("tensor_bytes", tensor_bytes, minimum=0)
    inside = all_reduce_cost(local, tensor_bytes, link)
    across = all_reduce_cost(n_nodes, tensor_bytes / local, network)
    return CollectiveCost(
        inside.steps + across.steps,
        inside.bytes_per_rank + across.bytes_per_rank,
        inside.seconds + across.seconds,
    )


def ring_tree_crossover_bytes(n_ranks, link):
    """The message size above which the ring beats the pipelined tree.

    S* = alpha B N ((N-1) - ceil(log2 N)), where their closed forms are equal. It is 0 for N <= 3:
    there the ring takes no more steps than the tree, so the tree never wins.

    >>> from parlab.hardware import Link
    >>> round(ring_tree_crossover_bytes(8, Link(5e-6, 50e9)))
    8000000
    """
    n = require_int("n_ranks", n_ranks, minimum=1, maximum=MOST_RANKS)
    link = _require_link("link", link)
    steps_saved = (n - 1) - (n - 1).bit_length()
    return link.latency_s * link.bandwidth_bytes_per_s * n * steps_saved


def bus_bandwidth(op, n_ranks, total_bytes, seconds):
    """Bandwidth at which the busiest link must have worked, in bytes/s, as nccl-tests reports it.

    Algorithm bandwidth S/t, times 2(N-1)/N for an all-reduce, (N-1)/N for reduce-scatter,
    all-gather and all-to-all of S bytes in total, and 1 for broadcast and reduce
    (nccl-tests, doc/PERFORMANCE.md).

    >>> bus_bandwidth("all_reduce", 8, 14e9, 0.05444) / 1e9  # doctest: +ELLIPSIS
    450.0...
    """
    n = require_int("n_ranks", n_ranks, minimum=1, maximum=MOST_RANKS)
    total_bytes = require_number("total_bytes", total_bytes, minimum=0)
    seconds = require_number("seconds", seconds, minimum=0, exclusive=True)
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_gather": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    return factors[require_choice("op", op, factors)] * total_bytes / seconds


def padded_elements(n_elements, parts):
    """The next multiple of `parts`: what libraries that need equal shards send instead.

    >>> padded_elements(8, 6)
    12
    """
    parts = require_int("parts", parts, minimum=1)
    return -(-require_int("n_elements", n_elements, minimum=0) // parts) * parts


def _require_link(name, link):
    if not isinstance(link, Link):
        raise TypeError(f"{name} must be a Link(latency_s, bandwidth_bytes_per_s), got {link!r}")
    return link


def _message(link, size):
    return link.latency_s + size / link.bandwidth_bytes_per_s


def _size_per_chunk(schedule, chunk_bytes):
    if not hasattr(chunk_bytes, "__len__"):
        return [chunk_bytes] * schedule.n_chunks
    if len(chunk_bytes) != schedule.n_chunks:
        raise ValueError(
            f"chunk_bytes must be one number or one per chunk ({schedule.n_chunks}), "
            f"got {len(chunk_bytes)}"
        )
    return list(chunk_bytes)
