"""Bytes of weights, gradients and optimizer on one rank under ZeRO, and the bytes that ZeRO sends.

Psi is the number of parameters, N the number of GPUs over which ZeRO shards; w, g and k are bytes
per parameter of weights, gradients and optimizer. 1 GB = 10^9 bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from parlab.units import require_int, require_number

MOST_PARAMS = 10**15
MOST_GPUS = MOST_MICRO_BATCHES = 10**9


@dataclass(frozen=True)
class ByteRecipe:
    """Bytes per parameter of weights, gradients and optimizer (k)."""

    weight_bytes: float
    grad_bytes: float
    k: float
    what: str
    source: str

    @property
    def total(self):
        """Bytes per parameter, all three together."""
        return self.weight_bytes + self.grad_bytes + self.k

    @property
    def arguments(self):
        """Keyword arguments for `zero_memory_bytes` and its twin.

        >>> [zero_memory_bytes(7e9, 8, 2, **BYTE_RECIPES[name].arguments) / 1e9
        ...  for name in ("mixed-precision", "autocast")]  # 16 bytes both, cut differently
        [26.25, 38.5]
        """
        return {"weight_bytes": self.weight_bytes, "grad_bytes": self.grad_bytes, "k": self.k}


_MEGATRON = "Megatron Core developer guide, Distributed Optimizer, table of bytes per parameter"
_ZERO = "arXiv 1910.02054, section 3.1"

BYTE_RECIPES = MappingProxyType(
    {
        "mixed-precision": ByteRecipe(2, 2, 12, "16-bit, Adam with fp32 masters", _ZERO),
        "autocast": ByteRecipe(4, 4, 8, "fp32, Adam; 16-bit casts are temporary", _MEGATRON),
        "fp32-gradients": ByteRecipe(2, 4, 12, "bf16, fp32 gradients", _MEGATRON),
        "fp16-main-gradients": ByteRecipe(2, 2, 16, "fp16, fp32 gradients in k", _MEGATRON),
        "sgd-momentum": ByteRecipe(4, 4, 4, "fp32, one buffer", "PyTorch docs, torch.optim.SGD"),
        "8-bit-adam": ByteRecipe(4, 4, 2, "fp32, moments in 8 bits; no scales", "arXiv 2110.02861"),
    }
)


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes on one rank by item, which sum to the total.

    unsharded: the same before ZeRO cuts anything. fullest: the same on the fullest rank, where
    sizes of parameters were given. Both are None within themselves.
    """

    weights: float
    gradients: float
    optimizer: float
    unsharded: "ZeroMemory | None" = None
    fullest: "ZeroMemory | None" = None

    @property
    def total(self):
        """Weights, gradients and optimizer together."""
        return self.weights + self.gradients + self.optimizer


def zero_memory(
    n_params, n_gpus, stage, k=12, *, weight_bytes=2, grad_bytes=2, parameter_sizes=None
):
    """Memory of the model states on one rank (the mean one), by item.

    Psi (w + g + k) at stage 0; stage 1 divides k by N, stage 2 also g, stage 3 also w. Rajbhandari
    et al. (arXiv 1910.02054), section 5 and figure 1. Activations, gathered layers, buckets and
    temporaries come on top.

    n_params: Psi, a number up to 10^15 or an array. n_gpus: N. k, weight_bytes, grad_bytes: bytes
        per parameter, see `BYTE_RECIPES`.
    parameter_sizes: shapes of all parameters (an int is a vector's length), tied ones once. Then
        `.fullest` holds rank 0, where every parameter is cut along its first dim as `dim0_shards`
        does. `fully_shard` pads: weights and gradients take that much on every rank.
    Raises ValueError or TypeError for stage 4, N = 0, negative or NaN bytes, other sums of sizes.

    >>> memory = zero_memory(7_500_000_000, 64, 2)
    >>> memory.weights, memory.gradients, memory.optimizer, memory.total
    (15000000000, 234375000, 1406250000, 16640625000)
    >>> zero_memory(30, 8, 3, parameter_sizes=[(10, 3)]).fullest.total / (16 * 30)
    0.2
    """
    n_params = _require_params(n_params)
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    stage = _require_stage(stage)
    w = require_number("weight_bytes", weight_bytes, minimum=0)
    g = require_number("grad_bytes", grad_bytes, minimum=0)
    k = require_number("k", k, minimum=0)
    weights, gradients, optimizer = w * n_params, g * n_params, k * n_params
    fullest = None
    if parameter_sizes is not None:
        most = _fullest_shard(n_params, parameter_sizes, n)
        fullest = ZeroMemory(
            weights=w * most if stage >= 3 else weights,
            gradients=g * most if stage >= 2 else gradients,
            optimizer=k * most if stage >= 1 else optimizer,
        )
    return ZeroMemory(
        weights=_share(weights, n) if stage >= 3 else weights,
        gradients=_share(gradients, n) if stage >= 2 else gradients,
        optimizer=_share(optimizer, n) if stage >= 1 else optimizer,
        unsharded=ZeroMemory(weights, gradients, optimizer),
        fullest=fullest,
    )


def zero_memory_bytes(n_params, n_gpus, stage, k=12, *, weight_bytes=2, grad_bytes=2):
    """Bytes of the model states on one rank: the total of `zero_memory`, with its arguments.

    >>> [zero_memory_bytes(7e9, 8, stage) / 1e9 for stage in range(4)]
    [112.0, 38.5, 26.25, 14.0]
    """
    return zero_memory(
        n_params, n_gpus, stage, k, weight_bytes=weight_bytes, grad_bytes=grad_bytes
    ).total


def dim0_shards(rows, n_gpus):
    """Return the rows of each rank: ceil(rows / N) until none are left, as `fully_shard` cuts.

    >>> dim0_shards(10, 8)
    [2, 2, 2, 2, 2, 0, 0, 0]
    """
    rows = require_int("rows", rows, minimum=0)
    n_gpus = require_int("n_gpus", n_gpus, minimum=1, maximum=10**6)
    chunk = -(-rows // n_gpus)
    return [min(chunk, max(rows - rank * chunk, 0)) for rank in range(n_gpus)]


@dataclass(frozen=True)
class ZeroMessage:
    """`count` equal collectives; bytes_per_rank is what a rank sends in all of them."""

    tensor: str
    op: str
    phase: str
    count: int
    bytes_per_rank: float


@dataclass(frozen=True)
class ZeroTraffic:
    """Items, and a total that is their sum."""

    items: tuple[ZeroMessage, ...]

    @property
    def bytes_per_rank(self):
        """Bytes that each rank sends."""
        return sum(item.bytes_per_rank for item in self.items)


def zero_traffic(n_params, n_gpus, stage, micro_batches=1, *, weight_bytes=2, grad_bytes=2):
    """Bytes that a rank sends in one optimizer step of M micro-batches, by collective, on rings.

    In units of (N-1)/N Psi: stage 0 sends 2g (all-reduce after the last micro-batch: no_sync);
    stage 1 g + w (reduce-scatter, then an all-gather of the new weights); stage 2, which keeps no
    whole gradient, M g + w; stage 3 gathers weights in forward and again in backward: M (2w + g).
    Rajbhandari et al. (arXiv 1910.02054), section 7, is M = 1 and g = w: 2, 2, 2 and 3. A stage 1
    that all-reduces gradients before it shares weights (PyTorch's ZeroRedundancyOptimizer under
    DDP) sends more than this.

    n_params: Psi. n_gpus: N. micro_batches: M. weight_bytes, grad_bytes: w, g as they are sent.

    >>> [zero_traffic(7e9, 8, stage, 4).bytes_per_rank / 1e9 for stage in range(4)]
    [24.5, 24.5, 61.25, 147.0]
    """
    n_params = _require_params(n_params)
    n_gpus = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    stage = _require_stage(stage)
    m = require_int("micro_batches", micro_batches, minimum=1, maximum=MOST_MICRO_BATCHES)
    weights = n_params * require_number("weight_bytes", weight_bytes, minimum=0)
    gradients = n_params * require_number("grad_bytes", grad_bytes, minimum=0)

    def message(tensor, op, phase, count, size):
        passes = 2 if op == "all_reduce" else 1
        sent = _share(passes * count * (n_gpus - 1) * size, n_gpus)
        return ZeroMessage(tensor, op, phase, count, sent)

    if stage == 0:
        return ZeroTraffic((message("gradients", "all_reduce", "backward", 1, gradients),))
    reduced = message("gradients", "reduce_scatter", "backward", 1 if stage == 1 else m, gradients)
    phases, count = (("forward", "backward"), m) if stage == 3 else (("after the step",), 1)
    gathered = (message("weights", "all_gather", phase, count, weights) for phase in phases)
    return ZeroTraffic((*gathered, reduced))


def zero_traffic_bytes(n_params, n_gpus, stage, micro_batches=1, *, weight_bytes=2, grad_bytes=2):
    """Bytes that a rank sends in one optimizer step: the total of `zero_traffic`.

    >>> zero_traffic_bytes(7e9, 8, 3) / zero_traffic_bytes(7e9, 8, 0)
    1.5
    """
    return zero_traffic(
        n_params, n_gpus, stage, micro_batches, weight_bytes=weight_bytes, grad_bytes=grad_bytes
    ).bytes_per_rank


def _require_params(value):
    number = require_number("n_params", value, minimum=0)
    if getattr(number, "max", lambda: number)() > MOST_PARAMS:
        raise ValueError(f"n_params must be at most 10^15, got {value}: it counts parameters")
    # 7e9 is how people write it; as an int its products are exact at any size.
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _require_stage(stage):
    why = "ZeRO shards nothing (0), the optimizer (1), also gradients (2), also weights (3)"
    return require_int("stage", stage, minimum=0, maximum=3, why=why)


def _share(n_bytes, parts):
    """Divide, and stay an exact int where one is the answer."""
    if isinstance(n_bytes, int) and n_bytes % parts == 0:
        return n_bytes // parts
    return n_bytes / parts


def _fullest_shard(n_params, parameter_sizes, n_gpus):
    """Parameters on rank 0, which gets the first, whole chunk of every parameter."""
    total = fullest = 0
    for size in parameter_sizes:
        shape = tuple(size) if isinstance(size, Iterable) else (size,)
        if not shape:
            raise ValueError("parameter_sizes must have a first dim to cut, got (): use (1,)")
        rows, *others = (require_int("parameter_sizes", dim, minimum=0) for dim in shape)
        total += rows * prod(others)
        fullest += -(-rows // n_gpus) * prod(others)
    if total != require_int("n_params", n_params, why="parameter_sizes are whole numbers"):
        raise ValueError(f"parameter_sizes must sum to n_params = {n_params}, got {total}")
    return fullest
