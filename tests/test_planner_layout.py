"""Layouts: the law, and the rules that a model, a batch and a cluster add."""

import pytest

import parlab as pl
from parlab.planner.layout import refusal

LLAMA = pl.model("llama-3-8b")  # 32 layers, 32 heads, 8 key-value heads


def test_the_world_is_the_product_of_the_four_degrees():
    assert pl.Layout(dp=2, tp=3, pp=5, cp=7).world == 210
    assert pl.Layout().world == 1


def test_ep_is_no_factor_of_the_world():
    assert pl.Layout(dp=4, cp=2, ep=8).world == 8


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"dp": 0}, "dp must be an int from 1"),
        ({"tp": 2.0}, "tp must be an int"),
        ({"pp": True}, "pp must be an int"),
        ({"cp": -1}, "cp must be an int from 1"),
        ({"dp": 10**7}, "dp must be an int from 1 to 1000000"),
        ({"zero": 4}, "stage must be an int from 0 to 3"),
        ({"ep": 2}, "ep must divide 1, got 2"),
        ({"dp": 6, "ep": 4}, "ep must divide 6, got 4"),
        ({"dp": 8, "zero": 1, "replicas": 4, "ep": 4}, "ep must divide 2, got 4"),
        ({"dp": 8, "zero": 1, "replicas": 3}, "replicas must divide 8, got 3"),
        ({"dp": 8, "replicas": 2}, "replicas must be 1 at stage 0"),
        ({"chunks": 2}, "chunks must be 1 without a pipeline"),
        ({"pp": 2, "chunks": 2, "schedule": "ZB-H1"}, "chunks must be 1 with ZB-H1"),
        ({"schedule": "GPipee"}, "schedule must be one of 1F1B, ZB-H1"),
        ({"recompute": "ful"}, "did you mean full"),
        ({"sequence_parallel": 1}, "sequence_parallel must be True or False"),
        ({"micro_batch": 0}, "micro_batch must be an int of at least 1"),
    ],
)
def test_what_is_no_layout_of_any_model_is_refused_by_name(wrong, words):
    with pytest.raises((ValueError, TypeError), match=words):
        pl.Layout(**wrong)


@pytest.mark.parametrize(
    "degrees, n_gpus, words",
    [
        ({"dp": 4}, 8, "dp x tp x pp x cp must be the 8 GPUs, got 4 x 1 x 1 x 1"),
        ({"tp": 16}, 16, "tp must divide kv_heads = 8, got 16"),
        ({"pp": 3}, 3, "pp x chunks must divide layers = 32, got 3 x 1"),
        ({"pp": 8, "chunks": 8}, 8, "pp x chunks must divide layers = 32, got 8 x 8"),
        ({"cp": 3}, 3, "2 cp must divide the sequence of 8192 tokens, got cp 3"),
        ({"dp": 4, "ep": 2}, 4, "ep must divide experts = 1, got 2"),
        ({"dp": 128}, 128, "dp must be at most the global batch of 64 sequences, got 128"),
        ({"dp": 4, "micro_batch": 32}, 4, "dp x micro_batch must divide the global batch of 64"),
        (
            {"dp": 16, "pp": 4, "micro_batch": 2, "chunks": 2},
            64,
            "pp must divide the 2 micro-batch",
        ),
        ({"dp": 16, "pp": 8, "schedule": "ZB-H1"}, 128, "at least pp = 8 micro-batches, got 4"),
    ],
)
def test_a_broken_rule_of_model_or_batch_is_named(degrees, n_gpus, words):
    assert words in refusal(LLAMA, n_gpus, pl.Layout(**degrees), 8192, 64)


def test_a_layout_that_breaks_no_rule_is_not_refused():
    layout = pl.Layout(dp=4, tp=8, pp=4, cp=2, chunks=8, sequence_parallel=True)
    assert refusal(LLAMA, 256, layout, 8192, 64) == ""


def test_more_experts_than_ranks_can_share_are_refused():
    mixtral = pl.model("mixtral-8x7b")
    assert "ep must divide experts = 8, got 16" in refusal(
        mixtral, 16, pl.Layout(dp=16, ep=16), 4096, 16
    )
    per_op = pl.Layout(dp=8, ep=8, recompute="per-op")
    assert "per-op with experts" in refusal(mixtral, 8, per_op, 4096, 8)
