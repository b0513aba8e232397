"""Exercises of chapter 3: linear layers with their matrices cut over ranks."""

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception

ORDER_OF_SUMS = "partial products are added in another order than in one matrix product"


def column_parallel(x, w_shards):
    """Return x @ [W_1 | W_2 | ...], where each rank computes its own block of columns.

    x: (rows, in), whole on every rank. w_shards: rank i's W_i, (in, out_i).

    >>> x, w = np.array([[10.0]]), np.array([[1.0, 2.0, 3.0, 4.0]])
    >>> column_parallel(x, np.split(w, 2, axis=1)).tolist()
    [[10.0, 20.0, 30.0, 40.0]]
    """
    return np.concatenate([x @ w for w in w_shards], axis=1)


def row_parallel(x_shards, w_shards, bias=None):
    """Return [x_1 | x_2 | ...] @ [W_1 ; W_2 ; ...] + bias, from each rank's block of rows.

    x_shards: rank i's columns of x, (rows, in_i). w_shards: rank i's W_i, (in_i, out).
    bias: (out,), or None.

    >>> x, w = np.array([[1, 2, 3, 4]]), np.arange(12).reshape(4, 3)
    >>> bias = np.array([100, 200, 300])
    >>> row_parallel(np.split(x, 2, axis=1), np.split(w, 2), bias).tolist()
    [[160, 270, 380]]
    """
    total = sum(x @ w for x, w in zip(x_shards, w_shards, strict=True))
    return total if bias is None else total + bias


# Independent routes: one matrix product.


def _expect_column(x, w_shards):
    return x @ np.hstack(w_shards)


def _expect_row(x_shards, w_shards, bias=None):
    product = np.hstack(x_shards) @ np.vstack(w_shards)
    return product if bias is None else product + bias


def normal(rng, *shape):
    return rng.normal(size=shape).round(2)


def _draw_column(rng):
    n, rows, inputs = (int(size) for size in rng.integers(2, 5, 3))
    width = int(rng.integers(1, 4))
    return normal(rng, rows, inputs), [normal(rng, inputs, width) for _ in range(n)]


def _draw_row(rng):
    n, rows, out = (int(size) for size in rng.integers(2, 5, 3))
    width = int(rng.integers(1, 4))
    x_shards = [normal(rng, rows, width) for _ in range(n)]
    bias = (normal(rng, out),) * (rng.random() < 0.5)
    return x_shards, [normal(rng, width, out) for _ in range(n)], *bias


# Known mistakes.


def _bias_on_every_rank(x_shards, w_shards, bias=None):
    return _expect_row(x_shards, w_shards, None if bias is None else len(x_shards) * bias)


def _case_of_shards():
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(5, 12)), rng.normal(size=(12, 8))
    columns = Case((x, np.split(w, 4, axis=1)), x @ w, "12 x 8 in 4 column shards")
    rows = Case((np.split(x, 3, axis=1), np.split(w, 3, axis=0)), x @ w, "12 x 8 in 3 row shards")
    return columns, rows


_COLUMNS, _ROWS = _case_of_shards()

COLUMN_PARALLEL = Exercise(
    chapter=3,
    solution=column_parallel,
    expect=_expect_column,
    route="one matrix product",
    draw=_draw_column,
    cases=(
        Case(
            (np.array([[10.0]]), [np.array([[1.0, 2.0]]), np.array([[3.0]])]),
            np.array([[10.0, 20.0, 30.0]]),
            "by hand",
        ),
        _COLUMNS,
    ),
    misconceptions=(
        Misconception(
            "blocks are added",
            (lambda x, w_shards: sum(x @ w for w in w_shards),),
            "Each rank has other columns of the result, all of them complete: nothing is left to "
            "add. Sums belong to the cut by rows.",
            "How many columns has the unsharded result?",
        ),
        Misconception(
            "blocks are put below each other",
            (lambda x, w_shards: np.vstack([x @ w for w in w_shards]),),
            "A block of columns of W gives the same columns of the result, for all rows of x.",
            "Along which axis do the results lie side by side?",
        ),
        Misconception(
            "blocks in reverse order",
            (lambda x, w_shards: np.hstack([x @ w for w in w_shards[::-1]]),),
            "Rank 0 has the first columns.",
            "Keep the order of the ranks.",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

ROW_PARALLEL = Exercise(
    chapter=3,
    solution=row_parallel,
    expect=_expect_row,
    route="one matrix product",
    draw=_draw_row,
    cases=(
        Case(
            (
                [np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]])],
                np.split(np.arange(12.0).reshape(4, 3), 2),
                np.array([100.0, 200.0, 300.0]),
            ),
            np.array([[160.0, 270.0, 380.0]]),
            "Megatron-LM 360",
        ),
        _ROWS,
    ),
    misconceptions=(
        Misconception(
            "the bias is added on every rank",
            (_bias_on_every_rank,),
            "The sum over ranks then has it n times: [260, 470, 680] instead of [160, 270, 380].",
            "The bias belongs to the sum, not to its terms.",
        ),
        Misconception(
            "the bias is forgotten",
            (lambda x_shards, w_shards, bias=None: _expect_row(x_shards, w_shards),),
            "Where one is given, the result is x W + b.",
            "Look at the last parameter.",
        ),
        Misconception(
            "partial sums are averaged",
            (
                lambda xs, ws, bias=None: (
                    _expect_row(xs, ws) / len(xs) + (0 if bias is None else bias)
                ),
                lambda xs, ws, bias=None: _expect_row(xs, ws, bias) / len(xs),
            ),
            "Each rank has a part of every sum over input features; the parts must be added.",
            "Compare an all-reduce with SUM and one with AVG.",
        ),
        Misconception(
            "partial sums are concatenated",
            (
                lambda xs, ws, bias=None: np.hstack(
                    [product + (0 if bias is None else bias) for product in map(np.matmul, xs, ws)]
                ),
                lambda xs, ws, bias=None: np.hstack([*map(np.matmul, xs, ws)]),
            ),
            "Every rank's product has all output columns, but only its share of each sum.",
            "What shape has the unsharded result?",
        ),
        Misconception(
            "one rank's share only",
            (
                lambda xs, ws, bias=None: xs[0] @ ws[0] + (0 if bias is None else bias),
                lambda xs, ws, bias=None: xs[-1] @ ws[-1] + (0 if bias is None else bias),
            ),
            "The other ranks' products are missing from the sum.",
            "Which collective makes one result of all partial sums?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

EXERCISES = (COLUMN_PARALLEL, ROW_PARALLEL)
