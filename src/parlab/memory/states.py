"""Bytes of weights, gradients and optimizer on one rank under ZeRO.

Psi is the number of parameters, N the number of GPUs over which ZeRO shards; w, g and k are bytes
per parameter of weights, gradients and optimizer. 1 GB = 10^9 bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from parlab.units import require_int, require_number

MOST_PARAMS = 10**15
MOST_GPUS = 10**9


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
    def of_each(self):
        """Weight, gradient and optimizer bytes, in this order."""
        return self.weight_bytes, self.grad_bytes, self.k

    @property
    def arguments(self):
        """Keyword arguments for `zero_memory_bytes` and its twin.

        >>> [zero_memory_bytes(7e9, 8, 2, **BYTE_RECIPES[name].arguments) / 1e9
        ...  for name in ("mixed-precision", "autocast")]  # 16 bytes both, cut differently
        [26.25, 38.5]
        """
        return {
            "weight_bytes": self.weight_bytes,
            "grad_bytes": self.grad_bytes,
            "k": self.k,
        }


_MEGATRON = "Megatron Core developer guide, Distributed Optimizer, table of bytes per parameter"
_ZERO = "arXiv 1910.02054, section 3.1"
_PURE = "8 bytes: transformers PR 21312, https://github.com/huggingface/transformers/pull/21312"

BYTE_RECIPES = MappingProxyType(
    {
        "mixed-precision": ByteRecipe(2, 2, 12, "bf16, Adam with fp32 masters", _ZERO),
        "autocast": ByteRecipe(4, 4, 8, "fp32, Adam; 16-bit casts are temporary", _MEGATRON),
        "fp32-gradients": ByteRecipe(2, 4, 12, "bf16, fp32 gradients", _MEGATRON),
        "fp16-main-gradients": ByteRecipe(2, 2, 16, "fp16, fp32 gradients in k", _MEGATRON),
        "pure-bf16": ByteRecipe(2, 2, 4, "bf16 all through, Adam too", _PURE),
        "sgd-momentum": ByteRecipe(4, 4, 4, "fp32, one buffer", "PyTorch docs, torch.optim.SGD"),
        "8-bit-adam": ByteRecipe(4, 4, 2, "fp32, moments in 8 bits; no scales", "arXiv 2110.02861"),
    }
)


class ZeroMemory(NamedTuple):
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
    n_params = require_params(n_params)
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    stage = require_stage(stage)
    w = require_number("weight_bytes", weight_bytes, minimum=0)
    g = require_number("grad_bytes", grad_bytes, minimum=0)
    k = require_number("k", k, minimum=0)
    fullest = None
    if parameter_sizes is not None:
        most = _fullest_shard(n_params, parameter_sizes, n)
        fullest = ZeroMemory(
            weights=w * (most if stage >= 3 else n_params),
            gradients=g * (most if stage >= 2 else n_params),
            optimizer=k * (most if stage >= 1 else n_params),
        )
    unsharded = ZeroMemory(w * n_params, g * n_params, k * n_params)
    return ZeroMemory(*zero_shares(n_params, w, g, k, n, stage), unsharded, fullest)


def zero_memory_bytes(n_params, n_gpus, stage, k=12, *, weight_bytes=2, grad_bytes=2):
    """Bytes of the model states on one rank: the total of `zero_memory`, with its arguments.

    >>> [zero_memory_bytes(7e9, 8, stage) / 1e9 for stage in range(4)]
    [112.0, 38.5, 26.25, 14.0]
    """
    return zero_memory(
        n_params, n_gpus, stage, k, weight_bytes=weight_bytes, grad_bytes=grad_bytes
    ).total


class ExpertZeroMemory(NamedTuple):
    """The states of what all ranks share, and of the experts that a rank has."""

    shared: ZeroMemory
    experts: ZeroMemory

    @property
    def weights(self):
        """Of both."""
        return self.shared.weights + self.experts.weights

    @property
    def gradients(self):
        """Of both."""
        return self.shared.gradients + self.experts.gradients

    @property
    def optimizer(self):
        """Of both."""
        return self.shared.optimizer + self.experts.optimizer

    @property
    def total(self):
        """Weights, gradients and optimizer together."""
        return self.shared.total + self.experts.total


def expert_zero_memory(
    config, n_gpus, stage, k=12, *, expert_parallel=1, weight_bytes=2, grad_bytes=2
):
    """Memory of the model states on one rank of a model with experts, by item.

    All experts count, not only those that a token visits. A rank has E / ep of them, and only
    N / ep ranks have the same ones: ZeRO shards the states of experts over those, all other states
    over N. Singh et al. (arXiv 2303.06318); Megatron Core calls the N / ep ranks the expert data
    parallel group.

    config: a ModelConfig with its experts E. n_gpus: N, GPUs that see different tokens.
        expert_parallel: ep, must divide E and N. The rest as in `zero_memory`.
    Raises ValueError or TypeError as `zero_memory`, and for an ep that does not divide.

    >>> from parlab.models import model
    >>> memory = expert_zero_memory(model("mixtral-8x7b"), 64, 1, expert_parallel=8)
    >>> round(memory.total / 1e9, 2), memory.experts.optimizer
    (37.73, 8455716864)
    """
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    ep = require_expert_parallel(expert_parallel, config, n)
    recipe = {"k": k, "weight_bytes": weight_bytes, "grad_bytes": grad_bytes}
    experts = config.parameters.mlp if config.experts > 1 else 0
    return ExpertZeroMemory(
        shared=zero_memory(config.n_params - experts, n, stage, **recipe),
        experts=zero_memory(experts // ep, n // ep, stage, **recipe),
    )


def expert_zero_memory_bytes(config, n_gpus, stage, k=12, **options):
    """Bytes of the model states on one rank: the total of `expert_zero_memory`."""
    return expert_zero_memory(config, n_gpus, stage, k, **options).total


def dim0_shards(rows, n_gpus):
    """Return the rows of each rank: ceil(rows / N) until none are left, as `fully_shard` cuts.

    >>> dim0_shards(10, 8)
    [2, 2, 2, 2, 2, 0, 0, 0]
    """
    rows = require_int("rows", rows, minimum=0)
    n_gpus = require_int("n_gpus", n_gpus, minimum=1, maximum=10**6)
    chunk = -(-rows // n_gpus)
    return [min(chunk, max(rows - rank * chunk, 0)) for rank in range(n_gpus)]


def require_expert_parallel(value, config, n_gpus):
    """Return ep, which divides the experts of a ModelConfig and the GPUs, or say that it must."""
    ep = require_int("expert_parallel", value, minimum=1)
    if ep > 1:
        for name, size in (("experts", config.experts), ("n_gpus", n_gpus)):
            if size % ep:
                raise ValueError(
                    f"expert_parallel must divide {name} = {size}, got {ep}: groups are equal"
                )
    return ep


def zero_shares(n_params, w, g, k, n_gpus, stage):
    """Return a rank's weights, gradients and optimizer; ZeRO cuts the last first."""
    return (
        share(w * n_params, n_gpus) if stage >= 3 else w * n_params,
        share(g * n_params, n_gpus) if stage >= 2 else g * n_params,
        share(k * n_params, n_gpus) if stage >= 1 else k * n_params,
    )


def require_params(value):
    """Return Psi, as an int where it is whole so that its products are exact."""
    if type(value) is int and 0 <= value <= MOST_PARAMS:
        return value
    number = require_number("n_params", value, minimum=0)
    if getattr(number, "max", lambda: number)() > MOST_PARAMS:
        raise ValueError(f"n_params must be at most 10^15, got {value}: it counts parameters")
    # 7e9 is how people write it.
    return int(number) if isinstance(number, float) and number.is_integer() else number


def require_stage(stage):
    """Return a ZeRO stage, or say what each one shards."""
    why = "ZeRO shards nothing (0), the optimizer (1), also gradients (2), also weights (3)"
    return require_int("stage", stage, minimum=0, maximum=3, why=why)


def share(n_bytes, parts):
    """Divide by an int, and stay an exact int where one is the answer."""
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
