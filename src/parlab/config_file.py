"""A ModelConfig from the config.json that Hugging Face checkpoints have beside their weights.

A type of model is read where its shape is exactly what ModelConfig says, to the last parameter. Any
other is refused with the features that stand in the way: a count that is nearly right would pass
for right.
"""

import json
from pathlib import Path
from typing import NamedTuple

from parlab.models import BIAS_PLACES, MAX_SIZE, ModelConfig
from parlab.units import require_bool, require_choice, require_int

MAX_BYTES = 10**6  # a config.json has some kB

_ATTENTION = ("qkv", "attention_output")
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "ffn": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_GPT2_SIZES = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "ffn": "n_inner",
    "positions": "n_positions",
}
_EXPERTS = {"experts": "num_local_experts", "active_experts": "num_experts_per_tok"}


class _Kind(NamedTuple):
    """What a model_type settles, as its class in the transformers library has it."""

    sizes: dict = _SIZES
    optional: tuple = ("head_dim",)  # sizes for which null, or none, means ModelConfig's own value
    gated: bool = True
    norm: str = "rms"
    tied: bool = False  # where the file does not say
    biases: tuple = ()
    bias_fields: dict = {}  # switches, off where the file does not say


_KINDS = {
    "gpt2": _Kind(_GPT2_SIZES, ("n_inner",), False, "layer", tied=True, biases=BIAS_PLACES),
    "llama": _Kind(
        optional=("num_key_value_heads", "head_dim"),
        bias_fields={"attention_bias": _ATTENTION, "mlp_bias": ("mlp",)},
    ),
    "mistral": _Kind(),
    "mixtral": _Kind(_SIZES | _EXPERTS),
    "qwen2": _Kind(biases=("qkv",)),
    "gemma": _Kind(optional=(), tied=True, bias_fields={"attention_bias": _ATTENTION}),
    "phi3": _Kind(optional=("num_key_value_heads", "head_dim")),
}

# What a type has that no field of its file need say.
_BUILT_IN = {
    "gemma2": "four norms a layer",
    "gemma3": "four norms a layer, and norms of queries and keys",
    "gemma3_text": "four norms a layer, and norms of queries and keys",
    "gpt_neox": "attention and MLP side by side in a layer",
    "gpt_oss": "attention sinks and biases of the router",
    "phi": "one norm a layer and a bias of the head",
    "qwen2_moe": "a gate for its shared experts",
    "qwen3": "norms of queries and keys",
    "qwen3_moe": "norms of queries and keys",
}

_SHARED = "experts that every token visits"
_DENSE = "dense layers among those with experts"
_QK_NORMS = "norms of queries and keys"
_OTHER_TYPES = "parts that are no language model"
# A field, the values with which it changes nothing, and what it brings with any other.
_FEATURES = (
    ("kv_lora_rank", (None,), "multi-head latent attention"),
    ("n_shared_experts", (None, 0), _SHARED),
    ("num_shared_experts", (None, 0), _SHARED),
    ("shared_expert_intermediate_size", (None, 0), _SHARED),
    ("first_k_dense_replace", (None, 0), _DENSE),
    ("mlp_only_layers", (None, []), _DENSE),
    ("moe_layer_freq", (None, 1), _DENSE),
    ("decoder_sparse_step", (None, 1), _DENSE),
    ("num_nextn_predict_layers", (None, 0), "layers that predict tokens further on"),
    ("qk_layernorm", (None, False), _QK_NORMS),
    ("use_qk_norm", (None, False), _QK_NORMS),
    ("block_configs", (None,), "a shape of its own for each layer"),
    ("num_kv_shared_layers", (None, 0), "layers that share keys and values"),
    ("add_cross_attention", (None, False), "cross attention"),
    ("cross_attention_layers", (None, []), "cross attention"),
    ("is_encoder_decoder", (None, False), "an encoder"),
    ("pruned_heads", (None, {}), "layers of unequal heads"),
    ("text_config", (None,), _OTHER_TYPES),
    ("vision_config", (None,), _OTHER_TYPES),
    ("audio_config", (None,), _OTHER_TYPES),
)
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


def config_from_json(config, name="config.json"):
    """Return the ModelConfig that a config.json describes; exact, or refused.

    Read are the types gpt2, llama, mistral, mixtral, qwen2, gemma and phi3. The type settles gates,
    norms and most biases; `attention_bias` and `mlp_bias` count where its class reads them. Where
    the file is silent, keys and values have as many heads as queries (llama, phi3 only: the others
    must say), and the head is tied for gpt2 and gemma. What changes no parameter is not read:
    rotary positions, windows of attention, element types.

    config: JSON text, as str or UTF-8 bytes of at most 10^6, or a dict. name: goes into the
        ModelConfig and stands before each message.
    Raises ValueError or TypeError, with the field, for what is no JSON object, for a field that is
    missing, twice there or absurd (a size is an int: neither 32.0 nor "32" nor true), for a type
    that is not read, and for any feature that ModelConfig cannot say, such as shared experts.

    >>> config_from_json({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                   "n_positions": 1024, "vocab_size": 50257}).n_params
    124439808
    >>> config_from_json('{"model_type": "qwen3"}')
    Traceback (most recent call last):
    ...
    ValueError: config.json: ModelConfig cannot say what a 'qwen3' has: norms of queries and keys
    """
    try:
        return _read(_fields(config), name)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def read_config(path):
    """Return the ModelConfig of a config.json on disk, or of the one in a folder.

    path: of the file or of a checkpoint's folder. The rest as in `config_from_json`, and OSError
    (FileNotFoundError and its like) where there is no such file.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"path must be a config.json or a folder with one, got {path!r}")
    if not file.is_file():
        raise ValueError(f"path must be a config.json or a folder with one, got {path!r}: no file")
    with file.open("rb") as stream:
        return config_from_json(stream.read(MAX_BYTES + 1), name=str(file))


def _fields(config):
    """Parse JSON more strictly than `json` does: no NaN, nothing twice, an object on top."""
    if isinstance(config, (str, bytes, bytearray)):
        if len(config) > MAX_BYTES:
            raise ValueError(f"the file must have at most {MAX_BYTES} bytes, got more")
        try:
            text = config if isinstance(config, str) else config.decode("utf-8-sig")
            config = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            raise ValueError(f"the file must be UTF-8, got another byte at {error.start}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"the file must be JSON, got {error}") from None
        except RecursionError:
            raise ValueError("the file must be JSON of a few levels, got very many") from None
    if not isinstance(config, dict):
        raise TypeError(f"the top level must be an object, got {type(config).__name__}")
    return config


def _unique(pairs):
    fields = {}
    for field, value in pairs:
        if field in fields:
            raise ValueError(f"{field!r:.60} must stand once in an object, got it twice")
        fields[field] = value
    return fields


def _no_constant(word):
    raise ValueError(f"the file must be JSON, got {word}, which is none of its numbers")


def _read(fields, name):
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be text such as 'llama', got {model_type!r:.40}")
    found = _features(fields, model_type.lower())
    if found:
        what = ", ".join(found)
        raise ValueError(f"ModelConfig cannot say what a {model_type!r:.40} has: {what}")
    model_type = require_choice("model_type", model_type, _KINDS)
    kind = _KINDS[model_type]
    given = {ours: field for ours, field in kind.sizes.items() if fields.get(field) is not None}
    missing = set(kind.sizes.values()) - set(given.values()) - set(kind.optional)
    if missing:
        raise ValueError(f"a {model_type} must have {', '.join(sorted(missing))}, got none")
    sizes = {
        ours: require_int(field, fields[field], minimum=1, maximum=MAX_SIZE)
        for ours, field in given.items()
    }
    if sizes.get("experts") == 1:
        raise ValueError("num_local_experts must be at least 2, got 1: a choice of one needs none")
    biases = kind.biases
    for field, places in kind.bias_fields.items():
        biases += places if require_bool(field, fields.get(field, False)) else ()
    return ModelConfig(
        **sizes,
        gated=kind.gated,
        norm=kind.norm,
        biases=biases,
        tied=require_bool("tie_word_embeddings", fields.get("tie_word_embeddings", kind.tied)),
        name=name,
        source="config.json",
    )


def _features(fields, model_type):
    """Return what ModelConfig cannot say, each with the field that brings it."""
    found = [_BUILT_IN[model_type]] if model_type in _BUILT_IN else []
    for field, harmless, what in _FEATURES:
        if fields.get(field) not in harmless:
            found.append(f"{what} ({field})")
    for field in (_SIZES | _EXPERTS).values():
        if isinstance(fields.get(field), list):
            found.append(f"a value for each layer ({field})")
    if model_type in _KINDS and "experts" not in _KINDS[model_type].sizes:
        found += [f"experts ({count})" for count in _EXPERT_COUNTS if fields.get(count)]
    layers = fields.get("layer_types") or []
    if not isinstance(layers, list) or any(layer not in _ATTENTION_LAYERS for layer in layers):
        found.append("layers without attention over earlier tokens (layer_types)")
    heads = fields.get("architectures") or []
    if not isinstance(heads, list) or not all(str(h).endswith(_LANGUAGE_MODELS) for h in heads):
        found.append("another end than a head for the vocabulary (architectures)")
    return found
