"""Memory at full size: PyTorch's machinery under fake tensors, beside formulas and real ranks."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import parlab as pl
from parlab.distributed import compat, fake_scale, zero
from parlab.distributed.fake_scale import GPT_7_5B, MOMENTS, measure, measure_here, stage_3_peak
from parlab.distributed.gpt import GPT, GPTConfig
from parlab.distributed.launch import RankError, run_ranks
from parlab.models import ModelConfig

# 54, 101 and 26 rows leave a rest for 4 ranks; so do most sizes of whole parameters.
UNEVEN = ModelConfig(layers=2, hidden=54, heads=6, vocab=101, positions=26, tied=False)
EVEN = ModelConfig(layers=4, hidden=64, heads=4, vocab=128, positions=32)


def states(measured):
    return measured.after_step[:3]


def test_the_7_5b_gpt_has_a_published_shape_and_the_zero_papers_size():
    rows = pl.published_table("weak-scaling").rows
    (row,) = (row for row in rows if row["params_billion"] == 7.5)
    sizes = ("layers", "hidden", "heads")
    assert [getattr(GPT_7_5B, size) for size in sizes] == [row[size] for size in sizes]
    assert GPT_7_5B.n_params == 7_501_340_672


@pytest.fixture(scope="module")
def full_size():
    return {stage: measure(stage) for stage in (2, 3)}


@pytest.mark.parametrize("stage, published_gb", [(2, 16.64), (3, 1.875)])
def test_7_5b_on_64_ranks_after_the_step_zero_paper(full_size, stage, published_gb):
    measured, psi = full_size[stage], GPT_7_5B.n_params
    assert states(measured) == pl.zero_memory(psi, 64, stage)[:3]  # to the byte: 64 divides
    assert measured.after_step.total / 1e9 == pytest.approx(published_gb, abs=0.005)


def test_the_peak_of_stage_3_at_full_size_item_by_item(full_size):
    seen = dict(full_size[3].moments["backward"])
    assert full_size[3].peak_moment == "backward"
    assert seen.pop("tokens") == 2 * 2048 * 8  # and their targets
    seen["activations"] -= 8  # the sum of the losses and their mean
    assert seen == stage_3_peak(GPT_7_5B, 64)
    assert full_size[3].peak / 1e9 == pytest.approx(13.242, abs=5e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_activations_at_full_size_when_the_loss_is_there(full_size, stage):
    h, tokens = GPT_7_5B.hidden, 2048
    layers = pl.activation_memory_bytes(GPT_7_5B, 1, sequence=2048, dropout=False, flash=True)
    statistics = (2 * 36 + 1) * 2 * 2 * tokens  # of 73 norms, mean and deviation in bfloat16
    last_norm_and_head = 2 * 2 * tokens * h  # the inputs of both
    log_softmax = pl.logits_bytes(tokens, GPT_7_5B.vocab, element_bytes=4)
    seen = full_size[stage].moments["loss"]["activations"]
    # And 16 bytes: the sum of the losses, their mean and their number.
    assert seen == layers + statistics + last_norm_and_head + log_softmax + 16


def test_gathered_weights_at_full_size_are_embeddings_and_head_once_forward_has_ended(full_size):
    outside = GPT_7_5B.n_params - 36 * GPT_7_5B.layer_params
    assert full_size[3].moments["loss"]["gathered weights"] == 2 * outside
    # In forward, while a block's weights arrive, the buffer of the block before is still there.
    assert full_size[3].moments["forward"]["all-gather buffers"] == 2 * 2 * GPT_7_5B.layer_params


CASES = {
    "stage 0": {"stage": 0},
    "stage 0, two sequences": {"stage": 0, "micro_batch": 2},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, autocast": {"stage": 3, "recipe": "autocast"},
    "stage 3, kept weights": {"stage": 3, "reshard_after_forward": False},
    "stage 3, full recompute": {"stage": 3, "recompute": "full"},
    "stage 2, selective recompute": {"stage": 2, "recompute": "selective"},
}


def measure_cases_here():
    return {name: measure_here(config=UNEVEN, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def real():
    return run_ranks(measure_cases_here, 4)


@pytest.mark.parametrize("case", CASES)
def test_fake_equals_a_real_gloo_run_byte_for_byte_uneven_shards_included(real, case):
    # At every moment and of every kind. Ranks differ at stages 1 and 3; rank 3 has short shards.
    for rank in range(4) if case in ("stage 1", "stage 3") else [3]:
        assert measure(n_ranks=4, rank=rank, config=UNEVEN, **CASES[case]) == real[rank][case]


def parameter_shapes(config):
    gpt = GPTConfig(
        config.vocab, config.layers, config.hidden, config.heads, config.positions, tied=config.tied
    )
    return [tuple(weight.shape) for weight in GPT(gpt).parameters()]


@pytest.mark.parametrize("rank", [0, 3, 4, 5, 7])
def test_fully_shard_cuts_10_rows_over_8_ranks_as_2_2_2_2_2_0_0_0_pytorch_pr_117877(rank):
    config = ModelConfig(layers=1, hidden=10, heads=2, vocab=10, positions=10)
    shapes = parameter_shapes(config)
    fullest = pl.zero_memory(config.n_params, 8, 3, parameter_sizes=shapes).fullest
    measured = measure(3, 8, rank, config=config).after_step
    # Weights and gradients are padded to the fullest shard on every rank, the optimizer is not.
    assert measured[:2] == fullest[:2]
    mine = sum(pl.dim0_shards(shape[0], 8)[rank] * prod(shape[1:]) for shape in shapes)
    assert measured.optimizer == 12 * mine
    if rank == 0:
        assert measured[:3] == fullest[:3]


def largest_first_to_the_emptiest(sizes, n_ranks):
    """Parameters on each rank, by the greedy rule of ZeroRedundancyOptimizer's documentation."""
    ranks = [0] * n_ranks
    for size in sorted(sizes, reverse=True):
        ranks[ranks.index(min(ranks))] += size
    return ranks


def test_zero_redundancy_optimizer_deals_out_whole_parameters():
    shares = largest_first_to_the_emptiest(map(prod, parameter_shapes(UNEVEN)), 4)
    assert len(set(shares)) > 1
    for rank, share in enumerate(shares):
        measured = measure(1, 4, rank, config=UNEVEN)
        psi = UNEVEN.n_params
        assert states(measured) == (2 * psi, 2 * psi, 12 * share)
        assert measured.moments["loss"]["optimizer"] == 12 * share  # it is there all the time


@pytest.mark.parametrize("rank, gb", [(0, 31.465), (30, 31.415), (63, 31.215)])
def test_whole_parameters_of_7_5b_on_64_ranks_are_uneven(rank, gb):
    # The bytes that `measure(1, rank=...)` gives in seconds each, by the same greedy rule.
    layer = [4096 * 4096] * 4 + [4 * 4096 * 4096] * 2 + [4096] * 9 + [4 * 4096]
    sizes = [*layer * 36, 29696 * 4096, 29696 * 4096, 2048 * 4096, 4096, 4096]
    assert sum(sizes) == GPT_7_5B.n_params
    share = largest_first_to_the_emptiest(sizes, 64)[rank]
    assert (4 * sum(sizes) + 12 * share) / 1e9 == pytest.approx(gb, abs=5e-4)
    mean = pl.zero_memory_bytes(sum(sizes), 64, 1) / 1e9
    assert mean == pytest.approx(31.41, abs=0.005)


def test_keeping_gathered_weights_changes_the_peak_not_what_stays_pytorch_pr_118017():
    kept, freed = (measure(3, 8, config=EVEN, reshard_after_forward=keep) for keep in (False, True))
    assert kept.moments["after the step"] == freed.moments["after the step"]
    assert kept.moments["loss"]["gathered weights"] == 2 * EVEN.n_params
    assert kept.peak > freed.peak


def test_fp32_shards_have_4_4_8_bytes_and_the_same_sum():
    mixed, fp32 = (measure(3, 8, config=EVEN, recipe=r) for r in ("mixed-precision", "autocast"))
    share = EVEN.n_params // 8
    assert states(mixed) == (2 * share, 2 * share, 12 * share)
    assert states(fp32) == (4 * share, 4 * share, 8 * share)
    # Gathered in bfloat16 all the same.
    assert fp32.moments["loss"]["gathered weights"] == mixed.moments["loss"]["gathered weights"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_drops_what_the_formula_says(recompute):
    def kept(config):
        size = {"sequence": 32, "dropout": False, "flash": True, "recompute": recompute}
        return pl.activation_memory_bytes(config, 3, **size)

    deep, shallow = replace(EVEN, layers=4), replace(EVEN, layers=1)
    options = {"n_ranks": 2, "micro_batch": 3, "recompute": recompute}
    seen = [
        measure(3, config=config, **options).moments["loss"]["activations"]
        for config in (deep, shallow)
    ]
    statistics = 0 if recompute == "full" else 2 * 2 * 2 * 3 * 32  # of a block's two norms
    assert seen[0] - seen[1] == kept(deep) - kept(shallow) + 3 * statistics


def test_moments_and_peak_are_read_off_the_items():
    measured = measure(2, 2, config=EVEN)
    assert tuple(measured.moments) == MOMENTS
    totals = {moment: sum(items.values()) for moment, items in measured.moments.items()}
    assert totals == {moment: measured.at(moment) for moment in MOMENTS}
    assert measured.peak == max(totals.values()) == totals[measured.peak_moment]
    with pytest.raises(ValueError, match=r"moment must be one of .*'losses'; did you mean loss"):
        measured.at("losses")


def rank_squared():
    return dist.get_rank() ** 2


def test_nothing_is_left_behind_and_real_ranks_run_afterwards():
    dtype = torch.get_default_dtype()
    first = measure(3, 4, config=EVEN)
    assert not dist.is_initialized()
    assert torch.get_default_dtype() == dtype
    assert run_ranks(rank_squared, 2) == [0, 1]
    assert measure(3, 4, config=EVEN) == first
    assert type(torch.ones(1)) is torch.Tensor


def test_a_failure_inside_leaves_nothing_behind_either():
    dtype = torch.get_default_dtype()

    def fail(line):
        raise KeyError(line)

    for _ in range(2):
        with pytest.raises(KeyError):
            measure(3, 4, config=EVEN, progress=fail)
    assert not dist.is_initialized()
    assert torch.get_default_dtype() == dtype


def measure_inside_ranks():
    return measure(3, 4, config=EVEN)


def test_inside_real_ranks_the_fake_group_is_refused():
    with pytest.raises(RankError, match="a process group exists already in this process"):
        run_ranks(measure_inside_ranks, 1)


def test_progress_is_silent_unless_asked_for(capsys):
    measure(2, 4, 1, config=EVEN)
    assert capsys.readouterr().out == ""
    measure(2, 4, 1, config=EVEN, progress=print)
    assert capsys.readouterr().out.splitlines() == [
        f"stage 2, rank 1 of 4: {EVEN.n_params:,} parameters",
        "stage 2, rank 1 of 4: forward",
        "stage 2, rank 1 of 4: backward",
        "stage 2, rank 1 of 4: optimizer",
    ]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"stage": 4}, ValueError, "stage must be an int from 0 to 3, got 4"),
        ({"stage": 2.0}, TypeError, "stage must be an int"),
        ({"n_ranks": 0}, ValueError, "n_ranks must be an int from 1 to 1024, got 0"),
        ({"n_ranks": 10**9}, ValueError, "n_ranks must be an int from 1 to 1024"),
        ({"rank": 4}, ValueError, "rank must be an int from 0 to 3, got 4: ranks count from 0"),
        ({"micro_batch": 0}, ValueError, "micro_batch must be an int of at least 1, got 0"),
        ({"recipe": "fp8"}, ValueError, "recipe must be one of mixed-precision, autocast"),
        ({"recipe": "autocast"}, ValueError, "recipe 'autocast' needs stage 3, got 2"),
        ({"recompute": "some"}, ValueError, "recompute must be one of none, selective, full"),
        ({"reshard_after_forward": 2}, TypeError, "reshard_after_forward must be True or False"),
        ({"config": "gpt2"}, TypeError, "config must be a ModelConfig, got str"),
        ({"config": pl.model("llama-2-7b")}, ValueError, "config must be of GPT-2's kind"),
        ({"config": replace(EVEN, positions=None)}, ValueError, "config must be of GPT-2's kind"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_measured_is_refused(change, error, message):
    case = {"stage": 2, "n_ranks": 4, "config": EVEN} | change
    with pytest.raises(error, match=re.escape(message)):
        measure(**case)
    assert not dist.is_initialized()


def test_private_names_of_torch_stay_in_compat():
    private = re.compile(r"torch\.(\w+\.)*_\w|from torch\S*\._|import _")
    for module in (fake_scale, zero):
        assert not private.search(Path(module.__file__).read_text("utf-8"))
    assert private.search(Path(compat.__file__).read_text("utf-8"))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1))
def test_chunks_of_fake_tensors_have_the_shapes_of_torch_chunk(rows, n, dim):
    tensor = torch.empty((rows, rows + 1))
    shapes = [piece.shape for piece in torch.chunk(tensor, n, dim)]
    with compat.ChunksOnce():
        assert [piece.shape for piece in torch.chunk(tensor, n, dim=dim)] == shapes


def test_the_tracker_sees_peaks_since_they_were_forgotten():
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    tracker = compat.memory_tracker(layer, optimizer, ())
    with tracker:
        big = torch.ones(1000)
        del big
        assert compat.tracked_bytes(tracker, "peak")["Activation"] == 4000
        compat.forget_peak(tracker)
        small = torch.ones(10)
        assert compat.tracked_bytes(tracker, "peak")["Activation"] == 40
        assert compat.tracked_bytes(tracker)["Parameter"] == 256
    del small
