"""Tensor parallelism by hand: the operators at its borders, and a block cut over the ranks.

Shapes in comments: b rows of a batch, s positions, h hidden size, N ranks. The operators act over
all ranks of the default process group.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from parlab.distributed import compat
from parlab.distributed.ring import all_reduce
from parlab.units import require_choice, require_int

# Weights lie (out, in): rows of `up.weight` are columns of A in x A.
COLUMN_PARALLEL = ("q", "k", "v", "up")
ROW_PARALLEL = ("o", "down")


class CopyToRanks(torch.autograd.Function):
    """Megatron's f (arXiv 1909.08053, section 3): identity forward, all-reduce backward.

    Every rank uses x in its own columns, so the gradient of x is the sum of what they find.
    """

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient)


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward.

    Every rank holds a part of the sum, and the derivative of a sum by each of its parts is 1.
    """

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class GatherSequence(torch.autograd.Function):
    """All-gather of the positions forward, reduce-scatter backward (g of arXiv 2205.05198)."""

    @staticmethod
    def forward(ctx, x):
        return _all_gather(x)  # (b, s / N, h) to (b, s, h)

    @staticmethod
    def backward(ctx, gradient):
        return _reduce_scatter(gradient)


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter of the positions forward, all-gather backward (g-bar of arXiv 2205.05198)."""

    @staticmethod
    def forward(ctx, x):
        return _reduce_scatter(x)  # (b, s, h) to (b, s / N, h)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient)


def f(x):
    """Enter a tensor-parallel region: x, whole on every rank; its gradient is summed."""
    return CopyToRanks.apply(x)


def g(x):
    """Leave a tensor-parallel region: the sum of x over the ranks."""
    return SumOverRanks.apply(x)


def gather_sequence(x):
    """Enter a tensor-parallel region with all positions; outside, a rank holds s / N of them."""
    return GatherSequence.apply(x)


def scatter_sequence(x):
    """Leave a tensor-parallel region: the sum over the ranks, at this rank's positions only."""
    return ScatterSequence.apply(x)


def _all_gather(x):
    rows = x.movedim(1, 0).contiguous()  # gathers and scatters go along dim 0
    out = rows.new_empty((dist.get_world_size() * rows.shape[0], *rows.shape[1:]))
    compat.all_gather_rows(out, rows)
    # Otherwise every linear layer that reads it would make, and keep, a copy of its own.
    return out.movedim(0, 1).contiguous()


def _reduce_scatter(x):
    rows = x.movedim(1, 0).contiguous()
    require_shares("sequence", rows.shape[0], dist.get_world_size(), "a rank keeps s / N positions")
    out = rows.new_empty((rows.shape[0] // dist.get_world_size(), *rows.shape[1:]))
    compat.reduce_scatter_rows(out, rows)
    return out.movedim(0, 1).contiguous()


def require_shares(name, size, n, why):
    """Refuse a size that n ranks cannot share equally.

    >>> require_shares("heads", 6, 4, "a rank computes whole heads")
    Traceback (most recent call last):
    ...
    ValueError: heads must be a multiple of the 4 ranks, got 6: a rank computes whole heads
    """
    if size % n:
        raise ValueError(f"{name} must be a multiple of the {n} ranks, got {size}: {why}")


def shards_of(name, tensor, n):
    """Cut a parameter of a block, or its gradient, as n ranks hold it; one tensor per rank.

    Of q, k, v and up a rank has some outputs: rows of the weight (out, in) and their biases. Of o
    and down it has some inputs: columns of the weight. Everything else, the biases of o and down
    included, is whole on every rank.

    Parameters
    ----------
    name : as in `named_parameters`, such as "mlp.up.weight".

    >>> [part.tolist() for part in shards_of("down.weight", torch.arange(8).view(2, 4), 2)]
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    >>> [part.tolist() for part in shards_of("up.bias", torch.arange(4), 2)]
    [[0, 1], [2, 3]]
    >>> [part.tolist() for part in shards_of("down.bias", torch.arange(2), 2)]
    [[0, 1], [0, 1]]

    Raises ValueError for a dimension that n ranks cannot share equally.
    """
    require_int("n", n, minimum=1)
    dim = _cut_dim(name)
    if dim is None:
        return [tensor] * n
    require_shares(name, tensor.shape[dim], n, f"a rank holds 1/{n} of dim {dim}")
    return list(tensor.chunk(n, dim))


def _cut_dim(name):
    """The dim along which the ranks share a parameter; None if each holds all of it."""
    layer, kind = ("", *name.split("."))[-2:]
    kind = require_choice("name", kind, ("weight", "bias"))
    if layer in COLUMN_PARALLEL:
        return 0
    return 1 if layer in ROW_PARALLEL and kind == "weight" else None


class ColumnLinear(nn.Module):
    """This rank's outputs of a linear layer: x A_r + a_r."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """The sum over ranks of x_r B_r, then the bias, once; `leave` is `g` or `scatter_sequence`."""

    def __init__(self, weight, bias, leave):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.leave = leave

    def forward(self, x):
        return self.leave(F.linear(x, self.weight)) + self.bias


def shard_layers(module, leave=g):
    """A copy of an `Attention` or `MLP` of `gpt` in which every linear layer is this rank's share.

    It expects its input through `f`, or `gather_sequence` where it leaves by `scatter_sequence`.

    Raises ValueError where the ranks cannot share the heads or the inner size, or for dropout.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    if module.dropout:
        raise ValueError(
            f"dropout must be 0 here, got {module.dropout}: ranks would have to draw one mask "
            "together where x is whole, and their own where it is cut"
        )
    if hasattr(module, "head_size"):
        whole_heads = "a rank computes whole heads"
        for name, layer in (("heads", module.q), ("kv_heads", module.k)):
            require_shares(name, layer.out_features // module.head_size, n, whole_heads)
    else:
        require_shares("ffn", module.up.out_features, n, "a rank computes ffn / N of the features")
    shares = {}
    for name, layer in module.named_children():
        weight, bias = (
            shards_of(f"{name}.{kind}", getattr(layer, kind).detach(), n)[rank].clone()
            for kind in ("weight", "bias")
        )
        rows = name in ROW_PARALLEL
        shares[layer] = RowLinear(weight, bias, leave) if rows else ColumnLinear(weight, bias)
    return _copy_with(module, shares)


def _copy_with(module, replacements):
    """A copy with some of its parts replaced; these are not copied, whole weights least of all."""
    return copy.deepcopy(module, {id(old): new for old, new in replacements.items()})


def _copy_norm(norm):
    return _copy_with(norm, {p: nn.Parameter(p.detach().clone()) for p in norm.parameters()})


class ParallelBlock(nn.Module):
    """This rank's share of a `gpt.Block`, its parameters under the same names.

    Without sequence parallelism it takes and returns x whole, (b, s, h), the same on every rank.
    With it, (b, s / N, h): norms, residual sums and what they keep for backward shrink by N; after
    the backward pass, call `sum_partial_gradients`.
    """

    def __init__(self, block, sequence_parallel=False):
        super().__init__()
        self.enter, leave = (gather_sequence, scatter_sequence) if sequence_parallel else (f, g)
        self.attention_norm = _copy_norm(block.attention_norm)
        self.attention = shard_layers(block.attention, leave)
        self.mlp_norm = _copy_norm(block.mlp_norm)
        self.mlp = shard_layers(block.mlp, leave)

    def forward(self, x):
        x = x + self.attention(self.enter(self.attention_norm(x)))
        return x + self.mlp(self.enter(self.mlp_norm(x)))


def sum_partial_gradients(block):
    """Sum, in one all-reduce, the gradients of the parameters that act outside the regions.

    Under sequence parallelism a rank applies the norms, and the biases of o and down, to its own
    positions only, so it has only these positions' part of their gradients. Without it every rank
    has seen all positions and holds the whole gradient already: a sum would be N times too large.
    """
    partial = [parameter for name, parameter in block.named_parameters() if _cut_dim(name) is None]
    total = all_reduce(torch.cat([parameter.grad.flatten() for parameter in partial]))
    pieces = total.split([parameter.numel() for parameter in partial])
    for parameter, piece in zip(partial, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))
