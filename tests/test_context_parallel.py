"""Ring attention on simulated ranks: equal to attention on one device, and counted byte by byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl

# Of float64 results of order 1: sums of at most 48 terms in another order, each rounding 1e-16.
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE


CASES = st.fixed_dictionaries(
    {
        "n": st.integers(1, 5),
        "pieces": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "d": st.integers(1, 5),
        "causal": st.booleans(),
        "balanced": st.booleans(),
        "outer": st.sampled_from([(), (2,), (2, 3)]),
    }
)


@given(case=CASES)
@settings(deadline=None, max_examples=60)
def test_the_ring_gives_the_attention_of_one_device(case):
    n, kv, group, d = case["n"], case["kv_heads"], case["group"], case["d"]
    s = 2 * n * case["pieces"]
    h = kv * group * d
    x = random(*case["outer"], s, h)
    wq, wk, wv = random(h, h), random(h, kv * d, seed=1), random(h, kv * d, seed=2)
    whole = pl.attention(
        x, wq, wk, wv, np.eye(h), n_heads=kv * group, n_kv_heads=kv, causal=case["causal"]
    )

    def heads(rows):
        return np.swapaxes(rows.reshape(*rows.shape[:-1], -1, d), -2, -3)

    options = {"causal": case["causal"], "balanced": case["balanced"]}
    results, sent = pl.ring_attention(heads(x @ wq), heads(x @ wk), heads(x @ wv), n, **options)
    joined = pl.join_pieces(results, balanced=case["balanced"])
    assert_close(np.swapaxes(joined, -2, -3).reshape(*x.shape[:-1], h), whole)
    pieces = pl.context_pieces(s, n, balanced=case["balanced"])
    for result, own in zip(results, pieces, strict=True):
        mine = [token for piece in own for token in piece]
        assert_close(
            np.swapaxes(result, -2, -3).reshape(*case["outer"], s // n, h), whole[..., mine, :]
        )

    config = pl.ModelConfig(layers=1, hidden=h, heads=kv * group, kv_heads=kv, head_dim=d, vocab=1)
    formula = pl.context_parallel_traffic(
        config, int(np.prod(case["outer"])), sequence=s, cp=n, element_bytes=8
    )
    assert sent == [formula.only(phase="forward").bytes_per_rank] * n


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gradients_are_those_that_torch_finds_on_one_device(torch, n, kv_heads, causal, balanced):
    q, dout = random(2, 2, 6, 24, 4)
    k, v = random(2, 2, kv_heads, 24, 4, seed=1)
    step = pl.ring_attention_step(q, k, v, dout, n, causal=causal, balanced=balanced)

    q_, k_, v_ = (torch.tensor(array, requires_grad=True) for array in (q, k, v))
    wide = (x.repeat_interleave(6 // kv_heads, dim=1) for x in (k_, v_))
    out = torch.nn.functional.scaled_dot_product_attention(q_, *wide, is_causal=causal)
    out.backward(torch.tensor(dout))
    for found, expected in zip(step[:4], (out, q_.grad, k_.grad, v_.grad), strict=True):
        assert_close(found, expected.detach().numpy())

    config = pl.ModelConfig(layers=1, hidden=24, heads=6, kv_heads=kv_heads, vocab=1)
    sizes = {"sequence": 24, "cp": n, "element_bytes": 8, "grad_bytes": 8}
    formula = pl.context_parallel_traffic(config, 2, **sizes)
    assert step.sent_forward == [formula.only(phase="forward").bytes_per_rank] * n
    assert step.sent_backward == [formula.only(phase="backward").bytes_per_rank] * n


@given(
    scores=st.lists(st.floats(-1e4, 1e4) | st.just(-np.inf), min_size=2, max_size=12).filter(
        lambda row: max(row) > -np.inf
    ),
    cut=st.integers(1, 11),
)
def test_a_softmax_in_blocks_is_the_softmax_of_the_whole_row(scores, cut):
    scores = np.array([scores])
    values = random(scores.shape[1], 3)
    shifted = np.exp(scores - scores.max())
    state = None
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        for own in (slice(None, cut), slice(cut, None)):
            state = pl.attend_block(state, scores[:, own], values[own])
        output, log_sum_exp = pl.finish_attention(state)
    assert_close(output, shifted / shifted.sum() @ values)
    assert log_sum_exp[0] == pytest.approx(scores.max() + np.log(shifted.sum()), rel=1e-12)


def test_rows_that_see_nothing_of_a_block_stay_as_they_are():
    state = pl.attend_block(None, np.array([[1.0], [-np.inf]]), np.array([[2.0]]))
    after = pl.attend_block(state, np.full((2, 3), -np.inf), np.ones((3, 1)))
    for before, now in zip(state, after, strict=True):
        assert before.tolist() == now.tolist()
    assert after.total.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="every query must see a key"):
        pl.finish_attention(after)


def test_large_scores_overflow_nowhere():
    q = 1e4 * random(1, 8, 2)
    results, _ = pl.ring_attention(q, q, random(1, 8, 2, seed=1), 2)
    assert np.isfinite(pl.join_pieces(results)).all()
    with pytest.raises(ValueError, match="leaves the range of float64"):
        pl.ring_attention(1e200 * q, 1e200 * q, q, 2)


def test_float32_stays_float32_and_travels_in_4_bytes():
    q, k, v, dout = random(4, 2, 8, 4).astype(np.float32)
    step = pl.ring_attention_step(q, k, v, dout, 2)
    assert {array.dtype for array in step[:4]} == {np.dtype(np.float32)}
    assert step.sent_forward == [k[:, :4].nbytes + v[:, :4].nbytes] * 2


def test_inputs_are_not_changed():
    arrays = random(4, 2, 8, 4)
    before = arrays.copy()
    pl.ring_attention_step(*arrays, 4)
    assert np.array_equal(arrays, before)


@pytest.mark.parametrize("balanced", [True, False])
def test_pieces_are_joined_in_the_order_of_the_sequence(balanced):
    pieces = pl.context_pieces(24, 3, balanced=balanced)
    rows = [np.concatenate([np.arange(p.start, p.stop) for p in own]) for own in pieces]
    assert pl.join_pieces(rows, balanced=balanced, axis=0).tolist() == list(range(24))


GOOD = {"q": random(4, 8, 2), "k": random(2, 8, 2), "v": random(2, 8, 2), "n": 2}


@pytest.mark.parametrize(
    "changed, error, said",
    [
        pytest.param({"n": 3}, ValueError, "2 cp must divide the sequence of 8 tokens", id="n"),
        pytest.param({"n": 0}, ValueError, "n must be an int of at least 1", id="no rank"),
        pytest.param(
            {"k": random(3, 8, 2), "v": random(3, 8, 2)}, ValueError, "k divides a", id="k"
        ),
        pytest.param({"v": random(2, 8, 3)}, ValueError, r"got \(4, 8, 2\), \(2, 8, 2\)", id="v"),
        pytest.param({"q": random(4, 0, 2)}, ValueError, "none empty", id="empty"),
        pytest.param({"q": random(8, 2)}, ValueError, "must be", id="no heads"),
        pytest.param({"balanced": 1}, TypeError, "balanced must be True or False", id="balanced"),
        pytest.param({"causal": None}, TypeError, "causal must be True or False", id="causal"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(changed, error, said):
    with pytest.raises(error, match=said):
        pl.ring_attention(**{**GOOD, **changed})


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="dout must have the output's shape"):
        pl.ring_attention_step(*(GOOD[name] for name in "qkv"), random(4, 8, 1), 2)
