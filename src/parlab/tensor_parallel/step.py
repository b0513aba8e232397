"""Forward and backward of an MLP on n simulated ranks, with every byte counted: two cuts.

The collectives are those of `parlab.collectives.simulate`. Without biases, to keep the lines that
communicate in view.
"""

from dataclasses import dataclass

import numpy as np

from parlab.collectives.simulate import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from parlab.tensor_parallel.linear import (
    as_floats,
    column_shards,
    gelu,
    gelu_gradient,
    require_finite,
    row_shards,
)


@dataclass(frozen=True)
class MLPStep:
    """Forward and backward of an MLP on n ranks; sent_*[r] are the bytes that rank r sent.

    output, dx: the same on every rank. da, db: gradients of the weights, put together from the
    ranks' shards, which stay where they are.
    """

    output: np.ndarray
    dx: np.ndarray
    da: np.ndarray
    db: np.ndarray
    sent_forward: list
    sent_backward: list


@np.errstate(over="ignore", invalid="ignore")  # `_checked` refuses what they would warn of
def megatron_mlp_step(x, A, B, dz, n):
    """Run `megatron_mlp` forward, and backward from dz: one ring all-reduce each way.

    The operators of Shoeybi et al. (2019): g adds up the partial outputs in forward, f the partial
    gradients of x in backward. dz: gradient of the output, on every rank. Returns an MLPStep.

    >>> step = megatron_mlp_step(np.ones((2, 4)), np.ones((4, 8)), np.ones((8, 4)), np.ones((2, 4)), 2)
    >>> step.sent_forward, step.sent_backward  # 2 (n-1)/n of 2 x 4 doubles
    ([64, 64], [64, 64])
    """  # noqa: E501
    x, A, B, dz = _inputs(x, A, B, dz)
    a_shards, b_shards = column_shards(A, n), row_shards(B, n)
    blocks = [x @ a for a in a_shards]
    hidden = [gelu(block) for block in blocks]
    output, sent_forward = ring_all_reduce(map(np.matmul, hidden, b_shards))

    db = [_flat(y).T @ _flat(dz) for y in hidden]
    dy = [dz @ b.T for b in b_shards]
    dh = list(map(np.multiply, dy, map(gelu_gradient, blocks)))
    da = [_flat(x).T @ _flat(d) for d in dh]
    dx, sent_backward = ring_all_reduce([d @ a.T for d, a in zip(dh, a_shards, strict=True)])
    da, db = np.concatenate(da, axis=1), np.concatenate(db, axis=0)
    return _checked(MLPStep(output[0], dx[0], da, db, sent_forward, sent_backward), x, A, B, dz)


@np.errstate(over="ignore", invalid="ignore")
def columns_only_mlp_step(x, A, B, dz, n):
    """Run an MLP with *both* weights cut by columns, and an all-gather after each layer.

    Forward: gather the f hidden features, then the h outputs. Backward: what follows the second
    gather is equal on all ranks, so each takes its slice of dz and nothing travels; what follows
    the first differs, so its gradient, a partial sum, is reduce-scattered; dx is all-reduced.
    Arguments and result as in `megatron_mlp_step`; n must divide f and h.

    >>> step = columns_only_mlp_step(np.ones((2, 4)), np.ones((4, 8)), np.ones((8, 4)), np.ones((2, 4)), 2)
    >>> step.sent_forward, step.sent_backward  # (n-1)/n of 2 x (8 + 4) doubles; of 2 x (8 + 2 x 4)
    ([96, 96], [128, 128])
    """  # noqa: E501
    x, A, B, dz = _inputs(x, A, B, dz)
    a_shards, b_shards = column_shards(A, n), column_shards(B, n)
    blocks = [x @ a for a in a_shards]
    hidden, sent_hidden = _gather_last([gelu(block) for block in blocks])
    output, sent_output = _gather_last([hidden @ b for b in b_shards])

    dz_slices = np.split(dz, n, axis=-1)
    db = [_flat(hidden).T @ _flat(d) for d in dz_slices]
    partial = [d @ b.T for d, b in zip(dz_slices, b_shards, strict=True)]
    # The features come first, so that rank r's chunk of the flat array is its block of them.
    scattered, sent_scatter = ring_reduce_scatter([np.moveaxis(d, -1, 0) for d in partial])
    rows = (blocks[0].shape[-1], *x.shape[:-1])
    dy = [np.moveaxis(chunk.reshape(rows), 0, -1) for chunk in scattered]
    dh = list(map(np.multiply, dy, map(gelu_gradient, blocks)))
    da = [_flat(x).T @ _flat(d) for d in dh]
    dx, sent_reduce = ring_all_reduce([d @ a.T for d, a in zip(dh, a_shards, strict=True)])

    sent_forward = list(map(sum, zip(sent_hidden, sent_output, strict=True)))
    sent_backward = list(map(sum, zip(sent_scatter, sent_reduce, strict=True)))
    da, db = np.concatenate(da, axis=1), np.concatenate(db, axis=1)
    return _checked(MLPStep(output, dx[0], da, db, sent_forward, sent_backward), x, A, B, dz)


def _inputs(x, A, B, dz):
    x, A, B, dz = (as_floats(*pair) for pair in (("x", x), ("A", A), ("B", B), ("dz", dz)))
    if A.ndim != 2 or B.shape != A.shape[::-1] or x.shape[-1:] != A.shape[:1]:
        raise ValueError(
            f"x, A and B must be (..., h), (h, f) and (f, h), got shapes {x.shape}, {A.shape}, "
            f"{B.shape}"
        )
    if dz.shape != x.shape:
        raise ValueError(f"dz must have the shape of the output, {x.shape}, got {dz.shape}")
    # One dtype for all, as between real ranks: collectives do not convert.
    dtype = np.result_type(x, A, B, dz)
    return tuple(array.astype(dtype, copy=False) for array in (x, A, B, dz))


def _checked(step, *inputs):
    for array in (step.output, step.dx, step.da, step.db):
        require_finite(array, *inputs)
    return step


def _flat(array):
    """(..., features) as (rows, features)."""
    return array.reshape(-1, array.shape[-1])


def _gather_last(blocks):
    """All-gather along the last dim; returns what rank 0 got, and the bytes that each rank sent."""
    # Gathers put blocks one after the other along the first dim.
    gathered, sent = ring_all_gather([np.moveaxis(block, -1, 0) for block in blocks])
    return np.moveaxis(gathered[0], 0, -1), sent
