"""Tensor parallelism on arrays: shards together equal the unsharded layer, bytes the formula."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl

# Sums of at most 64 products of numbers near 1 in float64, in another order: 64 x 2.2e-16.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ranks = st.sampled_from([1, 2, 3, 4])


def rng(seed=0):
    return np.random.default_rng(seed)


def scalar_gelu(x):
    """GeLU's tanh form in Python's own floats, from the paper's formula."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# GeLU


def test_gelu_of_a_sum_is_not_the_sum_of_gelus():
    assert round(float(pl.gelu(1) + pl.gelu(1)), 2) == 1.68
    assert round(float(pl.gelu(2)), 2) == 1.95


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8))
def test_gelu_is_the_formula(values):
    np.testing.assert_allclose(pl.gelu(values), [scalar_gelu(v) for v in values], atol=1e-15)


@pytest.mark.parametrize("x, expected", [(1e300, 1e300), (-1e300, 0), (60000.0, 60000.0)])
def test_gelu_of_huge_numbers_neither_overflows_nor_warns(x, expected):
    with np.errstate(all="raise"):
        assert pl.gelu(x) == expected
        assert pl.gelu_gradient(x) == (expected > 0)
        assert pl.gelu(np.float16(math.copysign(6e4, x))).dtype == np.float32


@given(st.floats(-9, 9))
def test_the_gradient_of_gelu_is_its_slope(x):
    step = 1e-6  # a central difference of a function with third derivative below 2 errs by 1e-12
    slope = (scalar_gelu(x + step) - scalar_gelu(x - step)) / (2 * step)
    assert float(pl.gelu_gradient(x)) == pytest.approx(slope, abs=1e-8)


# Columns and rows


def test_four_column_shards_of_12_by_8_make_the_whole_product():
    x, w = rng().normal(size=(5, 12)), rng(1).normal(size=(12, 8))
    shards = pl.column_shards(w, 4)
    assert [shard.shape for shard in shards] == [(12, 2)] * 4
    np.testing.assert_allclose(pl.column_parallel(x, shards), x @ w, **CLOSE)


def test_three_row_blocks_of_12_by_8_make_the_whole_product():
    x, w = rng().normal(size=(5, 12)), rng(1).normal(size=(12, 8))
    xs = np.split(x, 3, axis=1)
    np.testing.assert_allclose(pl.row_parallel(xs, pl.row_shards(w, 3)), x @ w, **CLOSE)


@settings(deadline=None)
@given(
    n=ranks,
    a=st.integers(0, 4),
    b=st.integers(0, 4),
    lead=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_any_shape_that_divides_gives_the_whole_product_and_inputs_stay(n, a, b, lead, seed):
    draw = rng(seed)
    x = draw.normal(size=(2,) * lead + (n * a,))
    w, bias = draw.normal(size=(n * a, n * b)), draw.normal(size=n * b)
    kept = [array.copy() for array in (x, w, bias)]
    columns = pl.column_parallel(x, pl.column_shards(w, n), biases=np.split(bias, n))
    rows = pl.row_parallel(np.split(x, n, axis=-1), pl.row_shards(w, n), bias)
    for result in (columns, rows):
        np.testing.assert_allclose(result, x @ w + bias, **CLOSE)
    for array, copy in zip((x, w, bias), kept, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_without_a_gather_every_rank_keeps_its_own_columns():
    blocks = pl.column_parallel([1.0], pl.column_shards([[1.0, 2.0, 3.0, 4.0]], 2), gather=False)
    assert [block.tolist() for block in blocks] == [[1, 2], [3, 4]]


def test_a_column_shard_adds_its_own_slice_of_the_bias():
    shards = pl.column_shards([[1.0, 2.0, 3.0, 4.0]], 2)
    assert pl.column_parallel([1.0], shards, biases=[[10, 20], [30, 40]]).tolist() == [
        11,
        22,
        33,
        44,
    ]


def test_the_bias_of_a_row_parallel_layer_is_added_once():
    x, w = np.array([1, 2, 3, 4]), np.arange(12).reshape(4, 3)
    shards = pl.row_shards(w, 2)
    assert pl.row_parallel([x[:2], x[2:]], shards, [100, 200, 300]).tolist() == [160, 270, 380]


@pytest.mark.parametrize("cut, axis", [(pl.column_shards, 0), (pl.row_shards, 1)])
def test_a_weight_stored_out_by_in_is_cut_along_the_other_dim(cut, axis):
    w = np.arange(24).reshape(4, 6)
    for stored, other in zip(cut(w.T, 2, stored="out_in"), cut(w, 2), strict=True):
        np.testing.assert_array_equal(stored, other.T)
    assert cut(w.T, 2, stored="out_in")[0].shape[axis] == w.T.shape[axis] // 2


# The MLP


def test_the_megatron_mlp_of_16_64_16_on_4_ranks_equals_the_whole_one():
    x, a, b = rng().normal(size=(3, 16)), rng(1).normal(size=(16, 64)), rng(2).normal(size=(64, 16))
    np.testing.assert_allclose(pl.megatron_mlp(x, a, b, 4), pl.gelu(x @ a) @ b, **CLOSE)


@settings(deadline=None)
@given(n=ranks, h=st.integers(1, 5), f=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_megatron_mlp_equals_the_whole_one_for_any_shape(n, h, f, seed):
    draw = rng(seed)
    x, a, b = (
        draw.normal(size=(2, 3, h)),
        draw.normal(size=(h, n * f)),
        draw.normal(size=(n * f, h)),
    )
    bias_a, bias_b = draw.normal(size=n * f), draw.normal(size=h)
    ours = pl.megatron_mlp(x, a, b, n, bias_a=bias_a, bias_b=bias_b)
    np.testing.assert_allclose(ours, pl.gelu(x @ a + bias_a) @ b + bias_b, **CLOSE)


STEPS = {"megatron": pl.megatron_mlp_step, "columns only": pl.columns_only_mlp_step}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("lead", [(3,), (2, 3), ()], ids=["rows", "batch", "vector"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_output_and_every_gradient_equal_those_of_the_whole_mlp(step, lead, n):
    draw = rng(n)
    x, a, b = draw.normal(size=(*lead, 8)), draw.normal(size=(8, 12)), draw.normal(size=(12, 8))
    dz = draw.normal(size=(*lead, 8))
    kept = [array.copy() for array in (x, a, b, dz)]
    ours = step(x, a, b, dz, n)
    import torch  # the independent route: autograd

    tx, ta, tb = (torch.tensor(array, requires_grad=True) for array in (x, a, b))
    whole = torch.nn.functional.gelu(tx @ ta, approximate="tanh") @ tb
    whole.backward(torch.tensor(dz))
    expected = (whole, tx.grad, ta.grad, tb.grad)
    for found, wanted in zip((ours.output, ours.dx, ours.da, ours.db), expected, strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), **CLOSE)
    for array, copy in zip((x, a, b, dz), kept, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_of_both_cuts_are_the_formulas_and_columns_only_sends_five_halves(n):
    rows, h, f = 3, 16, 64
    x, a, b = np.ones((rows, h)), np.ones((h, f)), np.ones((f, h))
    s = rows * h * 8
    megatron, columns = (step(x, a, b, x, n) for step in STEPS.values())
    assert megatron.sent_forward == megatron.sent_backward == [2 * (n - 1) * s // n] * n
    assert columns.sent_forward == [(n - 1) * (4 * s + s) // n] * n
    assert columns.sent_backward == [(n - 1) * (4 * s + 2 * s) // n] * n
    assert columns.sent_forward[0] / megatron.sent_forward[0] == 2.5


# Attention


def plain_attention(x, wq, wk, wv, wo, n_heads, n_kv, causal):
    """Head by head and query by query, in loops."""
    size = wq.shape[1] // n_heads
    out = np.zeros((len(x), n_heads * size))
    for head in range(n_heads):
        kv = head // (n_heads // n_kv)
        mine, theirs = (slice(i * size, (i + 1) * size) for i in (head, kv))
        q, k, v = x @ wq[:, mine], x @ wk[:, theirs], x @ wv[:, theirs]
        for i in range(len(x)):
            seen = i + 1 if causal else len(x)
            weights = [math.exp(q[i] @ k[j] / math.sqrt(size)) for j in range(seen)]
            out[i, mine] = sum(w * v[j] for j, w in enumerate(weights)) / sum(weights)
    return out @ wo


def attention_weights(draw, h, heads, kv, size):
    shapes = ((h, heads * size), (h, kv * size), (h, kv * size), (heads * size, h))
    return [draw.normal(size=shape) / 2 for shape in shapes]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.sampled_from(
        [(1, 4, 4), (2, 4, 4), (4, 4, 4), (2, 8, 2), (2, 6, 2), (4, 8, 2), (8, 8, 1)]
    ),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_by_heads_equals_plain_loops_grouped_and_replicated(sizes, causal, seed):
    n, heads, kv = sizes
    draw = rng(seed)
    x = draw.normal(size=(5, 6))
    weights = attention_weights(draw, 6, heads, kv, size=3)
    ours = pl.head_parallel_attention(x, *weights, n, heads, kv, causal=causal, replicate=True)
    expected = plain_attention(x, *weights, heads, kv, causal)
    np.testing.assert_allclose(ours, expected, **CLOSE)
    np.testing.assert_allclose(
        pl.attention(np.stack([x, x]), *weights, heads, kv, causal=causal)[1], expected, **CLOSE
    )


@given(
    n=st.sampled_from([1, 2, 4, 8]), group=st.integers(1, 4), kv=st.sampled_from([1, 2, 4, 8, 16])
)
def test_every_query_head_is_on_one_rank_together_with_its_key_value_head(n, group, kv):
    heads = group * kv
    if heads % n:
        return
    held = [pl.heads_of_rank(rank, n, heads, kv, replicate=True) for rank in range(n)]
    assert [head for queries, _ in held for head in queries] == list(range(heads))
    for queries, keys in held:
        assert {query // group for query in queries} == set(keys)
        assert len(queries) % len(keys) == 0


def test_four_key_value_heads_on_eight_ranks_are_refused_or_copied_never_halved():
    with pytest.raises(
        ValueError, match="divide the 4 key-value heads, got 8: a head is never cut"
    ):
        pl.heads_of_rank(0, 8, 32, 4)
    copies = [list(pl.heads_of_rank(r, 8, 32, 4, replicate=True)[1]) for r in range(8)]
    assert copies == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize(
    "arguments, said",
    [
        pytest.param((0, 3, 32), "divide the 32 query heads, got 3", id="heads not divided"),
        pytest.param((0, 4, 32, 5), "n_kv_heads must divide the 32", id="groups not equal"),
        pytest.param((0, 4, 12, 6), "divide the 6 key-value heads", id="neither divides"),
        pytest.param((4, 4, 32), "rank .* from 0 to 3", id="no such rank"),
    ],
)
def test_heads_that_cannot_be_dealt_out_are_refused_with_the_rule(arguments, said):
    with pytest.raises(ValueError, match=said):
        pl.heads_of_rank(*arguments, replicate=True)


def test_attention_with_large_scores_stays_finite():
    w = 100 * np.eye(2)
    out = pl.attention([[9.0, 0.0], [0.0, 9.0]], w, w, w, w, n_heads=2)
    assert np.isfinite(out).all()


# Packed SwiGLU


def swiglu(x, gate, up, down):
    return sum(
        g * x / (1 + math.exp(-g * x)) * (u * x) * d for g, u, d in zip(gate, up, down, strict=True)
    )


def test_packed_swiglu_pairs_each_gate_with_its_own_up():
    packed, down = pl.pack_gate_up([[1, 2]], [[3, 4]]), [[1], [1]]
    expected = swiglu(1, [1, 2], [3, 4], [1, 1])
    assert round(expected, 5) == 9.23955
    assert pl.packed_swiglu_mlp([1], packed, down, 2).item() == pytest.approx(expected, rel=1e-14)
    # What a contiguous cut would compute: gate 1 with up 2, gate 3 with up 4.
    assert round(swiglu(1, [1, 3], [2, 4], [1, 1]), 5) == 12.89301


@given(n=ranks, f=st.integers(1, 4), x=st.floats(-30, 30), seed=st.integers(0, 99))
def test_packed_swiglu_equals_the_whole_one_on_any_number_of_ranks(n, f, x, seed):
    gate, up, down = rng(seed).normal(size=(3, n * f))
    ours = pl.packed_swiglu_mlp([x], pl.pack_gate_up([gate], [up]), down[:, None], n).item()
    assert ours == pytest.approx(swiglu(x, gate, up, down), rel=1e-9, abs=1e-9)


def test_the_gate_must_divide_and_not_only_the_packed_weight():
    with pytest.raises(ValueError, match="n must divide the 3 features F of the gate, got 2"):
        pl.packed_swiglu_mlp([1.0], np.ones((1, 6)), np.ones((3, 1)), 2)


# Vocabulary


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_embedding_and_loss_of_a_cut_vocabulary_equal_the_whole_ones(sizes, seed):
    total, draw = sum(sizes), rng(seed)
    if not total:
        return
    cuts = np.cumsum(sizes)[:-1]
    table, tokens = draw.normal(size=(total, 3)), draw.integers(0, total, size=(2, 4))
    rows = pl.vocabulary_parallel_embedding(tokens, np.split(table, cuts))
    np.testing.assert_array_equal(rows, table[tokens])
    logits = 5 * draw.normal(size=(2, 4, total))
    losses = pl.vocabulary_parallel_cross_entropy(np.split(logits, cuts, axis=-1), tokens)
    for place in np.ndindex(2, 4):
        row = [math.exp(logit) for logit in logits[place]]
        assert losses[place] == pytest.approx(-math.log(row[tokens[place]] / sum(row)), abs=1e-12)


def test_eight_zero_logits_on_four_ranks_lose_ln_8():
    losses = pl.vocabulary_parallel_cross_entropy([np.zeros((3, 2))] * 4, [0, 3, 7])
    np.testing.assert_allclose(losses, math.log(8), rtol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_large_logits_use_the_largest_of_all_ranks(n):
    logits = np.array([1000.0, 0, -1000, 999])
    loss = pl.vocabulary_parallel_cross_entropy(np.split(logits, n), 1)
    assert round(float(loss), 4) == 1000.3133  # 1000 + ln(1 + e^-1)
    masked = np.array([-np.inf, 0.0, -np.inf, 0.0])  # a rank may have nothing but masked logits
    assert pl.vocabulary_parallel_cross_entropy(np.split(masked, n), 1) == pytest.approx(
        math.log(2)
    )


# Bad input

NAN = float("nan")
X, W = np.ones((2, 4)), np.ones((4, 6))


@pytest.mark.parametrize(
    "call, said",
    [
        pytest.param(
            lambda: pl.column_shards(W, 4), "divide the 6 output features, got 4", id="columns"
        ),
        pytest.param(lambda: pl.row_shards(W, 3), "divide the 4 input features, got 3", id="rows"),
        pytest.param(lambda: pl.megatron_mlp(X, W, W.T, 4), "divide the 6 output", id="mlp"),
        pytest.param(lambda: pl.columns_only_mlp_step(X, W, W.T, X, 3), "divide the 4", id="step"),
        pytest.param(
            lambda: pl.column_shards(W, 0), "n must be an int of at least 1", id="no ranks"
        ),
        pytest.param(lambda: pl.column_shards([1.0], 1), "needs dim 1", id="a vector"),
        pytest.param(lambda: pl.column_shards(W, 2, stored="oi"), "in_out, out_in", id="stored"),
        pytest.param(
            lambda: pl.column_parallel(X, []), "one array per rank, got none", id="no shard"
        ),
        pytest.param(
            lambda: pl.column_parallel(X, [W[:3]]), r"last dim of x .* w_shards\[0\]", id="x"
        ),
        pytest.param(lambda: pl.column_parallel(1.0, [W]), "last dim of x", id="scalar"),
        pytest.param(
            lambda: pl.column_parallel(X, [W], biases=[[1.0]]), "biases must fit", id="bias"
        ),
        pytest.param(lambda: pl.row_parallel([X], [W], [1.0]), "bias must fit", id="row bias"),
        pytest.param(
            lambda: pl.row_parallel([X, X], [W]), "per rank, got 2 and 1", id="ranks differ"
        ),
        pytest.param(
            lambda: pl.row_parallel([X, X[:1]], [W, W]), r"x_shards\[1\]", id="rows differ"
        ),
        pytest.param(
            lambda: pl.row_parallel([X, X], [W, W[:, :1]]), r"w_shards\[1\]", id="out differs"
        ),
        pytest.param(
            lambda: pl.megatron_mlp(X, W, W.T, 2, bias_a=np.ones(3)), "bias_a", id="bias_a"
        ),
        pytest.param(
            lambda: pl.megatron_mlp_step(X, W, W, X, 2), "must be .* got shapes", id="A and B"
        ),
        pytest.param(lambda: pl.megatron_mlp_step(X, W, W.T, W, 2), "dz must have", id="dz"),
        pytest.param(
            lambda: pl.attention(X, W, W, W, W, 4), "x, wq, wk, wv and wo", id="attention"
        ),
        pytest.param(lambda: pl.pack_gate_up(X, W), "must both be", id="gate and up"),
        pytest.param(lambda: pl.packed_swiglu_mlp(X, W.T, X, 1), "must fit gate_up", id="packed"),
        pytest.param(
            lambda: pl.packed_swiglu_shards(np.ones((2, 3)), 1), "halves", id="odd packed"
        ),
        pytest.param(
            lambda: pl.vocabulary_parallel_embedding([4], [X, X]), "from 0 to 3", id="token"
        ),
        pytest.param(
            lambda: pl.vocabulary_parallel_embedding([-1], [X, X]), "from 0 to 3", id="-1"
        ),
        pytest.param(lambda: pl.vocabulary_parallel_embedding([0], [X, W]), "one h", id="widths"),
        pytest.param(
            lambda: pl.vocabulary_parallel_cross_entropy([X], [6, 0]), "from 0", id="target"
        ),
        pytest.param(
            lambda: pl.vocabulary_parallel_cross_entropy([X], 1), "targets' shape", id="shape"
        ),
        pytest.param(
            lambda: pl.vocabulary_parallel_cross_entropy([X, X * NAN], [0, 0]),
            r"logit_shards\[1\] .* no NaN",
            id="NaN on one rank",
        ),
        pytest.param(
            lambda: pl.vocabulary_parallel_cross_entropy([[-np.inf], [-np.inf]], 0),
            "one logit above -infinity",
            id="all masked",
        ),
        pytest.param(lambda: pl.gelu(2**53 + 1), r"integers up to 2\^53", id="large integer"),
    ],
)
def test_bad_input_is_refused_with_the_cause(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: pl.gelu("1"), id="text"),
        pytest.param(lambda: pl.gelu(True), id="bool"),
        pytest.param(lambda: pl.gelu(1j), id="complex"),
        pytest.param(lambda: pl.column_shards(W, 2.0), id="n is a float"),
        pytest.param(lambda: pl.vocabulary_parallel_embedding([0.0], [X]), id="float token"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(call):
    with pytest.raises(TypeError):
        call()


def test_partial_sums_beyond_float16_cancel_as_they_should():
    x = np.array([300, 300], np.float16)
    w = np.array([[300], [-300]], np.float16)  # 90000 - 90000, each beyond float16's 65504
    result = pl.row_parallel([x[:1], x[1:]], pl.row_shards(w, 2))
    assert result.dtype == np.float32 and result.tolist() == [0]


def test_integers_do_not_wrap():
    x, w = np.array([100, 100], np.int8), np.array([[2], [2]], np.int8)
    assert pl.row_parallel([x[:1], x[1:]], pl.row_shards(w, 2)).tolist() == [400]
    assert pl.column_parallel(x, [w]).tolist() == [400]


BIG = np.full((2, 2), 1e200)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: pl.column_parallel(BIG, [BIG]), id="columns"),
        pytest.param(lambda: pl.row_parallel([BIG, BIG], [BIG, -BIG]), id="rows: inf - inf"),
        pytest.param(lambda: pl.megatron_mlp(BIG, BIG, BIG, 2), id="mlp"),
        pytest.param(lambda: pl.megatron_mlp_step(BIG, BIG, BIG, BIG, 2), id="megatron step"),
        pytest.param(lambda: pl.columns_only_mlp_step(BIG, BIG, BIG, BIG, 2), id="columns step"),
        pytest.param(lambda: pl.attention(BIG, BIG, BIG, BIG, BIG, 2), id="attention"),
        pytest.param(lambda: pl.packed_swiglu_mlp(BIG, BIG, BIG[:1], 1), id="swiglu"),
        pytest.param(
            lambda: pl.vocabulary_parallel_cross_entropy([[1.7e308], [-1.7e308]], 1), id="loss"
        ),
    ],
)
def test_finite_input_never_becomes_nan_or_infinity(call):
    with pytest.raises(ValueError, match="leaves the range of float64"):
        call()


def test_a_nan_of_one_rank_reaches_the_sum_as_it_does_unsharded():
    assert np.isnan(pl.row_parallel([[1.0], [NAN]], [[[1.0]], [[1.0]]])).all()
