"""Activations: figures of Korthikanti et al., public measurements, and what torch really keeps."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl

FIG_1 = pl.published_table("activation-memory").rows
FIG_7 = {row["model"]: row for row in pl.published_table("activation-memory-percent").rows}
METHODS = {
    "no_recompute": {},
    "sequence_parallel": {"sequence_parallel": True},
    "selective": {"recompute": "selective"},
    "sequence_parallel_selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}


def shape(layers=1, hidden=64, heads=4, kv_heads=None, ffn=None, **others):
    return SimpleNamespace(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        ffn=ffn or 4 * hidden,
        vocab=others.pop("vocab", 1000),
        gated=others.pop("gated", False),
        experts=others.pop("experts", 1),
        active_experts=others.pop("active", 1),
        **others,
    )


def of_paper(row, method, **changed):
    config = shape(row["layers"], row["hidden"], row["heads"])
    size = {"sequence": 2048, "tp": 8, "pipeline": row["pipeline"], "chunks": row["chunks"]}
    return pl.activation_memory_bytes(
        config, row["micro_batch"], **size, **METHODS[method], **changed
    )


def block_bytes(block, config, micro_batch=2, sequence=16, **options):
    memory = pl.activation_memory(config, micro_batch, sequence=sequence, **options)
    return sum(item.layer_bytes for item in memory.items if item.block == block)


@pytest.mark.parametrize("method", ["no_recompute", "sequence_parallel_selective"])
@pytest.mark.parametrize("row", FIG_1, ids=lambda row: row["model"])
def test_korthikanti_figure_1(row, method):
    assert of_paper(row, method) / 2**30 == row[f"{method}_gib"]


@pytest.mark.parametrize(
    "method", ["sequence_parallel", "selective", "sequence_parallel_selective", "full"]
)
@pytest.mark.parametrize("row", FIG_1, ids=lambda row: row["model"])
def test_korthikanti_figure_7_within_0_2_points(row, method):
    percent = 100 * of_paper(row, method) / of_paper(row, "no_recompute")
    assert percent == pytest.approx(FIG_7[row["model"]][method], abs=0.2)


def test_a_model_of_the_data_sheets_is_a_config():
    config = pl.model("llama-3-8b")
    memory = pl.activation_memory(config, 1, sequence=8192, tp=8, dropout=False, flash=True)
    # h = 4096, f = 14336, 32 heads, 8 of keys and values, s = 8192, t = 8.
    per_token = 4 * 2 * 4096 + (2 * (4096 + 1024) * 2 + 4 * 32 + 8 * 14336) // 8
    assert memory.total == 32 * 8192 * per_token


def test_gpt_3_has_5as_over_h_of_80_and_selective_leaves_34_of_114():
    gpt3 = shape(96, 12288, 96)
    whole = pl.activation_memory_bytes(gpt3, 1, sequence=2048)
    selective = pl.activation_memory_bytes(gpt3, 1, sequence=2048, recompute="selective")
    assert Fraction(whole, 96 * 2048 * 12288) == 114
    assert Fraction(selective, whole) == Fraction(34, 114)


SBH, ABS, AS2B = 16 * 2 * 64, 4 * 2 * 16, 4 * 16 * 16 * 2


@pytest.mark.parametrize(
    "block, options, expected",
    [
        ("attention", {"dropout": False, "flash": True}, 10 * SBH + 4 * ABS),
        ("attention", {"dropout": False}, 10 * SBH + 2 * AS2B),
        ("attention", {}, 11 * SBH + 5 * AS2B),
        ("attention", {"flash": True}, 11 * SBH + 4 * ABS),
        ("MLP", {"dropout": False}, 18 * SBH),
        ("MLP", {}, 19 * SBH),
        ("norms", {}, 4 * SBH),
    ],
    ids=str,
)
def test_blocks_as_measured_megatron_lm_1225(block, options, expected):
    assert block_bytes(block, shape(), **options) == expected


def test_with_flash_attention_selective_recomputation_saves_almost_nothing():
    gpt3 = shape(96, 12288, 96)
    size = {"sequence": 2048, "dropout": False, "flash": True}
    whole = pl.activation_memory_bytes(gpt3, 1, **size)
    saved = whole - pl.activation_memory_bytes(gpt3, 1, **size, recompute="selective")
    assert saved == 4 * 96 * 96 * 2048 and saved / whole < 0.001


# What autograd keeps, counted by hooks in bf16; parameters are no activations.


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


def kept_bytes(torch, function, x, weights, floats_only=False):
    storages = {}

    def note(tensor):
        if floats_only and not tensor.is_floating_point():
            return tensor
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # alive, so that no address is used twice
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(x).sum()
    for weight in weights:
        storages.pop(weight.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def parameters(torch, *shapes):
    return [torch.randn(*s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("gated", [False, True], ids=["GeLU", "SwiGLU"])
def test_an_mlp_keeps_what_autograd_keeps(torch, gated):
    F = torch.nn.functional
    h, f = 64, 192
    x, gate, up, down = parameters(torch, (2, 16, h), (f, h), (f, h), (h, f))

    def mlp(x):
        if gated:
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return F.linear(F.gelu(F.linear(x, up)), down)

    expected = kept_bytes(torch, mlp, x, [gate, up, down])
    assert block_bytes("MLP", shape(hidden=h, ffn=f, gated=gated), dropout=False) == expected


# Not naive with groups: torch then repeats keys and values, which the formula does not.
@pytest.mark.parametrize(
    "flash, kv_heads", [(False, 4), (True, 4), (True, 2)], ids=["naive", "flash", "flash-grouped"]
)
def test_attention_keeps_what_autograd_keeps(torch, flash, kv_heads):
    F = torch.nn.functional
    heads, d, s, b = 4, 16, 16, 2
    h = heads * d
    x, q, k, v, o = parameters(
        torch, (b, s, h), (h, h), (kv_heads * d, h), (kv_heads * d, h), (h, h)
    )

    def attention(x):
        queries, keys, values = (
            F.linear(x, w).view(b, s, -1, d).transpose(1, 2) for w in (q, k, v)
        )
        if flash:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                y = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        else:
            # Scaled first: a product with a constant keeps nothing.
            scores = (queries * d**-0.5) @ keys.transpose(2, 3)
            y = scores.softmax(-1) @ values
        return F.linear(y.transpose(1, 2).reshape(b, s, h), o)

    expected = kept_bytes(torch, attention, x, [q, k, v, o])
    config = shape(hidden=h, heads=heads, kv_heads=kv_heads)
    assert block_bytes("attention", config, dropout=False, flash=flash) == expected


@pytest.mark.parametrize("gated", [False, True], ids=["GeLU", "SwiGLU"])
def test_experts_keep_what_autograd_keeps(torch, gated):
    F = torch.nn.functional
    h, f, n_experts, active = 64, 96, 4, 2
    x, router = parameters(torch, (32, h), (n_experts, h))
    experts = [parameters(torch, (f, h), (f, h), (h, f)) for _ in range(n_experts)]

    def mlp(x, gate, up, down):
        if gated:
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return F.linear(F.gelu(F.linear(x, up)), down)

    def layer(x):
        probabilities = F.linear(x, router).float().softmax(-1)
        # As many tokens to each expert, as balanced routing has it.
        chosen = torch.arange(32 * active).reshape(32, active) % n_experts
        weights = probabilities.gather(1, chosen).bfloat16()
        total = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            tokens, slot = (chosen == number).nonzero(as_tuple=True)
            out = mlp(x[tokens], *expert) * weights[tokens, slot].unsqueeze(-1)
            # index_add would keep its source, which no gradient needs.
            total = total.index_put((tokens,), out, accumulate=True)
        return total

    expected = kept_bytes(torch, layer, x, [router, *sum(experts, [])], floats_only=True)
    config = shape(hidden=h, ffn=f, gated=gated, experts=n_experts, active=active)
    assert block_bytes("experts", config, dropout=False) == expected


# Experts, ends, one rank of a pipeline, and recomputation by operation.


def test_experts_keep_as_many_insides_as_a_token_visits():
    mixtral, dense = pl.model("mixtral-8x7b"), pl.model("llama-3-8b")  # the same h, a, k and f
    size = {"sequence": 4096, "dropout": False, "flash": True}
    experts = pl.activation_memory(mixtral, 1, **size).layer_bytes
    mlp = pl.activation_memory(dense, 1, **size).layer_bytes
    h, f = 4096, 14336
    # One more MLP's inside, two copies and two outputs of a token, 8 probabilities, 2 weights.
    assert (experts - mlp) / 4096 == 8 * f + 2 * 2 * h + 2 * 2 * h + 8 * 4 + 2 * 2


@pytest.mark.parametrize("load, copies", [(1, 64), (1.25, 80), (1.001, 65)])
def test_the_fullest_rank_has_more_copies_of_tokens(load, copies):
    config = shape(hidden=64, ffn=96, experts=8, active=2)
    memory = pl.activation_memory(config, 2, sequence=16, expert_load=load)
    sizes = {item.tensor: item.layer_bytes for item in memory.items if item.block == "experts"}
    assert sizes["copies of tokens"] == sizes["outputs before the sum"] == copies * 64 * 2
    assert sizes["input of GeLU"] == copies * 96 * 2
    assert sizes["input of the router"] == 32 * 64 * 2


@given(t=st.sampled_from([1, 2, 4]), options=st.booleans(), gated=st.booleans())
def test_sequence_parallelism_cuts_experts_like_everything_else(t, options, gated):
    config = shape(heads=4, ffn=96, experts=8, active=2, gated=gated)
    size = {"sequence": 32, "dropout": options, "flash": options}
    whole = pl.activation_memory_bytes(config, 1, **size)
    assert pl.activation_memory_bytes(config, 1, **size, tp=t, sequence_parallel=True) * t == whole


@pytest.mark.parametrize("chunks, in_flight", [(1, [4, 3, 2, 1]), (2, [11, 9, 7, 5])])
def test_each_rank_has_in_flight_what_torchs_schedules_hold(chunks, in_flight):
    # Schedule1F1B and ScheduleInterleaved1F1B with p = 4, m = 8: the largest stage.fwd_cache.
    config = shape(layers=8)
    size = {"sequence": 16, "pipeline": 4, "chunks": chunks}
    ranks = [pl.activation_memory(config, 1, **size, pipeline_rank=rank) for rank in range(4)]
    layers_of_a_chunk = 8 // (4 * chunks)
    assert [memory.layers_held for memory in ranks] == [n * layers_of_a_chunk for n in in_flight]


def test_the_ends_of_a_pipeline_korthikanti_section_4_3():
    # First stage: s b h p / t. Last stage: s b h / t (2 + 2) and 4 s b V / t, and 16-bit logits.
    s, b, h, v, t, p = 2048, 1, 12288, 51200, 8, 8
    config = shape(96, h, 96, vocab=v)
    size = {"sequence": s, "tp": t, "pipeline": p, "sequence_parallel": True, "ends": True}
    first, middle, last = [
        pl.activation_memory(config, b, **size, pipeline_rank=rank).ends for rank in (0, 3, p - 1)
    ]
    assert [item.layer_bytes for item in first] == [s * b * h * p // t]
    assert middle == ()
    assert {item.tensor: item.layer_bytes for item in last} == {
        "input of the last norm": 2 * s * b * h // t,
        "input of the head": 2 * s * b * h // t,
        "logits, 16 bits": 2 * s * b * v // t,
        "logits, fp32": 4 * s * b * v // t,
    }


def test_ends_count_once_beside_the_layers():
    config, size = shape(layers=4), {"sequence": 16, "dropout": False}
    with_ends = pl.activation_memory(config, 2, **size, ends=True)
    assert with_ends.items == pl.activation_memory(config, 2, **size).items
    added = with_ends.total - pl.activation_memory_bytes(config, 2, **size)
    assert added == 32 * (4 * 64 + 6 * 1000)


def test_every_second_product_is_kept_as_torchtitan_lists_them():
    # q, v, w1 and w2 of the products q, k, v, o, w1, w3, w2; the kernel's output; the input.
    memory = pl.activation_memory(
        pl.model("llama-3-8b"), 1, sequence=8192, recompute="per-op", flash=True, dropout=False
    )
    elements = 4096 + 1024 + 14336 + 4096 + 4096 + 4096
    log_sum_exp = 32 * 4
    assert memory.total == 32 * 8192 * (2 * elements + log_sum_exp)
    # q, v and up of the products q, k, v, o, up, down, and the input.
    gelu = pl.activation_memory(shape(), 1, sequence=16, recompute="per-op", dropout=False)
    assert gelu.total == 16 * 2 * (64 + 64 + 256 + 64)


def test_every_second_product_adds_the_sums_that_sequence_parallelism_scatters():
    size = {"sequence": 8192, "recompute": "per-op", "flash": True, "dropout": False, "tp": 8}
    memory = pl.activation_memory(pl.model("llama-3-8b"), 1, **size, sequence_parallel=True)
    cut = 4096 + 4096 + 1024 + 14336 + 4096 + 2 * 4096  # with two reduce-scattered sums
    assert memory.layer_bytes == 8192 * (2 * cut + 32 * 4) // 8 + 8192 * 2 * 4096


# Laws.

OPTIONS = {
    "sequence_parallel": st.booleans(),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "dropout": st.booleans(),
    "flash": st.booleans(),
}


@given(
    t=st.sampled_from([1, 2, 4, 8]),
    p=st.integers(1, 6),
    v=st.integers(1, 4),
    b=st.integers(1, 4),
    gated=st.booleans(),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_tensors_sum_to_the_total_of_the_layers_held(t, p, v, b, gated, options):
    config = shape(layers=2 * p * v, heads=8, kv_heads=8, gated=gated)
    size = {"sequence": 32, "tp": t, "pipeline": p, "chunks": v, **options}
    memory = pl.activation_memory(config, b, **size)
    assert all(type(item.layer_bytes) is int and item.layer_bytes > 0 for item in memory.items)
    held = 2 * p * v * (1 + (Fraction(p - 1, p * v) if v > 1 else 0))
    assert memory.layers_held == held
    assert memory.total == held * sum(item.layer_bytes for item in memory.items)
    assert memory.total == pl.activation_memory_bytes(config, b, **size)
    assert memory.total == b * pl.activation_memory_bytes(config, 1, **size)  # linear in b


@given(t=st.sampled_from([2, 4, 8]), options=st.fixed_dictionaries(OPTIONS))
def test_more_ranks_and_more_recomputation_never_need_more(t, options):
    config = shape(heads=8, kv_heads=8)

    def total(**changed):
        return pl.activation_memory_bytes(config, 1, sequence=32, **{**options, **changed})

    assert total(tp=t) <= total(tp=1)
    assert total(tp=t, sequence_parallel=True) <= total(tp=t, sequence_parallel=False)
    assert total(tp=t, sequence_parallel=True) * t == total(tp=1)
    by_recompute = [total(tp=t, recompute=r) for r in ("none", "selective", "full")]
    assert by_recompute == sorted(by_recompute, reverse=True)
    assert total(dropout=False) <= total(dropout=True)


def test_logits_of_8192_tokens_nemo_automodel_pr_3708():
    assert pl.logits_bytes(8192, 151_936) == 8192 * 151_936 * 4
    assert round(pl.logits_bytes(8192, 151_936) / 2**30, 3) == 4.637
    assert round(pl.logits_bytes(8192, 151_936, element_bytes=2) / 2**30, 3) == 2.318
    assert pl.logits_bytes(8192, 151_936, tp=8) * 8 == pl.logits_bytes(8192, 151_936)


GOOD = {"config": shape(layers=6, heads=8), "micro_batch": 1, "sequence": 30}


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"micro_batch": 0}, ValueError, "micro_batch must be an int of at least 1, got 0"),
        ({"sequence": 0}, ValueError, "sequence must be an int of at least 1, got 0"),
        ({"sequence": 2048.0}, TypeError, "sequence must be an int"),
        ({"tp": 0}, ValueError, "tp must be an int of at least 1"),
        ({"tp": 3}, ValueError, "tp must divide heads = 8, got 3"),
        ({"tp": 4, "sequence_parallel": True}, ValueError, "tp must divide the sequence of 30"),
        ({"pipeline": 4}, ValueError, "pipeline x chunks must divide layers = 6, got 4 x 1"),
        ({"chunks": True}, TypeError, "chunks must be an int"),
        ({"recompute": "selectiv"}, ValueError, "recompute must be one of .* selective[?]"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel must be True or False, got 1"),
        ({"dropout": 0.1}, TypeError, "dropout must be True or False, got 0.1"),
        ({"flash": None}, TypeError, "flash must be True or False"),
        ({"config": 7}, TypeError, "config must have layers"),
        ({"config": shape(layers=-1)}, ValueError, "layers must be an int of at least 1"),
        ({"config": shape(gated=1)}, TypeError, "gated must be True or False"),
        ({"config": shape(heads=6)}, ValueError, "heads must divide hidden = 64, got 6"),
        ({"config": shape(kv_heads=3)}, ValueError, "kv_heads must divide heads = 4, got 3"),
        ({"config": shape(kv_heads=2), "tp": 4}, ValueError, "tp must divide kv_heads = 2, got 4"),
        ({"config": shape(ffn=90), "tp": 4}, ValueError, "tp must divide ffn = 90, got 4"),
        ({"pipeline": 3, "pipeline_rank": 3}, ValueError, "pipeline_rank must be .* from 0 to 2"),
        ({"expert_load": 0.9}, ValueError, "expert_load must be a finite number of at least 1"),
        ({"expert_load": float("nan")}, ValueError, "expert_load must be a finite number"),
        ({"ends": 1}, TypeError, "ends must be True or False, got 1"),
        (
            {"ends": True, "config": shape(vocab=0)},
            ValueError,
            "vocab must be an int of at least 1",
        ),
        ({"ends": True, "config": shape(vocab=9), "tp": 4}, ValueError, "tp must divide vocab = 9"),
        ({"config": shape(experts=2, active=3)}, ValueError, "active_experts must be an int from"),
        (
            {"config": pl.model("mixtral-8x7b"), "recompute": "per-op"},
            ValueError,
            "recompute must not be per-op with experts",
        ),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, error, message):
    with pytest.raises(error, match=f"^{message}"):
        pl.activation_memory_bytes(**{**GOOD, **changed})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokens": -1, "vocab": 10}, "tokens must be"),
        ({"tokens": 1, "vocab": 0}, "vocab must be"),
        ({"tokens": 1, "vocab": 10, "tp": 3}, "tp must divide vocab = 10, got 3"),
        ({"tokens": 1, "vocab": 10, "element_bytes": 0}, "element_bytes must be"),
    ],
    ids=str,
)
def test_bad_logits_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        pl.logits_bytes(**arguments)


def test_numpy_integers_do_not_wrap_around():
    config = shape(layers=96, hidden=12288, heads=96)
    ours = pl.activation_memory_bytes(config, np.int32(8), sequence=np.int32(2048))
    assert ours == 8 * pl.activation_memory_bytes(config, 1, sequence=2048) > 2**31


def test_recompute_is_read_without_regard_to_case():
    row = FIG_1[0]
    config, size = shape(row["layers"], row["hidden"], row["heads"]), {"sequence": 2048, "tp": 8}
    full = pl.activation_memory_bytes(config, 4, **size, recompute="Full")
    assert full == 48 * 2 * 2048 * 4 * 6144
