"""All-to-all bytes of expert parallelism: by hand, by enumeration and by nccl-tests' bus factor."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl

MIXTRAL = pl.model("mixtral-8x7b")


def traffic(config=MIXTRAL, micro_batch=1, *, sequence=4096, ep=8, **options):
    return pl.expert_parallel_traffic(config, micro_batch, sequence=sequence, ep=ep, **options)


def shape(experts, active):
    return replace(MIXTRAL, experts=experts, active_experts=active, ffn=64, layers=1)


def test_mixtral_on_8_ranks_sends_seven_eighths_of_two_copies_four_times():
    items = traffic().items
    assert [(item.phase, item.direction) for item in items] == [
        ("forward", "dispatch"),
        ("forward", "combine"),
        ("backward", "dispatch"),
        ("backward", "combine"),
    ]
    assert [item.bytes_per_rank for item in items] == [4096 * 2 * 4096 * 2 * 7 // 8] * 4
    assert {item.op for item in items} == {"all_to_all"}
    assert traffic().bytes_per_rank == 4 * 58_720_256
    assert traffic().count == 4


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_bytes_are_what_the_bus_factor_of_nccl_tests_says_of_all_copies(ep):
    one = traffic(ep=ep).items[0]
    copies = 4096 * 2 * 4096 * 2
    assert one.bytes_per_rank == pl.bus_bandwidth("all_to_all", ep, copies, 1.0)
    assert isinstance(one.bytes_per_rank, int)
    assert one.messages == ep - 1


def test_recompute_dispatches_and_combines_once_more():
    again = traffic(recompute=True)
    assert again.count == 6
    assert again.bytes_per_rank == 6 * traffic().items[0].bytes_per_rank
    assert {item.phase for item in again.items} == {"forward", "recompute", "backward"}


@pytest.mark.parametrize(
    "options, factor",
    [
        ({"n_layers": 32}, 32),
        ({"micro_batch": 3}, 3),
        ({"element_bytes": 1}, 0.5),
        ({"load": 1.5}, 1.5),
        ({"tp": 4}, 1),
        ({"tp": 4, "sequence_parallel": True}, 0.25),
        ({"sequence": 1024}, 0.25),
    ],
    ids=str,
)
def test_each_size_counts_as_the_formula_says(options, factor):
    assert traffic(**options).bytes_per_rank == factor * traffic().bytes_per_rank


def test_seconds_are_messages_and_bytes_on_one_link():
    link = pl.Link(1e-5, 1e9)
    timed = traffic(link=link, n_layers=2)
    assert timed.latency_s == pytest.approx(2 * 4 * 7 * 1e-5, rel=1e-12)
    assert timed.transfer_s == pytest.approx(2 * 4 * 58_720_256 / 1e9, rel=1e-12)
    assert timed.seconds == timed.latency_s + timed.transfer_s


@pytest.mark.parametrize("ep, local", [(4, 2), (8, 2), (8, 4), (6, 2)])
def test_the_part_for_other_nodes_is_that_of_the_ranks_there(ep, local):
    config = shape(24, 1)
    wires = {"link": pl.Link(1e-6, 4e9), "network": pl.Link(1e-5, 1e9), "ranks_per_node": local}
    one = traffic(config, sequence=24, ep=ep, **wires).items[0]
    # One of the 24 tokens goes to each expert, and ep - local of ep ranks are in other nodes.
    away = sum(expert // (24 // ep) // local != 0 for expert in range(24))
    assert one.network_bytes == away * config.hidden * 2
    assert one.network_messages == ep - local
    assert one.bytes_per_rank == traffic(config, sequence=24, ep=ep).items[0].bytes_per_rank


def test_a_group_inside_a_node_sends_nothing_over_the_network():
    wires = {"link": pl.Link(1e-6, 4e9), "network": pl.Link(1e-5, 1e9)}
    inside = traffic(**wires, ranks_per_node=8)
    assert inside.network_bytes == 0
    assert inside.seconds == traffic(link=wires["link"]).seconds
    assert traffic(ep=1, **wires, ranks_per_node=8).seconds == 0


@pytest.mark.parametrize("inside_rate, slower", [(1e12, "network"), (1e6, "link")])
def test_the_slower_of_the_two_kinds_of_link_sets_the_time(inside_rate, slower):
    wires = {"link": pl.Link(1e-6, inside_rate), "network": pl.Link(1e-5, 1e9)}
    timed = traffic(**wires, ranks_per_node=2)  # 8 ranks: 1 other inside, 6 outside
    sent = timed.bytes_per_rank
    if slower == "network":
        assert timed.latency_s == pytest.approx(4 * 6 * 1e-5, rel=1e-12)
        assert timed.transfer_s == pytest.approx(sent * 6 / 7 / 1e9, rel=1e-12)
    else:
        assert timed.latency_s == pytest.approx(4 * 1 * 1e-6, rel=1e-12)
        assert timed.transfer_s == pytest.approx(sent * 1 / 7 / 1e6, rel=1e-12)
    assert timed.seconds == timed.latency_s + timed.transfer_s


def test_time_without_a_link_is_refused():
    with pytest.raises(ValueError, match="link must be given to expert_parallel_traffic"):
        _ = traffic().seconds


@pytest.mark.parametrize(
    "experts, active, ep", [(8, 2, 4), (8, 2, 8), (8, 3, 2), (6, 4, 3), (9, 2, 3)], ids=str
)
def test_one_copy_a_rank_is_the_mean_over_all_sets_of_experts(experts, active, ep):
    per_rank = experts // ep
    sets = list(combinations(range(experts), active))
    elsewhere = sum(len({e // per_rank for e in chosen} - {0}) for chosen in sets)
    config = shape(experts, active)
    sent = traffic(config, sequence=len(sets), ep=ep, once_per_rank=True).items[0].bytes_per_rank
    assert sent == elsewhere * config.hidden * 2  # every set once, from rank 0


def test_one_copy_a_rank_changes_nothing_where_a_rank_has_one_expert():
    assert traffic(ep=8, once_per_rank=True) == traffic(ep=8)


@given(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 16),
)
def test_one_copy_a_rank_never_sends_more_nor_more_than_every_token_to_every_rank(ep, e, active):
    config = shape(e, active)
    all_copies = traffic(config, ep=ep).bytes_per_rank
    once = traffic(config, ep=ep, once_per_rank=True).bytes_per_rank
    assert once <= all_copies * (1 + 1e-12)
    assert once <= 4 * 4096 * (ep - 1) * 4096 * 2 * (1 + 1e-12)


def test_all_tokens_at_one_of_8_ranks_is_a_load_of_4_for_2_experts_of_8():
    # Both experts of every token: one is on the rank, of two copies; the mean is 2 / 8.
    assert traffic(load=4).items[0].bytes_per_rank == 4096 * 7 * 4096 * 2
    with pytest.raises(ValueError, match="load must be at most 4 with 2 of 8 experts on ep = 8"):
        traffic(load=4.01)
    assert traffic(ep=1, load=4.01).bytes_per_rank == 0


def test_a_dense_model_has_nothing_to_send():
    assert traffic(pl.model("llama-3-8b"), ep=1).bytes_per_rank == 0
    with pytest.raises(ValueError, match="ep must divide experts = 1, got 2"):
        traffic(pl.model("llama-3-8b"), ep=2)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"ep": 3}, ValueError, "ep must divide experts = 8, got 3: ranks hold equally many"),
        ({"ep": 0}, ValueError, "ep must be an int of at least 1"),
        ({"ep": True}, TypeError, "ep must be an int"),
        ({"load": 0.5}, ValueError, "load must be a finite number of at least 1"),
        ({"load": float("nan")}, ValueError, "load must be a finite number"),
        ({"tp": 3, "sequence_parallel": True}, ValueError, "tp must divide the sequence of 4096"),
        ({"sequence": 0}, ValueError, "sequence must be an int of at least 1"),
        ({"micro_batch": 1.5}, TypeError, "micro_batch must be an int"),
        ({"n_layers": 0}, ValueError, "n_layers must be an int of at least 1"),
        ({"link": 3}, TypeError, "link must be a Link or None, got 3"),
        ({"network": 3}, TypeError, "network must be a Link or None, got 3"),
        ({"ranks_per_node": 8}, ValueError, "network and ranks_per_node must be given together"),
        (
            {"network": pl.Link(0, 1), "ranks_per_node": 3},
            ValueError,
            "ranks_per_node must divide ep = 8, got 3: a group fills nodes",
        ),
        (
            {"network": pl.Link(0, 1), "ranks_per_node": 0},
            ValueError,
            "ranks_per_node must be an int of at least 1",
        ),
        ({"config": "mixtral-8x7b"}, TypeError, "config must be a ModelConfig"),
        ({"recompute": 1}, TypeError, "recompute must be True or False"),
        ({"once_per_rank": 1}, TypeError, "once_per_rank must be True or False"),
        (
            {"config": replace(MIXTRAL, experts=8192, ffn=1), "once_per_rank": True},
            ValueError,
            "experts must be an int of at most 4096",
        ),
    ],
    ids=str,
)
def test_bad_input_is_named(options, error, message):
    with pytest.raises(error, match=message):
        traffic(**options)
