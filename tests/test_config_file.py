"""A config.json becomes the shape of its published checkpoint, or is refused with the reason."""

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl
from parlab.config_file import MAX_BYTES, config_from_json, read_config


def llama_style(model_type, layers, hidden, heads, kv_heads, ffn, vocab, **others):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **others,
    }


def gpt2_style(layers, hidden, heads, **others):
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024}
    return {"model_type": "gpt2", "vocab_size": 50257, **sizes, **others}


LLAMA = llama_style("llama", 2, 64, 4, 2, 96, 100)
MIXTRAL = llama_style(
    "mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2
)
# Elements of published checkpoints, and the fields of their config.json on the Hugging Face hub.
CHECKPOINTS = {
    "gpt2": (124_439_808, gpt2_style(12, 768, 12, n_ctx=1024)),
    "gpt2-xl": (1_557_611_200, gpt2_style(48, 1600, 25, n_inner=None)),
    "Llama-2-7b": (
        6_738_415_616,
        llama_style("llama", 32, 4096, 32, 32, 11008, 32000, tie_word_embeddings=False),
    ),
    "Meta-Llama-3-8B": (
        8_030_261_248,
        llama_style("llama", 32, 4096, 32, 8, 14336, 128256, rope_theta=500000.0),
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        llama_style("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    ),
    "TinyLlama-1.1B": (1_100_048_384, llama_style("llama", 22, 2048, 32, 4, 5632, 32000)),
    "SmolLM2-135M": (
        134_515_008,
        llama_style("llama", 30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        llama_style("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096),
    ),
    # Its heads of 128 are not hidden / heads = 160.
    "Mistral-Nemo-Base-2407": (
        12_247_782_400,
        llama_style("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128),
    ),
    "Mixtral-8x7B": (46_702_792_704, MIXTRAL),
    "Qwen2.5-0.5B": (
        494_032_768,
        llama_style("qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True),
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        llama_style("qwen2", 28, 3584, 28, 4, 18944, 152064, tie_word_embeddings=False),
    ),
    # Both leave out tie_word_embeddings: gemma is tied where its file does not say.
    "gemma-2b": (
        2_506_172_416,
        llama_style("gemma", 18, 2048, 8, 1, 16384, 256000, head_dim=256, hidden_act="gelu"),
    ),
    "gemma-7b": (
        8_537_680_896,
        llama_style("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256),
    ),
    "Phi-3-mini-4k": (3_821_079_552, llama_style("phi3", 32, 3072, 32, 32, 8192, 32064)),
}


@pytest.mark.parametrize("total, fields", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_config_file_has_the_parameters_of_its_checkpoint(total, fields):
    assert config_from_json(json.dumps(fields)).n_params == total
    assert config_from_json(fields).n_params == total


@pytest.mark.parametrize(
    "name, checkpoint",
    [
        ("gpt2", "gpt2"),
        ("llama-2-7b", "Llama-2-7b"),
        ("llama-3-8b", "Meta-Llama-3-8B"),
        ("qwen2.5-0.5b", "Qwen2.5-0.5B"),
        ("mixtral-8x7b", "Mixtral-8x7B"),
    ],
)
def test_it_is_the_shape_of_the_data_sheet(name, checkpoint):
    ours, sheet = config_from_json(CHECKPOINTS[checkpoint][1]), pl.model(name)
    about = ("name", "source", "as_of")
    shapes = [{k: v for k, v in vars(c).items() if k not in about} for c in (ours, sheet)]
    assert {k: v for k, v in shapes[0].items() if k[0] != "_"}.items() <= shapes[1].items()
    assert ours.layer_parts == sheet.layer_parts and ours.parameters == sheet.parameters


def tensors_of_llama(layers, h, heads, kv, f, vocab, attention_bias, mlp_bias, tied):
    """Every tensor of a llama's checkpoint, by size."""
    d = h // heads
    yield vocab * h
    for _ in range(layers):
        for rows, columns in ((heads * d, h), (kv * d, h), (kv * d, h), (h, heads * d)):
            yield rows * columns
            yield rows if attention_bias else 0
        for rows, columns in ((f, h), (f, h), (h, f)):
            yield rows * columns
            yield rows if mlp_bias else 0
        yield h
        yield h
    yield h
    yield 0 if tied else vocab * h


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_switches_of_a_llama_are_counted_tensor_by_tensor(n, kv, group, width, qkvo, mlp, tied):
    heads = kv * group
    sizes = (n, heads * width, heads, kv, 7 * width, 11)
    switches = {"attention_bias": qkvo, "mlp_bias": mlp, "tie_word_embeddings": tied}
    expected = sum(tensors_of_llama(*sizes, qkvo, mlp, tied))
    assert config_from_json(llama_style("llama", *sizes, **switches)).n_params == expected


def test_old_llamas_say_nothing_about_keys_and_values():
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    for fields in (without, LLAMA | {"num_key_value_heads": None}):
        assert config_from_json(fields).kv_heads == 4


def test_positions_are_learned_by_gpt2_only():
    assert config_from_json(gpt2_style(2, 64, 4)).positions == 1024
    assert config_from_json(LLAMA | {"max_position_embeddings": 4096}).positions is None


def test_layers_with_a_window_count_like_others():
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}
    assert config_from_json(LLAMA | windows).n_params == config_from_json(LLAMA).n_params


DEEPSEEK_V3 = llama_style(
    "deepseek_v3",
    61,
    7168,
    128,
    128,
    18432,
    129280,
    kv_lora_rank=512,
    q_lora_rank=1536,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
)
QWEN3_MOE = llama_style(
    "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, num_experts=128, num_experts_per_tok=8
)


@pytest.mark.parametrize(
    "fields, features",
    [
        (
            DEEPSEEK_V3,
            [
                "multi-head latent attention (kv_lora_rank)",
                "experts that every token visits (n_shared_experts)",
                "dense layers among those with experts (first_k_dense_replace)",
                "layers that predict tokens further on (num_nextn_predict_layers)",
            ],
        ),
        (QWEN3_MOE, ["norms of queries and keys"]),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, ["queries and keys", "dense", "mlp_only_layers"]),
        (LLAMA | {"model_type": "qwen3"}, ["norms of queries and keys"]),
        (
            LLAMA | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632},
            ["every token visits (shared_expert_intermediate_size)"],
        ),
        (LLAMA | {"model_type": "gemma2"}, ["four norms a layer"]),
        ({"model_type": "gemma3", "text_config": LLAMA}, ["no language model (text_config)"]),
        (LLAMA | {"model_type": "phi"}, ["one norm a layer and a bias of the head"]),
        (LLAMA | {"model_type": "gpt_neox"}, ["side by side"]),
        (LLAMA | {"model_type": "gpt_oss"}, ["attention sinks"]),
        (LLAMA | {"num_local_experts": 8}, ["experts (num_local_experts)"]),
        (LLAMA | {"num_key_value_heads": [2, 1]}, ["each layer (num_key_value_heads)"]),
        (LLAMA | {"intermediate_size": [96, 64]}, ["each layer (intermediate_size)"]),
        (LLAMA | {"layer_types": ["linear_attention"] * 2}, ["(layer_types)"]),
        (LLAMA | {"layer_types": "mamba"}, ["(layer_types)"]),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, ["(architectures)"]),
        (LLAMA | {"pruned_heads": {"0": [1]}}, ["unequal heads"]),
        (LLAMA | {"add_cross_attention": True}, ["cross attention"]),
        (LLAMA | {"use_qk_norm": True}, ["norms of queries and keys (use_qk_norm)"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value[-1],
)
def test_what_a_shape_cannot_say_is_refused_by_name(fields, features):
    with pytest.raises(ValueError, match="^config.json: ModelConfig cannot say") as refused:
        config_from_json(fields)
    assert all(feature in str(refused.value) for feature in features)


def test_fields_that_change_nothing_are_no_reason_to_refuse():
    usual = {
        "architectures": ["LlamaForCausalLM"],
        "pruned_heads": {},
        "is_encoder_decoder": False,
        "add_cross_attention": False,
        "n_shared_experts": None,
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
        "torch_dtype": "bfloat16",
    }
    assert config_from_json(LLAMA | usual).parameters == config_from_json(LLAMA).parameters


@pytest.mark.parametrize("field", [f for f in MIXTRAL if f != "model_type"])
def test_a_missing_field_is_named(field):
    for fields in ({k: v for k, v in MIXTRAL.items() if k != field}, MIXTRAL | {field: None}):
        with pytest.raises(ValueError, match=f": a mixtral must have {field}, got none"):
            config_from_json(fields)


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(ValueError, match="a gpt2 must have n_embd, n_head, n_layer, n_pos"):
        config_from_json({"model_type": "gpt2"})


ABSURD = ["0", "-1", "1.5", "32.0", "1e400", "true", '"32"', "{}", "1000000001", "9" * 400]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:10])
@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "num_key_value_heads"])
def test_a_size_is_an_int_from_1_on(field, value):
    text = json.dumps(LLAMA | {field: "HERE"}).replace('"HERE"', value)
    with pytest.raises((ValueError, TypeError), match=f"^config.json: {field} must be an int"):
        config_from_json(text)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [0, 1, "false", None])
def test_a_switch_is_true_or_false(field, value):
    with pytest.raises(TypeError, match=f"^config.json: {field} must be True or False"):
        config_from_json(LLAMA | {field: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_attention_heads": 5}, "heads must divide hidden = 64"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads = 4"),
        ({"num_hidden_layers": 10**9, "hidden_size": 4 * 10**5}, "n_params must be at most 10"),
        ({"model_type": "lama"}, "model_type must be one of .*did you mean llama?"),
        ({"model_type": None}, "model_type must be text such as 'llama', got None"),
        ({"model_type": ["llama"]}, "model_type must be text"),
    ],
    ids=str,
)
def test_sizes_that_fit_nowhere_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=f"^config.json: {message}"):
        config_from_json(LLAMA | changes)


def test_one_expert_is_refused_because_its_router_would_be_miscounted():
    with pytest.raises(ValueError, match="num_local_experts must be at least 2, got 1"):
        config_from_json(MIXTRAL | {"num_local_experts": 1, "num_experts_per_tok": 1})


def test_no_control_characters_reach_the_terminal():
    erase = "\x1b[2J"
    for changes in (
        {"model_type": erase},
        {"model_type": erase, "kv_lora_rank": 512},
        {"num_hidden_layers": erase},
        {erase: {"a": 1}, "architectures": [erase], "layer_types": [erase]},
    ):
        fields = LLAMA | changes
        with pytest.raises((ValueError, TypeError)) as refused:
            config_from_json(json.dumps(fields))
        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("model_type: llama", "must be JSON"),
        ('{"rope_theta": NaN}', "must be JSON, got NaN"),
        ('{"rope_theta": -Infinity}', "must be JSON, got -Infinity"),
        ("[]", "top level must be an object, got list"),
        ("3", "top level must be an object, got int"),
        (None, "top level must be an object, got NoneType"),
        ('{"a": {"b": 1, "b": 1}}', "'b' must stand once in an object"),
        ("[" * 500_000, "a few levels"),
        ('{"a":' * 190_000, "a few levels"),
        (b'{"model_type": "\xff"}', "must be UTF-8"),
        (b"\x80\x04\x95", "must be UTF-8"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ("{" + ",".join(f'"{n}": 0' for n in range(60_000)) + ',"0": 1}', "'0' must stand once"),
        (" " * (MAX_BYTES + 1), "at most 1000000 bytes"),
    ],
    ids=lambda value: str(value)[:20] if value else "nothing",
)
def test_a_hostile_file_is_refused(text, message):
    with pytest.raises((ValueError, TypeError), match=f"^config.json: .*{re.escape(message)}"):
        config_from_json(text)


@given(st.text(max_size=40) | st.binary(max_size=40))
def test_whatever_the_file_holds_there_is_a_message(text):
    with pytest.raises((ValueError, TypeError), match="^config.json: "):
        config_from_json(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*LLAMA, *DEEPSEEK_V3, "layer_types"]), JSON_VALUES))
def test_any_field_may_hold_anything(changes):
    try:
        config = config_from_json(LLAMA | changes)
    except (ValueError, TypeError) as error:
        assert str(error).startswith("config.json: ")
    else:
        assert 0 < config.n_params <= 10**15


def test_the_dict_is_left_as_it_was():
    fields = json.loads(json.dumps(LLAMA))
    config_from_json(fields)
    assert fields == LLAMA


def test_a_file_or_its_folder_is_read(tmp_path):
    file = tmp_path / "config.json"
    # Editors on Windows may write a byte order mark.
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    for path in (file, str(file), tmp_path):
        config = read_config(path)
        assert config.n_params == config_from_json(LLAMA).n_params
        assert config.name == str(file)


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, ""):
        with pytest.raises(OSError if path == "" else FileNotFoundError, match="path must be"):
            read_config(path)
    (tmp_path / "bad.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"bad\.json: a llama must have"):
        read_config(tmp_path / "bad.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no file"):
        read_config(tmp_path / "pipe")


def test_a_file_of_a_gigabyte_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(10**9)  # sparse: nothing is written
    with pytest.raises(ValueError, match="at most 1000000 bytes, got more"):
        read_config(tmp_path)
