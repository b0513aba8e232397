"""Shapes give the parameters of published checkpoints exactly, and the FLOP of the papers."""

import pickle
import re
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, replace
from datetime import date
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab.models
from parlab.distributed.gpt import GPT2_SMALL, GPTConfig
from parlab.models import BIAS_PLACES, ModelConfig, model
from parlab.published import published_table
from parlab.tensor_traffic import layer_flops

SHEET = tomllib.loads(
    (Path(parlab.models.__file__).parent / "data" / "models.toml").read_text(encoding="utf-8")
)
# Numbers of elements in the published checkpoints: total, and used by one token.
CHECKPOINTS = {
    "gpt2": (124_439_808, 124_439_808),
    "llama-2-7b": (6_738_415_616, 6_738_415_616),
    "llama-2-13b": (13_015_864_320, 13_015_864_320),
    "llama-2-70b": (68_976_648_192, 68_976_648_192),
    "llama-3-8b": (8_030_261_248, 8_030_261_248),
    "llama-3-70b": (70_553_706_496, 70_553_706_496),
    "llama-3-405b": (405_853_388_800, 405_853_388_800),
    "qwen2.5-0.5b": (494_032_768, 494_032_768),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
}
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64}
WEAK_SCALING = published_table("weak-scaling").rows
KORTHIKANTI = {  # arXiv 2205.05198, Table 3: layers, hidden, heads
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}
SIZES = st.integers(1, 6)


@st.composite
def shapes(draw):
    """Any small legal shape."""
    kv_heads, group, width = draw(SIZES), draw(SIZES), draw(SIZES)
    heads = kv_heads * group
    experts = draw(SIZES)
    return ModelConfig(
        layers=draw(SIZES),
        hidden=heads * width,
        heads=heads,
        vocab=draw(SIZES),
        kv_heads=kv_heads,
        head_dim=draw(st.none() | SIZES),
        ffn=draw(SIZES),
        gated=draw(st.booleans()),
        biases=draw(st.sets(st.sampled_from(BIAS_PLACES))),
        positions=draw(st.none() | st.integers(8, 16)),
        tied=draw(st.booleans()),
        norm=draw(st.sampled_from(["layer", "rms"])),
        experts=experts,
        active_experts=draw(st.integers(1, experts)),
    )


def tensors(c):
    """Every tensor of a checkpoint, one by one, as (kind, shape, is a layer's matrix)."""
    d = c.hidden // c.heads if c.head_dim is None else c.head_dim
    norm = ["weight", "bias"] if c.norm == "layer" else ["weight"]
    yield "embedding", (c.vocab, c.hidden), False
    if c.positions:
        yield "positions", (c.positions, c.hidden), False
    for _ in range(c.layers):
        for heads in (c.heads, c.kv_heads, c.kv_heads):
            yield "attention", (c.hidden, heads * d), True
            if "qkv" in c.biases:
                yield "attention", (heads * d,), False
        yield "attention", (c.heads * d, c.hidden), True
        if "attention_output" in c.biases:
            yield "attention", (c.hidden,), False
        for expert in range(c.experts):
            outputs = [c.ffn, c.ffn, c.hidden] if c.gated else [c.ffn, c.hidden]
            kind = "mlp" if expert < c.active_experts else "idle"
            for width in outputs:
                yield kind, (width, c.hidden + c.ffn - width), True
                if "mlp" in c.biases:
                    yield kind, (width,), False
        if c.experts > 1:
            yield "router", (c.hidden, c.experts), True
        for _ in norm * 2:
            yield "norms", (c.hidden,), False
    for _ in norm:
        yield "norms", (c.hidden,), False
    if not c.tied:
        yield "head", (c.vocab, c.hidden), False


def elements(c, *kinds, matrices_only=False):
    return sum(
        int(np.prod(shape, dtype=object))
        for kind, shape, is_matrix in tensors(c)
        if kind in kinds and (is_matrix or not matrices_only)
    )


def test_data_sheet_holds_the_promised_models():
    assert set(SHEET) == set(CHECKPOINTS)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_model_has_exactly_the_parameters_of_its_checkpoint(name):
    config = model(name.upper())
    assert (config.n_params, config.n_active_params) == CHECKPOINTS[name]
    assert config.parameters.total == config.n_params


@pytest.mark.parametrize("name", SHEET)
def test_row_names_its_source_and_its_day(name):
    config = model(name)
    assert re.search(r"https://\S+", config.source)
    assert date(2026, 1, 1) <= date.fromisoformat(config.as_of)
    assert (config.name, config.source) == (name, SHEET[name]["source"])


def test_qwen_without_its_embedding_has_the_0_36_billion_of_its_model_card():
    qwen = model("qwen2.5-0.5b")
    assert qwen.tied and qwen.biases == ("qkv",)
    assert round((qwen.n_params - qwen.parameters.embedding) / 1e9, 2) == 0.36


def test_an_untied_head_adds_one_more_embedding():
    tied, untied = ModelConfig(**SMALL), ModelConfig(**SMALL, tied=False)
    assert untied.n_params - tied.n_params == 64 * 32


@pytest.mark.parametrize(
    "gpt",
    [
        GPT2_SMALL,
        GPTConfig(vocab=50, layers=3, hidden=48, heads=6, sequence=8, kv_heads=2, ffn=20),
        GPTConfig(vocab=50, layers=3, hidden=48, heads=6, sequence=8, kv_heads=1, tied=False),
    ],
    ids=["gpt2", "grouped", "untied"],
)
def test_shape_counts_what_the_gpt_of_the_real_runs_counts(gpt):
    same = ("vocab", "layers", "hidden", "heads", "kv_heads", "ffn", "tied")
    shape = {field: getattr(gpt, field) for field in same}
    assert ModelConfig(**shape, positions=gpt.sequence).n_params == gpt.n_params


@pytest.mark.parametrize("row", WEAK_SCALING, ids=[f"{r['params_billion']}B" for r in WEAK_SCALING])
def test_narayanan_table_1_and_equations_2_and_3(row):
    layers, h, vocab, s = row["layers"], row["hidden"], 51200, 2048
    config = ModelConfig(layers=layers, hidden=h, heads=row["heads"], vocab=vocab, positions=s)
    assert round(config.n_params / 1e9, 1) == row["params_billion"]
    # Equation 2 leaves out the last norm, and is exact otherwise.
    size = 1 + Fraction(13, 12 * h) + Fraction(vocab + s, 12 * layers * h)
    assert config.n_params - 2 * h == 12 * layers * h**2 * size
    # Equation 3 runs the layers' forward twice, the head's once.
    flops = config.flops_per_token(s)
    work = 1 + Fraction(s, 6 * h) + Fraction(vocab, 16 * layers * h)
    recomputed = flops.forward - flops.head
    assert flops.training + recomputed == 96 * layers * h**2 * work
    counted = layer_flops(h, s, 1, n_layers=layers)
    assert 3 * s * flops.scores == counted.scores
    assert 3 * s * (flops.attention + flops.mlp) == counted.weights


@pytest.mark.parametrize(
    "row", published_table("iteration-time").rows, ids=lambda row: row["model"]
)
def test_korthikanti_table_5_utilisation_follows_from_flops_and_seconds(row):
    layers, hidden, heads = KORTHIKANTI[row["model"]]
    config = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200, positions=2048)
    work = row["global_batch"] * 2048 * config.flops_per_token(2048).training
    seconds = row["sequence_parallel_selective_s"] * row["n_gpus"]
    # 312 TFLOP/s is an A100's dense bf16 peak. 0.5 %: the seconds are printed with three digits.
    assert 100 * work / (seconds * 312e12) == pytest.approx(row["mfu_percent"], rel=5e-3)


def test_gpt3_trains_with_six_flop_per_parameter_but_for_a_few_percent():
    gpt3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=50257, positions=2048)
    flops = gpt3.flops_per_token(2048)
    without_scores = flops.training - 3 * flops.scores
    assert without_scores / (6 * gpt3.n_params) == pytest.approx(1, abs=1e-3)
    # The GPT-3 paper's 3.14e23 for 300 billion tokens is 6 N D with its 174.6 billion parameters.
    assert 300e9 * without_scores == pytest.approx(3.14e23, rel=2e-3)


def test_flops_of_mixtral_follow_the_active_parameters_not_the_total():
    mixtral = model("mixtral-8x7b")
    flops = mixtral.flops_per_token(4096)
    weights = flops.forward - flops.scores
    idle_tables = mixtral.parameters.embedding + mixtral.parameters.norms
    assert weights == 2 * (mixtral.n_active_params - idle_tables)


@given(shapes())
@settings(deadline=None)
def test_every_item_is_what_its_tensors_hold(config):
    items = config.parameters
    for kind in items._fields:
        kinds = ("mlp", "idle") if kind == "mlp" else (kind,)
        assert getattr(items, kind) == elements(config, *kinds), kind
    assert items.total == config.n_params == sum(items)
    assert config.n_active_params == config.n_params - elements(config, "idle")
    deeper = replace(config, layers=config.layers + 1)
    assert deeper.n_params - config.n_params == config.layer_params


@given(shapes(), st.integers(1, 8))
@settings(deadline=None)
def test_flops_are_two_per_active_weight_and_two_per_pair_and_feature(config, s):
    flops = config.flops_per_token(s)
    for kind in ("attention", "mlp", "router"):
        assert getattr(flops, kind) == 2 * elements(config, kind, matrices_only=True), kind
    assert flops.head == 2 * config.vocab * config.hidden
    pair = 2 * 2 * config.layers * config.heads * config.head_size  # scores, then their use
    assert s * flops.scores == pair * sum(1 for _query in range(s) for _key in range(s))
    seen = config.flops_per_token(s, causal=True)
    assert s * seen.scores == pair * sum(1 for query in range(s) for _key in range(query + 1))
    assert seen._replace(scores=flops.scores) == flops
    assert flops.training == 3 * flops.forward == 3 * sum(flops)


def test_counts_stay_exact_near_the_largest_model():
    layers, h = 51, 1_277_952
    config = ModelConfig(layers=layers, hidden=h, heads=128, vocab=1, biases=(), norm="rms")
    assert 0.99e15 < config.n_params < 1e15
    assert config.n_params == 12 * layers * h * h + (2 * layers + 1) * h + h
    assert type(config.n_params) is int


def test_numpy_sizes_do_not_wrap_around():
    sizes = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257}
    narrow = ModelConfig(**{name: np.int32(size) for name, size in sizes.items()})
    assert narrow == ModelConfig(**sizes)
    assert type(narrow.n_params) is int


@pytest.mark.parametrize(
    "field",
    ["layers", "hidden", "heads", "vocab", "kv_heads", "head_dim", "ffn", "positions", "experts"],
)
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-4, ValueError),
        (10**18, ValueError),
        (10**400, ValueError),
        (True, TypeError),
        (4.0, TypeError),
        (float("nan"), TypeError),
        ("4", TypeError),
    ],
    ids=["zero", "negative", "10^18", "10^400", "bool", "float", "nan", "text"],
)
def test_hostile_size_is_refused_by_name(field, value, error):
    with pytest.raises(error, match=f"^{field} must be an int"):
        ModelConfig(**{**SMALL, field: value})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"heads": 5}, ValueError, "heads must divide hidden = 32 .*got 5"),
        ({"kv_heads": 3}, ValueError, "kv_heads must divide heads = 4, got 3"),
        ({"kv_heads": 8}, ValueError, "kv_heads must divide heads = 4, got 8"),
        ({"experts": 8}, TypeError, "active_experts must be an int from 1 to 8, got None"),
        ({"experts": 8, "active_experts": 9}, ValueError, "active_experts .* from 1 to 8, got 9"),
        ({"active_experts": 2}, ValueError, "active_experts must be an int from 1 to 1, got 2"),
        ({"experts": 8, "active_experts": 0}, ValueError, "active_experts .* got 0"),
        ({"layers": 10**9, "hidden": 10**6}, ValueError, r"n_params must .* 10\^15, got 1.20e\+22"),
        ({"hidden": 10**9}, ValueError, "n_params must .*hidden=1000000000"),
        ({"gated": 1}, TypeError, "gated must be True or False, got 1"),
        ({"tied": None}, TypeError, "tied must be True or False"),
        ({"norm": "rsm"}, ValueError, "norm must be one of layer, rms.*did you mean rms"),
        ({"biases": "qkv"}, TypeError, "biases must be a tuple of qkv"),
        ({"biases": True}, TypeError, "biases must be a tuple of qkv"),
        ({"biases": ["kqv"]}, ValueError, "biases must be one of .*did you mean qkv"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_broken_law_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(**{**SMALL, **change})


@pytest.mark.parametrize(
    ("sequence", "error"),
    [
        *((0, ValueError), (-1, ValueError), (10**18, ValueError), (1025, ValueError)),
        *((True, TypeError), (float("nan"), TypeError), (None, TypeError)),
    ],
)
def test_bad_sequence_is_refused_by_name(sequence, error):
    with pytest.raises(error, match="^sequence must be an int from 1 to 1024, got"):
        model("gpt2").flops_per_token(sequence)


def test_rotary_positions_allow_any_sequence_up_to_a_billion():
    assert model("llama-3-8b").flops_per_token(10**9).scores == 4 * 32 * 4096 * 10**9
    with pytest.raises(ValueError, match="^sequence must be"):
        model("llama-3-8b").flops_per_token(10**9 + 1)


def test_causal_must_be_said_plainly():
    with pytest.raises(TypeError, match="^causal must be True or False, got 1"):
        model("gpt2").flops_per_token(8, causal=1)


def test_unknown_model_offers_the_nearest_names():
    with pytest.raises(ValueError, match="model name must be one of .*did you mean llama-3-8b"):
        model("llama3-8b")
    with pytest.raises(TypeError, match="model name must be text"):
        model(3)


def test_config_is_frozen_hashable_and_leaves_its_input_alone():
    places = ["mlp", "qkv"]
    config = ModelConfig(**SMALL, biases=places)
    assert places == ["mlp", "qkv"]
    assert config.biases == ModelConfig(**SMALL, biases={"MLP", "qkv"}).biases == ("qkv", "mlp")
    assert hash(config) == hash(ModelConfig(**SMALL, biases=("qkv", "mlp")))
    with pytest.raises(FrozenInstanceError):
        config.layers = 3


def test_equal_configs_have_equal_hashes_in_every_process():
    config = model("llama-3-8b")
    assert hash(pickle.loads(pickle.dumps(config))) == hash(replace(config)) == hash(config)
    code = "import parlab as pl; print(hash(pl.model('llama-3-8b')))"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(elsewhere.stdout) == hash(config)
