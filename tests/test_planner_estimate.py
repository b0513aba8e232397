"""Estimates: items that sum, memory from parlab.memory, and a bubble that equals simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl
from parlab.pipeline.schedules import interleaved_1f1b, one_f_one_b
from parlab.planner.efficiencies import PLAUSIBLE
from parlab.planner.layer import card_of, matmul_seconds
from parlab.planner.network import gather_seconds, neighbour_route, route

LLAMA = pl.model("llama-3-8b")
MIXTRAL = pl.model("mixtral-8x7b")
# Nothing is lost and nothing else takes time: what remains is FLOP over the dense peak.
IDEAL = pl.Efficiencies(1, 1e15, 1e9, 1e9, 1e9, 0, 1e9, 0)


def hgx(n_gpus, kind="hgx-h100"):
    node = pl.cluster(kind)
    return replace(node, gpus_per_node=min(8, n_gpus), n_nodes=max(1, n_gpus // 8))


@pytest.mark.parametrize(
    "layout",
    [
        pl.Layout(dp=8, zero=3),
        pl.Layout(dp=8, zero=1, recompute="full"),
        pl.Layout(dp=2, tp=4, sequence_parallel=True, recompute="per-op"),
        pl.Layout(pp=8, chunks=4),
        pl.Layout(pp=4, dp=2, schedule="ZB-H1", zero=1),
        pl.Layout(cp=8, zero=2),
        pl.Layout(dp=8, zero=3, replicas=2),
    ],
    ids=str,
)
def test_items_of_time_and_memory_sum_to_their_totals(layout):
    made = pl.estimate(LLAMA, hgx(8), layout, 8192, 64)
    assert made.seconds == pytest.approx(math.fsum(item.seconds for item in made.times), rel=1e-12)
    assert all(item.seconds > 0 for item in made.times)
    assert made.peak_bytes == max(map(sum, zip(*[i.bytes for i in made.memory.items], strict=True)))
    assert made.tokens_per_second_per_gpu == pytest.approx(64 * 8192 / made.seconds / 8)


def test_memory_is_that_of_training_memory_on_the_fullest_rank():
    made = pl.estimate(
        LLAMA, hgx(64), pl.Layout(dp=4, tp=4, pp=4, chunks=2, zero=1), 8192, 64, dropout=True
    )
    alone = pl.training_memory(
        LLAMA,
        1,
        sequence=8192,
        n_gpus=4,
        stage=1,
        tp=4,
        pipeline=4,
        chunks=2,
        keep_gradients=True,
        dropout=True,
        context_bytes=300e6,
    )
    assert made.memory == alone


def test_context_parallelism_holds_its_part_of_the_sequence_and_two_blocks_of_keys_and_values():
    made = pl.estimate(LLAMA, hgx(8), pl.Layout(cp=8), 131_072, 1)
    alone = pl.training_memory(
        LLAMA, 1, sequence=16_384, n_gpus=8, keep_gradients=False, context_bytes=300e6
    )
    # A block: keys and values, 8 heads of 128 features, 2 bytes, for 16,384 tokens.
    block = 2 * 16_384 * 8 * 128 * 2
    more = [a - b for a, b in zip(made.memory.totals, alone.totals, strict=True)]
    assert more == [0, 2 * block, 4 * block, 0]


def test_what_the_layout_decides_is_no_option_of_memory():
    for name in ("tp", "stage", "context_parallel", "keep_gradients"):
        with pytest.raises(TypeError, match=f"{name} must not be given: the job or its layout"):
            pl.estimate(LLAMA, hgx(8), pl.Layout(dp=8), 8192, 8, **{name: 1})
    with pytest.raises(TypeError, match="no_such_option"):
        pl.estimate(LLAMA, hgx(8), pl.Layout(dp=8), 8192, 8, no_such_option=1)


def test_without_losses_time_is_flop_over_peak():
    made = pl.estimate(
        LLAMA, hgx(8), pl.Layout(dp=8), 8192, 8, efficiencies=IDEAL, flash=True, fused=True
    )
    # 2 x 3 FLOP per weight of a matrix and token, head included; attention takes no time here.
    matrices = LLAMA.n_params - LLAMA.vocab * LLAMA.hidden - LLAMA.parameters.norms
    flop = 6 * matrices * 8192
    head = 2 * 8192 * (4096 * 128_256 + 4096 * 8192 + 128_256 * 8192)
    expected = flop / 989.4e12
    # What is left besides are the operands' bytes at the memory's full rate.
    assert expected < made.seconds < 1.06 * expected + 3 * head / 3.35e12


def test_mfu_counts_what_the_model_needs_and_hfu_what_recomputation_repeats():
    none, full = (
        pl.estimate(LLAMA, hgx(8), pl.Layout(dp=8, zero=3, recompute=how), 8192, 8)
        for how in ("none", "full")
    )
    flops = LLAMA.flops_per_token(8192)
    assert (
        none.mfu
        == none.hfu
        == pytest.approx(flops.training * none.tokens_per_second_per_gpu / 989.4e12)
    )
    repeated = (flops.training + flops.forward - flops.head) / flops.training
    assert full.hfu / full.mfu == pytest.approx(repeated)
    assert full.mfu < none.mfu


# Megatron's own rule for equal stages, and what a heavier last stage does to it.
@given(
    p=st.sampled_from([2, 4, 8]),
    rounds=st.integers(1, 3),
    chunks=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=30, deadline=None)
def test_the_bubble_in_closed_form_equals_the_simulated_pipeline(p, rounds, chunks):
    fast = replace(hgx(p), intra_node=pl.Link(0, 1e30))  # messages are free
    layout = pl.Layout(pp=p, chunks=chunks)
    made = pl.estimate(LLAMA, fast, layout, 4096, p * rounds)
    assert made.simulated_seconds == pytest.approx(made.seconds, rel=1e-9)
    step = made.step
    outside = step.data_parallel + step.slower_beside_collectives + step.optimizer
    # Another route: the work of a rank, split by hand over stages, with the head on the last.
    m, head = p * rounds, step.head_and_loss / (p * rounds)
    work = (made.seconds - outside - step.bubble - step.head_and_loss) / m
    forward, backward = [work / 4 / chunks] * (p * chunks), [3 * work / 4 / chunks] * (p * chunks)
    forward[-1], backward[-1] = forward[-1] + head / 3, backward[-1] + 2 * head / 3
    schedule = one_f_one_b(p, m) if chunks == 1 else interleaved_1f1b(p, m, chunks)
    makespan = pl.simulate(schedule, forward, backward).makespan
    assert makespan + outside == pytest.approx(made.seconds, rel=1e-9)


def test_zero_bubble_is_priced_a_little_above_its_simulation_and_never_below():
    for p, m in ((2, 8), (4, 8), (8, 32)):
        layout = pl.Layout(pp=p, schedule="ZB-H1")
        made = pl.estimate(LLAMA, replace(hgx(p), intra_node=pl.Link(0, 1e30)), layout, 4096, m)
        assert 0.9 < made.simulated_seconds / made.seconds <= 1 + 1e-9
        usual = pl.estimate(LLAMA, hgx(p), pl.Layout(pp=p), 4096, m)
        assert made.seconds < usual.seconds
        assert made.peak_bytes == usual.peak_bytes


def test_an_all_gather_of_data_parallel_ranks_takes_what_the_ring_formula_says():
    e = pl.FITTED
    wire = route(hgx(8), e, 8, 1)
    assert not wire.crosses and wire.bandwidth == e.nvlink * 450e9
    assert gather_seconds(wire, 8, 8e9) == pytest.approx(7e9 / (e.nvlink * 450e9), rel=0.01)


def test_a_ring_that_crosses_nodes_has_the_cards_of_its_ranks_in_a_node():
    e = pl.FITTED
    alone = route(hgx(64), e, 8, 8)  # one rank a node, as beside TP 8
    assert alone.crosses and alone.bandwidth == e.network * 50e9
    assert route(hgx(64), e, 16, 4).bandwidth == 2 * e.network * 50e9
    assert route(hgx(64), e, 64, 1).bandwidth == min(e.nvlink * 450e9, 8 * e.network * 50e9)
    assert neighbour_route(hgx(64), e, 8).bandwidth == e.network * 50e9
    assert neighbour_route(hgx(64), e, 4).bandwidth == e.nvlink * 450e9


def test_tensor_parallelism_that_leaves_the_node_costs_more():
    config = replace(LLAMA, kv_heads=32)
    inside = pl.estimate(config, hgx(16), pl.Layout(dp=2, tp=8), 8192, 16)
    across = pl.estimate(config, hgx(16), pl.Layout(tp=16), 8192, 16)
    per_token = [made.step.tensor_parallel for made in (inside, across)]
    # Each all-reduce is of twice as many sequences per rank, at half the ranks; the link is slower.
    assert per_token[1] > 2 * per_token[0]


def test_zero_three_moves_one_and_a_half_times_stage_zeros_bytes_and_again_for_each_micro_batch():
    slow = replace(hgx(8), intra_node=pl.Link(0, 1e6))  # so slow that nothing hides
    times = {
        (zero, batch): pl.estimate(
            LLAMA, slow, pl.Layout(dp=8, zero=zero), 8192, batch
        ).step.data_parallel
        for zero in (0, 1, 2, 3)
        for batch in (8, 32)
    }
    assert times[3, 8] / times[0, 8] == pytest.approx(1.5, rel=1e-3)
    assert times[1, 8] / times[0, 8] == pytest.approx(1, rel=1e-3)
    assert times[2, 8] / times[0, 8] == pytest.approx(1, rel=1e-3)
    assert times[0, 32] == pytest.approx(times[0, 8], rel=1e-3)
    assert times[3, 32] / times[3, 8] == pytest.approx(4, rel=1e-3)
    assert times[2, 32] / times[2, 8] == pytest.approx(2.5, rel=1e-3)  # 4 reductions, 1 gather


def test_gradients_beside_compute_cost_less_than_after_it():
    layout = pl.Layout(dp=64)
    beside, after = (
        pl.estimate(LLAMA, hgx(64), layout, 8192, 64, overlap=overlap) for overlap in (True, False)
    )
    assert beside.seconds < after.seconds
    hidden = after.step.data_parallel - beside.step.data_parallel
    # What is hidden slows the compute beside it, by the fitted share.
    assert beside.step.slower_beside_collectives == pytest.approx(pl.FITTED.overlap * hidden)


def test_replicas_of_shards_keep_the_gathers_in_the_node():
    whole = pl.estimate(LLAMA, hgx(64), pl.Layout(dp=64, zero=3), 2048, 64)
    hybrid = pl.estimate(LLAMA, hgx(64), pl.Layout(dp=64, zero=3, replicas=8), 2048, 64)
    assert hybrid.peak_bytes > whole.peak_bytes
    assert hybrid.memory.items[2].bytes[0] == pytest.approx(8 * whole.memory.items[2].bytes[0])


def test_the_ring_and_the_all_to_alls_move_the_bytes_of_their_chapters():
    slow = pl.Link(0, 1e3)  # so slow that bytes alone decide
    node = replace(hgx(8), intra_node=slow)
    bare = pl.FITTED._replace(overlap=0.0, launch=0.0, nvlink=1.0, attention=1e12)
    ring = pl.estimate(LLAMA, node, pl.Layout(cp=8), 8192, 1, efficiencies=bare)
    sent = pl.context_parallel_traffic(LLAMA, 1, sequence=8192, cp=8, n_layers=32)
    assert ring.step.context_parallel == pytest.approx(sent.bytes_per_rank / 1e3, rel=1e-6)
    experts = pl.estimate(
        MIXTRAL, node, pl.Layout(dp=8, ep=8, recompute="full"), 4096, 8, efficiencies=bare
    )
    sent = pl.expert_parallel_traffic(MIXTRAL, 1, sequence=4096, ep=8, n_layers=32, recompute=True)
    assert experts.step.expert_parallel == pytest.approx(sent.bytes_per_rank / 1e3, rel=1e-6)


def test_rings_and_all_to_alls_that_leave_the_node_use_a_ranks_own_network_card():
    node = replace(hgx(16), inter_node=pl.Link(0, 1e3))
    bare = pl.FITTED._replace(overlap=0.0, launch=0.0, network=1.0, attention=1e12)
    ring = pl.estimate(LLAMA, node, pl.Layout(cp=16), 8192, 1, efficiencies=bare)
    sent = pl.context_parallel_traffic(LLAMA, 1, sequence=8192, cp=16, n_layers=32)
    assert ring.step.context_parallel == pytest.approx(sent.bytes_per_rank / 1e3, rel=1e-6)
    more = replace(MIXTRAL, experts=16, ffn=4096)
    experts = pl.estimate(more, node, pl.Layout(dp=16, ep=16), 4096, 16, efficiencies=bare)
    sent = pl.expert_parallel_traffic(
        more,
        1,
        sequence=4096,
        ep=16,
        n_layers=32,
        link=pl.Link(0, 1e30),
        network=node.inter_node,
        ranks_per_node=8,
    )
    assert experts.step.expert_parallel == pytest.approx(sent.seconds, rel=1e-6)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_gradients_of_experts_are_summed_over_the_ranks_that_have_the_same_ones(ep):
    made = pl.estimate(MIXTRAL, hgx(8), pl.Layout(dp=8, ep=ep), 4096, 8, overlap=False)
    link = pl.cluster("hgx-h100").intra_node
    bandwidth = pl.FITTED.nvlink * link.bandwidth_bytes_per_s
    # A ring all-reduce of 2 bytes a gradient. Of Mixtral's 46.7e9 parameters 45.1e9 are in experts:
    # 8 in each of 32 layers, with three matrices of 4096 x 14336.
    experts = 32 * 8 * 3 * 4096 * 14336 / ep
    shared = MIXTRAL.n_params - 32 * 8 * 3 * 4096 * 14336
    sent = 2 * 2 * (shared * 7 / 8 + experts * (1 - ep / 8)) / bandwidth
    latency = 32 * 2 * 7 * link.latency_s  # of each layer's
    assert made.step.data_parallel == pytest.approx(sent + latency, rel=1e-9)


def test_experts_cost_all_to_alls_and_active_experts_only():
    made = pl.estimate(MIXTRAL, hgx(8), pl.Layout(dp=8, ep=8, zero=1), 4096, 8)
    dense = pl.estimate(MIXTRAL, hgx(8), pl.Layout(dp=8, zero=1), 4096, 8)
    assert made.step.expert_parallel > 0 and dense.step.expert_parallel == 0
    assert made.peak_bytes < dense.peak_bytes
    assert 0.2 < made.mfu < 0.7


def test_the_formula_of_a_product_is_the_sum_of_its_three_parts():
    card = card_of(pl.gpu("a100-80"), pl.FITTED)
    m, n, k = 4096, 8192, 2048
    e = pl.FITTED
    flop = 2 * m * n * k / (e.matmul_peak * 312e12)
    tiles = 2 * (m * k * (n / e.matmul_tile) + k * n * (m / e.matmul_tile)) / 19.5e12
    once = 2 * (m * n + m * k + k * n) / 2039e9
    assert matmul_seconds(card, m, n, k) == pytest.approx(flop + tiles + once)


def test_each_efficiency_is_within_its_plausible_range():
    for name, value, known in zip(pl.FITTED._fields, pl.FITTED, PLAUSIBLE, strict=True):
        assert known.low <= value <= known.high, name
        assert known.why


def test_cards_without_bf16_or_shared_memory_figures_are_estimated_too():
    for kind in ("hgx-b200", "t4-host"):
        made = pl.estimate(pl.model("gpt2"), pl.cluster(kind), _fills(kind), 1024, 8)
        assert 0.01 < made.mfu < 1


def _fills(kind):
    return pl.Layout(dp=pl.cluster(kind).n_gpus)


def test_dollars_follow_from_throughput():
    made = pl.estimate(LLAMA, hgx(8), pl.Layout(dp=8, zero=3), 8192, 8)
    hours = 1e9 / made.tokens_per_second_per_gpu / 3600
    assert made.usd_per_billion_tokens(3) == pytest.approx(3 * hours)
    with pytest.raises(ValueError, match="usd_per_gpu_hour"):
        made.usd_per_billion_tokens(-1)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"config": "llama-3-8b"}, "config must be a ModelConfig"),
        ({"cluster": "hgx-h100"}, "cluster must be a Cluster"),
        ({"layout": {"dp": 8}}, "layout must be a Layout"),
        ({"sequence": 0}, "sequence must be an int from 1"),
        ({"sequence": 8192.0}, "sequence must be an int"),
        ({"global_batch": 0}, "global_batch must be an int from 1"),
        ({"global_batch": 4}, "dp must be at most the global batch of 4"),
        ({"global_batch": [8]}, "global_batch must be an int"),
        ({"recipe": "mixed"}, "recipe must be one of"),
        ({"flash": 1}, "flash must be True or False"),
        ({"efficiencies": (1,) * 8}, "efficiencies must be Efficiencies"),
        ({"layout": pl.Layout(dp=4)}, "must be the 8 GPUs"),
    ],
)
def test_bad_input_is_named(change, words):
    usual = {
        "config": LLAMA,
        "cluster": hgx(8),
        "layout": pl.Layout(dp=8),
        "sequence": 8192,
        "global_batch": 8,
    }
    with pytest.raises((ValueError, TypeError), match=words):
        pl.estimate(**{**usual, **change})


def test_numpy_sizes_give_the_same_estimate():
    usual = pl.estimate(LLAMA, hgx(8), pl.Layout(dp=8, zero=3), 8192, 64)
    other = pl.estimate(LLAMA, hgx(8), pl.Layout(dp=8, zero=3), np.int32(8192), np.int64(64))
    assert other.step == usual.step and other.memory == usual.memory


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_eager_kernels_are_never_faster_and_dropout_is_never_free(name, schedule):
    layout = pl.Layout(dp=4, pp=2, zero=1, schedule=schedule)
    seconds = {
        (fused, dropout): pl.estimate(
            pl.model(name), pl.cluster("hgx-h100"), layout, 512, 64, fused=fused, dropout=dropout
        ).step.elementwise
        for fused in (True, False)
        for dropout in (True, False)
    }
    for same in (True, False):
        assert seconds[False, same] >= seconds[True, same]
        assert seconds[same, True] > seconds[same, False]
