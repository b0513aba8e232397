"""Bytes and seconds of context parallelism, and the causal work of each rank.

s is the sequence, cp the ranks over which it is cut, b the micro-batch, a heads, k kv_heads, d
their size, t the ranks of tensor parallelism. All bytes are per GPU, layer and micro-batch.
"""

from typing import NamedTuple

from parlab.hardware import Link
from parlab.totals import total
from parlab.units import require_bool, require_choice, require_int

ALGORITHMS = ("ring", "all_gather", "ulysses")
MOST_RANKS = 10**6
MOST_TOKENS = 10**9
MOST_BYTES = 16  # of one element


class ContextMessage(NamedTuple):
    """`count` equal messages of one rank, of one tensor in one phase.

    phase: "forward", "backward" or "recompute" (forward once more, within backward).
    op: "send" for the hops of a ring of attention, else the collective.
    bytes_per_rank: what each rank sends in all of them. latency_s, transfer_s: None without a link.
    """

    tensor: str
    phase: str
    op: str
    count: int
    bytes_per_rank: int
    latency_s: float | None
    transfer_s: float | None


class ContextTraffic(NamedTuple):
    """Items, and totals that are their sums."""

    items: tuple

    count = total("count", "Messages that each rank sends, one after the other.")
    bytes_per_rank = total("bytes_per_rank", "Bytes that each rank sends.")

    @property
    def latency_s(self):
        """Seconds of latency."""
        return sum(self._timed("latency_s"))

    @property
    def transfer_s(self):
        """Seconds of transfer."""
        return sum(self._timed("transfer_s"))

    @property
    def seconds(self):
        """Latency and transfer together, hidden behind compute or not."""
        return self.latency_s + self.transfer_s

    def only(self, **fields):
        """Return the traffic of the items whose fields have the given values."""
        for name in fields:
            if name not in ("tensor", "phase", "op"):
                raise TypeError(f"only() takes tensor, phase and op, got {name}")
        wanted = fields.items()
        return ContextTraffic(
            tuple(i for i in self.items if all(getattr(i, name) == v for name, v in wanted))
        )

    def _timed(self, field):
        values = [getattr(item, field) for item in self.items]
        if None in values:
            raise ValueError("link must be given for seconds, got None: bytes alone take no time")
        return values


def context_parallel_traffic(
    config,
    micro_batch,
    *,
    sequence,
    cp,
    tp=1,
    link=None,
    algorithm="ring",
    n_layers=1,
    recompute=False,
    element_bytes=2,
    grad_bytes=2,
):
    """What a rank sends so that its s/cp queries meet all keys, per layer and micro-batch.

    With n = 2 b (s/cp) (k/t) d, the keys and values of a rank's tokens:

    "ring": they travel cp - 1 hops in forward and again in backward; their gradients follow them,
    summed on the way, and end at home: (cp-1) n elements each time (Liu et al., arXiv 2310.01889).
    "all_gather": the same bytes in collectives, none hidden behind attention: a gather in forward
    and, if it is not kept, in backward, and a reduce-scatter of the gradients (Llama 3, arXiv
    2407.21783, section 3.3.2).
    "ulysses": four all-to-alls that give each rank all tokens of 1/cp of the heads, and back:
    (cp-1)/cp of 2 b (s/cp) (a + k)/t d elements in forward and in backward (Jacobs et al., arXiv
    2309.14509). So cp must divide the heads and kv_heads of a rank.

    The causal mask spares no bytes: a block that no query of a rank may see still passes through.
    Gradients of the weights, to which each of the cp ranks has its tokens' part, are left to data
    parallelism.

    config: a ModelConfig. micro_batch: b. sequence: s, which cp divides. tp: t, divides heads and
    kv_heads. link: of each rank, one direction; None gives bytes only. n_layers: layers that are
    counted. recompute: forward runs once more before backward. element_bytes: 2 for bf16.
    grad_bytes: of a gradient under way. 2 rounds each partial sum to bf16, as Transformer Engine
    does; PyTorch and ring-flash-attention keep them in fp32 and make cp hops, not cp - 1.

    >>> from parlab.models import model
    >>> traffic = context_parallel_traffic(model("llama-3-8b"), 1, sequence=131_072, cp=8)
    >>> [(item.tensor, item.phase, item.bytes_per_rank) for item in traffic.items]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('keys and values', 'forward', 469762048),
     ('keys and values', 'backward', 469762048),
     ('their gradients', 'backward', 469762048)]

    Raises ValueError or TypeError for what does not divide or is no size.
    """
    queries, keys, cp = _tokens_and_heads(config, micro_batch, sequence, cp, tp)
    layers = require_int("n_layers", n_layers, minimum=1, maximum=MOST_TOKENS)
    each = require_int("element_bytes", element_bytes, minimum=1, maximum=MOST_BYTES)
    grad = require_int("grad_bytes", grad_bytes, minimum=1, maximum=MOST_BYTES)
    algorithm = require_choice("algorithm", algorithm, ALGORITHMS)
    forward = ("forward", "recompute") if require_bool("recompute", recompute) else ("forward",)
    if algorithm == "ulysses":
        _require_heads_for_each_rank(config, cp, tp)
        rows = []
        for phase in (*forward, "backward"):
            size = each if phase != "backward" else grad
            whole = 2 * (queries + keys) * (cp - 1) * size
            rows.append(("queries, keys, values and output", phase, "all_to_all", 4, whole // cp))
    else:
        ring = algorithm == "ring"
        moves, sums = ("send", "send") if ring else ("all_gather", "reduce_scatter")
        count = cp - 1 if ring else 1
        kv = 2 * keys * (cp - 1)
        rows = [
            ("keys and values", phase, moves, count, kv * each) for phase in (*forward, "backward")
        ]
        rows.append(("their gradients", "backward", sums, count, kv * grad))
    return ContextTraffic(tuple(_message(row, layers, cp, link) for row in rows))


def require_link(link):
    """Return a Link, or say that it must be one."""
    if not isinstance(link, Link):
        raise TypeError(f"link must be a Link(latency_s, bandwidth_bytes_per_s), got {link!r}")
    return link


def _tokens_and_heads(config, micro_batch, sequence, cp, tp):
    """Return the elements of a rank's queries and of its keys, and cp, all checked."""
    for name in ("heads", "kv_heads", "head_size"):
        if not hasattr(config, name):
            raise TypeError(f"config must have {name}, as a ModelConfig has, got {config!r:.60}")
    b = require_int("micro_batch", micro_batch, minimum=1, maximum=MOST_TOKENS)
    s = require_int("sequence", sequence, minimum=1, maximum=MOST_TOKENS)
    cp = require_int("cp", cp, minimum=1, maximum=MOST_RANKS)
    tp = require_int("tp", tp, minimum=1)
    if s % cp:
        raise ValueError(f"cp must divide the sequence of {s} tokens, got {cp}: parts are equal")
    for name, heads in (("heads", config.heads), ("kv_heads", config.kv_heads)):
        if heads % tp:
            raise ValueError(f"tp must divide {name} = {heads}, got {tp}: a head is never cut")
    tokens = b * (s // cp) * config.head_size
    return tokens * (config.heads // tp), tokens * (config.kv_heads // tp), cp


def _require_heads_for_each_rank(config, cp, tp):
    for name, heads in (("heads", config.heads), ("kv_heads", config.kv_heads)):
        if heads // tp % cp:
            raise ValueError(
                f"cp must divide the {heads // tp} {name} of a rank for ulysses, got {cp}: "
                "each rank works on whole heads"
            )


def _message(row, layers, cp, link):
    tensor, phase, op, count, size = row
    latency = transfer = None
    if link is not None:
        require_link(link)
        steps = count if op == "send" else count * (cp - 1)
        latency = layers * steps * link.latency_s
        transfer = layers * size / link.bandwidth_bytes_per_s
    return ContextMessage(tensor, phase, op, layers * count, layers * size, latency, transfer)
