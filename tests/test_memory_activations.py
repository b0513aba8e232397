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


def shape(layers=1, hidden=64, heads=4, kv_heads=None, ffn=None, gated=False):
    return SimpleNamespace(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        ffn=ffn or 4 * hidden,
        vocab=1000,
        gated=gated,
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


def kept_bytes(torch, function, x, weights):
    storages = {}

    def note(tensor):
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
        ({"config": pl.model("mixtral-8x7b")}, ValueError, "config must have no experts, got 8"),
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
