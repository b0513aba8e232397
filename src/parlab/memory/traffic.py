"""Bytes that ZeRO sends in a step, by collective.

Psi is the number of parameters, N the number of GPUs over which ZeRO shards, R the replicas of such
a group, m the micro-batches of a step; w and g are bytes per parameter of weights and gradients as
they are sent. 1 GB = 10^9 bytes.
"""

from typing import NamedTuple

from parlab.memory.states import MOST_GPUS, require_params, require_stage, share
from parlab.units import require_bool, require_int, require_number

MOST_MICRO_BATCHES = 10**9


class ZeroMessage(NamedTuple):
    """`count` equal collectives; bytes_per_rank is what a rank sends in all of them."""

    tensor: str
    op: str
    phase: str
    count: int
    bytes_per_rank: float


class ZeroTraffic(NamedTuple):
    """Items, and a total that is their sum."""

    items: tuple

    @property
    def bytes_per_rank(self):
        """Bytes that each rank sends."""
        return sum(item.bytes_per_rank for item in self.items)


def zero_traffic(
    n_params,
    n_gpus,
    stage,
    micro_batches=1,
    *,
    weight_bytes=2,
    grad_bytes=2,
    reshard_after_forward=True,
    replicas=1,
):
    """Bytes that a rank sends in one optimizer step of m micro-batches, by collective, on rings.

    In units of (N-1)/N Psi: stage 0 sends 2g (all-reduce after the last micro-batch: no_sync);
    stage 1 g + w (reduce-scatter, then an all-gather of the new weights); stage 2, which keeps no
    whole gradient, m g + w; stage 3 gathers weights in forward and again in backward: m (2w + g),
    or, if it keeps them from forward to backward, m (w + g). Rajbhandari et al. (arXiv 1910.02054),
    section 7, is m = 1 and g = w: 2, 2, 2 and 3. A stage 1 that all-reduces gradients before it
    shares weights (PyTorch's ZeroRedundancyOptimizer under DDP) sends more than this.

    R groups of N with the same shards (HSDP) all-reduce the sharded gradient besides, 2 (R-1)/R of
    g Psi / N, after every reduce-scatter. FSDP2 does so at each backward, so m times, unless
    `set_requires_all_reduce(False)` holds it back until the last; stage 1 does it once.

    n_params: Psi. n_gpus: N. micro_batches: m. weight_bytes, grad_bytes: w, g.
    reshard_after_forward: stage 3 only; False gathers once per micro-batch, all layers at a time.
    replicas: R, groups of N GPUs.

    >>> [zero_traffic(7e9, 8, stage, 4).bytes_per_rank / 1e9 for stage in range(4)]
    [24.5, 24.5, 61.25, 147.0]
    >>> zero_traffic(7e9, 8, 3, replicas=16).items[-1]  # 2 * 15/16 of 14 GB / 8
    ZeroMessage(tensor='sharded gradients', op='all_reduce', phase='backward', count=1, \
bytes_per_rank=3281250000)
    """
    n_params = require_params(n_params)
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    stage = require_stage(stage)
    m = require_int("micro_batches", micro_batches, minimum=1, maximum=MOST_MICRO_BATCHES)
    weights = n_params * require_number("weight_bytes", weight_bytes, minimum=0)
    gradients = n_params * require_number("grad_bytes", grad_bytes, minimum=0)
    again = require_bool("reshard_after_forward", reshard_after_forward)
    r = require_int("replicas", replicas, minimum=1, maximum=MOST_GPUS)
    if r > 1 and stage == 0:
        raise ValueError(f"replicas must be 1 at stage 0, got {r}: n_gpus counts all that average")

    if stage == 0:
        sent = share(2 * (n - 1) * gradients, n)
        return ZeroTraffic((ZeroMessage("gradients", "all_reduce", "backward", 1, sent),))
    gathered = ("after the step",)
    if stage == 3:
        gathered = ("forward", "backward") if again else ("forward",)
    gathers, reduces = m if stage == 3 else 1, m if stage >= 2 else 1
    sent = share(gathers * (n - 1) * weights, n)
    items = [ZeroMessage("weights", "all_gather", phase, gathers, sent) for phase in gathered]
    sent = share(reduces * (n - 1) * gradients, n)
    items.append(ZeroMessage("gradients", "reduce_scatter", "backward", reduces, sent))
    if r > 1:
        sent = share(2 * reduces * (r - 1) * gradients, r * n)
        items.append(ZeroMessage("sharded gradients", "all_reduce", "backward", reduces, sent))
    return ZeroTraffic(tuple(items))


def zero_traffic_bytes(n_params, n_gpus, stage, micro_batches=1, **options):
    """Bytes that a rank sends in one optimizer step: the total of `zero_traffic`.

    >>> [zero_traffic_bytes(7e9, 8, 3, reshard_after_forward=again) / 24.5e9
    ...  for again in (True, False)]  # in units of data parallelism
    [1.5, 1.0]
    """
    return zero_traffic(n_params, n_gpus, stage, micro_batches, **options).bytes_per_rank
