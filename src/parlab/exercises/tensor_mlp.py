"""Exercises of chapter 3: the MLP cut by columns and rows, and by columns only."""

import math

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception
from parlab.exercises.tensor_linear import ORDER_OF_SUMS, normal, row_parallel
from parlab.tensor_parallel.linear import gelu


def megatron_mlp(x, A, B, n):
    """Return gelu(x A) B from n ranks, with one sum over the ranks, at the end.

    x: (rows, h), whole on every rank. A: (h, f). B: (f, h). n divides f.

    >>> x, A, B = np.ones((1, 2)), np.ones((2, 4)), np.ones((4, 2))
    >>> bool(np.allclose(megatron_mlp(x, A, B, 4), gelu(x @ A) @ B))
    True
    """
    a_shards, b_shards = np.array_split(A, n, axis=1), np.array_split(B, n, axis=0)
    return row_parallel([gelu(x @ a) for a in a_shards], b_shards)


def columns_only_mlp(x, A, B, n):
    """Return (gelu(x A) B, sent) with *both* matrices cut by columns over n ranks.

    After each matrix product a ring all-gather gives every rank the whole result.

    x: (rows, h), whole on every rank. A: (h, f). B: (f, h). n divides f and h.
    sent: bytes that each rank sends in the two all-gathers, one number as all ranks send as many.

    >>> x, A, B = np.ones((1, 2)), np.ones((2, 4)), np.ones((4, 2))
    >>> output, sent = columns_only_mlp(x, A, B, 2)
    >>> bool(np.allclose(output, gelu(x @ A) @ B)), sent  # half of 4 + 2 doubles
    (True, 24)
    """
    sent = 0  # given
    hidden = gelu(np.concatenate([x @ a for a in np.split(A, n, axis=1)], axis=1))
    sent += (n - 1) * hidden.nbytes // n
    output = np.concatenate([hidden @ b for b in np.split(B, n, axis=1)], axis=1)
    sent += (n - 1) * output.nbytes // n
    return output, sent  # given


# Independent routes: one matrix product, and GeLU entry by entry.


def _gelu(x):
    root = math.sqrt(2 / math.pi)
    values = [v / 2 * (1 + math.tanh(root * (v + 0.044715 * v**3))) for v in np.ravel(x).tolist()]
    return np.array(values).reshape(x.shape)


def _erf_gelu(x):
    values = [v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in np.ravel(x).tolist()]
    return np.array(values).reshape(x.shape)


def _expect_mlp(x, A, B, n, activation=_gelu):
    return activation(x @ A) @ B


def _expect_columns_only(x, A, B, n):
    # A rank sends all blocks of a gather but its neighbour's own, 8 bytes an entry.
    blocks = (n - 1) * len(x) * (A.shape[1] // n + B.shape[1] // n)
    return _expect_mlp(x, A, B, n), 8 * blocks


def _draw_mlp(rng):
    n = int(rng.integers(2, 5))
    rows, h, f = int(rng.integers(1, 4)), n * int(rng.integers(1, 3)), n * int(rng.integers(1, 4))
    # Half, because GeLU of -6 is a difference of almost equal numbers: other orders, other digits.
    return normal(rng, rows, h) / 2, normal(rng, h, f), normal(rng, f, h), n


# Known mistakes.


def _rows_of_a(x, A, B, n):
    """Partial sums of x A, each through GeLU before they are added."""
    parts = zip(np.array_split(x, n, axis=1), np.array_split(A, n, axis=0), strict=True)
    return sum(_gelu(x_i @ A_i) for x_i, A_i in parts) @ B


def _first_rank(x, A, B, n):
    f = A.shape[1] // n
    return _gelu(x @ A[:, :f]) @ B[:f]


def _sent(formula):
    """Right output; bytes from rows, f, h and n."""
    return lambda x, A, B, n: (
        _expect_mlp(x, A, B, n),
        8 * formula(len(x), A.shape[1], B.shape[1], n),
    )


def _output(wrong):
    return lambda x, A, B, n: (wrong(x, A, B, n), _expect_columns_only(x, A, B, n)[1])


def _mlp_case(rows, h, f, n, source):
    rng = np.random.default_rng(h)
    x, A, B = rng.normal(size=(rows, h)), rng.normal(size=(h, f)), rng.normal(size=(f, h))
    return Case((x, A, B, n), _expect_mlp(x, A, B, n), source)


GELU_MISTAKES = (
    Misconception(
        "GeLU after the sum",
        (lambda x, A, B, n: _gelu(x @ A @ B),),
        "GeLU stands between the two matrices. It works entry by entry on x A, of which each rank "
        "has complete columns.",
        "Apply it to what the first matrix gives, on each rank.",
    ),
    Misconception(
        "GeLU is forgotten",
        (lambda x, A, B, n: x @ A @ B,),
        "Without it the two matrices are one, A B.",
        "What happens between the two matrices?",
    ),
    Misconception(
        "another GeLU",
        (lambda x, A, B, n: _expect_mlp(x, A, B, n, _erf_gelu),),
        "This is the form with erf; the exercise gives gelu in its tanh form. They differ in the "
        "fourth digit, enough to spoil a comparison.",
        "Use the gelu that is given.",
    ),
)

MEGATRON_MLP = Exercise(
    chapter=3,
    solution=megatron_mlp,
    expect=_expect_mlp,
    route="unsharded, GeLU entry by entry",
    draw=_draw_mlp,
    cases=(_mlp_case(2, 2, 4, 2, "small"), _mlp_case(3, 16, 64, 4, "A 16 x 64 on 4 ranks")),
    misconceptions=(
        Misconception(
            "A is split by rows, and GeLU sees partial sums",
            (_rows_of_a,),
            "Rows of A give partial sums of x A, and gelu(a) + gelu(b) is not gelu(a + b): "
            "gelu(1) + gelu(1) = 1.68, gelu(2) = 1.95.",
            "Which cut of A leaves complete entries of x A on each rank?",
        ),
        *GELU_MISTAKES,
        Misconception(
            "partial outputs are averaged",
            (lambda x, A, B, n: _expect_mlp(x, A, B, n) / n,),
            "The outputs of the ranks are terms of one sum.",
            "Compare an all-reduce with SUM and one with AVG.",
        ),
        Misconception(
            "one rank's share only",
            (_first_rank,),
            "The other ranks' hidden features are missing.",
            "Which collective makes one result of all partial outputs?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

COLUMNS_ONLY_MLP = Exercise(
    chapter=3,
    solution=columns_only_mlp,
    expect=_expect_columns_only,
    route="unsharded, GeLU entry by entry; bytes by what the neighbour has already",
    draw=_draw_mlp,
    cases=(
        Case(
            (np.array([[0.0, 0.0]]), np.ones((2, 4)), np.ones((4, 2)), 2),
            (np.zeros((1, 2)), 24),
            "half of 4 + 2 doubles, by hand",
        ),
        Case(
            (np.zeros((4, 8)), np.ones((8, 32)), np.ones((32, 8)), 4),
            (np.zeros((4, 8)), 960),
            "3/4 of 4 x (32 + 8) doubles",
        ),
    ),
    misconceptions=(
        *(m._replace(ways=tuple(map(_output, m.ways))) for m in GELU_MISTAKES),
        Misconception(
            "only the hidden layer is gathered",
            (_sent(lambda rows, f, h, n: (n - 1) * rows * f // n),),
            "The second product is cut by columns too, so its result must be gathered as well.",
            "How many columns of the output does a rank have before the second gather?",
        ),
        Misconception(
            "bytes of an all-reduce",
            (_sent(lambda rows, f, h, n: 2 * (n - 1) * rows * (f + h) // n),),
            "An all-gather is half of an all-reduce: (n-1)/n of what is gathered.",
            "How many steps has a ring all-gather, and how large is one message?",
        ),
        Misconception(
            "the whole result in every step",
            (_sent(lambda rows, f, h, n: (n - 1) * rows * (f + h)),),
            "A step sends one rank's block, 1/n of the result.",
            "How large is what one rank has computed?",
        ),
        Misconception(
            "only the own block is counted",
            (_sent(lambda rows, f, h, n: rows * (f + h) // n),),
            "On a ring a rank also passes on the blocks that it receives.",
            "How many steps does it take until all ranks have all blocks?",
        ),
        Misconception(
            "elements are counted, not bytes",
            (_sent(lambda rows, f, h, n: (n - 1) * rows * (f + h) // n / 8),),
            "An element of float64 has 8 bytes.",
            "An array knows its bytes: .nbytes.",
        ),
    ),
    parts=("output", "sent"),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

EXERCISES = (MEGATRON_MLP, COLUMNS_ONLY_MLP)
