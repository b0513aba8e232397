"""Data parallelism on arrays: what averaging over ranks gets right, and what weights repair.

Every simulated rank holds a part of the batch and computes the gradient of its own mean loss. A
collective then joins these gradients. Their plain mean is the full batch's gradient when every rank
averaged over equally many terms; otherwise each counts by its share of the terms.
"""

import math

import numpy as np

from parlab.units import require_choice, require_int, require_number

WEIGHTINGS = ("rows", "ranks")


def data_parallel_grad(X, y, w, n, weighting="rows"):
    """Gradient of a least-squares loss from n ranks, each of which sees its own rows only.

    The loss is half the mean of (Xw - y)^2, so rank k with rows B_k computes

        g_k = X_k' (X_k w - y_k) / |B_k|,      full batch: X' (Xw - y) / |B|.

    weighting="rows" returns sum |B_k| / |B| g_k, the full batch's gradient for every split.
    weighting="ranks" returns sum g_k / n, what an all-reduce with AVG computes: equal to it where n
    divides the rows, and off otherwise. A rank without rows has nothing to add and sends zeros, but
    is one of the n that AVG divides by (as in torch's Join with divide_by_initial_world_size).

    Parameters
    ----------
    X : (rows, features), at least one row. y : (rows,) or (rows, targets).
    w : (features,) or (features, targets), as y.
    n : ranks; rows are cut as `np.array_split` cuts, so the last ranks may get none.
    weighting : "rows" or "ranks".

    Integers and every floating dtype are computed in float64. NaN and infinity pass through.

    Errors
    ------
    TypeError : values that are no real numbers. ValueError : shapes that do not fit, no rows, or
    finite values so large that the gradient overflows.

    >>> X, y, w = np.array([[1], [2], [6]]), np.zeros(3), np.ones(1)
    >>> data_parallel_grad(X, y, w, 2), (1 + 4 + 36) / 3  # rank 0 has two rows, rank 1 has one
    (array([13.66666667]), 13.666666666666666)
    >>> data_parallel_grad(X, y, w, 2, weighting="ranks"), ((1 + 4) / 2 + 36) / 2
    (array([19.25]), 19.25)
    """
    X, y, w = _least_squares(X, y, w)
    n = require_int("n", n, minimum=1, why="some rank has to hold the rows")
    weighting = require_choice("weighting", weighting, WEIGHTINGS)
    occupied = min(n, len(X))  # array_split leaves the ranks after these without rows
    with np.errstate(over="ignore", invalid="ignore"):
        shards = zip(np.array_split(X, occupied), np.array_split(y, occupied), strict=True)
        grads = [X_k.T @ (X_k @ w - y_k) / len(X_k) for X_k, y_k in shards]
    if all(np.isfinite(array).all() for array in (X, y, w)) and not np.isfinite(grads).all():
        raise ValueError("X, y and w are finite, but their gradient overflows: scale them down")
    if weighting == "ranks":
        return average_gradients(grads) * (occupied / n)
    return average_gradients(grads, [len(X_k) for X_k in np.array_split(X, occupied)])


def average_gradients(grads, weights=None):
    """Mean over ranks of their gradients: the plain one, or weighted.

    sum_k weights_k g_k / sum_k weights_k; weights are rows or tokens of each rank, None for equal.

    grads: one entry per rank, each an array, or a list of arrays (one per parameter, the same on
    every rank). Sums are taken in float64 and rounded once to the gradients' dtype, so float16 does
    not overflow; integers give float64, since their mean need not be whole. NaN passes through,
    even at weight 0, as it does in an all-reduce.

    Returns one array, or a list of them, as given. Raises TypeError for values that are no real
    numbers, ValueError for ranks that disagree and for weights that are negative, all zero or not
    one per rank.

    >>> average_gradients([np.array([3, 10]), np.array([4, 20])])
    array([ 3.5, 15. ])
    >>> average_gradients([np.array([1.0]), np.array([4.0])], weights=[2, 8])
    array([3.4])
    """
    ranks = list(grads)
    if not ranks:
        raise ValueError("grads must hold one gradient per rank, got none")
    shares = _shares(weights, len(ranks))
    if not _is_list_of_arrays(ranks[0]):
        return _mean([_real(g, f"grads[{k}]") for k, g in enumerate(ranks)], shares, "grads[{}]")
    for k, rank in enumerate(ranks):
        if not _is_list_of_arrays(rank) or len(rank) != len(ranks[0]):
            raise ValueError(
                f"all ranks must agree: grads[0] is a list of {len(ranks[0])} arrays, grads[{k}] "
                f"is {f'a list of {len(rank)}' if isinstance(rank, list | tuple) else 'not'}"
            )
    means = []
    for i in range(len(ranks[0])):
        parameter = [_real(rank[i], f"grads[{k}][{i}]") for k, rank in enumerate(ranks)]
        means.append(_mean(parameter, shares, f"grads[{{}}][{i}]"))
    return means


def token_weighted_mean(losses, tokens):
    """The mean loss per token over all ranks and micro-batches.

    sum loss_i tokens_i / sum tokens_i, where loss_i is the mean over its tokens_i tokens.

    losses, tokens: one number per rank, or one list per rank with a number per micro-batch. Where
    there are no tokens, the loss (a mean over nothing, often NaN) is left out.

    Raises TypeError for tokens that are no whole numbers, ValueError where the two do not have the
    same form, or where there is no token at all.

    >>> token_weighted_mean([1, 4], [2, 8])
    3.4
    """
    pairs = [pair for rank in _by_rank(losses, tokens) for pair in rank]
    return _token_mean(pairs)


def token_recipes(losses, tokens):
    """What common recipes make of the losses of N ranks with A micro-batches each.

    Returns {recipe: mean loss}; a gradient is off by the same factor or weights as its loss. The
    last three start from losses that are summed over tokens and differ from the right value by
    exactly N, 1/N and 1/(N A).

    losses, tokens: as in `token_weighted_mean`, with equally many micro-batches on every rank.

    >>> for recipe, loss in token_recipes([[1, 2], [3, 4]], [[3, 1], [5, 2]]).items():
    ...     print(f"{loss:.4f}  {recipe}")
    2.5455  sum over tokens / tokens of all ranks
    2.5000  mean of all micro-batch means
    2.2679  token mean on each rank, then mean over ranks
    5.0909  meant for AVG over ranks, but summed
    1.2727  divided by all tokens, then averaged over ranks
    0.6364  divided by all tokens, then averaged over all micro-batches
    """
    by_rank = _by_rank(losses, tokens)
    n = len(by_rank)
    if len({*map(len, by_rank)}) > 1:
        raise ValueError(
            f"losses must have equally many micro-batches on every rank, got {[*map(len, by_rank)]}"
        )
    if not all(count for rank in by_rank for _, count in rank):
        raise ValueError("tokens must be positive: most recipes have no value where one is 0")
    right = _token_mean([pair for rank in by_rank for pair in rank])
    means = [loss for rank in by_rank for loss, _ in rank]
    of_ranks = math.fsum(map(_token_mean, by_rank))
    return {
        "sum over tokens / tokens of all ranks": right,
        "mean of all micro-batch means": math.fsum(means) / len(means),
        "token mean on each rank, then mean over ranks": of_ranks / n,
        "meant for AVG over ranks, but summed": right * n,
        "divided by all tokens, then averaged over ranks": right / n,
        "divided by all tokens, then averaged over all micro-batches": right / len(means),
    }


def _least_squares(X, y, w):
    X, y, w = (_real(values, name).astype(float) for values, name in ((X, "X"), (y, "y"), (w, "w")))
    if X.ndim != 2 or not len(X):
        raise ValueError(
            f"X must have shape (rows, features) with at least one row, got {X.shape}: "
            "the mean over no rows does not exist"
        )
    if y.ndim not in (1, 2) or len(y) != len(X):
        raise ValueError(f"y must have one entry for each of the {len(X)} rows, got {y.shape}")
    if w.shape != X.shape[1:] + y.shape[1:]:
        raise ValueError(
            f"w must have shape {X.shape[1:] + y.shape[1:]} to go with X {X.shape} and "
            f"y {y.shape}, got {w.shape}"
        )
    return X, y, w


def _is_list_of_arrays(rank):
    return isinstance(rank, list | tuple) and any(isinstance(item, np.ndarray) for item in rank)


def _shares(weights, n_ranks):
    if weights is None:
        return np.full(n_ranks, 1.0 / n_ranks)
    weights = [require_number("weights", weight, minimum=0) for weight in weights]
    if len(weights) != n_ranks:
        raise ValueError(f"weights must be one per rank ({n_ranks}), got {len(weights)}")
    largest = max(weights)
    if not largest:
        raise ValueError("weights must not all be zero: nothing is left to average")
    scaled = [weight / largest for weight in weights]  # their sum cannot overflow
    return np.array(scaled) / math.fsum(scaled)


def _mean(arrays, shares, name):
    first = arrays[0]
    for k, array in enumerate(arrays):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ValueError(
                f"all ranks must agree: {name.format(k)} has shape {array.shape} and dtype "
                f"{array.dtype}, {name.format(0)} has {first.shape} and {first.dtype}"
            )
    total = np.zeros(first.shape)
    # Pulled back between the extremes, which rounding may leave by a unit in the last place: the
    # mean of equal gradients is that gradient, bit for bit.
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = np.minimum.reduce(arrays), np.maximum.reduce(arrays)
        for share, array in zip(shares, arrays, strict=True):
            total += share * array.astype(float)
        total = np.clip(total, low, high)
    return np.asarray(total, first.dtype if first.dtype.kind == "f" else float)


def _real(values, name):
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is not an array: {error}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must hold integers or floats, got dtype {array.dtype}")
    return array


def _by_rank(losses, tokens):
    """Pairs (loss, tokens) of every micro-batch, rank by rank."""
    nested_losses, nested_tokens = _nested(losses), _nested(tokens)
    counts = [*map(len, nested_losses)], [*map(len, nested_tokens)]
    if counts[0] != counts[1] or not counts[0]:
        raise ValueError(
            "losses and tokens must have one number for each micro-batch of each rank, got "
            f"{counts[0]} and {counts[1]} numbers per rank"
        )
    return [
        [
            (_loss(loss), require_int("tokens", count, minimum=0))
            for loss, count in zip(*rank, strict=True)
        ]
        for rank in zip(nested_losses, nested_tokens, strict=True)
    ]


def _loss(value):
    # NaN is let through: it must show in the result.
    return value if value != value else require_number("losses", value)


def _nested(values):
    return [list(value) if hasattr(value, "__len__") else [value] for value in values]


def _token_mean(pairs):
    total = sum(count for _, count in pairs)
    if not total:
        raise ValueError("tokens must not all be zero: the mean over no tokens does not exist")
    return math.fsum(loss * count for loss, count in pairs if count) / total
