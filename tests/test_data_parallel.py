"""Averaging gradients over ranks: exact where it should be, off by the known factor elsewhere."""

import math
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl
from parlab.panels.unequal_shards import unequal_shards

ROUNDING = 1e-12  # sums of fewer than a hundred terms of size 1 round by less than 1e-14


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draw(rows, features=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, features)), rng.standard_normal(rows), rng.random(features)


def exact_gradient(X, y, w):
    """X'(Xw - y)/n in fractions of Python integers: neither NumPy nor rounding."""
    X, y, w = ([[Fraction(float(v)) for v in np.atleast_1d(row)] for row in a] for a in (X, y, w))
    residuals = [sum(a * b[0] for a, b in zip(row, w, strict=True)) - t[0]
                 for row, t in zip(X, y, strict=True)]  # fmt: skip
    return [
        float(sum(row[j] * r for row, r in zip(X, residuals, strict=True)) / len(X))
        for j in range(len(w))
    ]


# The plain mean of 8 gradients of 8 rows each, and the full batch's closed form.
@pytest.mark.parametrize("weighting", ["rows", "ranks"])
def test_eight_equal_shards_average_to_the_full_batch(weighting):
    X, y, w = draw(64)
    expected = X.T @ (X @ w - y) / 64
    got = pl.data_parallel_grad(X, y, w, 8, weighting)
    np.testing.assert_allclose(got, expected, rtol=0, atol=ROUNDING)


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 40), n=st.integers(1, 50), seed=st.integers(0, 10**6))
def test_weighting_by_rows_is_exact_for_every_split(rows, n, seed):
    X, y, w = draw(rows, features=3, seed=seed)
    got = pl.data_parallel_grad(X, y, w, n)
    np.testing.assert_allclose(got, exact_gradient(X, y, w), rtol=0, atol=ROUNDING)


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 40), n=st.integers(1, 50), seed=st.integers(0, 10**6))
def test_the_plain_mean_is_that_of_the_split_with_zeros_for_ranks_without_rows(rows, n, seed):
    X, y, w = draw(rows, features=3, seed=seed)
    cuts = np.array_split(np.arange(rows), n)
    parts = [exact_gradient(X[c], y[c], w) if len(c) else [0.0] * 3 for c in cuts]
    expected = [math.fsum(column) / n for column in zip(*parts, strict=True)]
    got = pl.data_parallel_grad(X, y, w, n, weighting="ranks")
    np.testing.assert_allclose(got, expected, rtol=0, atol=ROUNDING)


def test_five_rows_on_eight_ranks_leave_five_eighths_of_the_gradient():
    X, y, w = draw(5)
    plain = pl.data_parallel_grad(X, y, w, 8, weighting="ranks")
    np.testing.assert_allclose(plain, 5 / 8 * X.T @ (X @ w - y) / 5, rtol=0, atol=ROUNDING)


def test_65_rows_on_8_ranks_miss_by_about_one_percent():
    # Rank 0's nine rows weigh 1/72 each instead of 1/65, the others 1/64: off by 9.7% and 1.6%.
    errors = []
    for seed in range(200):
        X, y, w = draw(65, seed=seed)
        full = X.T @ (X @ w - y) / 65
        off = pl.data_parallel_grad(X, y, w, 8, weighting="ranks") - full
        errors.append(np.abs(off).max() / np.abs(full).max())
    assert 0.005 < np.median(errors) < 0.03
    assert min(errors) < 0.014 < max(errors)  # a published draw
    X, y, w = draw(65)
    rows = X * (X @ w - y)[:, None]
    weights = np.array([1 / 72] * 9 + [1 / 64] * 56)
    plain = pl.data_parallel_grad(X, y, w, 8, weighting="ranks")
    np.testing.assert_allclose(plain, weights @ rows, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", ["i1", "i8", "u1", "f2", "f4", "f8", ">f8"])
def test_every_dtype_gives_the_float64_gradient_of_its_values(dtype):
    X = np.array([[100, 90], [120, 7], [3, 110]], dtype)  # products leave int8 and float16
    y, w = np.array([1, 2, 3], dtype), np.array([100, 120], dtype)
    got = pl.data_parallel_grad(X, y, w, 2)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, exact_gradient(X, y, w), rtol=1e-15)


def test_several_targets_are_several_problems():
    X, y, w = draw(13)
    Y, W = np.stack([y, -y], 1), np.stack([w, 2 * w], 1)
    got = pl.data_parallel_grad(X, Y, W, 4)
    for k in range(2):
        one = pl.data_parallel_grad(X, Y[:, k], W[:, k], 4)
        np.testing.assert_allclose(got[:, k], one, rtol=0, atol=ROUNDING)


def test_inputs_stay_as_they_are():
    X, y, w = draw(9)
    copies = X.copy(), y.copy(), w.copy()
    pl.data_parallel_grad(X, y, w, 4)
    for array, copy in zip((X, y, w), copies, strict=True):
        assert array.tobytes() == copy.tobytes()


@pytest.mark.parametrize("weighting", ["rows", "ranks"])
def test_nan_in_one_rank_reaches_the_result(weighting):
    X, y, w = draw(16)
    y[3] = np.nan
    assert np.isnan(pl.data_parallel_grad(X, y, w, 8, weighting)).all()


@pytest.mark.parametrize("n", [10**6, 10**18])
def test_absurdly_many_ranks_are_answered_at_once(n):
    X, y, w = draw(3)
    np.testing.assert_allclose(
        pl.data_parallel_grad(X, y, w, n, "ranks"), 3 / n * pl.data_parallel_grad(X, y, w, 1)
    )


X, y, w = draw(6, features=2)


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        pytest.param((X, y, w, 0), ValueError, "n must be .* at least 1", id="no ranks"),
        pytest.param((X, y, w, 2.0), TypeError, "n must be an int", id="half a rank"),
        pytest.param((X, y, w, 2, "size"), ValueError, "weighting .* rows, ranks", id="weighting"),
        pytest.param((X[:0], y[:0], w, 2), ValueError, "X .* at least one row", id="no rows"),
        pytest.param((X[0], y, w, 2), ValueError, "X must have shape", id="one axis"),
        pytest.param((X, y[:5], w, 2), ValueError, "y .* each of the 6 rows", id="short y"),
        # Xw - y would broadcast to 6 by 6 and give a plausible gradient.
        pytest.param((X, y[:, None], w, 2), ValueError, r"w must have shape \(2, 1\)", id="column"),
        pytest.param((X, y, w[:1], 2), ValueError, r"w must have shape \(2,\)", id="short w"),
        pytest.param((X, y > 0, w, 2), TypeError, "y must hold .* bool", id="bool"),
        pytest.param((X * 1j, y, w, 2), TypeError, "X must hold .* complex", id="complex"),
        pytest.param((X, ["a"] * 6, w, 2), TypeError, "y must hold", id="text"),
        pytest.param((X * 1e200, y, w, 2), ValueError, "gradient overflows", id="overflow"),
    ],
)
def test_what_has_no_gradient_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        pl.data_parallel_grad(*arguments)


# The mean of integers.
@pytest.mark.parametrize("dtype", [int, "i1", "u1", "u8"])
def test_the_mean_of_three_and_four_is_three_and_a_half(dtype):
    mean = pl.average_gradients([np.array([3], dtype), np.array([4], dtype)])
    assert mean.tolist() == [3.5] and mean.dtype == np.float64


def test_large_int8_and_float16_do_not_overflow():
    assert pl.average_gradients([np.array([120], "i1"), np.array([100], "i1")]).tolist() == [110]
    half = pl.average_gradients([np.full(2, 60000, "f2")] * 4)
    assert half.dtype == np.float16 and half.tolist() == [60000, 60000]
    widest = np.finfo(float).max
    assert pl.average_gradients([np.array([widest])] * 3).tolist() == [widest]


@given(value=st.floats(allow_nan=False, allow_infinity=False), n=st.integers(1, 9))
def test_equal_gradients_average_to_themselves(value, n):
    assert pl.average_gradients([np.array([value])] * n).tolist() == [value]


@given(
    pairs=st.lists(
        st.tuples(st.integers(-(10**6), 10**6), st.integers(0, 1000)), min_size=1
    ).filter(lambda pairs: any(weight for _, weight in pairs))
)
def test_the_weighted_mean_is_the_exact_one(pairs):
    values, weights = zip(*pairs, strict=True)
    expected = Fraction(sum(v * k for v, k in pairs), sum(weights))
    got = pl.average_gradients([np.array([v]) for v in values], weights)
    np.testing.assert_allclose(got[0], float(expected), rtol=1e-12, atol=1e-9)  # values of 1e6


def test_weights_do_not_care_for_their_scale():
    grads = [np.array([1.0]), np.array([4.0])]
    for scale in (1e-300, 1, 2e307, 10**200):  # 2e307 and four times that sum to infinity
        mean = pl.average_gradients(grads, [2 * scale, 8 * scale])
        np.testing.assert_allclose(mean, 3.4, rtol=1e-15)


def test_lists_of_parameters_are_averaged_one_by_one():
    ranks = [[np.ones((2, 3)), np.array(1)], [np.zeros((2, 3)), np.array(2)]]
    weight, bias = pl.average_gradients(ranks)
    assert weight.tolist() == [[0.5] * 3] * 2 and bias == 1.5


def test_numbers_and_lists_of_numbers_are_arrays():
    assert pl.average_gradients([1, 2]) == 1.5
    assert pl.average_gradients([[1, 2], [3, 5]]).tolist() == [2, 3.5]


@pytest.mark.parametrize("weights", [None, [1, 1], [1, 0]])
def test_nan_of_one_rank_is_in_the_mean(weights):
    mean = pl.average_gradients([np.array([1.0, 2.0]), np.array([np.nan, 4.0])], weights)
    assert np.isnan(mean[0]) and np.isfinite(mean[1])


@pytest.mark.parametrize(
    "grads, weights, error, said",
    [
        pytest.param([], None, ValueError, "one gradient per rank, got none", id="no ranks"),
        pytest.param([X, X[:3]], None, ValueError, r"grads\[1\] has shape \(3, 2\)", id="shapes"),
        pytest.param([X, X.astype("f4")], None, ValueError, "dtype float32", id="dtypes"),
        pytest.param([[X, y], [X]], None, ValueError, "list of 2 .* list of 1", id="one is short"),
        pytest.param([[X, y], X], None, ValueError, "list of 2 arrays, .* is not", id="no list"),
        pytest.param([X > 0, X > 0], None, TypeError, "got dtype bool", id="bool"),
        pytest.param([X, X], [1], ValueError, r"one per rank \(2\), got 1", id="few weights"),
        pytest.param([X, X], [1, -1], ValueError, "weights must be .* at least 0", id="negative"),
        pytest.param([X, X], [0, 0], ValueError, "weights must not all be zero", id="zero"),
        pytest.param([X, X], [1, math.nan], ValueError, "weights must be a finite", id="nan"),
    ],
)
def test_gradients_that_cannot_be_averaged_are_refused(grads, weights, error, said):
    with pytest.raises(error, match=said):
        pl.average_gradients(grads, weights)


# What breaks, with the exact error: g = mean of the ranks' gradients.
def test_dropped_double_counted_and_summed_ranks_are_off_by_known_amounts():
    n = 4
    ranks = [np.array([float(k**2 + 1)]) for k in range(n)]  # 1, 2, 5, 10: mean 4.5
    g, last = 4.5, 10
    dropped = sum(ranks[:-1]) / n
    replaced = pl.average_gradients(ranks[:-1])
    twice = pl.average_gradients([*ranks, ranks[-1]])
    assert dropped == g - last / n
    assert replaced == pytest.approx(g - (last - g) / (n - 1), rel=1e-15)
    assert twice == pytest.approx(g + (last - g) / (n + 1), rel=1e-15)
    assert sum(ranks) == n * g


def test_two_and_eight_tokens_give_three_point_four():
    assert pl.token_weighted_mean([1, 4], [2, 8]) == 3.4
    recipes = pl.token_recipes([1, 4], [2, 8])
    assert recipes["mean of all micro-batch means"] == 2.5


def test_two_ranks_with_two_micro_batches_have_one_right_value_and_known_wrong_ones():
    losses, tokens = [[1, 2], [3, 4]], [[3, 1], [5, 2]]
    right = Fraction(28, 11)
    assert pl.token_weighted_mean(losses, tokens) == pytest.approx(float(right), rel=1e-15)
    got = list(pl.token_recipes(losses, tokens).values())
    wrong = [Fraction(5, 2), (Fraction(5, 4) + Fraction(23, 7)) / 2]  # 2.5 and 2.2679
    scaled = [right * 2, right / 2, right / 4]
    np.testing.assert_allclose(got, [float(v) for v in (right, *wrong, *scaled)], rtol=1e-15)


@given(
    st.integers(1, 4).flatmap(
        lambda accumulation: st.lists(
            st.lists(
                st.tuples(st.integers(-99, 99), st.integers(1, 99)),
                min_size=accumulation,
                max_size=accumulation,
            ),
            min_size=1,
            max_size=5,
        )
    )
)
def test_scale_errors_are_exactly_ranks_and_ranks_times_micro_batches(pairs):
    losses = [[loss for loss, _ in rank] for rank in pairs]
    tokens = [[count for _, count in rank] for rank in pairs]
    flat = [pair for rank in pairs for pair in rank]
    right = Fraction(sum(k * v for v, k in flat), sum(k for _, k in flat))
    value, _, _, summed, once, twice = pl.token_recipes(losses, tokens).values()
    n, accumulation = len(pairs), len(pairs[0])
    expected = [right, right * n, right / n, right / (n * accumulation)]
    np.testing.assert_allclose([value, summed, once, twice], list(map(float, expected)), rtol=1e-14)


def test_a_rank_without_tokens_does_not_count_whatever_its_loss():
    assert pl.token_weighted_mean([1.5, math.nan], [4, 0]) == 1.5
    assert pl.token_weighted_mean([[1.0], [2.0, 4.0]], [[2], [1, 1]]) == 2.0
    assert math.isnan(pl.token_weighted_mean([1.0, math.nan], [4, 1]))


@pytest.mark.parametrize(
    "function, losses, tokens, error, said",
    [
        (pl.token_weighted_mean, [1, 2], [0, 0], ValueError, "tokens must not all be zero"),
        (pl.token_weighted_mean, [1, 2], [1], ValueError, "one number for each"),
        (pl.token_weighted_mean, [[1], [2, 3]], [[1], [2]], ValueError, r"\[1, 2\] and \[1, 1\]"),
        (pl.token_weighted_mean, [], [], ValueError, "one number for each"),
        (pl.token_weighted_mean, [1, 2], [1, -1], ValueError, "tokens must be .* at least 0"),
        (pl.token_weighted_mean, [1, 2], [1, 0.5], TypeError, "tokens must be an int"),
        (pl.token_weighted_mean, [1, math.inf], [1, 1], ValueError, "losses must be a finite"),
        (pl.token_recipes, [[1], [2, 3]], [[1], [2, 3]], ValueError, "equally many micro-batches"),
        (pl.token_recipes, [1, 2], [1, 0], ValueError, "tokens must be positive"),
    ],
)
def test_tokens_that_give_no_mean_are_refused(function, losses, tokens, error, said):
    with pytest.raises(error, match=said):
        function(losses, tokens)


# The panel, in pure Python on draws of its own, against the functions above.
def test_the_panel_says_what_the_arrays_say():
    from parlab.panels.unequal_shards import _draws, _errors

    sums = np.array(_draws()[0])
    rows = np.diff(sums, axis=1).T[:65]  # the rows' own gradients
    full = rows.mean(0)
    plain = np.mean([part.mean(0) for part in np.array_split(rows, 8)], 0)
    expected = np.abs(plain - full).max() / np.abs(full).max()
    error, weighted = _errors(_draws()[0], [9] + [8] * 7)
    assert error == pytest.approx(expected, rel=1e-9)  # of 1%, from sums that round at 1e-14
    assert weighted < 1e-12


@pytest.mark.parametrize("rows, n_ranks", [(64, 8), (8, 4), (72, 9), (257, 2), (5, 8), (1, 16)])
def test_the_panel_is_exact_where_the_ranks_divide_the_rows(rows, n_ranks):
    sentence = unequal_shards(rows, n_ranks).sentence
    assert ("both means are exact" in sentence) == (rows % n_ranks == 0)
    if rows < n_ranks:
        missing = 100 * (1 - rows / n_ranks)
        assert f"by {float(f'{missing:.3g}'):g}% of" in sentence


def test_every_rank_shows_its_rows():
    svg = unequal_shards(65, 8).svg
    baseline = re.findall(r'y="170.0" text-anchor="middle" font-size="14">(\d+)<', svg)
    assert baseline == ["9"] + ["8"] * 7
