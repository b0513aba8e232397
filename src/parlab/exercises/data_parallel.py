"""Exercises of chapter 2: gradients that ranks average, and what each of them should weigh."""

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception

ORDER_OF_SUMS = "sums of the same floats in another order"


def data_parallel_grad(X, y, w, n):
    """Gradient of a least-squares loss, averaged over n ranks with equal shards of the rows.

    The loss is half the mean of (Xw - y)^2, so a shard's gradient is X_k' (X_k w - y_k) / rows of
    the shard.

    X: (rows, features). y: (rows,). w: (features,). n divides the rows.

    >>> X, y, w = np.array([[1.0], [2.0]]), np.zeros(2), np.ones(1)
    >>> data_parallel_grad(X, y, w, 2).tolist()  # (1 + 4) / 2
    [2.5]
    """
    grads = []
    for X_k, y_k in zip(np.split(X, n), np.split(y, n), strict=True):
        grads.append(X_k.T @ (X_k @ w - y_k) / len(X_k))
    return sum(grads) / n


def unequal_shards_grad(X, y, w, n):
    """The full batch's gradient from n ranks whose shards differ in size.

    Each rank knows the gradient of its own mean loss, as in `data_parallel_grad`, and its number of
    rows. The rows are cut as `np.array_split` cuts them; n is at most their number.

    >>> X, y, w = np.array([[1.0], [2.0], [6.0]]), np.zeros(3), np.ones(1)
    >>> unequal_shards_grad(X, y, w, 2)  # (1 + 4 + 36) / 3
    array([13.66666667])
    """
    shards = list(zip(np.array_split(X, n), np.array_split(y, n), strict=True))  # given
    grads = [X_k.T @ (X_k @ w - y_k) / len(X_k) for X_k, y_k in shards]
    rows = [len(X_k) for X_k, _ in shards]
    return sum(g * r for g, r in zip(grads, rows, strict=True)) / sum(rows)


# Independent routes.


def _full_batch(X, y, w, n=1):
    """Row by row, in plain Python."""
    rows, features = X.shape
    misses = [sum(X[i, j] * w[j] for j in range(features)) - y[i] for i in range(rows)]
    return np.array([sum(X[i, j] * misses[i] for i in range(rows)) / rows for j in range(features)])


def _draw_batch(rng, rows):
    features = int(rng.integers(2, 5))
    X, y = rng.normal(size=(rows, features)).round(2), rng.normal(size=rows).round(2)
    return X, y, rng.normal(size=features).round(2)


def _draw_equal(rng):
    n = int(rng.integers(2, 6))
    return *_draw_batch(rng, n * int(rng.integers(1, 4))), n


def _draw_unequal(rng):
    n = int(rng.integers(2, 6))
    return *_draw_batch(rng, n * int(rng.integers(1, 4)) + int(rng.integers(0, n))), n


def _batch_case(rows, features, n, source):
    rng = np.random.default_rng(rows)
    X, y, w = rng.normal(size=(rows, features)), rng.normal(size=rows), rng.normal(size=features)
    return Case((X, y, w, n), X.T @ (X @ w - y) / rows, source)


_BY_HAND = np.array([[1.0], [2.0]]), np.zeros(2), np.ones(1), 2
_BY_HAND_3 = np.array([[1.0], [2.0], [6.0]]), np.zeros(3), np.ones(1), 2


# Known mistakes.


def _shard_grads(X, y, w, n):
    parts = zip(np.array_split(X, n), np.array_split(y, n), strict=True)
    return [_full_batch(X_k, y_k, w) for X_k, y_k in parts]


def _of_shards(combine):
    """A way that joins the shards' gradients wrongly: combine(gradients, all rows, n)."""
    return lambda X, y, w, n: combine(np.stack(_shard_grads(X, y, w, n)), len(X), n)


DROPPED = "a rank's gradient is dropped"
TWICE = "a rank's gradient counts twice"
SUMMED = Misconception(
    "summed, not averaged",
    (_of_shards(lambda g, rows, n: g.sum(0)),),
    "The sum of N means is N times the mean: the step is as long as with an N times larger "
    "learning rate, and changes with the number of ranks.",
    "Run it with one rank and with two: may the result differ?",
)

DATA_PARALLEL_GRAD = Exercise(
    chapter=2,
    solution=data_parallel_grad,
    expect=_full_batch,
    route="the full batch's gradient, row by row",
    draw=_draw_equal,
    cases=(
        Case(_BY_HAND, np.array([2.5]), "by hand"),
        _batch_case(64, 5, 8, "X'(Xw - y)/64, the mean of 8 shards"),
    ),
    misconceptions=(
        SUMMED,
        Misconception(
            "divided twice",
            (_of_shards(lambda g, rows, n: g.mean(0) / n),),
            "Each shard's gradient is divided by all rows, which is the average already, and then "
            "by the number of ranks again: N times too small.",
            "Divide by the rows of the shard or by the number of ranks, so that all rows count "
            "once in 1 / rows.",
        ),
        Misconception(
            DROPPED,
            (
                _of_shards(lambda g, rows, n: g[:-1].sum(0) / n),
                _of_shards(lambda g, rows, n: g[1:].sum(0) / n),
                _of_shards(lambda g, rows, n: g[:-1].mean(0)),
                _of_shards(lambda g, rows, n: g[1:].mean(0)),
            ),
            "The rows of the first or of the last rank have no say; the run trains on fewer data "
            "than it reads.",
            "Check both ends of your loop over the ranks.",
        ),
        Misconception(
            TWICE,
            (
                _of_shards(lambda g, rows, n: (g.sum(0) + g[0]) / n),
                _of_shards(lambda g, rows, n: (g.sum(0) + g[-1]) / n),
                _of_shards(lambda g, rows, n: (g.sum(0) + g[0]) / (n + 1)),
                _of_shards(lambda g, rows, n: (g.sum(0) + g[-1]) / (n + 1)),
            ),
            "One rank's rows weigh double: often it is both the start of a sum and a part of it.",
            "What does your sum start from?",
        ),
        Misconception(
            "the examples are summed, not averaged, on each rank",
            (_of_shards(lambda g, rows, n: g.mean(0) * rows / n),),
            "The loss is a mean over rows. A sum makes the gradient grow with the batch.",
            "Divide each shard's gradient by its rows.",
        ),
        Misconception(
            "the half of the loss is lost",
            (_of_shards(lambda g, rows, n: 2 * g.mean(0)),),
            "The loss is half the mean of squares, so that the 2 of the derivative cancels.",
            "Take the derivative of (Xw - y)^2 / 2 for one row.",
        ),
        Misconception(
            "the sign is wrong",
            (_of_shards(lambda g, rows, n: -g.mean(0)),),
            "The gradient points uphill: it has Xw - y, prediction less target.",
            "For one row with Xw above y, should a larger w cost more or less?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)


def _remainder_dropped(X, y, w, n):
    rows = len(X) // n * n
    return _full_batch(X[:rows], y[:rows], w)


def _padded(X, y, w, n):
    index = np.arange(-(-len(X) // n) * n) % len(X)
    return _full_batch(X[index], y[index], w)


def _weighted_sum(grads, rows, n):
    sizes = [len(part) for part in np.array_split(np.arange(rows), n)]
    return sum(size * grad for size, grad in zip(sizes, grads, strict=True))


UNEQUAL_SHARDS_GRAD = Exercise(
    chapter=2,
    solution=unequal_shards_grad,
    expect=_full_batch,
    route="the full batch's gradient, row by row",
    draw=_draw_unequal,
    cases=(
        Case(_BY_HAND_3, np.array([41 / 3]), "by hand"),
        _batch_case(65, 5, 8, "X'(Xw - y)/65, 65 rows on 8 ranks"),
    ),
    misconceptions=(
        Misconception(
            "the plain mean over ranks",
            (_of_shards(lambda g, rows, n: g.mean(0)),),
            "A rank with fewer rows then counts as much as one with more, so each of its rows "
            "weighs more. It is right for equal shards only.",
            "Let each gradient weigh as much as it has rows.",
        ),
        Misconception(
            "the remainder is dropped",
            (_remainder_dropped,),
            "Rows beyond the last multiple of n are left out, as a sampler with drop_last does; "
            "the full batch has them.",
            "np.array_split gives every row to somebody.",
        ),
        Misconception(
            "rows are repeated until the shards are equal",
            (_padded,),
            "A sampler pads like this, and the repeated rows count twice.",
            "Leave the shards as they are, and weigh them.",
        ),
        Misconception(
            "weighted, but not divided by all rows",
            (_of_shards(_weighted_sum),),
            "Weights must add up to 1: the rows of a rank over all rows.",
            "What do your weights add up to?",
        ),
        Misconception(
            "weighted, then averaged over ranks",
            (_of_shards(lambda g, rows, n: _weighted_sum(g, rows, n) / rows / n),),
            "The weights add up to 1 already; the division by n makes all of it n times smaller.",
            "Divide once, by the number of all rows.",
        ),
        SUMMED,
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)


EXERCISES = (DATA_PARALLEL_GRAD, UNEQUAL_SHARDS_GRAD)
