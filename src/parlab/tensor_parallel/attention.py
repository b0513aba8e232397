"""Attention and the gated MLP on n simulated ranks: cut by whole heads, and feature by feature.

Each function computes what the ranks compute, shard by shard, and adds up where real ranks would
communicate. Types and overflow as in `linear`.
"""

import numpy as np

from parlab.tensor_parallel.linear import (
    as_floats,
    equal_parts,
    require_finite,
    row_parallel,
    row_shards,
)
from parlab.units import require_int


def heads_of_rank(rank, n, n_heads, n_kv_heads=None, *, replicate=False):
    """Return the query heads and the key-value heads that a rank holds, as two ranges.

    A head is never cut: its softmax needs all of its scores. So n must divide n_heads, and either
    n divides n_kv_heads, or, with `replicate`, n_kv_heads divides n and each key-value head is
    held by n / n_kv_heads ranks (which then must add up their gradients for it).

    n_kv_heads: None for as many as n_heads; else a divisor of it (grouped-query attention).

    >>> heads_of_rank(1, 4, n_heads=32, n_kv_heads=8)
    (range(8, 16), range(2, 4))
    >>> heads_of_rank(5, 8, n_heads=32, n_kv_heads=4, replicate=True)
    (range(20, 24), range(2, 3))

    Raises ValueError that states the rule for numbers of heads that can't be dealt out.
    """
    n = require_int("n", n, minimum=1)
    rank = require_int("rank", rank, minimum=0, maximum=n - 1)
    n_heads = require_int("n_heads", n_heads, minimum=1)
    n_kv = n_heads if n_kv_heads is None else require_int("n_kv_heads", n_kv_heads, minimum=1)
    if n_heads % n_kv:
        raise ValueError(f"n_kv_heads must divide the {n_heads} query heads, got {n_kv}")
    if n_heads % n:
        raise ValueError(f"n must divide the {n_heads} query heads, got {n}: a head is never cut")
    if n_kv % n and not (replicate and n % n_kv == 0):
        raise ValueError(
            f"n must divide the {n_kv} key-value heads, got {n}: a head is never cut; "
            "replicate=True copies heads where n is a multiple of their number"
        )
    queries, group = n_heads // n, n_heads // n_kv
    first, last = rank * queries, (rank + 1) * queries
    return range(first, last), range(first // group, (last - 1) // group + 1)


def attention(x, wq, wk, wv, wo, n_heads, n_kv_heads=None, *, causal=True):
    """Return multi-head attention on one device; query head q uses key-value head q // group.

    x: (..., s, h). wq: (h, n_heads d). wk, wv: (h, n_kv_heads d). wo: (n_heads d, h).

    >>> w = np.eye(2)
    >>> attention([[1.0, 0.0], [0.0, 1.0]], w, w, w, w, n_heads=1)[0].tolist()  # sees itself only
    [1.0, 0.0]
    """
    n_kv = n_heads if n_kv_heads is None else n_kv_heads
    return head_parallel_attention(x, wq, wk, wv, wo, 1, n_heads, n_kv, causal=causal)


@np.errstate(over="ignore", invalid="ignore")  # `require_finite` refuses what they would warn of
def head_parallel_attention(
    x, wq, wk, wv, wo, n, n_heads, n_kv_heads=None, *, causal=True, replicate=False
):
    """Return `attention` with whole heads on each of n ranks and one all-reduce at the end.

    W_q, W_k and W_v are cut by columns, so that each rank has whole heads; W_o by rows (Shoeybi et
    al. 2019, section 3). Which heads: `heads_of_rank`. Other arguments as in `attention`.

    >>> x, w = np.ones((3, 4)), np.eye(4)
    >>> whole = attention(x, w, w, w, w, n_heads=4)
    >>> bool(np.allclose(head_parallel_attention(x, w, w, w, w, 2, n_heads=4), whole))
    True
    """
    x, wq, wk, wv, wo = map(as_floats, ("x", "wq", "wk", "wv", "wo"), (x, wq, wk, wv, wo))
    n_kv = n_heads if n_kv_heads is None else n_kv_heads
    held = [heads_of_rank(rank, n, n_heads, n_kv, replicate=replicate) for rank in range(n)]
    size = _head_size(x, wq, wk, wv, wo, n_heads, n_kv)
    outputs = []
    for queries, keys in held:
        q = _heads(x @ wq[:, queries.start * size : queries.stop * size], size)
        kv_columns = slice(keys.start * size, keys.stop * size)
        k, v = (_heads(x @ w[:, kv_columns], size) for w in (wk, wv))
        group = len(queries) // len(keys)
        k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
        seen = require_finite(_attend(q, k, v, causal), x, wq, wk, wv)
        seen = np.swapaxes(seen, -2, -3)  # (..., s, heads, d)
        outputs.append(seen.reshape(*seen.shape[:-2], -1))
    return row_parallel(outputs, row_shards(wo, n))


def pack_gate_up(gate, up):
    """Return [gate | up], the packed weight that many models store, (h, 2F).

    >>> pack_gate_up([[1, 2]], [[3, 4]]).tolist()
    [[1.0, 2.0, 3.0, 4.0]]
    """
    gate, up = as_floats("gate", gate), as_floats("up", up)
    if gate.shape != up.shape or gate.ndim != 2:
        raise ValueError(f"gate and up must both be (h, F), got {gate.shape} and {up.shape}")
    return np.concatenate([gate, up], axis=1)


def packed_swiglu_shards(gate_up, n):
    """Cut a packed weight so that rank i gets its columns of the gate and the same of the up half.

    A cut of the packed matrix into n contiguous blocks would pair columns that do not belong
    together, without any error. n must divide F, not only 2F.

    >>> [shard.tolist() for shard in packed_swiglu_shards(np.array([[1, 2, 3, 4]]), 2)]
    [[[1, 3]], [[2, 4]]]
    """
    halves = equal_parts("halves (gate and up)", gate_up, 2, axis=1)
    gates, ups = (equal_parts("features F of the gate", half, n, axis=1) for half in halves)
    return [np.concatenate(pair, axis=1) for pair in zip(gates, ups, strict=True)]


@np.errstate(over="ignore", invalid="ignore")
def packed_swiglu_mlp(x, gate_up, down, n):
    """Return (silu(x gate) * (x up)) down on n ranks, from the packed weight [gate | up].

    x: (..., h). gate_up: (h, 2F). down: (F, h). silu(z) = z / (1 + exp(-z)). Shazeer (2020).

    >>> packed = pack_gate_up([[1, 2]], [[3, 4]])
    >>> packed_swiglu_mlp([1.0], packed, [[1.0], [1.0]], n=2).round(5).tolist()
    [9.23955]
    """
    x = as_floats("x", x)
    shards = [as_floats("gate_up", shard) for shard in packed_swiglu_shards(gate_up, n)]
    if x.shape[-1:] != shards[0].shape[:1]:
        raise ValueError(f"x (..., h) must fit gate_up (h, 2F), got {x.shape}, {np.shape(gate_up)}")
    blocks = [np.split(x @ shard, 2, axis=-1) for shard in shards]
    hidden = [require_finite(_silu(gate) * up, x, *shards) for gate, up in blocks]
    return row_parallel(hidden, row_shards(down, n))


def _head_size(x, wq, wk, wv, wo, n_heads, n_kv):
    h = x.shape[-1] if x.ndim > 1 else None
    size = wq.shape[-1] // n_heads
    wanted = ((h, n_heads * size), (h, n_kv * size), (h, n_kv * size))
    if (wq.shape, wk.shape, wv.shape) != wanted or wo.shape[:1] != (n_heads * size,) or not size:
        raise ValueError(
            f"x, wq, wk, wv and wo must be (..., s, h), (h, {n_heads} d), (h, {n_kv} d) twice and "
            f"({n_heads} d, h), got {x.shape}, {wq.shape}, {wk.shape}, {wv.shape}, {wo.shape}"
        )
    return size


def _heads(rows, size):
    """(..., s, heads d) as (..., heads, s, d)."""
    return np.swapaxes(rows.reshape(*rows.shape[:-1], -1, size), -2, -3)


def _attend(q, k, v, causal):
    scores = q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    if causal:
        future = np.triu(np.ones(scores.shape[-2:], bool), 1)
        scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _silu(z):
    # exp of a large negative z would overflow; z / 2 (1 + tanh(z / 2)) is the same and does not.
    return z / 2 * (1 + np.tanh(z / 2))
