"""Embedding and loss with the vocabulary cut over n simulated ranks.

Each function computes what the ranks compute, shard by shard, and adds up or compares where real
ranks would communicate. Types as in `linear`.
"""

import numpy as np

from parlab.tensor_parallel.linear import as_floats, require_finite


def vocabulary_parallel_embedding(tokens, table_shards):
    """Return the rows of a table that is cut by rows (token numbers) over the ranks.

    A rank looks up the tokens in its range and holds zeros for the others; the sum, an all-reduce
    on real ranks, has each row once.

    tokens: integers of any shape. table_shards: rank i's rows, (v_i, h), in rank order.

    >>> table = np.arange(8.0).reshape(4, 2)
    >>> vocabulary_parallel_embedding([3, 0], np.split(table, 2)).tolist()
    [[6.0, 7.0], [0.0, 1.0]]
    """
    shards = _vocabulary("table_shards", table_shards, axis=0)
    tokens = _tokens("tokens", tokens, sum(len(shard) for shard in shards))
    start, total = 0, 0
    for shard in shards:
        mine = (tokens >= start) & (tokens < start + len(shard))
        rows = np.zeros((*tokens.shape, shard.shape[1]), shard.dtype)
        rows[mine] = shard[tokens[mine] - start]
        total = total + rows
        start += len(shard)
    return total


@np.errstate(over="ignore", invalid="ignore")  # `require_finite` refuses what they would warn of
def vocabulary_parallel_cross_entropy(logit_shards, targets):
    """Return -log softmax(logits)[target] for logits cut along the vocabulary, never gathered.

    loss = log(sum_i sum_j exp(l_ij - M)) + M - l_target, with M the largest logit of *all* ranks:
    three all-reduces of one number per token (a maximum and two sums) instead of a gather of V.

    logit_shards: rank i's (..., v_i), in rank order. targets: integers of shape (...).

    >>> logits = np.array([1000.0, 0.0, -1000.0, 999.0])
    >>> print(f"{vocabulary_parallel_cross_entropy(np.split(logits, 2), 1):.4f}")
    1000.3133

    Raises ValueError for NaN and +infinity, naming the rank, and for a token whose logits are all
    -infinity: no probability exists. Single logits of -infinity are allowed.
    """
    shards = _vocabulary("logit_shards", logit_shards, axis=-1)
    vocabulary = sum(shard.shape[-1] for shard in shards)
    targets = _tokens("targets", targets, vocabulary)
    for rank, shard in enumerate(shards):
        if shard.shape[:-1] != targets.shape:
            raise ValueError(
                f"logit_shards[{rank}] must be targets' shape {targets.shape} and the rank's part "
                f"of the vocabulary, got {shard.shape}"
            )
        if not (shard < np.inf).all():
            raise ValueError(f"logit_shards[{rank}] must be below infinity and no NaN")
    largest = np.max([shard.max(axis=-1, initial=-np.inf) for shard in shards], axis=0)
    if not (largest > -np.inf).all():
        raise ValueError("a token needs one logit above -infinity, got none on any rank")
    total, at_target, start = 0, 0, 0
    for shard in shards:
        width = shard.shape[-1]
        total = total + np.exp(shard - largest[..., None]).sum(axis=-1)
        mine = (targets >= start) & (targets < start + width)
        if width:
            column = np.where(mine, targets - start, 0)[..., None]
            found = np.take_along_axis(shard, column, axis=-1)[..., 0]
            at_target = at_target + np.where(mine, found, 0)
        start += width
    return require_finite(np.log(total) + (largest - at_target), *shards)


def _vocabulary(name, shards, axis):
    shards = [as_floats(f"{name}[{rank}]", shard) for rank, shard in enumerate(shards)]
    if not shards or any(shard.ndim < 1 for shard in shards):
        raise ValueError(f"{name} must hold one array per rank, each with a vocabulary dim")
    shapes = [shard.shape for shard in shards]
    if axis == 0 and any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"{name} must be (v_i, h) with one h, got {shapes}")
    return shards


def _tokens(name, values, vocabulary):
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {values.dtype}")
    if values.size and not (values.min() >= 0 and values.max() < vocabulary):
        raise ValueError(
            f"{name} must lie from 0 to {vocabulary - 1}, the vocabulary of all ranks, "
            f"got {int(values.min())} to {int(values.max())}"
        )
    return values.astype(np.int64)
