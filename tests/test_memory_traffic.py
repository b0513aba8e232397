"""What ZeRO sends: public corrections, the simulated rings, replicas, and the laws."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl

SIZES = st.integers(0, 10**15)
GPUS = st.integers(1, 5000)
STAGES = st.integers(0, 3)
BYTES = st.sampled_from([0, 1, 2, 4])


@pytest.mark.parametrize("stage, gb", [(0, 24.5), (1, 24.5), (2, 61.25), (3, 147)])
def test_traffic_of_14_gb_on_8_ranks_in_4_micro_batches_deepspeed_2252(stage, gb):
    assert pl.zero_traffic_bytes(7e9, 8, stage, 4) == gb * 1e9


def test_full_sharding_sends_1_5_times_data_parallelism():
    assert [pl.zero_traffic_bytes(7e9, 8, stage) / 24.5e9 for stage in range(4)] == [1, 1, 1, 1.5]


def test_the_collectives_of_each_stage():
    assert [
        [(i.tensor, i.op, i.phase, i.count) for i in pl.zero_traffic(64, 4, stage, 3).items]
        for stage in range(4)
    ] == [
        [("gradients", "all_reduce", "backward", 1)],
        [("weights", "all_gather", "after the step", 1)]
        + [("gradients", "reduce_scatter", "backward", 1)],
        [("weights", "all_gather", "after the step", 1)]
        + [("gradients", "reduce_scatter", "backward", 3)],
        [("weights", "all_gather", "forward", 3), ("weights", "all_gather", "backward", 3)]
        + [("gradients", "reduce_scatter", "backward", 3)],
    ]


@pytest.mark.parametrize("stage, equivalents", [(0, 8), (1, 4 + 2), (2, 3 * 4 + 2), (3, 3 * 8)])
def test_each_part_is_sent_in_its_own_dtype(stage, equivalents):
    # fp32 gradients (4) and bf16 weights (2), 3 micro-batches: units of (N-1)/N Psi bytes.
    ours = pl.zero_traffic_bytes(1000, 4, stage, 3, grad_bytes=4)
    assert ours == Fraction(3, 4) * 1000 * equivalents


@pytest.mark.parametrize("n", [2, 4, 8])
def test_stage_0_and_1_send_what_the_simulated_rings_send(n):
    gradients = [np.ones(96, dtype=np.float32) for _ in range(n)]
    _, all_reduced = pl.ring_all_reduce(gradients)
    shards, scattered = pl.ring_reduce_scatter(gradients)
    _, gathered = pl.ring_all_gather(shards)
    size = {"weight_bytes": 4, "grad_bytes": 4}
    assert [pl.zero_traffic_bytes(96, n, 0, **size)] * n == list(all_reduced)
    sent = [pl.zero_traffic(96, n, 1, **size).items[i].bytes_per_rank for i in (1, 0)]
    assert sent == [scattered[0], gathered[0]]


@given(SIZES, GPUS, STAGES, st.integers(1, 64), BYTES, BYTES)
def test_messages_sum_to_the_traffic_which_one_rank_does_not_have(n_params, n, stage, m, w, g):
    size = {"weight_bytes": w, "grad_bytes": g}
    traffic = pl.zero_traffic(n_params, n, stage, m, **size)
    assert traffic.bytes_per_rank == sum(item.bytes_per_rank for item in traffic.items)
    assert traffic.bytes_per_rank == pl.zero_traffic_bytes(n_params, n, stage, m, **size)
    assert pl.zero_traffic_bytes(n_params, 1, stage, m, **size) == 0
    assert traffic.bytes_per_rank <= pl.zero_traffic_bytes(n_params, n, stage, m + 1, **size)


# Sharding that keeps the weights from forward to backward, and replicas.


@pytest.mark.parametrize("again, times", [(True, 1.5), (False, 1.0)], ids=["reshard", "keep"])
def test_keeping_gathered_weights_sends_no_more_than_data_parallelism_pytorch_pr_118017(
    again, times
):
    # FSDP2 on 2 and 4 gloo processes sends 2.0 + 1.0 and 1.0 + 1.0 Psi (N-1)/N elements.
    traffic = pl.zero_traffic(7e9, 8, 3, reshard_after_forward=again)
    assert traffic.bytes_per_rank == times * pl.zero_traffic_bytes(7e9, 8, 0)
    assert [item.phase for item in traffic.items[:-1]] == ["forward", "backward"][: 1 + again]


def test_each_micro_batch_gathers_again_in_its_forward():
    one = pl.zero_traffic(7e9, 8, 3, reshard_after_forward=False)
    four = pl.zero_traffic(7e9, 8, 3, 4, reshard_after_forward=False)
    assert four.bytes_per_rank == 4 * one.bytes_per_rank == 98e9
    assert [item.count for item in four.items] == [4, 4]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_never_gathered_in_forward_is_not_kept_either(stage):
    kept = pl.zero_traffic(7e9, 8, stage, 4, reshard_after_forward=False)
    assert kept == pl.zero_traffic(7e9, 8, stage, 4)


@pytest.mark.parametrize("stage, count", [(1, 1), (2, 3), (3, 3)])
def test_replicas_all_reduce_the_shard_whenever_it_was_reduced(stage, count):
    whole = pl.zero_traffic(64 * 10**6, 8, stage, 3)
    traffic = pl.zero_traffic(64 * 10**6, 8, stage, 3, replicas=4)
    *others, last = traffic.items
    assert tuple(others) == whole.items
    assert (last.tensor, last.op, last.count) == ("sharded gradients", "all_reduce", count)
    # A shard has 2 * 64e6 / 8 bytes; a ring of 4 sends 2 * 3/4 of it.
    assert last.bytes_per_rank == count * 2 * Fraction(3, 4) * 16 * 10**6


def test_a_replicas_all_reduce_is_that_of_the_simulated_ring():
    gradient = np.ones(96, dtype=np.float32)
    shards, _ = pl.ring_reduce_scatter([gradient] * 2)
    _, sent = pl.ring_all_reduce([shards[0]] * 3)
    ours = pl.zero_traffic(96, 2, 3, grad_bytes=4, replicas=3).items[-1].bytes_per_rank
    assert [ours] * 3 == list(sent)


@given(SIZES, GPUS, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), BYTES)
def test_shards_and_replicas_together_average_like_one_large_group(n_params, n, stage, m, r, g):
    size = {"weight_bytes": 0, "grad_bytes": g}
    sent = pl.zero_traffic_bytes(n_params, n, stage, 1, replicas=r, **size)
    # Reduce-scatter over N, all-reduce over R: what a hierarchical all-reduce sends, less its
    # last all-gather.
    exact = Fraction(g * n_params * (n - 1), n) + Fraction(2 * g * n_params * (r - 1), n * r)
    assert sent == pytest.approx(float(exact), rel=1e-15)
    assert pl.zero_traffic_bytes(n_params, n, stage, m, replicas=1, **size) == (
        pl.zero_traffic_bytes(n_params, n, stage, m, **size)
    )


GOOD = {"n_params": 100, "n_gpus": 4, "stage": 1}


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("stage", 4, ValueError),
        ("stage", True, TypeError),
        ("n_gpus", 0, ValueError),
        ("n_params", float("nan"), ValueError),
        ("n_params", 10**18, ValueError),
        ("weight_bytes", -2, ValueError),
        ("grad_bytes", float("nan"), ValueError),
        ("micro_batches", 0, ValueError),
        ("reshard_after_forward", 1, TypeError),
        ("replicas", 0, ValueError),
        ("replicas", 2.0, TypeError),
    ],
    ids=str,
)
def test_bad_input_is_named(name, value, error):
    with pytest.raises(error, match=f"^{name} must be "):
        pl.zero_traffic_bytes(**{**GOOD, name: value})


def test_replicas_of_nothing_sharded_are_refused():
    with pytest.raises(ValueError, match="^replicas must be 1 at stage 0, got 2"):
        pl.zero_traffic(100, 4, 0, replicas=2)
