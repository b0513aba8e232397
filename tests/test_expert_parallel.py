"""A layer of experts on simulated ranks: routing, load, and every gradient and byte of the cut."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl
from parlab.models import ModelConfig

H, F = 4, 6

# Sums of at most a few hundred products of numbers near 1, in another order, in float64.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


def layer(rng, experts, tokens):
    """Weights of a layer, and x and dz for every rank."""
    router = rng.normal(size=(H, experts))
    first, second = rng.normal(size=(experts, H, F)), rng.normal(size=(experts, F, H))
    xs = [rng.normal(size=(t, H)) for t in tokens]
    return router, first, second, xs, [rng.normal(size=x.shape) for x in xs]


def compare(whole, ranks):
    """The cut layer's results against the whole one's."""
    close(np.concatenate([rank.output for rank in ranks]), whole.output)
    close(np.concatenate([rank.dx for rank in ranks]), whole.dx)
    close(sum(rank.d_router for rank in ranks), whole.d_router)
    close(np.concatenate([rank.d_first for rank in ranks]), whole.d_first)
    close(np.concatenate([rank.d_second for rank in ranks]), whole.d_second)


@settings(max_examples=40, deadline=None)
@given(
    ep=st.sampled_from([1, 2, 3, 4]),
    per_rank=st.integers(1, 3),
    data=st.data(),
    renormalise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_cut_layer_is_the_whole_one_and_sends_what_its_routing_says(
    ep, per_rank, data, renormalise, seed
):
    experts = ep * per_rank
    active = data.draw(st.integers(1, experts), label="active")
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=ep, max_size=ep), label="tokens")
    capacity = data.draw(st.none() | st.integers(0, 4), label="capacity")
    rng = np.random.default_rng(seed)
    router, first, second, xs, dzs = layer(rng, experts, tokens)
    chosen = [pl.route(x @ router, active).chosen for x in xs]
    kept = None
    if capacity is not None:
        kept = [pl.within_capacity(c, experts, capacity) for c in chosen]
    copies = [array.copy() for array in (router, first, second, *xs, *dzs)]

    whole = pl.expert_layer(
        np.concatenate(xs),
        router,
        first,
        second,
        np.concatenate(dzs),
        active,
        renormalise=renormalise,
        kept=None if kept is None else np.concatenate(kept),
    )
    ranks, sent = pl.expert_parallel_layer(
        xs, router, first, second, dzs, active, renormalise=renormalise, kept=kept
    )
    compare(whole, ranks)
    for before, now in zip(copies, (router, first, second, *xs, *dzs), strict=True):
        np.testing.assert_array_equal(before, now)

    leaving, coming = [0] * ep, [0] * ep
    for src in range(ep):
        for token in range(tokens[src]):
            for place in range(active):
                dst = chosen[src][token, place] // per_rank
                if dst != src and (kept is None or kept[src][token, place]):
                    leaving[src] += 1
                    coming[dst] += 1
    # Copies and gradients of outputs leave their home; outputs and gradients of copies come back.
    assert sent == [2 * (a + b) * H * 8 for a, b in zip(leaving, coming, strict=True)]
    between = pl.copies_between(chosen, experts, kept)
    np.fill_diagonal(between, 0)
    assert between.sum(axis=1).tolist() == leaving
    assert between.sum(axis=0).tolist() == coming


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("active", [1, 2])
def test_with_even_routing_counted_bytes_are_the_closed_form(ep, active):
    experts, tokens = 8, 16
    # Token t asks for experts t, t + 1, ...: each expert gets as many of each rank's tokens.
    logits = np.zeros((tokens, experts))
    for place in range(active):
        logits[np.arange(tokens), (np.arange(tokens) + place) % experts] = 9 - place
    router, rng = np.eye(experts), np.random.default_rng(0)
    first, second = rng.normal(size=(2, experts, experts, experts))
    xs = [logits] * ep
    _, sent = pl.expert_parallel_layer(xs, router, first, second, xs, active)
    config = ModelConfig(
        layers=1,
        hidden=experts,
        heads=1,
        vocab=1,
        ffn=experts,
        experts=experts,
        active_experts=active,
    )
    formula = pl.expert_parallel_traffic(config, 1, sequence=tokens, ep=ep, element_bytes=8)
    assert sent == [formula.bytes_per_rank] * ep


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("active", [1, 2, 4])
def test_every_gradient_of_the_whole_layer_is_autograds(torch, active, renormalise):
    router, first, second, (x,), (dz,) = layer(np.random.default_rng(1), 4, [5])
    step = pl.expert_layer(x, router, first, second, dz, active, renormalise=renormalise)

    arrays = [torch.tensor(a, requires_grad=True) for a in (x, router, first, second)]
    tx, tr, ta, tb = arrays
    weights, chosen = (tx @ tr).softmax(-1).topk(active)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for token in range(len(x)):
        row = 0
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            inner = torch.nn.functional.gelu(tx[token] @ ta[expert], approximate="tanh")
            row = row + weight * (inner @ tb[expert])
        rows.append(row)
    output = torch.stack(rows)
    (output * torch.tensor(dz)).sum().backward()
    close(step.output, output.detach().numpy())
    for ours, theirs in zip(step[1:], arrays, strict=True):
        close(ours, theirs.grad.numpy())


# Routing.


def test_renormalising_is_the_softmax_of_the_chosen_logits_mixtral():
    logits = np.random.default_rng(0).normal(size=(20, 8))
    routing = pl.route(logits, 2)
    of_chosen = np.exp(np.take_along_axis(logits, routing.chosen, axis=1))
    close(routing.weights, of_chosen / of_chosen.sum(axis=1, keepdims=True))


def test_the_only_weight_of_one_expert_is_1_and_teaches_the_router_nothing():
    router, first, second, (x,), (dz,) = layer(np.random.default_rng(0), 4, [9])
    step = pl.expert_layer(x, router, first, second, dz, 1)
    assert not step.d_router.any()
    assert pl.expert_layer(x, router, first, second, dz, 1, renormalise=False).d_router.any()


def test_of_equal_logits_the_lower_expert_comes_first():
    assert pl.route(np.zeros((2, 4)), 3).chosen.tolist() == [[0, 1, 2]] * 2


def test_large_logits_overflow_nowhere():
    routing = pl.route([[1000.0, 0.0, -1000.0, 999.0]], 2)
    assert routing.chosen.tolist() == [[0, 3]]
    assert routing.weights[0, 0] == pytest.approx(1 / (1 + np.exp(-1)), rel=1e-12)


@settings(deadline=None)
@given(
    st.integers(0, 12), st.integers(1, 5), st.integers(0, 6), st.integers(0, 99), st.integers(1, 5)
)
def test_room_goes_to_first_choices_in_the_order_of_tokens_gshard(t, e, capacity, seed, active):
    active = min(active, e)
    chosen = np.argsort(np.random.default_rng(seed).random((t, e)), axis=1)[:, :active]
    taken, expected = [0] * e, np.zeros((t, active), dtype=bool)
    for place in range(active):
        for token in range(t):
            expert = chosen[token, place]
            if taken[expert] < capacity:
                taken[expert] += 1
                expected[token, place] = True
    np.testing.assert_array_equal(pl.within_capacity(chosen, e, capacity), expected)
    assert pl.expert_counts(chosen, e, expected).tolist() == taken


def test_capacity_of_switch_transformer_figure_3():
    # 6 tokens, 3 experts: 2 slots each at capacity factor 1.0, 3 at 1.5.
    assert pl.expert_capacity(6, 3, 1, 1.0) == 2
    assert pl.expert_capacity(6, 3, 1, 1.5) == 3
    assert pl.expert_capacity(7, 3, 1, 1.0) == 3  # a part of a slot is a slot


def test_a_dropped_token_comes_out_as_zero_and_gets_no_gradient_from_experts():
    router, first, second, (x,), (dz,) = layer(np.random.default_rng(0), 4, [3])
    kept = np.array([[True, True], [False, False], [True, True]])
    step = pl.expert_layer(x, router, first, second, dz, 2, kept=kept)
    assert not step.output[1].any()
    assert not step.dx[1].any()
    assert step.output[0].any()


# The auxiliary loss.


def test_the_balancing_loss_of_a_batch_by_hand_switch_equation_4():
    probabilities = np.array([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.9, 0.1]])
    balance = pl.load_balancing_loss(pl.route(np.log(probabilities), 1))
    assert balance.loss == pytest.approx(2 * (3 / 4 * 0.6 + 1 / 4 * 0.4), rel=1e-12)


@pytest.mark.parametrize("active", [1, 2])
def test_the_balancing_gradient_is_autograds(torch, active):
    logits = np.random.default_rng(3).normal(size=(7, 5))
    routing = pl.route(logits, active)
    tensor = torch.tensor(logits, requires_grad=True)
    shares = torch.tensor(pl.expert_counts(routing.chosen, 5) / routing.chosen.size)
    loss = 5 * (shares * tensor.softmax(-1).mean(0)).sum()
    loss.backward()
    balance = pl.load_balancing_loss(routing)
    assert balance.loss == pytest.approx(loss.item(), rel=1e-12)
    close(balance.gradient, tensor.grad.numpy())


def test_even_use_is_1_but_not_the_least():
    even = pl.route(np.tile(np.eye(4), (2, 1)), 1)
    assert pl.load_balancing_loss(even).loss == pytest.approx(1, rel=1e-12)
    # Just over half of the tokens go to expert 1, which is hardly meant by any.
    rows = [[0.98, 0.02]] * 49 + [[0.49, 0.51]] * 51
    below = 2 * (0.49 * (0.49 * 0.98 + 0.51 * 0.49) + 0.51 * (0.49 * 0.02 + 0.51 * 0.51))
    assert pl.load_balancing_loss(pl.route(np.log(rows), 1)).loss == pytest.approx(below, rel=1e-12)
    assert below < 1


# Load.


def test_imbalance_is_the_busiest_over_the_mean():
    assert pl.imbalance([30, 10, 10, 10]) == 2
    assert pl.rank_counts([30, 10, 10, 10], 2).tolist() == [40, 20]
    assert pl.imbalance(pl.rank_counts([30, 10, 10, 10], 2)) == pytest.approx(4 / 3)


def test_random_imbalance_of_two_coins_by_hand():
    # 2 tokens, 2 experts: together half of the time (2 over 1), apart otherwise.
    # The mean of 4000 trials strays by 0.5 / sqrt(4000) = 0.008; five times that is 0.04.
    assert pl.random_imbalance(2, 2, 1, 2, trials=4000) == pytest.approx(1.5, abs=0.04)


@pytest.mark.parametrize("n, largest", [(2, 0.5641895835), (5, 1.1629644736), (8, 1.4236003060)])
def test_the_estimate_uses_the_tabled_expected_maximum_of_n_normals(n, largest):
    # Teichroew, Annals of Mathematical Statistics 27 (1956), tables to ten decimals.
    spread = pl.expected_imbalance(1000 * n, n, 1, n) - 1
    assert spread * 1000**0.5 == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(
    "tokens, experts, active, ep",
    [(4096, 8, 2, 8), (4096, 8, 6, 8), (512, 8, 2, 2), (2048, 64, 6, 16), (1024, 16, 1, 16)],
    ids=str,
)
def test_simulation_agrees_with_the_normal_estimate(tokens, experts, active, ep):
    simulated = pl.random_imbalance(tokens, experts, active, ep, trials=100, seed=1)
    estimate = pl.expected_imbalance(tokens, experts, active, ep)
    # One trial strays by about half of the excess; the mean of 100 by a twentieth. Loads are not
    # quite normal: another twentieth.
    assert simulated - 1 == pytest.approx(estimate - 1, rel=0.25)
    assert 1 < simulated < pl.balls_in_bins_imbalance(tokens * active, ep)


def test_even_by_construction_is_exactly_even():
    assert pl.random_imbalance(50, 4, 4, 2, trials=3) == 1
    assert pl.expected_imbalance(50, 4, 4, 2) == 1
    assert pl.expected_imbalance(50, 4, 2, 1) == pytest.approx(1, abs=1e-9)


def test_tokens_sent_once_a_rank_have_the_mean_that_the_closed_form_names():
    rng = np.random.default_rng(0)
    tokens, experts, active, ep = 20_000, 16, 4, 4
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :active]
    ranks = chosen // (experts // ep)
    elsewhere = sum((ranks == rank).any(axis=1).sum() for rank in range(1, ep)) / tokens
    config = ModelConfig(
        layers=1, hidden=1, heads=1, vocab=1, ffn=1, experts=experts, active_experts=active
    )
    formula = pl.expert_parallel_traffic(
        config, 1, sequence=tokens, ep=ep, element_bytes=1, once_per_rank=True
    )
    # A token's number has a deviation of about 0.7; of the mean of 20,000 that is 0.005.
    assert elsewhere == pytest.approx(formula.items[0].bytes_per_rank / tokens, abs=0.025)


# Field case 11.


def test_mixtral_by_its_matrices_aiconfigurator_pr_1390():
    h, f, v, layers = 4096, 14336, 32000, 32
    expert = 3 * h * f
    attention = 2 * h * h + 2 * h * 8 * 128
    shared = 2 * v * h + layers * (attention + 8 * h + 2 * h) + h
    config = pl.model("mixtral-8x7b")
    assert config.n_params == shared + layers * 8 * expert == 46_702_792_704
    assert config.n_active_params == shared + layers * 2 * expert == 12_879_925_248
    # On 64 GPUs with EP 8 there are 8 replicas of every expert.
    here = layers * expert
    right = 4 * (shared + here) + 12 * (shared / 64 + here / 8)
    wrong = 4 * (shared + here) + 12 * (shared / 64 + here / 64)
    assert pl.expert_zero_memory_bytes(config, 64, 1, expert_parallel=8) == right
    assert (round(right / 1e9, 2), round(wrong / 1e9, 2)) == (37.73, 30.33)


# Bad input.

X, R, A, B = np.ones((2, 3)), np.ones((3, 4)), np.ones((4, 3, 5)), np.ones((4, 5, 3))
SHAPES = r"must be \(T, h\), \(h, E\), \(E, h, f\), \(E, f, h\) and \(T, h\), got"


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: pl.route([1.0, 2.0], 1), ValueError, r"logits must be finite and \(tokens, exp"),
        (lambda: pl.route([[np.nan, 0]], 1), ValueError, "logits must be finite"),
        (lambda: pl.route(np.eye(2), 3), ValueError, "active must be an int from 1 to 2, got 3"),
        (lambda: pl.route(np.eye(2), 1, renormalise=1), TypeError, "renormalise must be True or"),
        (lambda: pl.expert_counts([[0, 4]], 4), ValueError, "chosen must lie from 0 to 3, got 0"),
        (lambda: pl.expert_counts([[1, 1]], 4), ValueError, "got one twice"),
        (lambda: pl.expert_counts([[0.5]], 4), TypeError, "chosen must be integers of shape"),
        (lambda: pl.expert_counts([[0]], 4, [[1]]), ValueError, "kept must be bools of chosen's"),
        (lambda: pl.expert_capacity(8, 4, 1, 0), ValueError, "factor must be a finite number abov"),
        (lambda: pl.within_capacity([[0]], 4, -1), ValueError, "capacity must be an int of at lea"),
        (lambda: pl.rank_counts([1, 2, 3], 2), ValueError, "ep must divide the 3 counts of"),
        (lambda: pl.rank_counts([[1, 2]], 2), ValueError, "counts must be one number an expert"),
        (lambda: pl.imbalance([0, 0]), ValueError, "counts must have a sum above 0"),
        (lambda: pl.random_imbalance(10**6, 10**3, 1, 1), ValueError, "tokens x experts x trials"),
        (lambda: pl.random_imbalance(8, 6, 1, 4), ValueError, "ep must divide experts = 6, got 4"),
        (lambda: pl.balls_in_bins_imbalance(0, 1), ValueError, "balls must be an int of at least"),
        (lambda: pl.all_to_all([[X], [X]]), ValueError, "parcels must be N lists of N arrays"),
        (lambda: pl.all_to_all([]), ValueError, "parcels must be N lists of N arrays"),
        (lambda: pl.expert_layer(X, R, A, A, X, 1), ValueError, SHAPES),
        (lambda: pl.expert_layer(X, R, A, B, X[0], 1), ValueError, SHAPES),
        (lambda: pl.expert_layer("x", R, A, B, X, 1), TypeError, "x must hold real numbers"),
        (
            lambda: pl.expert_parallel_layer([X] * 3, R, A, B, [X] * 3, 1),
            ValueError,
            "xs must have as many ranks as divide the 4 experts, got 3",
        ),
        (
            lambda: pl.load_balancing_loss(pl.route(np.ones((0, 4)), 1)),
            ValueError,
            "routing must have at least one token",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
