"""Cards, models and ways to recompute that the memory panels offer.

Constants, because reading the data sheets costs a browser time; a test compares them.
"""

from parlab.models import ModelConfig

# usable_bytes of each card; the second has exactly 40 GB.
CARDS = {
    "t4": 15_633_680_957,
    "40e9 B": 40_000_000_000,
    "a100-40": 42_298_834_944,
    "h100-sxm": 84_932_978_278,
    "a100-80": 85_094_039_552,
    "h200": 150_119_844_413,
    "b200": 191_501_854_310,
}

RECOMPUTE = ("none", "selective", "full")  # the choices with a formula in the literature


def _gpt(layers, hidden, heads):
    """A GPT of Korthikanti et al. (arXiv 2205.05198), table 3; positions are not counted."""
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200)


def _llama(layers, hidden, heads, kv_heads, ffn, vocab=128256, **others):
    kind = {"gated": True, "biases": (), "tied": False, "norm": "rms"} | others
    return ModelConfig(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, **kind
    )


MODELS = {
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, 151936, biases=("qkv",), tied=True),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "gpt-22b": _gpt(48, 6144, 64),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, experts=8, active_experts=2),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "gpt-175b": _gpt(96, 12288, 96),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248),
    "gpt-530b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
}

SHORT = {  # as written beside a slider, where a longer name breaks
    "qwen2.5-0.5b": "qwen-0.5b",
    "mixtral-8x7b": "mixtral",
    "llama-2-70b": "llama2-70b",
    "llama-3-70b": "llama3-70b",
    "llama-3-405b": "llama-405b",
}


def short(model):
    """Return the name of a model as a slider shows it."""
    return SHORT.get(model, model)


def count(params):
    """Write a number of parameters with three significant digits.

    >>> count(494_032_768), count(1_008_054_809_600)
    ('494M', '1.01T')
    """
    size, unit = next((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if params >= s)
    return f"{params / size:.3g}{unit}"
