"""Model states under ZeRO: the paper's tables, public corrections, exact shards, and experts."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl

SIZES = st.integers(0, 10**15)
GPUS = st.integers(1, 5000)
STAGES = st.integers(0, 3)
BYTES = st.sampled_from([0, 1, 2, 4, 8, 12, 16])


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("row", pl.published_table("zero-model-states").rows, ids=str)
def test_zero_paper_numbers(row, stage):
    ours = pl.zero_memory_bytes(row["n_params"], row["n_gpus"], stage) / 1e9
    published = row[f"stage_{stage}_gb"]
    # Half a unit of the last printed digit; whole numbers are exact.
    decimals = len(str(published).partition(".")[2])
    tolerance = 0.500001 * 10**-decimals if decimals else 0
    assert ours == pytest.approx(published, abs=tolerance, rel=0)


def test_7b_on_8_gpus_at_every_stage():
    published = {stage: gb for stage, gb in pl.published_table("model-states-7b").values}
    assert published == {0: 112, 1: 38.5, 2: 26.25, 3: 14}
    assert {stage: pl.zero_memory_bytes(7e9, 8, stage) / 1e9 for stage in range(4)} == published


def test_fp32_gradients_are_a_parameter_megatron_lm_pr_1345():
    ours = [pl.zero_memory_bytes(7e9, 8, stage, grad_bytes=4) / 1e9 for stage in range(4)]
    assert ours == [126, 52.5, 28, 15.75]


def test_zero_2_is_2_psi_and_14_psi_over_n_deepspeed_4076():
    assert pl.zero_memory_bytes(2.851e9, 8, 2) == 1.069125e10
    assert round(1.069125e10 / 2**30, 3) == 9.957


def test_zero_3_of_6_8_billion_on_4_deepspeed_4527():
    assert pl.zero_memory_bytes(6.805e9, 4, 3) == 2.722e10


@pytest.mark.parametrize("stage, same", [(0, True), (1, False), (2, False), (3, True)])
def test_autocast_and_mixed_precision_agree_only_where_all_or_nothing_is_cut(stage, same):
    ours = [
        pl.zero_memory_bytes(7e9, 8, stage, **pl.BYTE_RECIPES[name].arguments)
        for name in ("mixed-precision", "autocast")
    ]
    assert (ours[0] == ours[1]) is same


def test_the_recipes_have_8_to_20_bytes_and_a_source():
    recipes = pl.BYTE_RECIPES
    assert {name: recipe.total for name, recipe in recipes.items()} == {
        "mixed-precision": 16,
        "autocast": 16,
        "fp32-gradients": 18,
        "fp16-main-gradients": 20,
        "pure-bf16": 8,
        "sgd-momentum": 12,
        "8-bit-adam": 10,
    }
    assert all(recipe.source for recipe in recipes.values())
    with pytest.raises(TypeError):
        recipes["mine"] = recipes["autocast"]


@pytest.mark.parametrize(
    "recipe, whole, cut", [("autocast", 8, 8), ("fp32-gradients", 6, 12)], ids=str
)
def test_stage_1_is_the_distributed_optimizer_of_megatron_core(recipe, whole, cut):
    memory = pl.zero_memory(10**9, 16, 1, **pl.BYTE_RECIPES[recipe].arguments)
    assert memory.total == 10**9 * (whole + Fraction(cut, 16))


@given(SIZES, GPUS, STAGES, BYTES, BYTES, BYTES)
def test_items_sum_to_the_total_and_each_stage_cuts_one_more(n_params, n, stage, k, w, g):
    arguments = {"k": k, "weight_bytes": w, "grad_bytes": g}
    memory = pl.zero_memory(n_params, n, stage, **arguments)
    assert memory.weights + memory.gradients + memory.optimizer == memory.total
    assert memory.total == pl.zero_memory_bytes(n_params, n, stage, **arguments)
    assert memory.unsharded.total == n_params * (k + w + g)  # exact at any size
    for item, size, first in (("optimizer", k, 1), ("gradients", g, 2), ("weights", w, 3)):
        exact = Fraction(n_params * size, n if stage >= first else 1)
        # Exact where N divides; one rounded division otherwise.
        value = getattr(memory, item)
        assert value == (exact if exact.denominator == 1 else float(exact))


@given(SIZES, st.integers(1, 5000))
def test_memory_falls_with_the_stage_and_with_n(n_params, n):
    by_stage = [pl.zero_memory_bytes(n_params, n, stage) for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    for stage in range(4):
        assert pl.zero_memory_bytes(n_params, n + 1, stage) <= by_stage[stage]
        assert pl.zero_memory_bytes(n_params, 1, stage) == 16 * n_params
    assert by_stage[3] == pytest.approx(16 * n_params / n, rel=1e-15)  # three roundings


def test_counts_stay_exact_beyond_the_integers_of_a_float():
    n_params = 10**15 - 1
    optimizer = pl.zero_memory(n_params, 1, 3, k=11).optimizer
    assert optimizer == 11 * n_params != float(11 * n_params)  # odd and above 2^53


def test_an_array_of_sizes_passes_through():
    sizes = np.array([7e9, 70e9])
    assert pl.zero_memory_bytes(sizes, 8, 2).tolist() == [26.25e9, 262.5e9]
    assert sizes.tolist() == [7e9, 70e9]


def test_10_rows_over_8_ranks_pytorch_pr_117877():
    assert pl.dim0_shards(10, 8) == [2, 2, 2, 2, 2, 0, 0, 0]
    memory = pl.zero_memory(10, 8, 3, parameter_sizes=[10])
    assert memory.total == 20 and memory.fullest.total == 32  # 12.5% and 20% of 160


@given(st.integers(0, 300), st.integers(1, 40))
def test_shards_of_dim_0_are_those_of_torch_chunk(torch, rows, n):
    # torch.chunk leaves out empty chunks, and cuts an empty tensor into one.
    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(n) if len(chunk)]
    assert pl.dim0_shards(rows, n) == chunks + [0] * (n - len(chunks))


@settings(deadline=None)  # thousands of ranks, each counted
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), max_size=6), GPUS, STAGES)
def test_the_fullest_rank_holds_the_largest_shards(shapes, n, stage):
    n_params = sum(int(np.prod(shape)) for shape in shapes)
    memory = pl.zero_memory(n_params, n, stage, parameter_sizes=shapes)
    per_rank = [0] * n
    for shape in shapes:
        for rank, rows in enumerate(pl.dim0_shards(shape[0], n)):
            per_rank[rank] += rows * int(np.prod(shape[1:]))
    assert sum(per_rank) == n_params
    largest = max(per_rank)
    assert memory.fullest.optimizer == 12 * (largest if stage >= 1 else n_params)
    assert memory.fullest.gradients == 2 * (largest if stage >= 2 else n_params)
    assert memory.fullest.weights == 2 * (largest if stage >= 3 else n_params)
    assert memory.fullest.total >= memory.total * (1 - 1e-15)


# Experts.


def test_expert_states_shard_over_the_ranks_that_have_them_aiconfigurator_pr_1390():
    mixtral = pl.model("mixtral-8x7b")
    assert (mixtral.n_params, mixtral.n_active_params) == (46_702_792_704, 12_879_925_248)
    memory = pl.expert_zero_memory(mixtral, 64, 1, expert_parallel=8)
    assert round(memory.total / 1e9, 2) == 37.73
    # The wrong answer shards the optimizer of experts over all 64 ranks.
    here = mixtral.n_params - mixtral.parameters.mlp * 7 // 8
    assert round(pl.zero_memory_bytes(here, 64, 1) / 1e9, 2) == 30.33


def test_an_experts_rank_by_hand():
    # 32 layers of 8 experts, each with 3 matrices of 4096 x 14336; 8 groups of 8 ranks.
    experts = 32 * 3 * 4096 * 14336
    shared = 46_702_792_704 - 8 * experts
    memory = pl.expert_zero_memory(pl.model("mixtral-8x7b"), 64, 1, expert_parallel=8)
    assert memory.experts.weights == memory.experts.gradients == 2 * experts
    assert memory.experts.optimizer == 12 * experts / 8
    assert memory.shared[:3] == (2 * shared, 2 * shared, 12 * shared / 64)
    assert memory.weights == memory.gradients == 2 * (shared + experts)
    assert memory.optimizer == 12 * experts / 8 + 12 * shared / 64


@given(stage=STAGES, power=st.integers(0, 3), n=st.sampled_from([8, 16, 64]), g=BYTES)
def test_expert_parallelism_cuts_what_zero_leaves_whole(stage, power, n, g):
    mixtral, ep = pl.model("mixtral-8x7b"), 2**power
    memory = pl.expert_zero_memory(mixtral, n, stage, expert_parallel=ep, grad_bytes=g)
    total = pl.expert_zero_memory_bytes(mixtral, n, stage, expert_parallel=ep, grad_bytes=g)
    assert memory.total == total == memory.weights + memory.gradients + memory.optimizer
    # What ZeRO cuts is cut N ways in all, however the ranks are grouped.
    plain = pl.zero_memory(mixtral.n_params, n, stage, grad_bytes=g)
    for item, first in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        ours, theirs = getattr(memory, item), getattr(plain, item)
        if stage >= first or ep == 1:
            assert ours == pytest.approx(theirs, rel=1e-15)  # two rounded divisions
        else:
            assert ours <= theirs


def test_a_model_without_experts_is_plain_zero():
    llama = pl.model("llama-3-8b")
    for stage in range(4):
        ours = pl.expert_zero_memory_bytes(llama, 64, stage)
        assert ours == pl.zero_memory_bytes(llama.n_params, 64, stage)


@pytest.mark.parametrize(
    "ep, n, message",
    [
        (3, 64, "expert_parallel must divide experts = 8, got 3"),
        (8, 12, "expert_parallel must divide n_gpus = 12, got 8"),
        (0, 8, "expert_parallel must be an int of at least 1"),
    ],
)
def test_bad_expert_groups_are_named(ep, n, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        pl.expert_zero_memory(pl.model("mixtral-8x7b"), n, 1, expert_parallel=ep)


GOOD = {"n_params": 100, "n_gpus": 4, "stage": 1}


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("stage", 4, ValueError),
        ("stage", -1, ValueError),
        ("stage", 1.0, TypeError),
        ("stage", True, TypeError),
        ("n_gpus", 0, ValueError),
        ("n_gpus", 10**10, ValueError),
        ("n_params", -1, ValueError),
        ("n_params", float("nan"), ValueError),
        ("n_params", 10**18, ValueError),
        ("n_params", "7B", TypeError),
        ("n_params", np.array([1.0, 1e18]), ValueError),
        ("weight_bytes", -2, ValueError),
        ("grad_bytes", float("inf"), ValueError),
        ("k", None, TypeError),
    ],
    ids=str,
)
def test_bad_input_is_named(name, value, error):
    with pytest.raises(error, match=f"^{name} must be "):
        pl.zero_memory_bytes(**{**GOOD, name: value})


@pytest.mark.parametrize(
    "n_params, sizes, error, message",
    [
        (11, [10], ValueError, "parameter_sizes must sum to n_params = 11, got 10"),
        (1, [()], ValueError, "parameter_sizes must have a first dim"),
        (1, [-1], ValueError, "parameter_sizes must be an int of at least 0"),
        (2, [2.0], TypeError, "parameter_sizes must be an int"),
        (2.5, [2], TypeError, "n_params must be an int"),
    ],
    ids=str,
)
def test_bad_sizes_are_named(n_params, sizes, error, message):
    with pytest.raises(error, match=message):
        pl.zero_memory(n_params, 2, 3, parameter_sizes=sizes)


@pytest.mark.parametrize("rows, n, name", [(-1, 2, "rows"), (4, 0, "n_gpus"), (4, 10**9, "n_gpus")])
def test_bad_shards_are_named(rows, n, name):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        pl.dim0_shards(rows, n)
