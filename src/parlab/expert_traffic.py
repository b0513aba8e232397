"""Bytes and seconds that expert parallelism adds to a layer of experts.

E is the experts of a layer, of which a token visits e and a rank of `ep` holds E / ep; h is the
hidden size, s the sequence, b the micro-batch. All is per micro-batch and per GPU.
"""

from math import comb
from typing import NamedTuple

from parlab.hardware import Link
from parlab.models import ModelConfig
from parlab.totals import total
from parlab.units import require_bool, require_int, require_number

MOST_EXPERTS = 4096  # for numbers of sets of experts, whose digits grow with them


class Exchange(NamedTuple):
    """`count` equal all-to-alls of one direction in one phase.

    direction: "dispatch" takes copies of tokens to their experts, "combine" takes results back; in
    the phase "backward" gradients go the same two ways. bytes_per_rank: what the busiest rank sends
    or receives in all of them. messages: that it sends, one after the other. network_bytes,
    network_messages: the part of both that goes to other nodes.
    """

    direction: str
    phase: str
    op: str
    count: int
    bytes_per_rank: float
    messages: int
    network_bytes: float = 0
    network_messages: int = 0


class ExpertTraffic(NamedTuple):
    """Items, totals that are their sums, and their time.

    Messages inside a node and over the network go at once, so the slower of the two counts.
    """

    items: tuple
    link: Link | None = None
    network: Link | None = None

    count = total("count", "Number of collectives.")
    bytes_per_rank = total("bytes_per_rank", "Bytes that the busiest rank sends or receives.")
    network_bytes = total("network_bytes", "The part of them that goes to other nodes.")

    @property
    def latency_s(self):
        """Seconds of latency."""
        return self._times()[0]

    @property
    def transfer_s(self):
        """Seconds of transfer."""
        return self._times()[1]

    @property
    def seconds(self):
        """Latency and transfer together; ValueError where no link was given."""
        return sum(self._times())

    def _times(self):
        if self.link is None:
            raise ValueError("link must be given to expert_parallel_traffic for a time, got None")
        messages = sum(item.messages for item in self.items)
        outside = sum(item.network_messages for item in self.items), self.network_bytes
        inside = messages - outside[0], self.bytes_per_rank - outside[1]
        pairs = ((inside, self.link), (outside, self.network or self.link))
        return max(
            ((n * link.latency_s, size / link.bandwidth_bytes_per_s) for (n, size), link in pairs),
            key=sum,
        )


def expert_parallel_traffic(
    config,
    micro_batch,
    *,
    sequence,
    ep,
    tp=1,
    sequence_parallel=False,
    load=1,
    link=None,
    network=None,
    ranks_per_node=None,
    n_layers=1,
    element_bytes=2,
    recompute=False,
    once_per_rank=False,
):
    """Traffic of a layer of experts cut over ep ranks: an all-to-all there and one back, each way.

    Each of the four takes T e h element_bytes (ep-1)/ep from every rank, T being its tokens: a
    token visits e experts, and of evenly spread ones (ep-1)/ep are elsewhere. The exchange is that
    of Lepikhin et al. (arXiv 2006.16668); here nothing is padded or dropped.

    T is s b, or s b / tp under sequence parallelism. Without it the tp ranks hold the same tokens,
    and each sends all of them (Singh et al., arXiv 2303.06318, remove these duplicates).
    A copy is sent for every expert, also when two of them share a rank.

    Not in it: the numbers of tokens, which ranks tell each other first; what tensor parallelism
    sends inside the experts; any all-reduce of gradients.

    config: a ModelConfig with experts. micro_batch, sequence: b, s (with context parallelism the s
        of one rank). ep: must divide the experts. tp: must divide s with sequence_parallel.
    load: bytes of the busiest rank over the mean, from 1 to all that can meet on a rank.
    link: of each rank, one direction; a rank sends its ep - 1 messages one after the other.
    network, ranks_per_node: given together. Of a group larger than that, each node has so many
        ranks; (ep - ranks_per_node) / (ep - 1) of all bytes then leave it by each rank's own port.
    n_layers: layers of experts. element_bytes: 2 for bf16. recompute: forward runs once more.
    once_per_rank: True sends one copy to each rank that holds some of a token's experts, and one
        result, their weighted sum, back. That is the mean number if every set of e of the E experts
        is equally likely: (ep-1) (1 - C(E - E/ep, e) / C(E, e)) copies of a token.

    Raises ValueError or TypeError for sizes that are not positive ints or don't divide.

    >>> from parlab.models import model
    >>> traffic = expert_parallel_traffic(model("mixtral-8x7b"), 1, sequence=4096, ep=8)
    >>> traffic.items[0].bytes_per_rank, 4096 * 2 * 4096 * 2 * 7 // 8  # tokens, e, h, bytes
    (58720256, 58720256)
    >>> traffic.count, traffic.bytes_per_rank
    (4, 234881024)
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {config!r:.60}")
    ep = require_int("ep", ep, minimum=1)
    if config.experts % ep:
        raise ValueError(
            f"ep must divide experts = {config.experts}, got {ep}: ranks hold equally many"
        )
    for name, wire in (("link", link), ("network", network)):
        if wire is not None and not isinstance(wire, Link):
            raise TypeError(f"{name} must be a Link or None, got {wire!r:.60}")
    local = _ranks_in_node(ep, network, ranks_per_node)
    copies, one_in = _copies(config, ep, require_bool("once_per_rank", once_per_rank))
    load = _load(load, copies / one_in, config, ep, once_per_rank)
    tokens = _tokens(micro_batch, sequence, tp, sequence_parallel)
    count = require_int("n_layers", n_layers, minimum=1)
    token_bytes = config.hidden * require_int("element_bytes", element_bytes, minimum=1)
    # A rank gets `copies / one_in` copies of each token of ep - 1 others, and sends as many.
    sent = load * _divide(count * tokens * token_bytes * (ep - 1) * copies, one_in)
    outside = _divide(sent * (ep - local), max(ep - 1, 1))
    same = ("all_to_all", count, sent, count * (ep - 1), outside, count * (ep - local))
    phases = ("forward", "backward")
    if require_bool("recompute", recompute):
        phases = ("forward", "recompute", "backward")
    return ExpertTraffic(
        tuple(
            Exchange(direction, phase, *same)
            for phase in phases
            for direction in ("dispatch", "combine")
        ),
        link,
        network,
    )


def _ranks_in_node(ep, network, ranks_per_node):
    """Return how many ranks of a group share a node."""
    if (ranks_per_node is None) != (network is None):
        raise ValueError("network and ranks_per_node must be given together or not at all")
    local = ep if network is None else require_int("ranks_per_node", ranks_per_node, minimum=1)
    if ep > local and ep % local:
        raise ValueError(f"ranks_per_node must divide ep = {ep}, got {local}: a group fills nodes")
    return min(local, ep)


def _tokens(micro_batch, sequence, tp, sequence_parallel):
    """Return T, the tokens that a rank routes."""
    b = require_int("micro_batch", micro_batch, minimum=1)
    s = require_int("sequence", sequence, minimum=1)
    t = require_int("tp", tp, minimum=1)
    if not require_bool("sequence_parallel", sequence_parallel):
        return s * b
    if s % t:
        raise ValueError(f"tp must divide the sequence of {s} tokens, got {t}: it is cut too")
    return s // t * b


def _copies(config, ep, once_per_rank):
    """Return the mean copies of a token that one rank's experts get, as (number, divisor)."""
    if not once_per_rank:
        return config.active_experts, ep
    why = "the numbers of their sets are computed exactly"
    experts = require_int("experts", config.experts, maximum=MOST_EXPERTS, why=why)
    sets = comb(experts, config.active_experts)
    return sets - comb(experts - experts // ep, config.active_experts), sets


def _load(load, mean, config, ep, once_per_rank):
    """Return the busiest rank's bytes over the mean's; all of a token's copies may come to it."""
    load = require_number("load", load, minimum=1)
    most = 1 if once_per_rank else min(config.active_experts, config.experts // ep)
    if ep > 1 and load * mean > most * (1 + 1e-12):
        raise ValueError(
            f"load must be at most {most / mean:.4g} with {config.active_experts} of "
            f"{config.experts} experts on ep = {ep} ranks, got {load}: "
            "no rank can get more copies than that"
        )
    return load


def _divide(number, by):
    """Divide, and stay an exact int where one is the answer."""
    return number // by if isinstance(number, int) and number % by == 0 else number / by
