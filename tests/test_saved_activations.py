"""What autograd keeps: the formula against hooks at production sizes, its limits, and its peak."""

import gc
import itertools
import weakref
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parlab as pl
from parlab.distributed import compat, gpt
from parlab.distributed.launch import run_ranks
from parlab.distributed.layer_memory import (
    beside_formula,
    build_layer,
    count_flops,
    measure_layer,
)
from parlab.distributed.layers import (
    Core,
    Layer,
    Recomputed,
    RMSNorm,
    _GatheredLinears,
    in_segments,
)
from parlab.distributed.live import LiveBytes
from parlab.distributed.saved import history, measure
from parlab.distributed.saved_watch import Saver
from parlab.distributed.sharding import gather_sequence

GPT3 = pl.ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)
LLAMA = pl.model("llama-3-8b")
SMALL = pl.ModelConfig(layers=1, hidden=64, heads=4, vocab=100)
SMALL_LLAMA = pl.ModelConfig(
    layers=1, hidden=64, heads=8, kv_heads=2, ffn=96, gated=True, norm="rms", vocab=100
)
BF16 = torch.bfloat16


def fake_layer(config, attention="naive", *, dtype=BF16, **options):
    return build_layer(config, attention, dtype=dtype, **options)


def fake_input(config, sequence, micro_batch=2, dtype=BF16):
    return torch.empty(micro_batch, sequence, config.hidden, dtype=dtype)


# The layer of GPT-3, 175B: Korthikanti et al., sections 4 and 5.

PAPER = {
    ("none", False): lambda t: 10 + Fraction(24, t) + Fraction(80, t),
    ("none", True): lambda t: Fraction(34 + 80, t),
    ("selective", False): lambda t: 10 + Fraction(24, t),
    ("selective", True): lambda t: Fraction(34, t),
    ("full", False): lambda t: 2,
    ("full", True): lambda t: Fraction(2, t),
}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)], ids=["1", "8", "8-sequence"]
)
def test_gpt_3_keeps_what_the_paper_says_and_statistics_of_two_norms(
    tp, sequence_parallel, recompute
):
    options = {"tp": tp, "sequence_parallel": sequence_parallel, "recompute": recompute}
    kept = measure_layer(GPT3, 2, sequence=2048, **options)
    sbh = 2048 * 2 * 12288
    # A mean and a deviation of 2 bytes for each token that this rank normalises, twice.
    positions = 2048 * 2 // (tp if sequence_parallel else 1)
    statistics = 0 if recompute == "full" else 2 * 2 * 2 * positions
    assert kept.total == PAPER[recompute, sequence_parallel](tp) * sbh + statistics


def test_selective_recomputation_leaves_34_of_114_megatron_lm_1225():
    whole, selective = (
        measure_layer(GPT3, 2, sequence=2048, recompute=r).total for r in ("none", "selective")
    )
    statistics = 8 * 2 * 2048
    assert Fraction(selective - statistics, whole - statistics) == Fraction(34, 114)
    assert whole - selective == 80 * 2048 * 2 * 12288  # 5 a s / h = 80


def test_llama_3_keeps_41_sbh_with_flash_attention():
    kept = measure_layer(LLAMA, 2, sequence=8192, dropout=False, flash=True)
    s_b, h, f, keys = 8192 * 2, 4096, 14336, 1024  # 8 of 32 heads
    norms, attention, mlp = 4 * h, 2 * h + 4 * h + 4 * keys, 2 * h + 8 * f
    log_sum_exp, rms, seed = 4 * 32, 2 * 4, 24
    assert kept.total == s_b * (norms + attention + mlp + log_sum_exp + rms) + seed
    assert kept.total / (s_b * h) == pytest.approx(41.0332, abs=1e-4)


OPTIONS = [
    {"sequence_parallel": cut, "tp": tp, "recompute": recompute, "dropout": dropout, "flash": flash}
    for tp, cut in ((1, False), (8, False), (8, True))
    for recompute in ("none", "selective", "full")
    for dropout, flash in itertools.product((False, True), repeat=2)
]


@pytest.mark.parametrize(
    ("config", "sequence"), [(GPT3, 2048), (LLAMA, 8192)], ids=["gpt-3", "llama-3-8b"]
)
def test_every_tensor_has_the_bytes_of_the_formula(config, sequence):
    for options in OPTIONS:
        lines = beside_formula(config, 2, sequence=sequence, **options)
        extra = {line.tensor: line.measured for line in lines if line.measured != line.formula}
        positions = 2 * sequence // (options["tp"] if options["sequence_parallel"] else 1)
        expected = {} if options["recompute"] == "full" else {"statistics": 8 * positions}
        if options["flash"] and options["recompute"] == "none":
            expected["random seed"] = 24
        assert extra == expected, options


def test_the_measured_column_adds_up_to_all_that_is_kept():
    lines = beside_formula(GPT3, 2, sequence=2048, flash=True)
    kept = measure_layer(GPT3, 2, sequence=2048, flash=True)
    assert sum(line.measured for line in lines) == kept.total


# Blocks, as measured in public (Megatron-LM 1225, flash-attention 899).

BLOCKS = {
    "attention, flash": ("attention", "flash", False, lambda sbh, abs, as2b: 10 * sbh + 4 * abs),
    "attention, naive": ("attention", "naive", False, lambda sbh, abs, as2b: 10 * sbh + 2 * as2b),
    "attention, naive, dropout": (
        "attention", "naive", True, lambda sbh, abs, as2b: 11 * sbh + 5 * as2b,
    ),
    "GeLU MLP": ("mlp", "naive", False, lambda sbh, abs, as2b: 18 * sbh),
    "GeLU MLP, dropout": ("mlp", "naive", True, lambda sbh, abs, as2b: 19 * sbh),
}  # fmt: skip


@pytest.mark.parametrize(("part", "attention", "dropout", "expected"), BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(
    ("h", "a", "s"), [(12288, 96, 2048), (8192, 64, 4096)], ids=["175B", "70B"]
)
def test_blocks_keep_what_was_measured_in_public(part, attention, dropout, expected, h, a, s):
    config = pl.ModelConfig(layers=1, hidden=h, heads=a, vocab=100)
    with compat.fake_tensors():
        layer = fake_layer(config, attention, dropout=dropout)
        kept = measure(getattr(layer, part), fake_input(config, s))
    assert kept.total == expected(s * 2 * h, a * 2 * s, a * s * s * 2)


def test_with_flash_attention_selective_recomputation_saves_the_log_sum_exp_only():
    whole, selective = (
        measure_layer(GPT3, 2, sequence=2048, recompute=recompute, flash=True).total
        for recompute in ("none", "selective")
    )
    assert whole - selective == 4 * 96 * 2 * 2048 + 24


# Dropout under a flash kernel.


def test_a_gpus_flash_kernel_keeps_a_seed_and_no_mask():
    with compat.fake_tensors():
        q = torch.empty(2, 96, 2048, 128, dtype=BF16)
        with_dropout = measure(lambda q: compat.gpu_flash_attention(q, q, q, 0.1), q)
        without = measure(lambda q: compat.gpu_flash_attention(q, q, q, 0.0), q)
    assert with_dropout.total == without.total
    seed = [item for item in with_dropout.items if item.dtype is torch.uint64]
    assert sum(item.bytes for item in seed) == 24
    assert not [item for item in with_dropout.items if item.shape[-2:] == (2048, 2048)]


def test_on_a_cpu_dropout_turns_torchs_kernel_into_fp32_arithmetic_that_keeps_the_scores():
    def kept(dropout):
        with compat.fake_tensors():
            layer = fake_layer(GPT3, "flash")
            layer.attention.core.dropout = dropout
            return measure(layer.attention.core, *[torch.empty(2, 96, 2048, 128, dtype=BF16)] * 3)

    sbh, scores = 2 * 2048 * 12288, 2 * 96 * 2048 * 2048
    assert kept(0.0).total == 2 * sbh + 2 * sbh + 4 * 96 * 2 * 2048  # one tensor is q, k and v here
    # Copies of q, k and v; softmax, its mask and their product: 4 bytes each.
    assert kept(0.1).total == 4 * (3 * sbh + 3 * scores)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_cpus_flash_kernel_keeps_what_a_gpus_does_but_the_seed(fake):
    config = SMALL_LLAMA

    def kept(attention):
        with compat.fake_tensors():
            return measure(fake_layer(config, attention), fake_input(config, 32))

    ours = kept("flash")
    if not fake:
        ours = measure(fake_layer(config, "flash"), torch.ones(2, 32, 64, dtype=BF16))
    assert kept("gpu-flash").total - ours.total == 24


# Real tensors.

SAME = {
    "naive": (SMALL, {}),
    "naive, dropout": (SMALL, {"dropout": True}),
    "selective": (SMALL, {"recompute": "selective", "dropout": True}),
    "full": (SMALL, {"recompute": "full"}),
    "flash": (SMALL, {"attention": "flash"}),
    "grouped, gated, rms": (SMALL_LLAMA, {"dropout": True}),
    "grouped, gated, rms, flash": (SMALL_LLAMA, {"attention": "flash"}),
}


@pytest.mark.parametrize(("config", "options"), SAME.values(), ids=SAME)
def test_real_tensors_keep_the_same_as_fake_ones_byte_for_byte(config, options):
    real = measure(fake_layer(config, **options), torch.ones(2, 32, 64, dtype=BF16))
    with compat.fake_tensors():
        fake = measure(fake_layer(config, **options), fake_input(config, 32))
    assert real.items == fake.items
    assert real.total > 0


def test_a_real_history_is_the_fake_one():
    def run(x):
        layers = [fake_layer(SMALL, dropout=True) for _ in range(4)]
        return history(in_segments(layers, 2), x)

    real = run(torch.ones(2, 32, 64, dtype=BF16))
    with compat.fake_tensors():
        fake = run(fake_input(SMALL, 32))
    assert real.moments == fake.moments


# Where the formula does not hold. Bytes per s b h, by what is kept.


def per_sbh(function, config, sequence, micro_batch=2, dtype=BF16, parameters=None):
    x = fake_input(config, sequence, micro_batch, dtype)
    kept = measure(function, x, parameters=parameters)
    return Fraction(kept.total, sequence * micro_batch * config.hidden)


def test_fp32_doubles_all_but_the_masks():
    with compat.fake_tensors():
        layer = fake_layer(GPT3, dropout=True, dtype=torch.float32)
        found = per_sbh(layer, GPT3, 2048, dtype=torch.float32)
    masks = 2 + 16  # a byte an element: two of (s, b, h), one of the scores
    assert found == 2 * (114 - masks) + masks + Fraction(16, 12288)


@pytest.mark.parametrize(
    ("stream", "more"),
    # The norms' inputs in fp32, and a cast of the first one's result for each of q, k and v.
    [(BF16, 0), (torch.float32, 2 + 2 + 2 * 2)],
    ids=["bf16 stream", "fp32 stream"],
)
def test_autocast_keeps_a_16_bit_copy_of_every_weight(stream, more):
    with compat.fake_tensors(), torch.autocast("cpu", BF16):
        layer = fake_layer(GPT3, dtype=torch.float32)
        found = per_sbh(layer, GPT3, 2048, dtype=stream)
    weights = Fraction(2 * 12 * 12288**2, 2 * 2048 * 12288)  # 72 sbh
    statistics = Fraction(8 if stream is BF16 else 16, 12288)
    assert found == 64 + weights + more + statistics


def test_dropout_on_a_cpu_keeps_its_mask_in_16_bits():
    with compat.fake_tensors():
        assert per_sbh(lambda x: F.dropout(x, 0.1), GPT3, 2048) == 2
        assert per_sbh(lambda x: gpt.drop(x, 0.1, True), GPT3, 2048) == 1


def test_an_rms_norm_in_plain_operators_keeps_8_sbh_not_2():
    with compat.fake_tensors():
        plain = per_sbh(nn.RMSNorm(4096, dtype=BF16), LLAMA, 8192)
        fused = per_sbh(RMSNorm(4096, dtype=BF16), LLAMA, 8192)
    assert (plain, fused) == (8 + Fraction(4, 4096), 2 + Fraction(4, 4096))


def test_repeated_keys_and_values_undo_what_grouped_queries_save():
    def block(kv_heads):
        size = {"vocab": 8, "layers": 1, "hidden": 4096, "heads": 32, "sequence": 8192}
        return gpt.Block(gpt.GPTConfig(**size, kv_heads=kv_heads))

    with compat.fake_tensors():
        assert measure(block(8), torch.empty(2, 8192, 4096)).total == (
            measure(block(32), torch.empty(2, 8192, 4096)).total
        )
    grouped, full = (
        measure_layer(replace(LLAMA, kv_heads=k), 2, sequence=8192, flash=True).total
        for k in (8, 32)
    )
    assert full - grouped == 2 * 2 * Fraction(3, 4) * 2 * 8192 * 4096


class PackedAttention(nn.Module):
    """Queries, keys and values from one matrix, as in many codes."""

    def __init__(self, hidden, heads, rotate=False, flash=True):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, dtype=BF16)
        self.heads, self.rotate = heads, rotate
        self.core = Core("flash", 0.0) if flash else lambda *qkv: gpt.attend_explicitly(*qkv, 0.0)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.rotate:
            q, k = q.neg() * 2, k.neg() * 2  # anything that makes new ones and keeps nothing
        return self.core(q, k, v)


def test_with_packed_queries_keys_and_values_a_rotation_costs_4_sbh():
    with compat.fake_tensors():
        plain, rotated = (
            per_sbh(PackedAttention(4096, 32, rotate), LLAMA, 2048) for rotate in (False, True)
        )
    assert plain == 2 + 6 + 2 + Fraction(4 * 32, 4096)  # input, q k v, output, log-sum-exp
    assert rotated == plain + 4  # v is a view and holds the old q and k


def test_with_a_batch_of_one_views_of_packed_keys_hold_the_queries_too():
    def kept(micro_batch):
        attention = PackedAttention(4096, 32, flash=False)
        return per_sbh(attention, LLAMA, 2048, micro_batch)

    with compat.fake_tensors():
        one, two = kept(1), kept(2)
    assert two == 2 + 6 + 2 * 32 * Fraction(2048, 4096)  # input, q k v copied, softmax
    assert one == two + 2  # scaled q and all of (q, k, v), not copies of k and v


def test_a_fused_swiglu_keeps_less_than_8_sbf():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return F.silu(gate) * up

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError

    def mlp(x, product):
        gate, up, down = (torch.empty(*shape, dtype=BF16) for shape in shapes)
        return F.linear(product(F.linear(x, gate), F.linear(x, up)), down)

    shapes = [(14336, 4096), (14336, 4096), (4096, 14336)]
    s_b_f = Fraction(14336, 4096)
    with compat.fake_tensors():
        weights_kept = 3 * Fraction(2 * 14336 * 4096, 2 * 2048 * 4096)
        plain = per_sbh(lambda x: mlp(x, lambda g, u: F.silu(g) * u), LLAMA, 2048)
        fused = per_sbh(lambda x: mlp(x, Fused.apply), LLAMA, 2048)
    assert plain - fused == 2 * s_b_f  # SiLU of the gate
    # Weights that need no gradient keep no input, so 2 sbh for x is missing here; SiLU's input,
    # both factors; the product is kept for nobody.
    assert plain == 6 * s_b_f + weights_kept


# Names and storages.


def test_items_say_who_keeps_what():
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    kept = measure(mlp, torch.ones(5, 8))
    assert [(item.shape, item.dtype, item.bytes, item.savers) for item in kept.items] == [
        ((5, 8), torch.float32, 160, (Saver("0", "linear", 0, "input 0"),)),
        ((5, 32), torch.float32, 640, (Saver("1", "gelu", 0, "input 0"),)),
        ((5, 32), torch.float32, 640, (Saver("2", "linear", 0, "input 0"),)),
    ]


def test_a_tensor_that_several_functions_keep_counts_once():
    kept = measure(lambda x: (x.sin(), x.cos(), x.exp()), torch.ones(10))
    assert kept.total == 40 + 40  # x, and the result of exp
    assert [saver.operation for saver in kept.items[0].savers] == ["sin", "cos"]
    assert kept.items[1].savers == (Saver("", "exp", 0, "output 0"),)


def test_a_view_keeps_all_of_its_storage():
    kept = measure(lambda x: (2 * x)[:1].sin(), torch.ones(1000))
    assert (kept.total, kept.items[0].shape) == (4000, (1,))


def test_what_is_dropped_before_the_end_of_forward_is_not_kept():
    def function(x):
        x.sin().cos()
        return 2 * x

    assert measure(function, torch.ones(10)).total == 0


def test_parameters_and_buffers_are_left_out_even_as_views():
    norm = nn.BatchNorm1d(6).eval()
    assert measure(norm, torch.ones(4, 6)).total == 4 * 6 * 4
    weight = torch.ones(3, 8, requires_grad=True)
    for parameters, expected in ((None, 16 * 4 + 3 * 8 * 4), ([weight], 16 * 4)):
        kept = measure(lambda x: x @ weight.T, torch.ones(2, 8), parameters=parameters)
        assert kept.total == expected


def test_an_empty_tensor_is_no_item():
    assert measure(lambda x: x[:0].clone().sin(), torch.ones(10)).items == ()


def test_calls_in_one_module_are_numbered():
    kept = measure(lambda x: x.sin().sin(), torch.ones(10))
    assert [item.savers[0].call for item in kept.items] == [0, 1]


def test_a_table_shows_one_line_an_item(capsys):
    measure(nn.Sequential(nn.Linear(8, 32), nn.GELU()), torch.ones(5, 8)).show()
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "module operation keeps its shape dtype bytes",
        "0 linear input 0 5 x 8 float32 160 B",
        "1 gelu input 0 5 x 32 float32 640 B",
    ]


@pytest.mark.parametrize("run", [measure, history])
def test_a_measurement_changes_nothing(run):
    layer = nn.Linear(4, 4)
    layer.weight.grad = torch.full((4, 4), 7.0)
    x = torch.ones(2, 4)
    run(layer, x)
    assert (layer.weight.grad == 7).all() and layer.bias.grad is None
    assert not x.requires_grad and x.grad is None
    assert not layer._forward_hooks and not layer._forward_pre_hooks
    assert layer(x).requires_grad


@pytest.mark.parametrize("run", [measure, history])
def test_a_failing_forward_leaves_no_hooks_behind(run):
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        run(layer, torch.ones(2, 5))
    assert not layer._forward_hooks and not layer._forward_pre_hooks
    assert compat.second_forward_hooks() is None


@pytest.mark.parametrize("run", [measure, history])
def test_a_result_without_gradient_is_refused(run):
    with pytest.raises(ValueError, match="^function must return a tensor that needs a gradient"):
        run(lambda x: x.argmax(), torch.ones(3))
    with torch.no_grad(), pytest.raises(ValueError, match="^function must return"):
        run(nn.Linear(3, 3), torch.ones(3))


# The peak.

S, B, H = 32, 2, 64
SBH = S * B * H
WORTH = 34 * SBH + 5 * 4 * S * S * B + 8 * S * B  # a layer of SMALL, with statistics


def small_layers(n, **options):
    return [fake_layer(SMALL, dropout=True, **options) for _ in range(n)]


def run_history(module, sequence=S):
    run = history(module, torch.ones(B, sequence, H, dtype=BF16))
    assert run.moments[-1].bytes == 0
    events = [moment.event for moment in run.moments]
    assert "forward" not in events[events.index("backward") :]
    assert "recompute" not in events[: events.count("forward")]
    return run


def test_without_recomputation_the_peak_is_what_forward_keeps():
    run = run_history(nn.Sequential(*small_layers(6)))
    assert run.after_forward == run.peak == 6 * WORTH
    assert {moment.event for moment in run.moments} == {"forward", "backward"}
    sizes = [moment.bytes for moment in run.moments]
    top = sizes.index(run.peak)
    assert sizes[: top + 1] == sorted(sizes[: top + 1])
    assert sizes[top:] == sorted(sizes[top:], reverse=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_full_recomputation_brings_back_one_segment_at_a_time(size):
    layers, segments = 6, -(-6 // size)
    run = run_history(in_segments(small_layers(layers), size))
    assert run.after_forward == 2 * SBH * segments
    last = layers - size * (segments - 1)
    # The first tensor of a segment is its input, which is kept already. The last, shorter segment
    # runs first, with all inputs; one input is gone when a whole one runs.
    inputs_and_worth = (
        [(segments, last), (segments - 1, size)] if last < size else [(segments, size)]
    )
    assert run.peak == max(2 * SBH * (n - 1) + worth * WORTH for n, worth in inputs_and_worth)


def test_layers_come_back_from_the_last_to_the_first():
    run = run_history(in_segments(small_layers(3), 1))
    again = [moment.module.split(".")[0] for moment in run.moments if moment.event == "recompute"]
    assert list(dict.fromkeys(again)) == ["2", "1", "0"]


def selective_peak(inner, sequence):
    """Most bytes of a layer whose scores come back in backward, from what forward keeps of it.

    By then backward has freed 24 sbh of it: the MLP's 19, the second norm's input and statistics,
    the mask and the input of the projection. It keeps new copies of q, k and v, 6 sbh.
    """
    sbh, scores = sequence * B * H, 5 * 4 * sequence * sequence * B
    return max(inner, inner - 18 * sbh - 4 * sequence * B + scores)


@pytest.mark.parametrize("sequence", [32, 96])
def test_selective_recomputation_brings_back_one_layers_scores(sequence):
    run = run_history(nn.Sequential(*small_layers(6, recompute="selective")), sequence)
    inner = 34 * sequence * B * H + 8 * sequence * B
    assert run.after_forward == 6 * inner
    assert run.peak == 5 * inner + selective_peak(inner, sequence)
    assert (run.peak > run.after_forward) == (sequence == 96)


@pytest.mark.parametrize("sequence", [32, 96])
def test_a_region_inside_a_recomputed_layer_comes_back_by_itself(sequence):
    layers = [Recomputed(layer) for layer in small_layers(2, recompute="selective")]
    run = run_history(nn.Sequential(*layers), sequence)
    inner = 34 * sequence * B * H + 8 * sequence * B
    assert run.after_forward == 2 * 2 * sequence * B * H
    assert run.peak == 2 * sequence * B * H + selective_peak(inner, sequence)


def test_custom_functions_count_when_they_run_again():
    layers = [fake_layer(SMALL_LLAMA) for _ in range(3)]  # whose norms are custom functions
    worth = measure(layers[0], torch.ones(B, S, H, dtype=BF16)).total
    run = run_history(in_segments(layers, 1))
    assert run.peak == 2 * 2 * SBH + worth


def test_the_history_of_a_module_begins_with_what_measure_finds():
    config = replace(gpt.TINY, dropout=0.1, attention="explicit")
    for recompute in ("none", "selective", "full"):
        model = gpt.GPT(replace(config, recompute=recompute))
        tokens, _ = gpt.token_batch(config, 2)
        run = history(model, tokens)
        assert run.after_forward == measure(model, tokens).total
        assert run.moments[-1].bytes == 0


# Forward again: FLOP.


@pytest.mark.parametrize(
    ("config", "sequence"), [(GPT3, 2048), (LLAMA, 8192)], ids=["gpt-3", "llama-3-8b"]
)
def test_torch_counts_the_flop_of_the_formula_without_a_causal_discount(config, sequence):
    flops = count_flops(config, 2, sequence=sequence)
    formula = config.flops_per_token(sequence, causal=False)
    layer = (formula.attention + formula.scores + formula.mlp) // config.layers * 2 * sequence
    assert (flops.forward, flops.recompute, flops.backward) == (layer, 0, 2 * layer)


def test_a_whole_second_forward_adds_a_third():
    flops = count_flops(GPT3, 1, sequence=2048, recompute="full", early_stop=False)
    expected = pl.layer_flops(12288, 2048, 1, recompute=True)
    assert flops.total == expected.weights + expected.scores
    assert Fraction(flops.total, flops.forward + flops.backward) == Fraction(4, 3)


def test_torch_stops_the_second_forward_before_the_last_product():
    flops = count_flops(GPT3, 1, sequence=2048, recompute="full")
    assert flops.recompute == flops.forward - 2 * 2048 * 12288 * 4 * 12288
    assert flops.recompute / (flops.forward + flops.backward) == pytest.approx(0.225, abs=0.001)


def test_selective_recomputation_adds_under_a_percent_for_gpt_3():
    # 4 s h of a token's 3 (24 h^2 + 4 s h): s / (18 h + 3 s).
    flops = count_flops(GPT3, 1, sequence=2048, recompute="selective", early_stop=False)
    share = Fraction(flops.recompute, flops.forward + flops.backward)
    assert share == Fraction(2048, 18 * 12288 + 3 * 2048) == Fraction(1, 111)
    early = count_flops(GPT3, 1, sequence=2048, recompute="selective")
    assert early.recompute * 2 == flops.recompute  # the first of two products


# Logits.

TOKENS, VOCAB = 8192, 151_936


def test_a_loss_keeps_one_fp32_copy_of_the_logits_nemo_automodel_pr_3708():
    with compat.fake_tensors():
        targets = torch.zeros(1, TOKENS, dtype=torch.int64)
        logits = torch.empty(1, TOKENS, VOCAB, dtype=BF16)
        kept = measure(lambda logits: gpt.token_loss(logits, targets), logits)
    largest = max(kept.items, key=lambda item: item.bytes)
    assert largest.bytes == pl.logits_bytes(TOKENS, VOCAB) == 4_978_638_848  # 4.637 GiB
    assert largest.dtype is torch.float32
    # Targets, the sum of weights, and the number of targets that count.
    assert kept.total == largest.bytes + 8 * TOKENS + 4 + 8


@pytest.mark.parametrize("logits_held", [False, True], ids=["logits freed", "logits held"])
def test_the_peak_of_the_loss_is_three_fp32_copies_of_the_logits(logits_held):
    with compat.fake_tensors():
        hidden = torch.empty(1, TOKENS, 16, dtype=BF16, requires_grad=True)
        head = nn.Linear(16, VOCAB, bias=False, dtype=BF16)
        targets = torch.zeros(1, TOKENS, dtype=torch.int64)
        with LiveBytes() as live:
            logits = head(hidden)
            after_head = live.now
            loss = gpt.token_loss(logits, targets)
            forward_peak = live.peak
            if not logits_held:
                del logits
            loss.backward()
    wide, narrow = TOKENS * VOCAB * 4, TOKENS * VOCAB * 2
    small = 300_000  # targets' mask, losses: far below a copy
    assert after_head == narrow
    assert 0 <= forward_peak - (narrow + 2 * wide) < small
    assert 0 <= live.peak - (3 * wide + logits_held * narrow) < small


def test_live_bytes_count_results_until_they_are_freed():
    before = torch.ones(100)
    with LiveBytes() as live:
        view = before[:50]
        before.add_(1)
        assert live.now == 0
        x = before * 2
        y = x.view(10, 10)
        assert live.now == 400
        del x
        assert live.now == 400
        del y
        z = before.sum()
    assert (live.now, live.peak) == (4, 400)
    del view, z
    assert live.now == 0


# The layer itself.


def test_our_rms_norm_is_torchs():
    torch.manual_seed(0)
    x, direction = torch.randn(2, 3, 5, 8)
    weight = torch.rand(8) + 0.5
    results = []
    for norm in (RMSNorm(8, torch.float32), nn.RMSNorm(8, eps=1e-5)):
        norm.weight = nn.Parameter(weight.clone())
        own = x.clone().requires_grad_()
        out = norm(own)
        out.backward(direction)
        results.append((out, own.grad, norm.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)  # fp32 sums of 8 or 15 numbers near 1


def test_naive_attention_with_shared_keys_is_torchs_grouped_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 4), *torch.randn(2, 2, 2, 5, 4)
    naive, flash = Core("naive", 0.0)(q, k, v), Core("flash", 0.0)(q, k, v)
    assert torch.allclose(naive, flash, atol=1e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_recomputed_layer_has_the_same_gradients(recompute):
    torch.manual_seed(0)
    layer = build_layer(SMALL_LLAMA, "naive", dropout=True, dtype=torch.float32)
    again = build_layer(
        SMALL_LLAMA, "naive", dropout=True, dtype=torch.float32, recompute=recompute
    )
    again.load_state_dict(dict(zip(again.state_dict(), layer.state_dict().values(), strict=True)))
    x = torch.randn(2, 7, 64)
    gradients = []
    for module in (layer, again):
        torch.manual_seed(1)
        own = x.clone().requires_grad_()
        module(own).square().sum().backward()
        gradients.append([own.grad, *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def gathered_beside_plain():
    """Projections of a cut sequence on this rank: kept cut, or gathered first as one does."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    x = torch.randn(2, 8, 6, dtype=torch.float64).chunk(2, 1)[rank].contiguous()
    first, second = (torch.randn(n, 6, dtype=torch.float64) for n in (4, 3))
    found = []
    for cut in (True, False):
        own = [t.clone().requires_grad_() for t in (x, first, second)]
        if cut:
            results = _GatheredLinears.apply(*own)
        else:
            whole = gather_sequence(own[0])
            results = [F.linear(whole, weight) for weight in own[1:]]
        sum((result * result.detach().cos()).sum() for result in results).backward()
        found.append([*results, *(t.grad for t in own)])
    return all(torch.allclose(one, other) for one, other in zip(*found, strict=True))


def test_gathering_again_in_backward_gives_the_same_gradients_on_two_ranks():
    assert run_ranks(gathered_beside_plain, 2) == [True, True]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"recompute": "per-op"}, ValueError, "recompute must be one of none, selective, full"),
        ({"config": pl.model("mixtral-8x7b")}, ValueError, "config must have no experts, got 8"),
        ({"tp": 5}, ValueError, "tp must divide heads = 32, got 5"),
        ({"sequence": 0}, ValueError, "sequence must be an int of at least 1, got 0"),
        ({"flash": 1}, TypeError, "flash must be True or False, got 1"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, error, message):
    arguments = {"config": LLAMA, "micro_batch": 2, "sequence": 16, **changed}
    with pytest.raises(error, match=f"^{message}"):
        measure_layer(**arguments)


def test_a_layer_needs_a_model_config_and_a_segment_a_layer():
    with pytest.raises(TypeError, match="^config must be a ModelConfig, got 7"):
        build_layer(7, "naive")
    with pytest.raises(ValueError, match="^size must be an int of at least 1, got 0"):
        in_segments([nn.Identity()], 0)


def test_a_layer_of_gpt_keeps_what_this_layer_keeps():
    size = {"vocab": 8, "layers": 1, "hidden": 64, "heads": 4, "sequence": 32}
    for recompute in ("none", "selective", "full"):
        block = gpt.Block(
            gpt.GPTConfig(**size, dropout=0.1, attention="explicit", recompute=recompute)
        ).to(BF16)
        x = torch.ones(2, 32, 64, dtype=BF16)
        ours = build_layer(SMALL, "naive", dropout=True, recompute=recompute)
        assert measure(block, x).total == measure(ours, x).total
    assert isinstance(ours, Recomputed) and isinstance(ours.module, Layer)


def test_measuring_leaves_nothing_behind_of_an_operation_that_keeps_its_own_output():
    outputs = []

    def exponential(x):
        y = x.exp()
        outputs.append(weakref.ref(y.untyped_storage()))
        return y

    gc.collect()
    gc.disable()  # reference counts alone must free it: a graph in a cycle may wait for long
    try:
        assert measure(exponential, torch.ones(4, requires_grad=True)).total == 16
        assert outputs[0]() is None
    finally:
        gc.enable()
