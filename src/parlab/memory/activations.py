"""Bytes that forward keeps for backward, tensor by tensor, in 16 bits.

s is the sequence, b the micro-batch, h hidden, a heads, f ffn, t the ranks of tensor parallelism, L
layers, p pipeline stages, v chunks a rank. Figures in GiB are the papers' (2^30 bytes).
"""

from dataclasses import dataclass
from typing import NamedTuple

from parlab.units import require_choice, require_int

RECOMPUTE = ("none", "selective", "full")


class Kept(NamedTuple):
    """One tensor that a layer keeps, and its bytes on one rank."""

    block: str
    tensor: str
    layer_bytes: int


@dataclass(frozen=True)
class ActivationMemory:
    """Tensors of one layer, and the number of layers whose tensors are held at once."""

    items: tuple[Kept, ...]
    layers_held: int

    @property
    def layer_bytes(self):
        """All items together: one layer and one micro-batch."""
        return sum(item.layer_bytes for item in self.items)

    @property
    def total(self):
        """Bytes on one rank."""
        return self.layers_held * self.layer_bytes


def activation_memory(
    config,
    micro_batch,
    *,
    sequence,
    tp=1,
    sequence_parallel=False,
    recompute="none",
    pipeline=1,
    chunks=1,
    dropout=True,
    flash=False,
):
    """Activations of a transformer's layers on a rank of the first pipeline stage, by tensor.

    With GeLU, f = 4h, dropout and 16 bits a layer keeps sbh (10 + 24/t + 5as/ht); sequence
    parallelism cuts the 10 by t too; selective recomputation drops the scores, 5as/h; full keeps
    the layer's input, 2 sbh. Korthikanti et al. (arXiv 2205.05198), sections 4 and 5, table 2.

    Without dropout there are no masks and one copy of the scores: 32 sbh + 2 a s^2 b. A flash
    kernel keeps 4 bytes a head and token instead of scores (log-sum-exp, fp32), also with dropout,
    whose mask it draws again. Grouped-query attention keeps keys and values of `kv_heads` only, as
    a flash kernel does. A gated MLP keeps 8 sbf, not 4 sbf: the gate before and after SiLU, the
    other factor, and the product; a fused kernel keeps less.

    The pipeline is 1F1B with at least p micro-batches: the first stage holds L layers' worth, and
    L (1 + (p-1)/(pv)) for v > 1. Full recomputation under sequence parallelism keeps the cut
    input, 2 sbh/t. Left out: embedding, head and loss (`logits_bytes`), statistics of norms, and
    the one layer that recomputation brings back at a time.

    config: a ModelConfig, or any object with its sizes; without experts. micro_batch: b. sequence:
        s, tokens. tp: t, must divide heads, kv_heads and ffn, and s with sequence_parallel.
        pipeline, chunks: p, v; their product must divide the layers.

    Raises ValueError or TypeError for sizes that are not positive ints or don't divide.

    >>> from parlab.models import ModelConfig
    >>> gpt3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)
    >>> size = {"sequence": 2048, "tp": 8, "pipeline": 8, "chunks": 3}
    >>> activation_memory(gpt3, 1, **size).total / 2**30
    66.84375
    >>> kept = activation_memory(gpt3, 1, **size, sequence_parallel=True, recompute="selective")
    >>> kept.total / 2**30, kept.items[1]
    (12.3515625, Kept(block='attention', tensor='queries', layer_bytes=6291456))
    """
    layers, h, a, kv, d, f, gated = _shape(config)
    b = _require_size("micro_batch", micro_batch)
    s = _require_size("sequence", sequence)
    t = _require_size("tp", tp)
    p = _require_size("pipeline", pipeline)
    v = _require_size("chunks", chunks)
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    _require_bool("sequence_parallel", sequence_parallel)
    _require_bool("dropout", dropout)
    _require_bool("flash", flash)
    for name, size in (("heads", a), ("kv_heads", kv), ("ffn", f)):
        if size % t:
            raise ValueError(f"tp must divide {name} = {size}, got {t}: ranks hold equal parts")
    if sequence_parallel and s % t:
        raise ValueError(f"tp must divide the sequence of {s} tokens, got {t}: it is cut too")
    if layers % (p * v):
        raise ValueError(
            f"pipeline x chunks must divide layers = {layers}, got {p} x {v}: "
            "a stage holds whole layers"
        )
    tokens = s * b
    wide = tokens * h // (t if sequence_parallel else 1)  # elements of (s, b, h)
    if recompute == "full":
        items = (Kept("layer", "input", 2 * wide),)
    else:
        scores = () if recompute == "selective" else _scores(tokens, s, a // t, dropout, flash)
        mlp = _gated_mlp if gated else _gelu_mlp
        items = (
            *_attention(wide, tokens * d * a // t, tokens * d * kv // t, dropout, scores),
            *mlp(wide, tokens * f // t, dropout),
            Kept("norms", "input of the first", 2 * wide),
            Kept("norms", "input of the second", 2 * wide),
        )
    # Exact: p v divides the layers.
    waiting = layers * (p - 1) // (p * v) if v > 1 else 0
    return ActivationMemory(items, layers + waiting)


def activation_memory_bytes(config, micro_batch, *, sequence, **options):
    """Bytes of activations on one rank: the total of `activation_memory`, with its arguments.

    >>> from parlab.models import ModelConfig
    >>> config = ModelConfig(layers=48, hidden=6144, heads=64, vocab=51200)
    >>> activation_memory_bytes(config, 4, sequence=2048, tp=8) / 2**30
    59.25
    """
    return activation_memory(config, micro_batch, sequence=sequence, **options).total


def logits_bytes(tokens, vocab, *, tp=1, element_bytes=4):
    """Bytes of one copy of the logits: tokens x vocab x element_bytes / tp, on the last stage.

    A loss in fp32 holds such a copy beside the 16-bit one, and its gradient may be a third.

    tokens: s b. vocab: V, a multiple of tp, over which it is cut. element_bytes: 4 in fp32.

    >>> [round(logits_bytes(8192, 151_936, element_bytes=e) / 2**30, 3) for e in (4, 2)]
    [4.637, 2.318]
    """
    tokens = require_int("tokens", tokens, minimum=0)
    vocab = _require_size("vocab", vocab)
    tp = _require_size("tp", tp)
    if vocab % tp:
        raise ValueError(f"tp must divide vocab = {vocab}, got {tp}: pad the vocabulary")
    return tokens * (vocab // tp) * _require_size("element_bytes", element_bytes)


def _attention(wide, queries, keys, dropout, scores):
    yield Kept("attention", "input of queries, keys, values", 2 * wide)
    yield Kept("attention", "queries", 2 * queries)
    yield Kept("attention", "keys", 2 * keys)
    yield from scores
    yield Kept("attention", "values", 2 * keys)
    yield Kept("attention", "input of the projection", 2 * queries)
    if dropout:
        yield Kept("attention", "dropout mask", wide)


def _scores(tokens, sequence, heads, dropout, flash):
    if flash:
        yield Kept("attention", "log-sum-exp of the scores", 4 * tokens * heads)
        return
    n_scores = tokens * sequence * heads
    yield Kept("attention", "softmax output", 2 * n_scores)
    if dropout:
        yield Kept("attention", "softmax dropout mask", n_scores)
        yield Kept("attention", "softmax after dropout", 2 * n_scores)


def _gelu_mlp(wide, inner, dropout):
    yield Kept("MLP", "input of the first matrix", 2 * wide)
    yield Kept("MLP", "input of GeLU", 2 * inner)
    yield Kept("MLP", "input of the second matrix", 2 * inner)
    if dropout:
        yield Kept("MLP", "dropout mask", wide)


def _gated_mlp(wide, inner, dropout):
    yield Kept("MLP", "input of gate and up", 2 * wide)
    yield Kept("MLP", "gate before SiLU", 2 * inner)
    yield Kept("MLP", "gate after SiLU", 2 * inner)
    yield Kept("MLP", "up", 2 * inner)
    yield Kept("MLP", "input of down", 2 * inner)
    if dropout:
        yield Kept("MLP", "dropout mask", wide)


def _shape(config):
    names = ("layers", "hidden", "heads", "kv_heads", "ffn")
    for name in (*names, "gated"):
        if not hasattr(config, name):
            raise TypeError(f"config must have {name}, as a ModelConfig has, got {config!r:.60}")
    layers, h, a, kv, f = [_require_size(name, getattr(config, name)) for name in names]
    _require_bool("gated", config.gated)
    if getattr(config, "experts", 1) != 1:
        raise ValueError(
            f"config must have no experts, got {config.experts}: what they keep depends on routing"
        )
    if a % kv:
        raise ValueError(f"kv_heads must divide heads = {a}, got {kv}: groups are equal")
    head_size = getattr(config, "head_size", None)
    if head_size is None:
        if h % a:
            raise ValueError(f"heads must divide hidden = {h}, got {a}: heads are equal")
        head_size = h // a
    return layers, h, a, kv, head_size, f, config.gated


def _require_size(name, value):
    # The usual case by itself: an estimate has a dozen of these checks, and microseconds.
    return value if type(value) is int and value >= 1 else require_int(name, value, minimum=1)


def _require_bool(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
