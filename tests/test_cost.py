"""Closed forms, priced schedules and published figures agree."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl
from parlab.collectives import cost, schedules

IDEAL = pl.Link(0.0, 1.0)
LINK = pl.Link(5e-6, 50e9)
MAKERS = {
    "ring": schedules.ring_all_reduce_schedule,
    "binomial": schedules.binomial_all_reduce_schedule,
    "halving_doubling": schedules.halving_doubling_schedule,
    "naive": schedules.naive_all_reduce_schedule,
}


@pytest.mark.parametrize("algorithm", MAKERS)
@pytest.mark.parametrize("n_ranks", [*range(1, 18), 32, 33, 64])
@pytest.mark.parametrize("tensor_bytes", [0, 4096, 3.5e9])
def test_the_closed_form_is_the_schedule_priced_step_by_step(algorithm, n_ranks, tensor_bytes):
    form = cost.all_reduce_cost(n_ranks, tensor_bytes, LINK, algorithm)
    counted = cost.price(MAKERS[algorithm](n_ranks), tensor_bytes, LINK)
    assert form.steps == counted.steps
    # Only the order of floating additions differs, over at most 128 steps.
    assert form.bytes_per_rank == pytest.approx(counted.bytes_per_rank, rel=1e-13)
    assert form.seconds == pytest.approx(counted.seconds, rel=1e-13)


@pytest.mark.parametrize(
    "n_nodes, ranks_per_node", [(1, 1), (1, 8), (2, 8), (4, 8), (3, 5), (8, 1)]
)
def test_the_hierarchical_closed_form_is_its_schedule_priced(n_nodes, ranks_per_node):
    fast, network = pl.Link(1e-6, 450e9), LINK
    form = cost.hierarchical_all_reduce_cost(n_nodes, ranks_per_node, 14e9, fast, network)
    schedule = schedules.hierarchical_schedule(n_nodes, ranks_per_node)
    counted = cost.price(schedule, 14e9, fast, ranks_per_node=ranks_per_node, network=network)
    assert form.steps == counted.steps
    assert form.bytes_per_rank == pytest.approx(counted.bytes_per_rank, rel=1e-13)
    assert form.seconds == pytest.approx(counted.seconds, rel=1e-13)


def test_a_flat_ring_over_nodes_runs_at_the_speed_of_the_network():
    ring = schedules.ring_all_reduce_schedule(16)
    counted = cost.price(ring, 14e9, pl.Link(1e-6, 450e9), ranks_per_node=8, network=LINK)
    assert counted.seconds == pytest.approx(cost.all_reduce_cost(16, 14e9, LINK).seconds)


def test_gradients_of_a_7b_model_over_8_gpus():
    nvlink = cost.all_reduce_cost(8, 14e9, pl.Link(0, pl.link("nvlink-4").bandwidth_bytes_per_s))
    network = cost.all_reduce_cost(8, 14e9, pl.Link(0, 50e9))
    assert nvlink.bytes_per_rank == 24.5e9
    assert round(nvlink.seconds * 1e3) == 54
    assert round(network.seconds, 2) == 0.49


@pytest.mark.parametrize("n_ranks, gigabytes, steps", [(8, 1.75, 14), (64, 1.97, 126)])
def test_a_gigabyte_over_8_and_64_gpus(n_ranks, gigabytes, steps):
    ring = cost.all_reduce_cost(n_ranks, 1e9, IDEAL)
    assert (round(ring.bytes_per_rank / 1e9, 2), ring.steps) == (gigabytes, steps)


@pytest.mark.parametrize(
    "n_ranks, megabytes", [(1, 0), (2, 0), (3, 0), (4, 1), (6, 3), (8, 8), (48, 492), (64, 912)]
)
def test_crossover_of_ring_and_tree(n_ranks, megabytes):
    assert cost.ring_tree_crossover_bytes(n_ranks, LINK) == pytest.approx(megabytes * 1e6)


@given(n_ranks=st.integers(4, 10**6))
def test_ring_and_tree_take_equal_times_at_the_crossover_and_swap_there(n_ranks):
    size = cost.ring_tree_crossover_bytes(n_ranks, LINK)

    def ring_over_tree(tensor_bytes):
        ring = cost.all_reduce_cost(n_ranks, tensor_bytes, LINK)
        return ring.seconds / cost.tree_all_reduce_cost(n_ranks, tensor_bytes, LINK).seconds

    assert ring_over_tree(size) == pytest.approx(1)
    assert ring_over_tree(size / 2) > 1 > ring_over_tree(2 * size)


@given(tensor_bytes=st.floats(0, 1e12))
def test_a_tree_of_two_never_beats_the_ring(tensor_bytes):
    ring = cost.all_reduce_cost(2, tensor_bytes, LINK)
    assert ring.seconds <= cost.tree_all_reduce_cost(2, tensor_bytes, LINK).seconds


@pytest.mark.parametrize("n_ranks", [2, 3, 8, 64])
def test_bytes_of_the_busiest_ring_rank_meet_the_lower_bound(n_ranks):
    # 2 (N-1) S in total, spread evenly, is the least for point-to-point sends of partial sums.
    ring = cost.traffic(schedules.ring_all_reduce_schedule(n_ranks), 1000)
    assert ring.busiest * n_ranks == 2 * (n_ranks - 1) * 1000 * n_ranks == sum(ring.sent)


@pytest.mark.parametrize("name", MAKERS)
@given(n_ranks=st.integers(1, 20), chunk_bytes=st.integers(0, 10**15))
def test_what_is_sent_is_received_in_every_step(name, n_ranks, chunk_bytes):
    for sent, received in cost.traffic(MAKERS[name](n_ranks), chunk_bytes).steps:
        assert sum(sent) == sum(received)


@pytest.mark.parametrize("n_nodes, hierarchical, flat", [(2, 1.0, 1.875), (4, 1.5, 1.9375)])
def test_bytes_that_leave_each_node_of_eight(n_nodes, hierarchical, flat):
    n_ranks = 8 * n_nodes
    tensor_bytes = 64 * n_ranks

    def leaving(schedule):
        return cost.bytes_leaving_nodes(schedule, 64, ranks_per_node=8)

    three_rings = leaving(schedules.hierarchical_schedule(n_nodes, 8))
    one_ring = leaving(schedules.ring_all_reduce_schedule(n_ranks))
    assert three_rings == [hierarchical * tensor_bytes] * n_nodes
    assert one_ring == [flat * tensor_bytes] * n_nodes


def test_per_card_the_hierarchy_gains_more_since_eight_cards_share_the_exit():
    per_node = cost.bytes_leaving_nodes(schedules.hierarchical_schedule(2, 8), 64, 8)[0]
    one_card = cost.traffic(schedules.hierarchical_schedule(2, 8), 64).steps[7][0][0]
    assert 2 * one_card * 8 == per_node  # two steps across, eight cards


@pytest.mark.parametrize(
    "elements, parts, padded", [(8, 6, 12), (12, 6, 12), (0, 6, 0), (10**18 + 1, 2, 10**18 + 2)]
)
def test_padding_to_equal_shards(elements, parts, padded):
    assert cost.padded_elements(elements, parts) == padded


@pytest.mark.parametrize(
    "op, factor",
    [
        ("all_reduce", 1.75),
        ("reduce_scatter", 0.875),
        ("all_gather", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_bandwidth_factors_of_nccl_tests(op, factor):
    assert cost.bus_bandwidth(op, 8, 1e9, 0.01) == pytest.approx(factor * 1e11)


def test_bus_bandwidth_of_an_ideal_ring_is_the_link():
    ring = cost.all_reduce_cost(8, 1e9, pl.Link(0, 450e9))
    assert cost.bus_bandwidth("all_reduce", 8, 1e9, ring.seconds) == pytest.approx(450e9)


def test_formulas_take_arrays_and_do_not_wrap():
    sizes = np.array([2**30, 2**31 - 1], np.int32)
    ring = cost.all_reduce_cost(1000, sizes, LINK)
    np.testing.assert_allclose(ring.bytes_per_rank, sizes.astype(float) * 1.998)
    assert ring.seconds.shape == (2,)


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
@pytest.mark.parametrize("n_ranks", [1, 2, 10**9])
def test_extreme_worlds_have_finite_costs(algorithm, n_ranks):
    result = cost.all_reduce_cost(n_ranks, 1e15, LINK, algorithm)
    assert math.isfinite(result.seconds) and (result.seconds == 0) == (n_ranks == 1)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: cost.all_reduce_cost(0, 1, LINK), ValueError, "n_ranks"),
        (lambda: cost.all_reduce_cost(True, 1, LINK), TypeError, "n_ranks"),
        (lambda: cost.all_reduce_cost(10**400, 1, LINK), ValueError, "n_ranks"),
        (lambda: cost.all_reduce_cost(2, -1, LINK), ValueError, "tensor_bytes"),
        (lambda: cost.all_reduce_cost(2, float("nan"), LINK), ValueError, "tensor_bytes"),
        (lambda: cost.all_reduce_cost(2, 1, LINK, "rings"), ValueError, "ring"),
        (lambda: cost.all_reduce_cost(2, 1, 50e9), TypeError, "link must be a Link"),
        (lambda: cost.bus_bandwidth("gather", 2, 1, 1), ValueError, "op must be one of"),
        (lambda: cost.bus_bandwidth("reduce", 2, 1, 0), ValueError, "seconds"),
        (lambda: cost.traffic(MAKERS["ring"](4), [1, 2]), ValueError, "one per chunk"),
        (lambda: cost.price(MAKERS["ring"](4), 1, LINK, network=LINK), ValueError, "together"),
        (lambda: cost.bytes_leaving_nodes(MAKERS["ring"](4), 1, 3), ValueError, "must divide"),
    ],
    ids=[
        "no ranks",
        "bool",
        "absurd",
        "negative",
        "nan",
        "algorithm",
        "link",
        "op",
        "seconds",
        "chunks",
        "network",
        "node",
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
