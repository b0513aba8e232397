"""Attention over a sequence that is cut: who holds which tokens, whose work that is, how long a
ring takes.

s is the sequence, cp the ranks over which it is cut, n = s / cp. A pair is a query and a key that
it may see: under the causal mask its own and all earlier ones.
"""

from math import ceil
from typing import NamedTuple

from parlab.context_traffic import (
    MOST_BYTES,
    MOST_RANKS,
    MOST_TOKENS,
    context_parallel_traffic,
    require_link,
)
from parlab.tensor_traffic import compute_seconds
from parlab.totals import total
from parlab.units import require_bool, require_int

# FLOP a pair, per feature of a head: 2 for each product. Forward has the scores and the weighted
# sum; backward has gradients of values, weights, queries and keys, and makes the scores again.
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10


def context_pieces(sequence, cp, *, balanced=True):
    """Return the tokens that each rank holds, as a tuple of ranges.

    balanced: the sequence is cut into 2 cp pieces, of which rank r holds the pieces r and
    2 cp - 1 - r (zigzag; Llama 3, arXiv 2407.21783, section 3.3.2). False: rank r holds one piece,
    the r-th of cp.

    >>> context_pieces(8, 2)
    [(range(0, 2), range(6, 8)), (range(2, 4), range(4, 6))]
    >>> context_pieces(8, 2, balanced=False)
    [(range(0, 4),), (range(4, 8),)]

    Raises ValueError where the pieces would not be equal.
    """
    s = require_int("sequence", sequence, minimum=1, maximum=MOST_TOKENS)
    cp = require_int("cp", cp, minimum=1, maximum=MOST_RANKS)
    count = 2 * cp if require_bool("balanced", balanced) else cp
    if s % count:
        rule = "2 cp" if balanced else "cp"
        raise ValueError(
            f"{rule} must divide the sequence of {s} tokens, got cp = {cp}: pieces are equal"
        )
    size = s // count
    pieces = [range(i * size, (i + 1) * size) for i in range(count)]
    if not balanced:
        return [(piece,) for piece in pieces]
    return [(pieces[rank], pieces[-1 - rank]) for rank in range(cp)]


def causal_pairs(queries, keys):
    """Count the pairs of a query and a key that is not later, from two tuples of ranges of tokens.

    >>> causal_pairs((range(4),), (range(4),))  # 1 + 2 + 3 + 4
    10
    """
    return sum(
        _triangle(q.stop - k.start)
        - _triangle(q.start - k.start)
        - _triangle(q.stop - k.stop)
        + _triangle(q.start - k.stop)
        for q in queries
        for k in keys
    )


class CausalWork(NamedTuple):
    """Pairs of each rank; the slowest sets the pace."""

    pairs: tuple

    @property
    def total(self):
        """Pairs of the whole sequence, s (s + 1) / 2."""
        return sum(self.pairs)

    @property
    def imbalance(self):
        """The busiest rank's pairs over the mean: 1 is perfect."""
        return max(self.pairs) * len(self.pairs) / self.total


def causal_work(sequence, cp, *, balanced=True):
    """Count the pairs of every rank under the causal mask; pieces as in `context_pieces`.

    One piece a rank: n^2 r + n (n + 1) / 2, so the last rank has (2 - 1/cp) times the mean of long
    sequences. Balanced, with c = s / 2cp: 2 cp c^2 + c on every rank.

    >>> causal_work(16, 4, balanced=False).pairs, causal_work(16, 4).pairs
    ((10, 26, 42, 58), (34, 34, 34, 34))
    >>> round(causal_work(131_072, 8, balanced=False).imbalance, 3)
    1.875
    """
    pieces = context_pieces(sequence, cp, balanced=balanced)
    everything = (range(sequence),)
    return CausalWork(tuple(causal_pairs(queries, everything) for queries in pieces))


class RingPhase(NamedTuple):
    """Seconds of the slowest rank in one layer's attention, with one micro-batch.

    transfer_s: of all hops. exposed_s: the part of it that is not hidden behind compute.
    """

    phase: str
    compute_s: float
    transfer_s: float
    exposed_s: float

    @property
    def seconds(self):
        """Compute, and what of the transfer is not hidden behind it."""
        return self.compute_s + self.exposed_s


class RingTime(NamedTuple):
    """Forward and backward, and totals that are their sums."""

    phases: tuple

    compute_s = total("compute_s", "Seconds of compute.", of="phases")
    transfer_s = total("transfer_s", "Seconds of transfer, hidden or not.", of="phases")
    exposed_s = total("exposed_s", "Seconds of transfer that nothing hides.", of="phases")

    @property
    def seconds(self):
        """Compute and exposed transfer."""
        return self.compute_s + self.exposed_s


def ring_time(
    config,
    micro_batch,
    *,
    sequence,
    cp,
    link,
    gpu,
    tp=1,
    efficiency=0.4,
    causal=True,
    balanced=True,
    grad_bytes=2,
):
    """Time ring attention in one layer, step by step: a block is computed as the next one travels.

    Forward has cp steps of compute, the first on the rank's own block, and under each but the last
    one hop. Backward goes round the other way: keys and values travel under each step but the last,
    the gradients of the step before under each but the first, the rank's own block comes last. A
    step takes as long as its compute or its transfer, whichever is more. Without `balanced` some
    rank has a whole block in every step, so there the causal mask saves almost nothing.

    efficiency: share of the bf16 peak that attention reaches, the same in both phases. Its forward
    has 4 FLOP a pair and feature, backward 10, with the scores that a flash kernel makes again.
    Other arguments as in `context_parallel_traffic` and `context_pieces`.

    >>> from parlab import hardware, models
    >>> setting = {"cp": 8, "link": hardware.link("infiniband-400g"), "gpu": hardware.gpu("h100-sxm")}
    >>> for s in (8_192, 131_072):
    ...     time = ring_time(models.model("llama-3-8b"), 1, sequence=s, **setting)
    ...     print(f"{time.exposed_s / time.transfer_s:.2f}")
    0.69
    0.00
    """  # noqa: E501
    traffic = context_parallel_traffic(
        config,
        micro_batch,
        sequence=sequence,
        cp=cp,
        tp=tp,
        link=require_link(link),
        grad_bytes=grad_bytes,
    )
    micro_batch, sequence, cp = map(int, (micro_batch, sequence, cp))  # NumPy's products wrap
    own, other = _pairs_of_a_step(sequence, cp, causal, balanced)
    width = micro_batch * config.heads * config.head_size
    kv, grad = (
        traffic.only(tensor=tensor, phase="backward").seconds / max(cp - 1, 1)
        for tensor in ("keys and values", "their gradients")
    )
    phases = []
    for phase, flops in (("forward", FORWARD_FLOPS), ("backward", BACKWARD_FLOPS)):
        seconds = [
            compute_seconds(flops * pairs * width, tp, gpu, efficiency=efficiency)
            for pairs in (own, other)
        ]
        # How often a step of this compute has this transfer under it.
        if phase == "forward":
            steps = [(1, seconds[0], kv), (cp - 2, seconds[1], kv)]
        elif cp == 2:
            steps = [(1, seconds[1], kv), (1, seconds[0], grad)]
        else:
            steps = [(1, seconds[1], kv), (cp - 2, seconds[1], kv + grad), (1, seconds[0], grad)]
        exposed = sum(count * max(0.0, hop - busy) for count, busy, hop in steps if count > 0)
        transfer = traffic.only(phase=phase).seconds
        phases.append(RingPhase(phase, seconds[0] + (cp - 1) * seconds[1], transfer, exposed))
    return RingTime(tuple(phases))


def ring_hides_from(
    config, gpu, link, *, efficiency=0.4, causal=True, element_bytes=2, grad_bytes=2
):
    """Return the tokens per rank from which on `ring_time` hides every hop behind compute.

    A hop carries 2 w n k d bytes over B bytes/s; a step has 4 a d n^2 / 2 FLOP at F FLOP/s, or
    without the mask twice that. So n >= w (k/a) F/B, or half of it; with w = 2, k = a and no mask
    the F/B of Liu et al. (arXiv 2310.01889, section 3). Backward has 5/2 times the FLOP and
    (w + g)/w times the bytes. The larger of the two is returned; latency is left out.

    >>> from parlab import hardware, models
    >>> for name in ("nvlink-4", "infiniband-400g"):
    ...     wire = hardware.link(name)
    ...     print(ring_hides_from(models.model("llama-3-8b"), hardware.gpu("h100-sxm"), wire))
    440
    3958
    """
    require_bool("causal", causal)
    each = require_int("element_bytes", element_bytes, minimum=1, maximum=MOST_BYTES)
    grad = require_int("grad_bytes", grad_bytes, minimum=1, maximum=MOST_BYTES)
    seconds_of_a_flop = compute_seconds(1.0, 1, gpu, efficiency=efficiency)
    flops_per_byte = 1 / (seconds_of_a_flop * require_link(link).bandwidth_bytes_per_s)
    seen = 0.5 if causal else 1.0
    most = max(each / (FORWARD_FLOPS * seen), (each + grad) / (BACKWARD_FLOPS * seen))
    return ceil(2 * config.kv_heads / config.heads * most * flops_per_byte)


def _triangle(n):
    """1 + 2 + ... + n, and 0 below."""
    return n * (n + 1) // 2 if n > 0 else 0


def _pairs_of_a_step(sequence, cp, causal, balanced):
    """Pairs of the busiest rank in the step with its own block, and in any other step."""
    require_bool("balanced", balanced)
    n = sequence // cp
    if not require_bool("causal", causal):
        return n * n, n * n
    if balanced and n % 2:
        raise ValueError(
            f"2 cp must divide the sequence of {sequence} tokens, got cp = {cp}: pieces are equal"
        )
    # A balanced rank sees either an early half with all queries or all keys with half of them.
    return n * (n + 1) // 2, n * n // 2 if balanced else n * n
